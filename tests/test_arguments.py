"""A bad argument gets one clear error, at construction."""

import pytest

from compile_profiler import CompileProfiler
from runs import Regression, train

BAD_VALUES = [
    ({"target": "net"}, "target=\\['net'\\]"),
    ({"target": []}, "at least one submodule"),
    ({"target": ["net", ""]}, "no empty name"),
    ({"backend": "indcutor"}, "backend must be .* got 'indcutor'"),
    ({"mode": "fast"}, "mode must be .* got 'fast'"),
    ({"mode": "reduce-overhead", "backend": "eager"}, "setting of backend='inductor'"),
    ({"mode": "default", "options": {"max_autotune": True}}, "exclude each other"),
    ({"mode": "auto", "options": {"max_autotune": True}}, "exclude each other"),
    ({"mode": "auto", "heal": True}, "got heal=True. Keep one"),
    ({"mode": "auto", "max_pairs": 0}, "got max_pairs=0"),
    ({"mode": "auto", "candidates": ["step"], "target": "forward"}, "target='forward' too"),
    ({"mode": "auto", "candidates": ["step"], "dynamic": True}, "got dynamic=True too"),
    ({"mode": "auto", "candidates": []}, "at least one|none"),
    ({"mode": "auto", "candidates": ["step/reduce-overhead"], "backend": "eager"}, "setting of backend='inductor'"),
    ({"mode": "auto", "candidates": ["step/fast"]}, "got 'step/fast'"),
    ({"candidates": ["step"]}, "those of a search, got mode=None"),
    ({"stages": ()}, "stages must be"),
    ({"stages": ("train", "test")}, "stages must be"),
    ({"warmup_steps": -1}, "warmup_steps must be an integer of at least 0, got -1"),
    ({"min_speedup": 0.0}, "min_speedup must be"),
    ({"min_speedup": float("nan")}, "min_speedup must be"),
    ({"confidence": 0.0}, "confidence must lie between 0 and 1"),
    ({"confidence": 1.0}, "confidence must lie between 0 and 1"),
    ({"confidence": 95}, "confidence must lie between 0 and 1"),
    ({"max_pairs": -1}, "max_pairs must be an integer of at least 0, got -1"),
    ({"pair_every_n_steps": 0}, "pair_every_n_steps must be an integer of at least 1, got 0"),
    ({"overhead_budget": 0.0}, "overhead_budget must lie between 0 and 1"),
    ({"overhead_budget": -0.1}, "overhead_budget must be"),
    ({"overhead_budget": 2}, "overhead_budget must lie between 0 and 1"),
    ({"end_to_end": "window"}, "end_to_end must be one of 'estimate', 'windows', 'off', got 'window'"),
    ({"drift": "ignore"}, "drift must be one of"),
    ({"drift_tolerance": -1e-3}, "drift_tolerance must be"),
    ({"drift_reference": "float32"}, "drift_reference must be one of None, 'float64', got 'float32'"),
]
BAD_TYPES = [
    {"target": 3},
    {"target": ["net", 3]},
    {"backend": 3},
    {"mode": 3},
    {"dynamic": "yes"},
    {"fullgraph": "no"},
    {"options": [("max_autotune", True)]},
    {"stages": "train"},
    {"warmup_steps": 2.5},
    {"warmup_steps": True},
    {"min_speedup": "1.02"},
    {"confidence": None},
    {"max_pairs": "40"},
    {"fallback": None},
    {"seed": 0.5},
    {"log": "yes"},
    {"verbose": 1},
]


@pytest.mark.parametrize(("arguments", "message"), BAD_VALUES, ids=str)
def test_a_bad_value_is_refused_with_what_came_and_what_was_expected(arguments, message):
    with pytest.raises(ValueError, match=message):
        CompileProfiler(**arguments)


@pytest.mark.parametrize("candidates", ["step", [3], {"target": "step"}], ids=str)
def test_candidates_of_the_wrong_type_are_refused(candidates):
    with pytest.raises(TypeError, match="candidate"):
        CompileProfiler(mode="auto", candidates=candidates)


@pytest.mark.parametrize("arguments", BAD_TYPES, ids=str)
def test_a_bad_type_is_refused_by_name(arguments):
    (name,) = arguments
    with pytest.raises(TypeError, match=f"{name} must be .* got"):
        CompileProfiler(**arguments)


@pytest.mark.parametrize("arguments", [{}, {"mode": "reduce-overhead"}, {"target": ["net.0"]}, {"target": "blocks"}])
def test_a_good_argument_is_taken(arguments):
    CompileProfiler(**arguments)


def test_an_unknown_submodule_is_named_before_the_first_step():
    with pytest.raises(ValueError, match=r"'encoder', which Regression does not have.* net"):
        train(Regression, [CompileProfiler(target=["encoder"])], max_steps=1)


def test_blocks_without_a_repeated_block_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"found no block in Regression.*Use target='step'"):
        train(Regression, [CompileProfiler(target="blocks")], max_steps=1)


def test_two_profilers_in_one_trainer_are_refused():
    with pytest.raises(ValueError, match="more than one CompileProfiler"):
        train(Regression, [CompileProfiler(), CompileProfiler()], max_steps=1)
