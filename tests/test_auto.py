"""``mode="auto"`` on real runs: candidates whose truth is planted by what a backend sees of them."""

import re
import time

import pytest
import torch
from lightning.pytorch import Callback

from auto_runs import (
    FOR_LONG,
    PAUSE_S,
    Backend,
    Pausing,
    StopAt,
    assert_trained_as_in_eager,
    failing,
    halfway,
    not_finite,
    out_of_memory,
    row,
    scaled,
    searched,
    slowly,
)
from compile_profiler import CompileProfiler
from compile_profiler.windows import Alternation
from runs import Regression, fit, train


@pytest.mark.parametrize(("slow", "fast"), [("step", "forward"), ("forward", "step")])
def test_it_settles_on_the_fastest_and_trains_on_that(slow, fast):
    backend = Backend(**{slow: halfway})

    report, _, _ = searched(backend=backend, more=40)

    verdict, winner = report.verdict, row(report, f"{fast}/default")
    assert (verdict.decision, verdict.reason, verdict.config["target"]) == ("compiled", "gain", fast)
    assert winner.status == "chosen"
    assert winner.speedup > 1.3
    assert winner.speedup_low < winner.speedup < winner.speedup_high
    assert winner.num_pairs >= 8
    assert row(report, f"{slow}/default").status in ("dropped", "skipped")
    assert report.search.active == f"{fast}/default"
    assert report.search.settled
    assert report.speedup.median == pytest.approx(winner.speedup, rel=0.5)  # pairs go on after the search
    assert set(backend.calls[-20:]) == {fast}
    assert report.compiles.graphs == 1


def test_a_run_that_is_too_short_compiles_nothing():
    backend = Backend()

    report, _, _ = searched(backend=backend, max_steps=60)

    assert backend.calls == []
    assert (report.verdict.decision, report.verdict.reason) == ("eager", "no_gain")
    assert "too short" in report.verdict.message
    assert {one.status for one in report.search.candidates} == {"skipped"}
    assert all(one.why for one in report.search.candidates)


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        (failing, "runtime_error"),
        (out_of_memory, "out_of_memory"),
        (scaled, "drift"),
        (not_finite, "non_finite"),
    ],
)
def test_a_candidate_that_cannot_be_used_is_dropped_and_the_next_is_tried(does, reason):
    report, module, trainer = searched(backend=Backend(step=does), step=60)

    assert row(report, "step/default").status == "dropped"
    assert row(report, "step/default").why.startswith(reason)
    assert row(report, "forward/default").status in ("tried", "chosen")
    assert report.verdict.decision != "eager"
    assert_trained_as_in_eager(module, trainer)


def test_what_training_runs_on_may_fail_and_the_search_goes_on():
    backend = Backend()

    class Arming(Callback):
        """Makes the whole step fail as soon as real steps run on it."""

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if profiler.report.search.active == "step/default":
                backend.does["step"] = failing

    profiler = CompileProfiler(mode="auto", backend=backend, candidates=["step", "forward"], verbose=False)
    module, trainer = train(Pausing, [profiler, Arming(), StopAt(200)], max_steps=FOR_LONG, validate=False)
    report = profiler.report

    assert backend.does
    assert row(report, "step/default").status == "dropped"
    assert row(report, "step/default").why.startswith("runtime_error")
    assert row(report, "forward/default").status in ("tried", "chosen")
    assert report.verdict.decision != "eager"
    assert_trained_as_in_eager(module, trainer)


def test_where_nothing_gains_the_run_ends_in_eager_with_nothing_left_behind():
    backend = Backend(step=slowly, forward=slowly)

    report, module, trainer = searched(Regression, backend=backend)

    assert (report.verdict.decision, report.verdict.reason) == ("eager", "no_gain")
    assert row(report, "step/default").status == "dropped"
    assert report.speedup.median < 1
    assert_trained_as_in_eager(module, trainer)
    assert backend.calls.count("step") < 600  # pairs alone: no training step ran on it


def test_windows_of_real_steps_are_the_last_word(monkeypatch):
    """A pass gains, but the step around it loses more: only real steps show that."""

    monkeypatch.setitem(Alternation.__init__.__kwdefaults__, "window_steps", 4)
    backend = Backend()

    class Slower(Regression):
        def forward(self, x):
            if not torch.compiler.is_compiling():
                time.sleep(0.006)
            return super().forward(x)

        def on_before_zero_grad(self, optimizer):  # no part of a pass
            time.sleep(0.070 if backend.calls[-1:] == ["step"] else 0.050)
            backend.calls.append("between")

    report, _, _ = searched(Slower, backend=backend, candidates=["step"])

    assert report.verdict.decision == "eager"
    assert "real steps" in row(report, "step/default").why
    assert row(report, "step/default").end_to_end_method == "windows"


def test_the_next_run_of_the_same_job_begins_with_the_winner():
    backend = Backend(step=halfway)
    first, _, _ = searched(backend=backend)
    again = Backend(step=halfway)

    second, _, _ = searched(backend=again)

    assert first.search.active == second.search.active == "forward/default"
    assert [one.step for one in second.search.switches][1] < 20
    assert set(again.calls) == {"forward"}
    assert "earlier run" in row(second, "step/default").why


def test_that_nothing_gains_is_remembered_too_unless_the_user_wants_to_look_again():
    first, _, _ = searched(backend=Backend(step=slowly, forward=slowly))
    again, forgetful = Backend(), Backend(step=slowly, forward=slowly)

    second, _, _ = searched(backend=again)
    third, _, _ = searched(backend=forgetful, step=40, remember=False)

    assert first.verdict.decision == second.verdict.decision == "eager"
    assert "earlier run" in second.verdict.message
    assert second.search.settled
    assert again.calls == []
    assert forgetful.calls
    assert row(third, "step/default").status == "tried"


@pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint.*")
def test_a_run_that_is_resumed_begins_with_what_has_won():
    first, _, trainer = searched(backend=Backend(step=halfway), remember=False, more=0)
    trainer.save_checkpoint("stopped.ckpt")
    again = Backend(step=halfway)
    profiler = CompileProfiler(
        mode="auto", backend=again, candidates=["step", "forward"], remember=False, verbose=False
    )
    callbacks = [profiler, StopAt(trainer.global_step + 60)]
    fit(Pausing(), callbacks, max_steps=FOR_LONG, validate=False, ckpt_path="stopped.ckpt")

    assert first.search.active == profiler.report.search.active == "forward/default"
    assert set(again.calls) == {"forward"}


def test_a_pass_is_timed_before_anything_is_compiled():
    """So that what pairs would take is part of the price: ten of them, each two blocks of four pauses and two more."""
    report, *_ = searched(max_steps=120, step=100)
    why = row(report, "step/default").why
    told_s = float(re.search(r"cost (\d+\.\d) s", why).group(1))

    assert report.search.spent_s == 0
    assert told_s > 5 + 10 * 10 * PAUSE_S
