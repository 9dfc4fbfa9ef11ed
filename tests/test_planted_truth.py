"""What is planted is found: gains, losses, and nothing where there is nothing."""

import time

import lightning.pytorch as pl
import pytest
import torch

from compile_profiler import CompileProfiler
from runs import InMemoryLogger, Regression, sleepy, train

SHORT_S = 0.02
LONG_S = 0.05


class SlowInEager(Regression):
    """Sleeps in eager only: the branch is gone from what is traced."""

    seconds = LONG_S

    def training_step(self, batch, batch_idx):
        if not torch.compiler.is_compiling():
            time.sleep(self.seconds)
        return super().training_step(batch, batch_idx)


def test_a_backend_that_sleeps_is_called_no_gain_and_the_run_ends_in_eager():
    profiler = CompileProfiler(backend=sleepy(0.02), verbose=False)
    train(Regression, [profiler])
    report = profiler.report

    assert (report.verdict.decision, report.verdict.reason) == ("eager", "no_gain")
    assert report.speedup.high < 1
    assert 0.015 < report.time.compiled_s - report.time.eager_s < 0.1
    assert report.time.saved_s < 0
    assert report.time.break_even_step is None


def test_after_no_gain_the_compiled_code_is_not_called_again():
    calls, calls_by_step = [], []

    def backend(graph, example_inputs):
        def run(*inputs):
            calls.append(time.sleep(0.02))
            return graph.forward(*inputs)

        return run

    class Counts(pl.Callback):
        def on_train_batch_start(self, *args):
            calls_by_step.append(len(calls))

    profiler = CompileProfiler(backend=backend, verbose=False, pair_every_n_steps=1)
    train(Regression, [profiler, Counts()], max_steps=120)
    decided = profiler.report.verdict.step

    assert profiler.report.verdict.reason == "no_gain"
    assert calls_by_step[decided] > decided
    assert set(calls_by_step[decided + 1 :]) == {len(calls)}


def test_a_planted_gain_is_called_gain_and_reported_within_five_per_cent():
    class Slower(SlowInEager):
        """So slow that what the machine adds to a sleep is less than a per cent."""

        seconds = 0.3

    profiler = CompileProfiler(backend=sleepy(0.12), verbose=False, pair_every_n_steps=1)
    train(Slower, [profiler], max_steps=16, validate=False)
    report = profiler.report

    assert (report.verdict.decision, report.verdict.reason) == ("compiled", "gain")
    assert report.speedup.median == pytest.approx(0.3 / 0.12, rel=0.05)
    assert report.speedup.low > 1
    assert report.speedup.num_pairs >= 8


def test_a_planted_gain_shows_in_the_whole_step_and_in_the_money():
    class Slower(SlowInEager):
        """So slow that what the machine adds to a step is a small part of it."""

        seconds = 0.4

    profiler = CompileProfiler(backend=sleepy(0.16), verbose=False, pair_every_n_steps=4)
    train(Slower, [profiler], max_steps=20, validate=False)
    report = profiler.report

    assert 1.5 < report.end_to_end.speedup < 1.1 * Slower.seconds / 0.16
    assert report.end_to_end.compute_share > 0.8
    assert report.end_to_end.input_bound is False
    assert report.time.break_even_step > 0


def test_a_backend_that_changes_nothing_is_not_called_a_gain():
    profiler = CompileProfiler(backend="eager", verbose=False)
    train(Regression, [profiler], max_steps=250)

    assert profiler.report.verdict.reason in ("no_gain", "inconclusive", "pending")
    assert profiler.report.drift.grad_rel == 0


def test_without_fallback_the_reason_is_reported_and_the_run_stays_compiled():
    profiler = CompileProfiler(backend=sleepy(0.02), verbose=False, fallback=False)
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


class HalvesItsBatch(SlowInEager):
    """Half of every batch from some step on: another shape for the step, another graph."""

    at_step = 50

    def on_after_batch_transfer(self, batch, dataloader_idx):
        halved = self.trainer.global_step >= self.at_step
        return [part[: len(part) // 2] for part in batch] if halved else batch


class LosesLater(pl.Callback):
    """A backend that is quick at first and slow from some step on."""

    seconds = SHORT_S

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step >= 50:
            self.seconds = 2 * LONG_S

    def __call__(self, graph, example_inputs):
        def run(*inputs):
            time.sleep(self.seconds)
            return graph.forward(*inputs)

        return run


def test_a_run_that_stops_gaining_in_the_middle_goes_back_to_eager():
    backend = LosesLater()
    profiler = CompileProfiler(backend=backend, verbose=False, pair_every_n_steps=1, overhead_budget=1.0)
    logger = InMemoryLogger()
    train(SlowInEager, [backend, profiler], logger=logger, max_steps=130, validate=False)

    assert (profiler.report.verdict.decision, profiler.report.verdict.reason) == ("eager", "no_gain")
    assert "stopped gaining" in profiler.report.verdict.message
    assert 1 in {row["compile/active"] for _, row in logger.rows if "compile/active" in row}


def test_a_new_shape_opens_the_question_again_and_decides_on_its_own_pairs():
    profiler = CompileProfiler(backend=sleepy(SHORT_S), verbose=False, pair_every_n_steps=2)
    train(HalvesItsBatch, [profiler], max_steps=90, validate=False)
    report = profiler.report

    assert report.verdict.reason == "gain"
    assert report.verdict.step > HalvesItsBatch.at_step
    assert report.speedup.num_shapes == 2
    assert report.compiles.recompiles == 1
