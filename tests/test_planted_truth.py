"""What is planted is found: gains, losses, and nothing where there is nothing."""

import time

import pytest
import torch
from runs import Regression, sleepy, train

from compile_profiler import CompileProfiler

SHORT_S = 0.02
LONG_S = 0.05


class SlowInEager(Regression):
    """Sleeps in eager only: the branch is gone from what is traced."""

    def training_step(self, batch, batch_idx):
        if not torch.compiler.is_compiling():
            time.sleep(LONG_S)
        return super().training_step(batch, batch_idx)


def test_a_backend_that_sleeps_is_called_no_gain_and_the_run_ends_in_eager():
    profiler = CompileProfiler(backend=sleepy(0.003), verbose=False)
    train(Regression, [profiler])
    report = profiler.report

    assert (report.verdict.decision, report.verdict.reason) == ("eager", "no_gain")
    assert report.speedup.high < 1
    assert report.time.compiled_s - report.time.eager_s == pytest.approx(0.003, rel=0.2)
    assert report.time.saved_s < 0
    assert report.time.break_even_step is None


def test_after_no_gain_a_longer_run_calls_the_compiled_code_no_more_often():
    calls = []

    def backend(graph, example_inputs):
        def run(*inputs):
            calls.append(time.sleep(0.003))
            return graph.forward(*inputs)

        return run

    profiler = CompileProfiler(backend=backend, verbose=False, pair_every_n_steps=1)
    train(Regression, [profiler], max_steps=30)
    num_calls = len(calls)
    assert profiler.report.verdict.decision == "eager"
    assert num_calls > 20

    calls.clear()
    train(Regression, [profiler], max_steps=300)
    assert len(calls) == pytest.approx(num_calls, rel=0.5)


def test_a_planted_gain_is_called_gain_and_reported_within_five_per_cent():
    profiler = CompileProfiler(backend=sleepy(SHORT_S), verbose=False, pair_every_n_steps=2)
    train(SlowInEager, [profiler], max_steps=40)
    report = profiler.report

    assert (report.verdict.decision, report.verdict.reason) == ("compiled", "gain")
    assert report.speedup.median == pytest.approx(LONG_S / SHORT_S, rel=0.05)
    assert report.speedup.low > 1
    assert report.speedup.num_pairs >= 8


def test_a_planted_gain_shows_in_the_whole_step_and_in_the_money():
    profiler = CompileProfiler(backend=sleepy(SHORT_S), verbose=False, pair_every_n_steps=2)
    train(SlowInEager, [profiler], max_steps=40)
    report = profiler.report

    assert report.end_to_end.speedup == pytest.approx(LONG_S / SHORT_S, rel=0.15)
    assert report.end_to_end.compute_share > 0.8
    assert report.end_to_end.input_bound is False
    assert report.time.break_even_step > 0


def test_a_backend_that_changes_nothing_is_not_called_a_gain():
    profiler = CompileProfiler(backend="eager", verbose=False)
    train(Regression, [profiler], max_steps=250)

    assert profiler.report.verdict.reason in ("no_gain", "inconclusive", "pending")
    assert profiler.report.drift.grad_rel == 0


def test_without_fallback_the_reason_is_reported_and_the_run_stays_compiled():
    profiler = CompileProfiler(backend=sleepy(0.003), verbose=False, fallback=False)
    train(Regression, [profiler])

    assert (profiler.report.verdict.decision, profiler.report.verdict.reason) == ("compiled", "no_gain")


def test_max_pairs_zero_compiles_and_never_measures():
    profiler = CompileProfiler(backend="eager", verbose=False, max_pairs=0)
    train(Regression, [profiler])
    report = profiler.report

    assert report.verdict.decision == "compiled"
    assert report.compiles.graphs == 1
    assert report.speedup.num_pairs == 0
    assert report.speedup.median is None


def test_steps_that_compile_never_enter_the_timing():
    def slow_to_compile(graph, example_inputs):
        time.sleep(0.5)
        return graph.forward

    profiler = CompileProfiler(backend=slow_to_compile, verbose=False)
    train(Regression, [profiler])
    report = profiler.report

    assert report.time.compile_s > 0.5
    assert report.time.compiled_s < 0.05
    assert report.end_to_end.step_s < 0.1
