"""The search step by step: what it tries, what it keeps, what it gives up, and that it says why."""

from __future__ import annotations

import math
import random

import pytest

from compile_profiler.candidates import Candidate, Pruned, checked_candidates
from compile_profiler.duel import MAX_COUPLES, MAX_PAIRS, MAX_VOID, MAX_VOID_COUPLES
from compile_profiler.outlook import ASSUMED_LEFT_S, Now
from compile_profiler.records import Drift, Report, Sample
from compile_profiler.search import Measure, Search, Settle, Try, Windows
from compile_profiler.verdict import Limits

STEP, GRAPHS, FORWARD = checked_candidates(["step", "step/reduce-overhead", "forward"])
AUTOTUNED = Candidate(mode="max-autotune")
DYNAMIC = Candidate(dynamic=True)
DAY = Now(step=5, elapsed_s=1.0, seconds_left=86400.0, step_s=0.03, pass_s=0.025, host_s=0.01)
HOUR = Now(step=5, elapsed_s=1.0, seconds_left=3600.0, step_s=0.03, pass_s=0.025, host_s=0.01)


def search_of(*candidates, **others):
    return Search(candidates, **{"limits": Limits(), "num_leaves": 50, **others})


def pair(speedup, *, step=10, step_s=None, shape="", void=None, drift=None, host_share=0.4):
    eager_s, compiled_s = (0.025, 0.025 / speedup) if void is None else (0.0, 0.0)
    return Sample(
        step=step,
        eager_s=eager_s,
        compiled_s=compiled_s,
        eager_host_s=host_share * eager_s,
        compiled_host_s=host_share * compiled_s,
        step_s=step_s,
        shape=shape,
        void=void,
        drift=drift,
    )


def couple(ratio):
    return Sample(step=20, eager_s=0.03, compiled_s=0.03 / ratio, num_passes=20)


def go_on(search, truth, *, now=HOUR, until=Settle, compile_s=5.0, real=None):
    """Answer what the search asks for, by the true ratios of passes (and of steps), until it asks for ``until``."""
    asked = []
    for _ in range(1000):
        action = search.next(now)
        asked.append(action)
        if isinstance(action, until) and len(asked) > 1:
            return action, asked
        if isinstance(action, Try):
            search.compiled(action.candidate, compile_s)
            search.saw_pair(pair(1.0, void="compiled"), 0.1)
        elif isinstance(action, Measure):
            search.saw_pair(pair(truth[action.candidate], step_s=0.03), 0.3)
        elif isinstance(action, Windows):
            mine = (real or truth)[action.challenger]
            search.saw_couple(couple(mine / (1.0 if action.incumbent is None else (real or truth)[action.incumbent])))
        else:
            return action, asked
    raise AssertionError("the search does not end")


def row(search, candidate):
    return next(one for one in search.report().candidates if one.name == candidate.name)


def test_a_clear_gain_is_kept_at_once_and_nobody_asks_for_windows():
    search = search_of(STEP)

    end, asked = go_on(search, {STEP: 2.0})

    assert end == Settle(STEP, "gain", end.message)
    assert "2.00x eager in a pass" in end.message
    assert "(the only one tried)" in end.message
    assert not any(isinstance(action, Windows) for action in asked)
    assert sum(isinstance(action, Measure) for action in asked) == 9  # 2 / (0.05 / 2) needs nine signs
    assert search.incumbent == STEP
    assert search.alive == (STEP,)


def test_without_news_the_same_action_comes_again():
    search = search_of(STEP)

    assert search.next(HOUR) == search.next(HOUR) == Try(STEP)
    search.compiled(STEP, 5.0)
    assert search.next(HOUR) == search.next(HOUR) == Measure(STEP)
    end, _ = go_on(search, {STEP: 2.0})
    assert search.next(HOUR) is end


def test_what_loses_is_dropped_before_it_trains_anything():
    search = search_of(STEP)

    end, asked = go_on(search, {STEP: 0.8})

    assert (end.candidate, end.reason) == (None, "no_gain")
    assert "step/default 0.80x eager in a pass" in end.message
    assert not any(isinstance(action, Windows) for action in asked)
    assert row(search, STEP).status == "dropped"
    assert search.alive == ()


