"""What a search may try: pruned by what is known, or named by the user."""

from __future__ import annotations

import json

import pytest

from compile_profiler.candidates import AUTOTUNE_FROM_S, Candidate, candidates_for, checked_candidates


def names(choice):
    return [candidate.name for candidate in choice.candidates]


def choice_for(device_type="cuda", *, has_blocks=False, shapes_vary=False, **others):
    return candidates_for(device_type, has_blocks=has_blocks, shapes_vary=shapes_vary, **others)


def test_on_a_gpu_with_time_everything_but_what_makes_no_sense():
    assert names(choice_for(has_blocks=True))[:6] == [
        "step/default",
        "forward/default",
        "blocks/default",
        "step/reduce-overhead",
        "forward/reduce-overhead",
        "blocks/reduce-overhead",
    ]
    assert "step/max-autotune" in names(choice_for(seconds_left=AUTOTUNE_FROM_S))


@pytest.mark.parametrize(
    ("facts", "left_out", "why"),
    [
        ({"device_type": "cpu"}, "step/reduce-overhead", "CUDA graphs need a CUDA device"),
        ({"has_blocks": False}, "blocks/default", "no repeated blocks"),
        ({"shapes_vary": False}, "step/default/dynamic", "one shape"),
        ({"shapes_vary": True}, "step/reduce-overhead", "a CUDA graph of its own"),
        ({"no_graphs": "gradients live in them"}, "step/max-autotune", "gradients live in them"),
        ({"seconds_left": 60.0}, "step/max-autotune-no-cudagraphs", "60 s are left"),
        ({"targets": ("blocks",), "has_blocks": True}, "step/default", "cannot be compiled with this target"),
    ],
)
def test_each_reason_to_leave_one_out_is_told(facts, left_out, why):
    choice = choice_for(**facts)

    assert left_out not in names(choice)
    assert why in {candidate.name: reason for candidate, reason in choice.pruned}[left_out]


def test_nothing_is_both_kept_and_left_out_or_neither():
    for shapes_vary in (False, True):
        choice = choice_for(has_blocks=True, shapes_vary=shapes_vary)
        everything = [*choice.candidates, *(candidate for candidate, _ in choice.pruned)]
        assert len(set(everything)) == len(everything) == 24


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(),
        Candidate(target="blocks", mode="max-autotune", dynamic=True),
        Candidate(dynamic=False),
        Candidate(target=("encoder", "head"), mode="reduce-overhead"),
    ],
)
def test_a_candidate_survives_json(candidate):
    assert Candidate.from_dict(json.loads(json.dumps(candidate.to_dict()))) == candidate
    if isinstance(candidate.target, str):
        assert checked_candidates([candidate.name]) == (candidate,)
    assert checked_candidates([candidate]) == (candidate,)


def test_modes_of_this_torch_are_allowed_too():
    assert checked_candidates(["step/lite-mode"], known_modes=["default", "lite-mode"])[0].mode == "lite-mode"


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("step", TypeError, r"must be a sequence.*got 'step' of type str.*write \['step'\]"),
        ({"target": "step"}, TypeError, "must be a sequence"),
        (3, TypeError, "got 3 of type int"),
        ([], ValueError, "got none"),
        (["step", "step/default"], ValueError, "'step/default' twice"),
        ([3], TypeError, "got 3 of type int"),
        (["stp"], ValueError, "'stp'.*submodule"),
        (["step/fast"], ValueError, "'default' or one of 'reduce-overhead'.*'step/fast'"),
        (["step/reduce-overhead/static/x"], ValueError, "got 'step/reduce-overhead/static/x'"),
        ([{"target": "step", "backend": "eager"}], ValueError, "'backend'.*hold for all"),
        ([{"dynamic": "yes"}], TypeError, "True, False or None"),
        ([{"dynamic": 1}], TypeError, "True, False or None"),
        ([{"target": []}], TypeError, "submodule names"),
        ([{"target": 5}], TypeError, "submodule names"),
        ([{"mode": 5}], ValueError, "mode of a candidate"),
        ([{"mode": ["reduce-overhead"]}], ValueError, "mode of a candidate"),
    ],
)
def test_a_bad_list_gets_one_clear_error(given, error, message):
    with pytest.raises(error, match=message):
        checked_candidates(given)
