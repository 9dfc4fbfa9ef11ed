"""``mode="auto"`` where it hurts: modules with hazards, odd loops, failures and endings in the midst of a search."""

import contextlib
import gc
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch._dynamo
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, IterableDataset

from auto_runs import FOR_LONG, Backend, Pausing, StopAfterSearch, StopAt, assert_trained_as_in_eager, row
from compile_profiler import CompileProfiler, duel, host, probe
from compile_profiler.windows import Alternation
from runs import Regression, differences, fit, left_behind, train
from test_leaving import attributes, surroundings
from zoo import Counters, FreezesParameters, LogsEverything, MomentumQueue, RandomControlFlow

QUICKLY = {"mode": "auto", "verbose": False, "pair_every_n_steps": 1, "warmup_steps": 1, "remember": False}


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """A search that goes through all its stages in few steps: what it finds is noise, what it leaves is not."""
    monkeypatch.setitem(Alternation.__init__.__kwdefaults__, "window_steps", 3)
    monkeypatch.setattr(probe, "MIN_BLOCK_S", 1e-3)
    monkeypatch.setattr(duel, "CLEAR_GAIN", 1e9)  # windows for everybody
    for name, value in {"MAX_PAIRS": 4, "MIN_PAIRS": 2, "MAX_COUPLES": 2}.items():
        monkeypatch.setattr(duel, name, value)


class StopAfter(Callback):
    """Ends a long run after so many batches."""

    def __init__(self, num):
        self.left = num

    def on_train_batch_end(self, trainer, *_):
        self.left -= 1
        trainer.should_stop = self.left <= 0


def pausing(kind):
    """The same module, whose ``forward`` pauses in eager: whatever compiles it gains."""

    def forward(self, x):
        if not torch.compiler.is_compiling():
            time.sleep(0.01)
        return kind.forward(self, x)

    return type(kind.__name__, (kind,), {"forward": forward})


def fought(profiler):
    """Candidates that were measured in windows of real steps."""
    return [one.name for one in profiler.report.search.candidates if one.end_to_end_method == "windows"]


# -- no trace ----------------------------------------------------------------------------------------------------------

HAZARDS = [Counters, FreezesParameters, LogsEverything, MomentumQueue, RandomControlFlow]


