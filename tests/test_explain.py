"""Console and verdict say what is not compiled, which line it is, and what to write instead."""

import logging
import re
import time
import warnings

import pytest
import torch
import torch._dynamo
from lightning_utilities.core import rank_zero
from torch import nn

import compile_cases as cases
from compile_cases import line_of
from compile_profiler import CompileProfiler, notices
from compile_profiler.targets import called, other_targets
from runs import differences, left_behind, train

RUN = {"max_steps": 25, "validate": False}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


class Lines(logging.Handler):
    """Lines on the console of rank 0."""

    def __init__(self):
        super().__init__()
        self.all = []
        self.of_compiling = []

    def emit(self, record):
        line = record.getMessage()
        self.all.append(line)
        if line.startswith("CompileProfiler: compiling"):
            self.of_compiling.append(line)


@pytest.fixture
def console(monkeypatch):
    lines = Lines()
    logger = rank_zero.log  # of whichever of the two packages was imported last
    level = logger.level
    monkeypatch.setattr(logger, "handlers", [lines])
    logger.setLevel(logging.INFO)
    yield lines
    logger.setLevel(level)


def fitted(module_class, target="step", **options):
    """The report of a real fit, and the warnings it gave."""
    arguments = {"backend": "aot_eager", "max_pairs": 0, "verbose": False, "log": False, **options}
    run = {**RUN, **arguments.pop("run", {})}
    profiler = CompileProfiler(target, **arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(module_class, [profiler], **run)
    return profiler.report, [str(w.message) for w in caught if "CompileProfiler" in str(w.message)]


# -- before the limit, and at it -------------------------------------------------------------------------------------

EPOCHS = {"max_epochs": 12, "max_steps": -1, "limit_train_batches": 1}


@pytest.mark.parametrize(
    ("module_class", "name", "change", "run"),
    [
        (cases.CountsItself, "self.n changes", "self.register_buffer('n', torch.tensor(0))", {}),
        (
            cases.ReadsCurrentEpoch,
            "self.current_epoch changes",
            "copy it into a buffer",
            EPOCHS,
        ),
    ],
)
def test_a_number_that_changes_is_named_before_the_limit_and_at_it(module_class, name, change, run):
    report, messages = fitted(module_class, run=run)
    (message,) = messages
    verdict = report.verdict

    assert f"training_step (compile_cases.py:{line_of(module_class)}) has 6 graphs; at 8 torch stops" in message
    assert name in message
    assert change in message
    assert (verdict.decision, verdict.reason) == ("eager", "recompile_limit")
    assert "in training_step at step 8" in verdict.message
    assert name in verdict.message
    assert change in verdict.message
    assert not re.search(r"\. [A-Z]", verdict.message)  # one sentence


@pytest.mark.parametrize(("steps", "num_warnings"), [(5, 0), (6, 1)])
def test_the_warning_comes_when_two_more_recompiles_reach_the_limit(steps, num_warnings):
    report, messages = fitted(cases.CountsItself, run={"max_steps": steps})

    assert len(messages) == num_warnings
    assert report.compiles.graphs == steps
    assert report.compiles.limit_hits == 0


def test_the_warning_follows_the_limit_that_torch_has_been_given():
    with torch._dynamo.config.patch(recompile_limit=12):
        report, (message,) = fitted(cases.CountsItself)

    assert "has 10 graphs; at 12 torch" in message
    assert report.compiles.graphs == 12


def test_a_step_with_a_few_healthy_graphs_is_not_warned_of():
    report, messages = fitted(cases.EveryThirdBatch)

    assert report.compiles.recompiles == 2
    assert messages == []


# -- a storm, or health ----------------------------------------------------------------------------------------------


def test_compiling_without_end_that_never_meets_torchs_limit_is_a_storm():
    report, messages = fitted(cases.CompilesWithoutEnd, backend="eager")
    verdict = report.verdict

    assert report.compiles.limit_hits == 0
    assert messages == []
    assert (verdict.decision, verdict.reason) == ("eager", "recompile_storm")
    assert re.match(
        r"Something was compiled in 17 of the last 64 steps, most often in by_a_new_function, which took [\d.]+ s; ",
        verdict.message,
    )


@pytest.mark.parametrize(("module_class", "graphs"), [(cases.VaryingLength, 2), (cases.EveryThirdBatch, 3)])
def test_a_few_graphs_beside_validation_and_sanity_check_are_health(module_class, graphs):
    """One more for a ragged tail, one for a varying length, a few for batch_idx % k; other stages are counted apart."""
    run = {"max_steps": 40, "validate": True, "val_check_interval": 20}
    report, messages = fitted(module_class, backend="eager", stages=("train", "validate"), run=run)
    by_stage = report.compiles.by_stage

    assert report.compiles.graphs == by_stage["train"]["graph"] == graphs
    assert by_stage["sanity"]["graph"] == 1
    assert report.verdict.decision == "compiled"
    assert messages == []


def test_each_of_several_models_of_one_class_has_the_whole_limit_to_itself():
    """Five graphs each: of one budget of eight there would be none left for the second."""
    reports = [fitted(cases.CountsItself, backend="eager", run={"max_steps": 5})[0] for _ in range(4)]

    assert [(report.compiles.graphs, report.compiles.recompiles) for report in reports] == [(5, 4)] * 4
    assert [report.compiles.limit_hits for report in reports] == [0] * 4


def test_equal_blocks_with_adapters_share_two_graphs():
    """The first one's input needs no gradient, that of the others does."""
    compiles = fitted(cases.Adapters, "blocks", backend="eager")[0].compiles
    (recompile,) = [event for event in compiles.events if event.kind == "recompile"]

    assert (compiles.graphs, compiles.recompiles) == (2, 1)
    assert (recompile.owner, recompile.cause, recompile.count) == ("user", "stage", 1)
    assert (recompile.function, recompile.line) == ("training_step", line_of(cases.Adapters))


def test_rows_picked_by_pythons_random_numbers_meet_the_limit_behind_their_break():
    report, _ = fitted(cases.SamplesRows, backend="eager")
    events = {event.kind: event for event in report.compiles.events}

    assert report.verdict.reason == "recompile_limit"
    assert (events["graph_break"].cause, events["graph_break"].line) == ("unsupported", line_of(cases.SamplesRows))
    assert "Draw with torch.rand" in events["graph_break"].hint
    assert (events["recompile"].cause, events["limit_hit"].count) == ("python_scalar", 1)


def test_what_a_library_does_in_validation_is_counted_there_and_is_not_blamed_on_training():
    run = {"validate": True, "limit_val_batches": 1, "num_sanity_val_steps": 1, "max_steps": 3}
    report, _ = fitted(cases.ScoresInValidation, backend="eager", stages=("train", "validate"), run=run)
    events = [event for event in report.compiles.events if event.kind not in ("graph", "recompile")]

    assert (report.compiles.graphs, report.compiles.recompiles, report.compiles.graph_breaks) == (1, 0, 0)
    assert {event.kind for event in events} == {"graph_break", "skipped_frame"}
    assert {(event.stage, event.owner, event.function, event.line) for event in events} == {
        ("sanity", "third_party", "validation_step", line_of(cases.ScoresInValidation))
    }


class Guarded(cases.Case):
    """Reads many attributes, each of which has to be checked before each call."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(1, 1) for _ in range(300))
        for n, part in enumerate(self.parts):
            part.factor = n

    def training_step(self, batch, batch_idx):
        total = 0
        for part in self.parts:
            total += part.factor
        return super().training_step(batch, batch_idx) * (1 + total)


def test_the_time_to_find_a_graph_is_measured_by_what_there_is_to_check():
    """Hundreds of attributes to check take many times longer than a few."""
    options = {"backend": "eager", "max_pairs": 1, "pair_every_n_steps": 1, "run": {"max_steps": 8}}
    plain = fitted(cases.Case, **options)[0].compiles.guard_s
    guarded = fitted(Guarded, **options)[0].compiles.guard_s
    forward = fitted(CallsForward, "forward", **options)[0].compiles

    assert guarded > 4 * plain > 0
    assert forward.graphs == 1
    assert forward.guard_s is None  # not known for a target in place


# -- nothing compiled: which target would be -------------------------------------------------------------------------


class CallsForward(cases.Case):
    def training_step(self, batch, batch_idx):
        return self.error(self(batch[0]), batch)


class Unused(CallsForward):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(8, 1)


@pytest.mark.parametrize(
    ("module_class", "target", "advice"),
    [
        (cases.Case, "forward", "try target=['net'] or target='step'"),
        (Unused, ["spare"], "try target=['net'] or target='forward' or target='step'"),
    ],
)
@pytest.mark.parametrize("max_pairs", [0, 40])
def test_a_target_that_never_runs_is_told_with_those_that_would(module_class, target, advice, max_pairs):
    verdict = fitted(module_class, target, max_pairs=max_pairs)[0].verdict

    assert (verdict.decision, verdict.reason, verdict.step) == ("eager", "nothing_compiled", 0)
    assert verdict.message == (
        f"The compiler made no graph in 1 step, because the step does not call the target, {advice}; "
        "training goes on in eager."
    )


@pytest.mark.parametrize(("module_class", "target"), [(cases.Case, "forward"), (Unused, ["spare"])])
def test_the_advice_holds(module_class, target):
    """Each target that is named makes a graph."""
    message = fitted(module_class, target)[0].verdict.message

    targets = [name.strip("'") if name[0] == "'" else ["net"] for name in re.findall(r"target=(\S+?)[ ;]", message)]
    assert len(targets) >= 2
    for other in targets:
        assert fitted(module_class, other)[0].compiles.graphs > 0


class Drops(cases.Case):
    """Random numbers, a buffer that moves, a counter in Python, logging: whatever a second pass could disturb."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.n = 0

    def training_step(self, batch, batch_idx):
        self.n += 1
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def left(self):
        return self.n, len(self.net._forward_pre_hooks)


def test_finding_out_what_the_step_calls_leaves_no_trace():
    plain = left_behind(*train(Drops, **RUN))
    profiler = CompileProfiler("forward", backend="eager", verbose=False)
    watched = left_behind(*train(Drops, [profiler], **RUN))

    assert "try target=['net']" in profiler.report.verdict.message
    assert differences(plain, watched) == []
    assert not nn.modules.module._global_forward_pre_hooks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).relu()