def test_windows_have_the_last_word_where_a_gain_is_small():
    """1.3x in a pass that is slower in real steps."""
    search = search_of(STEP)

    end, asked = go_on(search, {STEP: 1.1}, real={STEP: 0.97})

    assert end.candidate is None
    assert row(search, STEP).why == "0.97x eager in real steps"
    assert row(search, STEP).end_to_end_method == "windows"
    assert row(search, STEP).end_to_end == pytest.approx(0.97)
    assert 8 <= sum(isinstance(action, Windows) for action in asked) <= MAX_COUPLES


def test_the_better_challenger_takes_over_and_the_loser_is_let_go():
    search = search_of(STEP, GRAPHS)

    end, _ = go_on(search, {STEP: 1.5, GRAPHS: 2.5})

    assert end.candidate == GRAPHS
    assert "(the best of 2 tried)" in end.message
    assert row(search, STEP).why == "slower than step/reduce-overhead"
    assert [switch.name for switch in search.report().switches] == ["eager", STEP.name, GRAPHS.name]
    assert row(search, GRAPHS).end_to_end > row(search, STEP).end_to_end > 1.2


def test_a_challenger_that_loses_to_the_incumbent_leaves_it_in_place():
    search = search_of(STEP, GRAPHS)

    end, _ = go_on(search, {STEP: 2.0, GRAPHS: 1.4})

    assert end.candidate == STEP
    assert row(search, GRAPHS).why == "0.70x step/default in a pass"


def test_passes_that_are_nearly_equal_are_settled_by_real_steps():
    search = search_of(STEP, GRAPHS)

    end, asked = go_on(search, {STEP: 2.0, GRAPHS: 1.95}, real={STEP: 1.5, GRAPHS: 1.7})

    assert Windows(STEP, GRAPHS) in asked
    assert end.candidate == GRAPHS


def test_pairs_are_compared_within_one_shape():
    """The incumbent's gain is 3x on short batches and 1.5x on long ones; the challenger met only long ones."""
    search = search_of(STEP, GRAPHS)
    for _ in range(12):
        if not isinstance(search.next(HOUR), (Try, Measure)):
            break
        search.compiled(STEP, 1.0)
        for shape, speedup in (("short", 3.0), ("long", 1.5)):
            if search.challenger == STEP:
                search.saw_pair(pair(speedup, shape=shape, step_s=0.03), 0.1)
                search.next(HOUR)
    assert search.incumbent == STEP
    assert search.next(HOUR) == Try(GRAPHS)

    search.compiled(GRAPHS, 1.0)
    for _ in range(4):
        search.saw_pair(pair(1.6, shape="long", step_s=0.02), 0.1)
        action = search.next(HOUR)

    assert action == Measure(GRAPHS)  # 1.6x is ahead of 1.5x, whatever short batches gain


def test_pairs_without_times_of_launching_or_of_steps_do():
    """As on a CPU, and where no window has ended between two pairs."""
    search = search_of(STEP)
    for number in range(9):
        search.next(HOUR)
        step_s = 0.03 if number % 2 else None
        search.saw_pair(Sample(step=number, eager_s=0.025, compiled_s=0.0125, step_s=step_s), 0.2)

    end = search.next(HOUR)

    assert end.candidate == STEP
    assert row(search, STEP).end_to_end == pytest.approx(0.03 / 0.0175)


def test_without_the_time_of_any_step_windows_decide():
    search = search_of(STEP)
    for number in range(9):
        search.next(HOUR)
        search.saw_pair(Sample(step=number, eager_s=0.025, compiled_s=0.0125), 0.2)

    assert search.next(HOUR) == Windows(None, STEP)
    search.failed(STEP, "runtime_error")
    assert row(search, STEP).end_to_end is None


def test_what_seems_to_lose_in_pairs_that_decide_nothing_is_not_tried_in_real_steps():
    search = search_of(STEP)
    for number in range(MAX_PAIRS):
        assert isinstance(search.next(HOUR), (Try, Measure))
        search.saw_pair(pair(0.9 if number % 3 else 1.1, step_s=0.03), 0.1)

    assert search.next(HOUR).candidate is None
    assert row(search, STEP).why == f"0.90x eager in a pass, by {MAX_PAIRS} pairs"


def test_an_incumbent_with_too_few_pairs_is_measured_again():
    """Nine have shown that it beats eager; to lose or win against another it needs as many as that one."""
    search = search_of(STEP, GRAPHS)

    _, asked = go_on(search, {STEP: 2.0, GRAPHS: 1.4})

    assert asked.index(Try(GRAPHS)) < max(n for n, action in enumerate(asked) if action == Measure(STEP))
    assert row(search, STEP).num_pairs == row(search, GRAPHS).num_pairs == 11


