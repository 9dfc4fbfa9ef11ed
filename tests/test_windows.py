"""Windows of real steps: the arithmetic with a scripted clock, the whole thing with a planted gain."""

import pytest
import torch

from compile_profiler import CompileProfiler
from compile_profiler.clock import Clock
from compile_profiler.windows import Alternation, Window
from runs import Regression, sleepy, train
from test_planted_truth import SlowInEager


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

    assert window.close() == (2.0, 0.0)
    assert window.close() is None


def test_a_window_goes_on_behind_validation_without_what_lies_between():
    """Epochs shorter than a window complete one; neither validation nor the first step behind it is in it."""
    time = Scripted()
    window = Window(time.clock)
    for _epoch in range(3):
        for step in range(4):
            time.now_s += 50.0 if step == 0 else 2.0
            window.step(own_s=0.25)
        time.now_s += 30.0
        window.pause()

    assert window.num_steps == 9
    assert window.close() == (2.0, 0.25)


def test_what_a_lagging_device_did_behind_the_last_step_is_not_guessed(monkeypatch):
    """A part that ends with a long wait for something else is left out: the device may have worked on in it."""
    monkeypatch.setattr(Clock, "lags", property(lambda self: True))
    monkeypatch.setattr(Clock, "synchronize", lambda self: None)
    time = Scripted()
    window = Window(time.clock)
    for wait_s, num_steps in ((0.1, 3), (5.0, 3)):
        for _ in range(1 + num_steps):
            time.now_s += 2.0
            window.step()
        time.now_s += wait_s
        window.pause()

    assert window.num_steps == 3
    assert window.close().step_s == pytest.approx(2.0)


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


def test_what_the_callback_takes_is_no_part_of_an_eager_step():
    time = Scripted()
    alternation = Alternation(time.clock, seed=0, window_steps=2, settle_steps=1)
    found = None
    for step in range(20):
        time.now_s += 3.0 if alternation.arm == "eager" else 2.0
        found = found or alternation.step(step, boundary=True, own_s=0.5)

    assert (found.eager_s, found.compiled_s) == (2.5, 2.0)


def test_a_paused_window_goes_on_and_rest_stays_compiled():
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
            alternation.pause()
        found = found or alternation.step(step, boundary=True)
    assert (found.eager_s, found.compiled_s) == (1.0, 1.0)


class SlowerInEager(SlowInEager):
    """So slow that what a busy machine adds to each step leaves most of the gain."""

    seconds = 0.12


def test_a_planted_gain_is_found_in_real_steps_and_kept(monkeypatch):
    monkeypatch.setattr("compile_profiler.windows.Alternation", _short)
    profiler = CompileProfiler(
        backend=sleepy(0.03), verbose=False, end_to_end="windows", pair_every_n_steps=2, warmup_steps=1
    )
    train(SlowerInEager, [profiler], max_steps=90, validate=False)
    report = profiler.report

    assert (report.verdict.decision, report.verdict.reason) == ("compiled", "gain")
    assert report.end_to_end.method == "windows"
    assert 1.5 < report.end_to_end.speedup < 1.2 * SlowerInEager.seconds / 0.03
    assert report.end_to_end.low > 1
    assert 1.5 < report.speedup.median < 1.1 * SlowerInEager.seconds / 0.03


def test_a_planted_loss_ends_in_eager_by_windows_alone(monkeypatch):
    monkeypatch.setattr("compile_profiler.windows.Alternation", _short)
    profiler = CompileProfiler(backend=sleepy(0.06), verbose=False, end_to_end="windows", warmup_steps=1)
    train(Regression, [profiler], max_steps=120, validate=False)

    assert (profiler.report.verdict.decision, profiler.report.verdict.reason) == ("eager", "no_gain")
    assert profiler.report.end_to_end.speedup < 0.5


def _short(clock, *, seed, of_all, eager_is_free):
    """Windows short enough for a test; the planted difference is far above noise."""
    return Alternation(clock, seed=seed, window_steps=2, settle_steps=1, of_all=of_all, eager_is_free=eager_is_free)
