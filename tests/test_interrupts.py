"""Signals, forks and threads: a clean end with its report, wherever they meet the run."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from compile_profiler import CompileProfiler, Report
from runs import Regression, differences, fit, left_behind, train

OPTIONS = {"verbose": False, "fallback": False, "warmup_steps": 1, "pair_every_n_steps": 2}


@pytest.fixture
def signals():
    """Python's own handlers: Ctrl-C is ignored where the tests run in the background."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def is_clean(module, profiler):
    """Nothing of ours is left, and the report is on disk."""
    handler = torch._dynamo.callback.callback_handler
    assert not {"training_step", "log", "log_dict", "__getstate__"} & set(vars(module))
    assert not handler.start_callbacks
    assert not handler.end_callbacks
    assert Report.from_dict(json.loads(Path("compile_profile.json").read_text())) == profiler.report
    return True


def interrupting(number, *, seconds=0.0):
    """A backend in whose compiling a signal comes: at once, or while it sleeps."""

    def backend(graph, example_inputs):
        if seconds:
            threading.Timer(seconds / 4, os.kill, (os.getpid(), number)).start()
            time.sleep(seconds)
        else:
            signal.raise_signal(number)
        return graph.forward

    return backend


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("seconds", [0.0, 20.0])
def test_ctrl_c_in_the_middle_of_a_compile_ends_it_clean(seconds):
    profiler, module = CompileProfiler(backend=interrupting(signal.SIGINT, seconds=seconds), **OPTIONS), Regression()
    began_s = time.perf_counter()
    with pytest.raises(SystemExit):  # what Lightning makes of KeyboardInterrupt
        fit(module, [profiler], validate=False)

    assert time.perf_counter() - began_s < 15
    assert is_clean(module, profiler)
    assert profiler.report.verdict.reason == "pending"


@pytest.mark.usefixtures("signals")
@pytest.mark.filterwarnings("ignore:.*signal.*")
def test_the_cluster_wants_its_machine_back_in_the_middle_of_a_compile():
    """Lightning lets the batch at hand end; it is trained, compiled, and then the run ends."""
    profiler, module = CompileProfiler(backend=interrupting(signal.SIGTERM), **OPTIONS), Regression()
    with pytest.raises(BaseException) as raised:  # noqa: PT011, Lightning's SIGTERMException, a SystemExit
        fit(module, [profiler], validate=False)

    assert type(raised.value).__name__ == "SIGTERMException"
    assert is_clean(module, profiler)
    assert len(module.seen) == 1
    assert profiler.report.compiles.graphs == 1


class CtrlCInPair(Regression):
    """Somebody presses Ctrl-C in the second pass of the first pair; the step keeps count in a buffer."""

    press = True

    def __init__(self):
        super().__init__()
        self.register_buffer("num_passes", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.num_passes += 1
        loss = super().training_step(batch, batch_idx)
        torch.compiler.disable(self.look)()
        return loss

    def look(self):
        self.extra_passes = getattr(self, "extra_passes", 0)
        if len(self.seen) < float(self.num_passes) and self.press:
            signal.raise_signal(signal.SIGINT)


class Stops(Regression):
    """The same, between two batches, without a profiler."""

    def __init__(self):
        super().__init__()
        self.register_buffer("num_passes", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.num_passes += 1
        return super().training_step(batch, batch_idx)


@pytest.mark.usefixtures("signals")
@pytest.mark.filterwarnings("ignore")
def test_ctrl_c_in_the_middle_of_a_pair_leaves_what_the_last_batch_made():
    """Weights, buffers and random numbers: a checkpoint written on the way out is that of the last step."""
    profiler = CompileProfiler(["net"], backend="eager", **OPTIONS)
    torch.manual_seed(7)
    module = CtrlCInPair()
    with pytest.raises(SystemExit):
        fit(module, [profiler], validate=False)
    random = torch.get_rng_state()
    plain, trainer = train(Stops, max_steps=len(module.seen), validate=False)
    expected, found = plain.state_dict(), module.state_dict()

    assert 1 < len(module.seen) < 10
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert torch.equal(random, torch.get_rng_state())
    assert trainer.global_step == len(module.seen)
    assert is_clean(module, profiler)


class Forked(Regression):
    """Its batches come from two processes that were forked before anything was compiled."""

    def train_dataloader(self):
        data = TensorDataset(torch.randn(240, 8), torch.randn(240, 1))
        return DataLoader(data, 8, shuffle=True, num_workers=2, multiprocessing_context="fork", persistent_workers=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_workers_that_were_forked_before_the_first_compile_go_on():
    profiler = CompileProfiler(backend="aot_eager", **OPTIONS)
    options = {"max_steps": 40, "validate": False}
    plain = left_behind(*train(Forked, **options))
    measured = left_behind(*train(Forked, [profiler], **options))

    assert differences(plain, measured) == []
    assert profiler.report.speedup.num_pairs > 0
    assert profiler.report.compiles.graphs == 1


def slow_to_compile(graph, example_inputs):
    """A backend that leaves another thread time to work while it compiles."""
    time.sleep(0.2)
    return graph.forward


@pytest.mark.filterwarnings("ignore:.*(logging interval).*")
def test_a_thread_that_computes_while_the_step_compiles_is_left_alone():
    """As loggers have that gather statistics; Dynamo itself is not safe to be used from two threads."""
    done, num_rounds, wrong = threading.Event(), 0, []

    def compute():
        nonlocal num_rounds
        while not done.is_set():
            values = torch.arange(8.0)
            if values.mean().item() != 3.5:
                wrong.append(num_rounds)
            num_rounds += 1
            time.sleep(0.001)

    plain = left_behind(*train(Regression, max_steps=20, validate=False))
    thread = threading.Thread(target=compute)
    thread.start()
    try:
        profiler = CompileProfiler(backend=slow_to_compile, **OPTIONS)
        measured = left_behind(*train(Regression, [profiler], max_steps=20, validate=False))
    finally:
        done.set()
        thread.join()

    assert differences(plain, measured) == []
    assert wrong == []
    assert num_rounds > 20
    assert profiler.report.compiles.graphs == 1
    assert profiler.report.verdict.reason not in ("compile_error", "runtime_error", "disabled")