def test_batches_that_never_meet_are_not_compared():
    """The incumbent has met batches of one shape only, the challenger of another: real steps tell."""
    search = search_of(STEP, GRAPHS)
    go_on(search, {STEP: 2.0}, until=Try)
    asked = []
    while not isinstance(action := search.next(HOUR), Windows):
        asked.append(action)
        search.saw_pair(pair(1.9, shape="long" if search.challenger == action.candidate else "", step_s=0.02), 0.1)

    assert action == Windows(STEP, GRAPHS)
    assert len(asked) <= 2 * MAX_PAIRS
    assert row(search, GRAPHS).num_pairs == row(search, STEP).num_pairs == MAX_PAIRS


# -- trouble ----------------------------------------------------------------------------------------------------------


def test_a_challenger_that_fails_is_dropped_with_what_it_shares_with_others():
    search = search_of(STEP, GRAPHS, FORWARD)
    assert search.next(HOUR) == Try(STEP)

    search.failed(STEP, "compile_error", "Unsupported: a list")

    assert search.next(HOUR) == Try(FORWARD)
    assert row(search, STEP).why == "compile_error: Unsupported: a list"
    search.failed(FORWARD, "out_of_memory")
    end = search.next(HOUR)
    assert (end.candidate, end.reason) == (None, "compile_error")
    assert "step/default: compile_error: Unsupported: a list; forward/default: out_of_memory" in end.message
    assert row(search, GRAPHS).status == "skipped"
    assert row(search, GRAPHS).why == "step/default has failed (compile_error)"


def test_a_failure_of_cuda_graphs_is_not_held_against_the_default_mode():
    search = search_of(GRAPHS, STEP)
    host_bound = Now(step=5, seconds_left=3600.0, step_s=0.03, pass_s=0.025, host_s=0.025)
    assert search.next(host_bound) == Try(GRAPHS)

    search.failed(GRAPHS, "out_of_memory", "pools")

    assert search.next(host_bound) == Try(STEP)


def test_an_incumbent_that_fails_gives_those_it_had_beaten_another_chance():
    search = search_of(STEP, GRAPHS)
    go_on(search, {STEP: 1.5, GRAPHS: 2.5})

    search.failed(GRAPHS, "runtime_error", "illegal memory access")

    assert search.incumbent is None
    assert search.report().active == "eager"
    assert search.challenger is None
    assert search.next(HOUR) == Try(STEP)
    end, _ = go_on(search, {STEP: 1.5})
    assert end.candidate == STEP
    assert [switch.name for switch in search.report().switches][-2:] == ["eager", STEP.name]


def test_drift_and_nan_end_a_challenger():
    far = Drift(within_tolerance=False, eager_finite=True, compiled_finite=True, loss_rel=0.1, grad_rel=0.2)
    spoilt = Drift(eager_finite=True, compiled_finite=False)
    search = search_of(STEP, FORWARD)
    for _ in range(3):
        search.next(HOUR)
        search.saw_pair(pair(2.0, drift=far), 0.1)
    assert row(search, STEP).why.startswith("drift: ")
    assert (row(search, STEP).loss_rel, row(search, STEP).grad_rel) == (0.1, 0.2)

    assert search.next(HOUR) == Try(FORWARD)
    search.saw_pair(pair(1.0, void="compiled", drift=spoilt), 0.1)  # counts in a void pair too
    assert row(search, FORWARD).why.startswith("non_finite: ")
    assert search.next(HOUR).reason == "drift"


def test_drift_that_the_user_only_wants_to_hear_of_ends_nothing():
    far = Drift(within_tolerance=False, eager_finite=True, compiled_finite=True)
    search = search_of(STEP, limits=Limits(drift="warn"))
    for _ in range(9):
        search.next(HOUR)
        search.saw_pair(pair(2.0, step_s=0.03, drift=far), 0.1)

    assert search.next(HOUR).candidate == STEP


def test_one_that_never_stops_compiling_is_given_up():
    search = search_of(STEP)
    for _ in range(MAX_VOID):
        assert isinstance(search.next(HOUR), (Try, Measure))
        search.saw_pair(pair(1.0, void="compiled"), 0.1)

    assert search.next(HOUR).candidate is None
    assert row(search, STEP).why == f"{MAX_VOID} pairs in a row were void (compiled)"


