"""How often the search ends on a wrong choice and how long its runs are, over thousands of simulated ones.

`python -m benchmarks.search_simulated` and the same with `--wrong` print the tables.
"""

from __future__ import annotations

import math

import pytest

from benchmarks.search_simulated import (
    COMPILE_SD,
    HARD,
    JOBS,
    SEARCH_BUDGET,
    Job,
    Truth,
    main,
    simulate,
    summary,
    wrong_choices,
)
from compile_profiler.results import EAGER
from compile_profiler.scout import UNLEARNED


@pytest.mark.parametrize("name", HARD)
def test_at_most_one_choice_in_twenty_is_wrong(name):
    """An arm more than 3 % slower than the best one, kept; docs/benchmarks.md has the figures of 2,000 runs each."""
    assert wrong_choices(HARD[name], num_runs=120) <= 0.05


def test_wrong_choices_are_counted():
    """Where windows are so noisy that they say nothing, arms 6 % apart cannot be told from each other."""
    arms = {
        "step/default": Truth(pairs=1.3, steps=1.2, compile_s=20.0),
        "step/reduce-overhead": Truth(pairs=1.3, steps=1.27, compile_s=20.0),
    }
    job = Job(step_s=0.03, pass_s=0.025, arms=arms, window_sd=1.0)

    assert 0.2 < wrong_choices(job, num_runs=100) < 0.8


@pytest.mark.parametrize("name", JOBS)
def test_no_run_ends_later_than_eager_by_more_than_the_search_may_cost(name):
    """Unless compiling takes longer than it may by the guess, and no compiler can be stopped."""
    for num_steps in (1000, 5000, 20_000):
        eager_s = JOBS[name].alone_s(EAGER, num_steps)
        for seed in range(20):
            run = simulate(JOBS[name], num_steps=num_steps, seed=seed)
            overrun_s = max(0.0, run.compile_s - UNLEARNED * run.expected_s)
            assert run.total_s <= (1 + SEARCH_BUDGET) * eager_s + overrun_s


@pytest.mark.parametrize(
    ("name", "best"),
    [("gpt", "step/reduce-overhead"), ("resnet", "step/reduce-overhead"), ("pointwise", "step/reduce-overhead")],
)
def test_long_runs_end_soon_after_the_best_single_configuration(name, best):
    found = summary(JOBS[name], num_steps=100_000, num_runs=20)

    assert found["best"] == best
    assert found["active"] == {best: 1.0}
    assert found["over_best"][1] < 1.05
    assert found["over_eager"][1] < 0.8


def test_what_is_known_from_an_earlier_run_saves_the_search():
    """The winner at once, compiled in a fifth of the time from a warm cache: 2 % over the best single configuration."""
    for name in ("gpt", "resnet", "pointwise"):
        found = summary(JOBS[name], num_steps=5000, num_runs=20, known="step/reduce-overhead", warmth=0.2)
        assert found["over_best"][1] < 1.05, name
        assert found["over_best"][1] < summary(JOBS[name], num_steps=5000, num_runs=20, warmth=0.2)["over_best"][1]


def test_the_noise_is_what_it_is_said_to_be():
    seconds = [math.log(simulate(JOBS["gpt"], num_steps=20_000, seed=seed).compile_s) for seed in range(60)]
    mean = sum(seconds) / len(seconds)

    assert 0.5 < math.sqrt(sum((one - mean) ** 2 for one in seconds) / len(seconds)) / COMPILE_SD < 1.5


def test_both_tables_are_printed(capsys, tmp_path):
    main(["--jobs", "linear", "--steps", "1000", "--runs", "3", "--out", str(tmp_path / "search.json")])
    main(["--wrong", "--runs", "1"])

    printed = capsys.readouterr().out
    assert "linear" in printed
    assert "Over best: mean" in printed
    assert "noisy, 4 % apart: 0.0 % of 1" in printed
    assert "over_best" in (tmp_path / "search.json").read_text()
