"""Windows of real steps: the arithmetic with a scripted clock, the whole thing with a planted gain."""

import pytest
import torch

from compile_profiler import CompileProfiler
from compile_profiler.clock import Clock
from compile_profiler.windows import Alternation, Window
from runs import Regression, sleepy, train
from test_planted_truth import LONG_S, SHORT_S, SlowInEager


class Scripted:
    """A clock that moves when told to."""

    def __init__(self):
        self.now_s = 0.0
        self.clock = Clock(torch.device("cpu"), read_s=lambda: self.now_s)


def test_a_window_divides_by_whole_steps_and_begins_after_the_first():
    time = Scripted()
    window = Window(time.clock)
    for _ in range(4):
        time.now_s += 2.0
        window.step()

    assert window.close() == 2.0
    window.drop()
    assert window.close() is None


@pytest.mark.parametrize("accumulate", [1, 3])
def test_two_neighbouring_windows_make_one_sample_at_optimizer_steps(accumulate):
    time = Scripted()
    alternation = Alternation(time.clock, seed=0, window_steps=4, settle_steps=1)
    seconds = {"eager": 5.0, "compiled": 2.0}
    samples, arms = [], []
    for step in range(60):
        boundary = step % accumulate == accumulate - 1
        before = alternation.arm
        time.now_s += seconds[before]
        samples.append(alternation.step(step, boundary=boundary))
        arms.append(before)
        assert boundary or alternation.arm == before
    found = [sample for sample in samples if sample is not None]

    assert len(found) >= 3
    assert {(sample.eager_s, sample.compiled_s) for sample in found} == {(5.0, 2.0)}
    assert {"eager", "compiled"} == set(arms)


def test_a_dropped_window_begins_again_and_rest_stays_compiled():
    time = Scripted()
    alternation = Alternation(time.clock, seed=0, window_steps=2, settle_steps=1)
    alternation.rest(5)
    arms = [alternation.arm]
    for step in range(4):
        assert alternation.step(step, boundary=True) is None
        arms.append(alternation.arm)
    assert set(arms) == {"compiled"}
    assert alternation.between

    found = None
    for step in range(4, 30):
        time.now_s += 1.0
        if step == 8:
            time.now_s += 100.0
            alternation.drop()
        found = found or alternation.step(step, boundary=True)
    assert (found.eager_s, found.compiled_s) == (1.0, 1.0)


def test_a_planted_gain_is_found_in_real_steps_and_kept(monkeypatch):
    monkeypatch.setattr("compile_profiler.session.Alternation", _short)
    profiler = CompileProfiler(
        backend=sleepy(SHORT_S), verbose=False, end_to_end="windows", pair_every_n_steps=2, warmup_steps=1
    )
    train(SlowInEager, [profiler], max_steps=90, validate=False)
    report = profiler.report

    assert (report.verdict.decision, report.verdict.reason) == ("compiled", "gain")
    assert report.end_to_end.method == "windows"
    assert 1.5 < report.end_to_end.speedup < 1.2 * LONG_S / SHORT_S
    assert report.end_to_end.low > 1
    assert 1.5 < report.speedup.median < 1.1 * LONG_S / SHORT_S


def test_a_planted_loss_ends_in_eager_by_windows_alone(monkeypatch):
    monkeypatch.setattr("compile_profiler.session.Alternation", _short)
    profiler = CompileProfiler(backend=sleepy(SHORT_S), verbose=False, end_to_end="windows", warmup_steps=1)
    train(Regression, [profiler], max_steps=120, validate=False)

    assert (profiler.report.verdict.decision, profiler.report.verdict.reason) == ("eager", "no_gain")
    assert profiler.report.end_to_end.speedup < 0.5


def _short(clock, *, seed):
    """Windows short enough for a test; the planted difference is far above noise."""
    return Alternation(clock, seed=seed, window_steps=2, settle_steps=1)