def test_where_no_step_can_be_timed_pairs_have_to_do():
    search = search_of(STEP)
    action, _ = go_on(search, {STEP: 1.1}, until=Windows)
    for _ in range(MAX_VOID_COUPLES):
        assert search.next(HOUR) == action
        search.saw_couple(Sample(step=1, eager_s=0.0, compiled_s=0.0, void="paused"))

    end = search.next(HOUR)
    assert end.candidate == STEP
    assert "by estimate" in end.message


# -- what is worth trying ---------------------------------------------------------------------------------------------


def test_a_short_run_compiles_nothing_and_says_so():
    search = search_of(STEP, FORWARD)

    end = search.next(Now(step=5, seconds_left=20.0, step_s=0.03))

    assert (end.candidate, end.reason) == (None, "no_gain")
    assert end.message.startswith("The run is too short to find out: about 20 s are left, and step/default would take")
    assert {one.status for one in search.report().candidates} == {"skipped"}


def test_a_gain_that_would_cost_too_much_to_find_is_not_looked_for():
    search = search_of(STEP, search_budget=0.01)

    end = search.next(Now(step=5, seconds_left=300.0, step_s=0.03))

    assert end.candidate is None
    assert "more than a search may risk here (3 s)" in end.message
    assert "the search may cost 3.0 s more" in row(search, STEP).why


def test_without_candidates_there_is_nothing_to_find():
    end = search_of().next(HOUR)

    assert (end.candidate, end.reason) == (None, "unsupported")


def test_where_python_sets_the_pace_cuda_graphs_come_first():
    """And where the device does, they are not tried in a run of minutes."""
    python = Now(step=5, seconds_left=600.0, step_s=0.03, pass_s=0.025, host_s=0.025)
    device = Now(step=5, seconds_left=600.0, step_s=0.03, pass_s=0.025, host_s=0.005)

    assert search_of(STEP, GRAPHS).next(python) == Try(GRAPHS)
    assert search_of(STEP, GRAPHS).next(device) == Try(STEP)
    search = search_of(STEP, GRAPHS)
    go_on(search, {STEP: 2.0}, now=device)
    assert row(search, GRAPHS).status == "skipped"


def test_autotuning_waits_for_the_same_without():
    search = search_of(AUTOTUNED, GRAPHS)
    week = Now(step=5, seconds_left=600_000.0, step_s=0.03, pass_s=0.025, host_s=0.025)

    assert search.next(week) == Try(GRAPHS)
    search.failed(GRAPHS, "out_of_memory")
    assert row(search, AUTOTUNED).status == "untried"
    assert search.next(week).candidate is None
    assert row(search, AUTOTUNED).why == "step/reduce-overhead has failed (out_of_memory)"


def test_dynamic_shapes_are_tried_for_what_recompiling_has_cost():
    search = search_of(STEP, DYNAMIC)
    minutes = Now(step=5, seconds_left=300.0, step_s=0.03, pass_s=0.025, host_s=0.01)
    end, _ = go_on(search, {STEP: 2.0}, now=minutes)
    assert end.candidate == STEP
    assert row(search, DYNAMIC).status == "skipped"

    search = search_of(STEP, DYNAMIC)
    end, _ = go_on(
        search, {STEP: 2.0, DYNAMIC: 2.0}, now=Now(step=5, seconds_left=300.0, step_s=0.03, recompile_s=60.0)
    )
    assert row(search, DYNAMIC).status == "dropped"


def test_compile_seconds_are_learned():
    """Three times the guess for the first: the second is expected to take three times as long, too."""
    search = search_of(STEP, FORWARD)
    go_on(search, {STEP: 2.0, FORWARD: 1.0}, compile_s=3 * 12.5, now=DAY)

    assert row(search, STEP).expected_compile_s == 12.5
    assert row(search, FORWARD).expected_compile_s == 37.5


def test_what_an_earlier_run_remembers_replaces_the_guess():
    search = search_of(STEP, remembered_s={"step/default": 2.0})

    assert search.next(Now(step=5, seconds_left=40.0, step_s=0.03, pass_s=0.02)) == Try(STEP)
    assert row(search, STEP).expected_compile_s == 2.0


def test_a_run_of_unknown_length_is_taken_to_be_an_hour_long():
    search = search_of(STEP)

    assert search.next(Now(step=5, elapsed_s=10.0, step_s=0.03)) == Try(STEP)
    report = search.report()
    assert (report.run_s, report.run_is_assumed) == (ASSUMED_LEFT_S + 10.0, True)
    assert report.budget_s == pytest.approx(0.1 * report.run_s)


