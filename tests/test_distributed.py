"""Two real processes: pairs leave no trace under any variant of DDP, and all ranks decide the same at the same step."""

import pytest
import torch

import world

VARIANTS = ["plain", "bucket_view", "find_unused", "static_graph", "accumulate", "power_sgd"]
ACCIDENTS = {
    "cannot_compile": "compile_error",
    "runs_out_of_memory": "out_of_memory",
    "fails_later": "runtime_error",
    "fails_in_the_middle_of_backward": "runtime_error",
    "slow_rank": "no_gain",
    "nan_rank": "non_finite",
}
MAX_S = 60
"""No case may wait for the watchdog of a process group, which is 30 minutes for gloo."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """All cases, run in one world of two processes."""
    return world.launch(tmp_path_factory.mktemp("world"), list(world.CASES))


def both_have(seen, case, key):
    """What the two ranks have, which is the same."""
    first, second = (rank[key] for rank in seen[case])
    if isinstance(first, dict):
        assert all(torch.equal(first[name], second[name]) for name in first), case
    else:
        assert first == second, case
    return first


def verdict_of(seen, case):
    """The verdict, which is the same on both ranks, message and step included."""
    first, second = (rank["report"]["verdict"] for rank in seen[case])
    assert {**first, "config": None} == {**second, "config": None}
    return first


def test_no_case_waits_for_a_watchdog(seen):
    assert {name: rank["seconds"] for name in seen for rank in seen[name] if rank["seconds"] > MAX_S} == {}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_with_pairs_is_bit_identical_to_one_without_the_callback(seen, variant):
    for rank in seen[variant]:
        assert rank["differs"] == []
        assert rank["report"]["speedup"]["num_pairs"] >= 5
        assert rank["report"]["speedup"]["void"] == {}
        assert rank["report"]["drift"]["within_tolerance"] is not False
    both_have(seen, variant, "weights")
    verdict_of(seen, variant)


def test_pairs_are_the_same_pairs_on_every_rank(seen):
    first, second = (rank["report"] for rank in seen["plain"])

    for part in ("speedup", "drift"):
        assert first[part] == second[part]
    assert first["time"]["eager_s"] == second["time"]["eager_s"]


def test_graphs_are_split_at_the_buckets_so_that_gradients_travel_during_backward(seen):
    assert seen["fails_in_the_middle_of_backward"][0]["num_backward_graphs"] > 1


@pytest.mark.parametrize("case", ACCIDENTS)
def test_an_accident_on_one_rank_is_everybodys_at_the_same_step(seen, case):
    verdict = verdict_of(seen, case)

    assert (verdict["decision"], verdict["reason"]) == ("eager", ACCIDENTS[case])
    if "error" in verdict["reason"] or "memory" in verdict["reason"]:
        assert "rank 1" in verdict["message"]
    both_have(seen, case, "weights")
    if "seen" in seen[case][0]:
        both_have(seen, case, "seen")


def test_a_rank_that_cannot_compile_is_known_before_a_step_is_compiled(seen):
    assert verdict_of(seen, "cannot_compile")["step"] == 1
    assert seen["cannot_compile"][0]["seen"][1] == "eager"


def test_gradients_handed_on_before_a_failure_are_not_handed_on_again(seen):
    for rank in seen["fails_in_the_middle_of_backward"]:
        assert rank["far"] < 1e-4
        assert all(value.isfinite().all() for value in rank["weights"].values())


def test_the_slow_rank_is_named_and_its_time_counts(seen):
    report = seen["slow_rank"][0]["report"]

    assert report["ranks"]["num"] == 2
    assert report["ranks"]["pass_s"]["slowest_rank"] == 1
    assert report["ranks"]["pass_s"]["slowest_s"] > 0.08
    assert report["time"]["compiled_s"] > 0.08
    assert report["ranks"]["compile_s"]["median_s"] > 0


def test_a_planted_gain_is_kept_on_every_rank(seen):
    assert verdict_of(seen, "gain")["reason"] == "gain"


def test_several_ranks_search_nothing_and_compile_the_first_candidate(seen):
    for rank in seen["search"]:
        assert rank["differs"] == []
        assert rank["report"]["search"] is None
        assert rank["report"]["verdict"]["config"]["target"] == "forward"
        assert rank["report"]["speedup"]["num_pairs"] >= 5
    both_have(seen, "search", "weights")
    verdict_of(seen, "search")


def test_a_step_that_talks_to_other_ranks_is_timed_in_windows(seen):
    for rank in seen["own_collectives"]:
        assert rank["differs"] == []
        assert rank["report"]["speedup"]["num_pairs"] == 0
        assert rank["report"]["end_to_end"]["method"] == "windows"
        assert rank["report"]["drift"]["grad_rel"] is None
    first, second = (rank["report"]["end_to_end"] for rank in seen["own_collectives"])
    assert first == second


def test_fsdp2_is_compiled_block_by_block_and_timed_in_windows(seen):
    for rank in seen["sharded"]:
        assert rank["differs"] == []
        assert rank["report"]["end_to_end"]["method"] == "windows"
        assert rank["report"]["verdict"]["config"]["modules"] == ["net.0", "net.1", "net.2"]
        assert rank["report"]["compiles"]["graphs"] > 0
        assert rank["cannot"]["verdict"]["reason"] == "compile_error"
        assert "target='blocks'" in rank["asks_too_much"]["verdict"]["message"]
    both_have(seen, "sharded", "seen")


def test_ranks_that_cannot_meet_part_in_peace(seen):
    for rank in seen["one_does_not_come"]:
        assert rank["lost"]
        assert rank["waited_s"] < 10
        assert rank["report"]["verdict"]["decision"] == "eager"
        assert "could not meet" in rank["report"]["verdict"]["message"]
    both_have(seen, "one_does_not_come", "weights")