def test_what_the_user_compiled_is_not_traced_again_by_looking_who_is_called():
    net, x, graphs = Block(), torch.ones(2, 8), []
    net.compile(backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    net(x)

    assert called(net, lambda: net(x)) == ["", "linear"]
    net(x)
    assert len(graphs) == 1
    assert other_targets(nn.ModuleDict({"net": net}), "forward", ["net"]) == ["target='step'"]


# -- the target's own function left in eager -------------------------------------------------------------------------


class CallsAHelper(cases.Recurrent):
    def training_step(self, batch, batch_idx):
        hidden, _ = self.rnn(batch[0][:, None])  # here
        return self.error(self.net(hidden[:, 0]), batch)


class CallsANetwork(cases.Recurrent):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def training_step(self, batch, batch_idx):
        hidden, _ = self.rnn(self.block(batch[0])[:, None])
        return self.error(self.net(hidden[:, 0]), batch)


class InForward(CallsAHelper):
    def forward(self, x):
        hidden, _ = self.rnn(x[:, None])  # here
        return self.error(self.net(hidden[:, 0]), (x, x[:, :1]))

    def training_step(self, batch, batch_idx):
        return self(batch[0])


@pytest.mark.parametrize(("module_class", "target"), [(CallsAHelper, "step"), (InForward, "forward")])
def test_a_target_left_in_eager_is_not_compiled_although_its_helpers_are(module_class, target):
    """A loss function alone is no compiled step: the verdict says so, with the line and another target."""
    report, _ = fitted(module_class, target)
    verdict, line = report.verdict, line_of(module_class)

    assert report.compiles.graphs > 0
    assert report.compiles.eager_frames > 0
    assert (verdict.decision, verdict.reason) == ("eager", "nothing_compiled")
    assert verdict.message == (
        "The target was left in eager and only helpers that it calls were compiled, because of "
        f"test_explain.py:{line}, try target=['net']; training goes on in eager."
    )


def test_a_step_left_in_eager_without_any_graph_names_the_line_and_another_target():
    message = fitted(cases.Recurrent)[0].verdict.message

    assert message == (
        f"The compiler made no graph in 1 step, because of compile_cases.py:{line_of(cases.Recurrent)}, "
        "try target=['net']; training goes on in eager."
    )


def test_a_part_of_the_network_that_is_compiled_below_such_a_step_is_measured():
    """It may be worth having: a graph with parameters is no mere helper."""
    report, _ = fitted(CallsANetwork)

    assert report.compiles.eager_frames > 0
    assert report.verdict.reason == "disabled"  # max_pairs=0: compiled and observed
    skipped = [event for event in report.compiles.events if event.kind == "skipped_frame"]
    assert "Name the other submodules in target" in skipped[0].hint


# -- the console -----------------------------------------------------------------------------------------------------


def slow_to_compile(graph, inputs):
    time.sleep(0.6)
    return graph.forward


def test_a_long_compile_is_told_with_function_step_reason_and_seconds(console, monkeypatch):
    monkeypatch.setattr(notices, "LONG_COMPILE_S", 0.5)  # for a quick test
    fitted(cases.RaggedTail, backend=slow_to_compile, verbose=True, run={"max_steps": 6})

    start, first, again = console.of_compiling
    assert start.endswith("compiling training_step in the first steps; this can take a minute.")
    assert re.search(r"compiling training_step took [\d.]+ s at step 0: its first graph\.$", first)
    assert re.search(r"compiling training_step took [\d.]+ s at step \d: again, because .*expected 8, actual 3", again)


def test_a_quick_compile_and_a_quiet_callback_tell_nothing(console):
    fitted(cases.Case, verbose=True)
    (start,) = console.of_compiling
    fitted(cases.Case, verbose=False)

    assert "in the first steps" in start
    assert console.of_compiling == [start]