def test_an_overrun_budget_ends_in_few_pairs_and_no_more_candidates():
    search = search_of(STEP, FORWARD)
    now = Now(step=5, seconds_left=400.0, step_s=0.03, pass_s=0.025, host_s=0.01)

    end, asked = go_on(search, {STEP: 1.03}, now=now, compile_s=60.0)

    assert sum(isinstance(action, Measure) for action in asked) == 4
    assert end.candidate == STEP
    assert row(search, FORWARD).status == "skipped"


def test_max_pairs_of_the_callback_is_one_more_bound():
    search = search_of(STEP, limits=Limits(max_pairs=2))

    _, asked = go_on(search, {STEP: 1.5})

    assert sum(isinstance(action, Measure) for action in asked) == 2
    assert MAX_PAIRS > 2


# -- an earlier run's winner ------------------------------------------------------------------------------------------


def test_a_known_winner_trains_from_its_first_pair_on_and_nobody_else_is_tried():
    search = search_of(STEP, GRAPHS, known=GRAPHS)
    assert search.next(HOUR) == Try(GRAPHS)
    search.compiled(GRAPHS, 5.0)
    search.saw_pair(pair(2.0, step_s=0.02), 0.1)
    assert search.incumbent == GRAPHS

    end, _ = go_on(search, {GRAPHS: 2.0})

    assert end.candidate == GRAPHS
    assert row(search, STEP).why == "step/reduce-overhead has won in an earlier run of this job"
    assert row(search, STEP).status == "skipped"


def test_a_known_winner_that_wins_no_more_makes_room_for_the_others():
    search = search_of(STEP, GRAPHS, known=GRAPHS)

    end, asked = go_on(search, {STEP: 2.0, GRAPHS: 0.9})

    assert asked[0] == Try(GRAPHS)
    assert end.candidate == STEP
    assert [switch.name for switch in search.report().switches] == ["eager", GRAPHS.name, "eager", STEP.name]


def test_a_known_winner_that_saves_less_than_it_costs_is_left_alone():
    minute = Now(step=5, seconds_left=60.0, step_s=0.03, pass_s=0.02, host_s=0.01)
    remembered = {"known": GRAPHS, "remembered_s": {GRAPHS.name: 2.0}}

    assert search_of(STEP, GRAPHS, **remembered, known_speedup=1.3).next(minute) == Try(GRAPHS)
    search = search_of(STEP, GRAPHS, **remembered, known_speedup=1.02)
    assert search.next(minute).candidate is None
    assert "too little for the time that is left" in row(search, STEP).why


def test_a_winner_that_is_no_candidate_any_more_is_ignored():
    assert search_of(STEP, known=GRAPHS).next(HOUR) == Try(STEP)


# -- the whole --------------------------------------------------------------------------------------------------------


def test_the_report_has_every_candidate_and_survives_json():
    search = search_of(STEP, GRAPHS, pruned=[Pruned(AUTOTUNED, "autotuning takes minutes")])
    go_on(search, {STEP: 1.5, GRAPHS: 2.5})
    search.saw_memory(GRAPHS, 123)

    report = search.report()

    assert [one.name for one in report.candidates] == ["step/default", "step/reduce-overhead", "step/max-autotune"]
    assert [one.status for one in report.candidates] == ["dropped", "chosen", "skipped"]
    assert report.candidates[1].peak_bytes == 123
    assert report.candidates[1].compile_s == 5.0
    assert report.candidates[1].speedup_low == pytest.approx(2.5)
    assert report.settled
    assert report.spent_s == search.spent_s > 10.0
    assert Report.from_dict(Report(search=report).to_dict()).search == report


def test_ranks_that_hear_the_same_do_the_same():
    """A second search, fed what the first was fed, does as the first did."""
    chance = random.Random(0)
    first, second = (search_of(STEP, GRAPHS, FORWARD) for _ in range(2))
    for _ in range(200):
        actions = [search.next(HOUR) for search in (first, second)]
        assert actions[0] == actions[1]
        if isinstance(actions[0], Settle):
            break
        if isinstance(actions[0], Windows):
            sample = couple(math.exp(chance.gauss(0.02, 0.05)))
            for search in (first, second):
                search.saw_couple(sample)
        else:
            sample = pair(math.exp(chance.gauss(0.05, 0.1)), step_s=0.03)
            for search in (first, second):
                search.compiled(actions[0].candidate, 1.0)
                search.saw_pair(sample, 0.2)

    assert isinstance(actions[0], Settle)
    assert first.report() == second.report()