@pytest.mark.parametrize("kind", HAZARDS, ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore")  # torch's own, about what it does not trace
def test_a_module_with_a_hazard_is_searched_without_a_trace(kind):
    profiler = CompileProfiler(**QUICKLY, backend="eager", candidates=["forward", {"target": ["net"]}])
    options = {"max_steps": FOR_LONG, "limit_val_batches": 1, "val_check_interval": 0.5}
    searched = left_behind(*train(pausing(kind), [profiler, StopAfter(45)], **options))
    plain = left_behind(*train(kind, [StopAfter(45)], **options))

    assert differences(plain, searched) == []
    assert profiler.report.search.candidates[0].num_pairs


class TwoOptimizers(Regression):
    """Moves two optimizers itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Linear(8, 1)

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9),
            torch.optim.Adam(self.other.parameters()),
        ]

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for optimizer, loss in ((first, self.loss(batch)), (second, (self.other(batch[0]) - batch[1]).square().mean())):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


class RawOptimizers(TwoOptimizers):
    """So that ``global_step`` stands still."""

    def optimizers(self, use_pl_optimizer=True):
        return super().optimizers(use_pl_optimizer=False)


class Switches(Callback):
    """At which batches another arm came into an open window of accumulation."""

    def __init__(self, profiler):
        self.profiler, self.arm, self.is_open, self.inside, self.num = profiler, None, False, [], 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        rig = self.profiler._session._seat.rig
        arm = None if rig is None else (rig.active, rig.is_compiled)
        if arm != self.arm:
            self.num += 1
            self.inside += [batch_idx] if self.is_open else []
        self.arm = arm

    def on_train_batch_end(self, trainer, *_):
        self.is_open = trainer.fit_loop._should_accumulate()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Regression, {"accumulate_grad_batches": 3, "limit_train_batches": 10}),
        (Regression, {"precision": "bf16-mixed", "gradient_clip_val": 0.1}),
        (TwoOptimizers, {}),
    ],
    ids=["accumulation", "half precision", "manual"],
)
def test_any_loop_is_searched_without_a_trace_and_arms_change_between_optimizer_steps(kind, options):
    plainly, kind, options = kind, pausing(kind), {"max_steps": FOR_LONG, "validate": False, **options}
    profiler = CompileProfiler(**QUICKLY, backend="eager", candidates=["forward", {"target": ["net"]}])
    switches = Switches(profiler)
    searched = left_behind(*train(kind, [profiler, switches, StopAfter(75)], **options))
    plain = left_behind(*train(plainly, [StopAfter(75)], **options))

    assert differences(plain, searched) == []
    assert fought(profiler)
    assert switches.num > 3
    assert switches.inside == []


# -- how long the run is -----------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """Batches without end, and without a length."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(1)
        while True:
            yield torch.randn(8, 8, generator=generator), torch.randn(8, 1, generator=generator)


class Streaming(Pausing):
    def train_dataloader(self):
        return DataLoader(Stream(), batch_size=None)


def test_a_stream_of_unknown_length_is_searched():
    profiler = CompileProfiler(**QUICKLY, backend=Backend(), candidates=["forward"])
    train(Streaming, [profiler, StopAfterSearch(profiler, 2, 60)], max_steps=-1, max_epochs=5, validate=False)

    assert profiler.report.search.run_is_assumed
    assert profiler.report.search.candidates[0].num_pairs
    assert profiler.report.time.last_step is None


class Left(Callback):
    """How many batches are left, as the host reckons."""

    def __init__(self):
        self.batches = []

    def on_train_batch_end(self, trainer, *_):
        self.batches.append(host.seconds_left(trainer, 1.0))


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (Regression, {"max_steps": 50}, 30),
        (Regression, {"max_steps": -1, "max_epochs": 2}, 60),
        (Regression, {"max_steps": 50, "max_epochs": 9}, 30),
        (Regression, {"max_steps": -1, "max_epochs": 2, "accumulate_grad_batches": 4}, 60),
        (TwoOptimizers, {"max_steps": 100}, 30),
        (TwoOptimizers, {"max_steps": -1, "max_epochs": 2}, 60),
        (RawOptimizers, {"max_steps": -1, "max_epochs": 2}, 60),
        (Streaming, {"max_steps": 50, "max_epochs": 2}, 30),
        (Streaming, {"max_steps": -1, "max_epochs": 2}, float("inf")),
    ],
)
def test_how_many_batches_are_left_is_known_in_any_loop(kind, options, expected):
    left = Left()
    train(kind, [left, StopAfter(20)], validate=False, **options)

    assert left.batches[19] == pytest.approx(expected)


def test_steps_that_cannot_be_timed_do_not_stall_the_search():
    """Two batches in an epoch leave no step between two looks at the clock."""
    profiler = CompileProfiler(**QUICKLY, backend=Backend(), candidates=["forward", {"target": ["net"]}])
    train(
        Pausing,
        [profiler, StopAfterSearch(profiler, 0, 300)],
        max_steps=FOR_LONG,
        validate=False,
        limit_train_batches=2,
    )

    assert profiler.report.search.settled
    assert profiler.report.search.active == "forward/default"
    assert fought(profiler) == []


# -- who is to blame ---------------------------------------------------------------------------------------------------


class InWindows(Callback):
    """Calls ``does`` before each batch once windows of real steps have begun."""

    def __init__(self, profiler, does):
        self.profiler, self.does = profiler, does

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        session = self.profiler._session
        if session is not None and session._times.alternates:
            self.does(module)


def test_a_challenger_that_fails_in_a_real_step_fails_once():
    backend, failures = Backend(), []

    def failing(graph, inputs):
        failures.append(1)
        raise RuntimeError("planted failure")

    profiler = CompileProfiler(**QUICKLY, backend=backend, candidates=["step", "forward"])
    arming = InWindows(profiler, lambda module: backend.does.update(step=failing))
    module, trainer = train(Pausing, [profiler, arming, StopAt(80)], max_steps=FOR_LONG, validate=False)

    assert row(profiler.report, "step/default").why.startswith("runtime_error")
    assert row(profiler.report, "forward/default").status in ("tried", "chosen")
    assert len(failures) == 1
    assert_trained_as_in_eager(module, trainer)


class Storming(Pausing):
    """Is compiled anew for each value of ``key``, unless only its network is compiled."""

    key = "a"

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if self.key else -loss


def test_a_challenger_that_is_compiled_in_each_real_step_is_dropped():
    """No step that compiles is timed: its windows would never end."""
    profiler = CompileProfiler(**QUICKLY, backend=Backend(), candidates=["step", {"target": ["net"]}])
    storming = InWindows(profiler, lambda module: setattr(module, "key", module.key + "a"))
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000):
        train(Storming, [profiler, storming, StopAt(70)], max_steps=FOR_LONG, validate=False)

    assert row(profiler.report, "step/default").why.startswith("recompile_storm")
    assert "recompile_storm" not in row(profiler.report, "net/default").why


def test_what_one_candidate_does_to_validation_is_not_held_against_the_next():
    """In a search nobody is compared in validation: what is found there is held against whoever wins."""

    class Compared(Callback):
        def on_validation_end(self, trainer, module):
            session = profiler._session
            if session is not None and session._ledger.validations:
                compared.add(session._contest.is_on)

    compared = set()
    profiler = CompileProfiler(**QUICKLY, backend=Backend(), candidates=["forward"], stages=("train", "validate"))
    callbacks = [profiler, Compared(), StopAfterSearch(profiler, 60, 120)]
    train(Pausing, callbacks, max_steps=FOR_LONG, val_check_interval=4, limit_val_batches=1)

    assert True not in compared
    assert profiler.report.search.candidates[0].num_pairs


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        (["step", {"target": ["nte"]}], "names the submodule 'nte', which Regression does not have"),
        (["step", "blocks"], "found no block in Regression"),
    ],
)
def test_a_candidate_whose_target_is_not_there_is_an_error_before_the_first_step(candidates, message):
    with pytest.raises(ValueError, match=message):
        fit(Regression(), [CompileProfiler(**QUICKLY, candidates=candidates)], max_steps=2)


# -- endings -----------------------------------------------------------------------------------------------------------


class Ends(Callback):
    """Ends the run by an error once ``when`` is true of the contest, between eager's steps and compiled ones."""

    def __init__(self, profiler, when, error):
        self.profiler, self.when, self.error = profiler, when, error

    def on_train_batch_start(self, trainer, *_):
        if self.when(self.profiler._session):
            raise self.error


def _between_two_compiled(session):
    search = session._contest._search
    return session._times.alternates and search.incumbent is not None


def _in_pairs(session):
    return bool(session._contest._entrants)


def _after(session):
    return not session._contest.is_on


@pytest.mark.parametrize("when", [_in_pairs, _between_two_compiled, _after])
@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_an_end_in_the_midst_of_a_search_leaves_nothing(when, error):
    graphs = []

    def backend(graph, example_inputs):
        def run(*inputs):
            return graph.forward(*inputs)

        graphs.extend([weakref.ref(graph), weakref.ref(run)])
        return run

    profiler = CompileProfiler(**QUICKLY, backend=backend, candidates=["forward", "step", {"target": ["net.0"]}])
    plain, module = Pausing(), Pausing()
    fit(plain, max_steps=2)
    torch.compile(torch.nn.Linear(1, 1), backend="eager")(torch.ones(1))  # torch sets up its own logger only now
    before = surroundings()
    with contextlib.suppress(KeyError, SystemExit):
        fit(module, [profiler, Ends(profiler, when, error), StopAt(200)], max_steps=FOR_LONG, validate=False)
    after = surroundings()
    gc.collect()

    assert [name for name in before if before[name] != after.get(name)] == []
    assert attributes(module) == attributes(plain)
    assert not any(reference() is not None for reference in graphs)
    assert Path("compile_profile.json").exists()
    assert len(graphs) > (2 if when is _between_two_compiled else 0) or when is _in_pairs


def test_the_losers_code_is_freed_while_training_goes_on():
    """Two arms are alive at most."""
    graphs, counts = [], set()

    def backend(graph, example_inputs):
        def run(*inputs):
            return graph.forward(*inputs)

        graphs.append(weakref.ref(run))
        return run

    class Counts(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step % 10 == 0:  # to collect takes a while
                gc.collect()
                counts.add(sum(reference() is not None for reference in graphs))

    profiler = CompileProfiler(**QUICKLY, backend=backend, candidates=["forward", "step", {"target": ["net.0"]}])
    train(Pausing, [profiler, StopAfterSearch(profiler, 12, 100), Counts()], max_steps=FOR_LONG, validate=False)

    assert len(graphs) >= 2
    assert 0 < max(counts) <= 2
    assert sum(reference() is not None for reference in graphs) == 0
