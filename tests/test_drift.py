"""Distances between what two arms computed; the oracle is numpy in float64."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from compile_profiler import drift, sums
from compile_profiler.drift import Comparison, Outcome, compare, distance, measured
from compile_profiler.tolerances import tolerance_for, unit_roundoff_for

SHAPES = {"embed": (50, 8), "layer.weight": (16, 8), "layer.bias": (16,), "scale": ()}


def gradients(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


def outcome(grads, loss=2.0):
    return Outcome(loss=None if loss is None else torch.as_tensor(loss), gradients=grads)


def judge(eager, compiled, *, tolerance=1e-4, noise_floor=None, rng="none"):
    return compare(eager, compiled, noise_floor=noise_floor, rng=rng, tolerance=tolerance)


def oracle(eager, compiled):
    """Relative distance and cosine of two dicts of dense tensors, by numpy in double precision."""

    def vector(grads):
        wide = np.complex128 if any(g.is_complex() for g in grads.values()) else np.float64
        parts = [g.to(torch.complex128 if wide == np.complex128 else torch.float64).numpy() for g in grads.values()]
        return np.concatenate([part.ravel() for part in parts])

    e, c = vector(eager), vector(compiled)
    norm = np.linalg.norm
    return norm(c - e) / norm(e), np.vdot(e, c).real / (norm(e) * norm(c))


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128],
    ids=str,
)
def test_distances_agree_with_numpy(dtype):
    """All gradients count as one vector, in every dtype, to double precision."""
    eager, compiled = gradients(dtype), gradients(dtype, seed=1)
    expected_rel, expected_cosine = oracle(eager, compiled)

    found = judge(outcome(eager, 2.0), outcome(compiled, -1.0))

    assert found.grad_rel == pytest.approx(expected_rel, rel=1e-12)
    assert found.grad_cosine == pytest.approx(expected_cosine, rel=1e-12)
    assert found.loss_rel == 1.5
    assert distance(outcome(eager), outcome(compiled)) == found.grad_rel


def test_long_gradients_are_compared_to_the_last_element(monkeypatch):
    """The pieces in which a long gradient is widened leave nothing out."""
    monkeypatch.setattr(sums, "_CHUNK", 7)
    eager, compiled = gradients(), gradients(seed=1)
    expected_rel, expected_cosine = oracle(eager, compiled)

    found = judge(outcome(eager), outcome(compiled))

    assert (found.grad_rel, found.grad_cosine) == pytest.approx((expected_rel, expected_cosine), rel=1e-12)


def test_half_precision_does_not_overflow():
    """Values whose square, and whose difference, float16 cannot hold."""
    eager, compiled = ({"w": torch.full((1000,), value, dtype=torch.float16)} for value in (60000.0, -60000.0))

    found = judge(outcome(eager), outcome(compiled))

    assert (found.grad_rel, found.grad_cosine) == pytest.approx((2.0, -1.0))
    assert found.eager_finite
    assert found.compiled_finite


def test_equal_outcomes_are_at_no_distance():
    """Zero, not almost zero; no parameter is blamed."""
    found = judge(outcome(gradients()), outcome(gradients()), tolerance=0.0)

    assert (found.loss_rel, found.grad_rel, found.worst_parameter) == (0.0, 0.0, None)
    assert found.grad_cosine == pytest.approx(1.0, abs=1e-15)
    assert found.within_tolerance is True


@pytest.mark.parametrize("factor", [1.001, 1.01])
@pytest.mark.parametrize("planted", ["embed", "layer.weight", "layer.bias"])
def test_one_scaled_gradient_is_found_and_named(planted, factor):
    """A single float32 gradient that is 0.1 % or 1 % too large exceeds the limit."""
    compiled = {name: g * factor if name == planted else g for name, g in gradients().items()}

    found = judge(outcome(gradients()), outcome(compiled), tolerance=tolerance_for(torch.float32))

    assert found.grad_rel == pytest.approx(oracle(gradients(), compiled)[0], rel=1e-12)
    assert found.worst_parameter == planted
    assert found.within_tolerance is False


def test_a_wrong_loss_alone_is_found():
    """Right gradients do not excuse a loss that is 1 % off."""
    found = judge(outcome(gradients(), 2.0), outcome(gradients(), 2.02))

    assert found.loss_rel == pytest.approx(0.01, rel=1e-5)
    assert found.grad_rel == 0.0
    assert found.within_tolerance is False


def test_a_sign_flip_turns_the_cosine():
    """All gradients the other way round: cosine -1, distance 2."""
    found = judge(outcome(gradients()), outcome({name: -g for name, g in gradients().items()}))

    assert (found.grad_cosine, found.grad_rel) == pytest.approx((-1.0, 2.0))


def test_a_conjugated_gradient_is_a_difference():
    """The imaginary part counts, also in a lazily conjugated tensor."""
    eager = {"w": torch.tensor([1 + 2j, 3 - 1j])}
    expected_rel, expected_cosine = oracle(eager, {"w": torch.tensor([1 - 2j, 3 + 1j])})

    found = judge(outcome(eager), outcome({"w": eager["w"].conj()}))

    assert (found.grad_rel, found.grad_cosine) == pytest.approx((expected_rel, expected_cosine))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("arm", ["eager", "compiled"])
def test_one_value_that_is_not_finite_is_found_and_named(arm, value):
    """One NaN or infinity among all gradients: the arm is flagged, the parameter named, no distance claimed."""
    spoilt = gradients()
    spoilt["layer.bias"][3] = value
    arms = {"eager": gradients(), "compiled": gradients(), arm: spoilt}

    found = judge(outcome(arms["eager"]), outcome(arms["compiled"]))

    assert (found.eager_finite, found.compiled_finite) == (arm != "eager", arm != "compiled")
    assert found.worst_parameter == "layer.bias"
    assert (found.grad_rel, found.grad_cosine, found.within_tolerance) == (None, None, None)
    assert found.loss_rel == 0.0


def test_a_loss_that_is_not_finite_flags_the_arm():
    """The loss counts for the flag as the gradients do."""
    found = judge(outcome(gradients()), outcome(gradients(), float("nan")))

    assert (found.eager_finite, found.compiled_finite) == (True, False)
    assert (found.loss_rel, found.grad_rel, found.within_tolerance) == (None, 0.0, None)


def test_a_gradient_missing_on_both_sides_is_no_difference():
    """A parameter that backward does not reach is left out."""
    found = judge(outcome({**gradients(), "unused": None}), outcome({**gradients(), "unused": None}))

    assert (found.grad_rel, found.within_tolerance) == (0.0, True)


@pytest.mark.parametrize("arm", ["eager", "compiled"])
@pytest.mark.parametrize("how", ["none", "absent"])
def test_a_gradient_missing_on_one_side_counts_as_zero(arm, how):
    """Losing a gradient, or finding one, is a difference as large as the gradient."""
    arms = {"eager": gradients(), "compiled": gradients()}
    zeroed = {key: {**grads, "embed": torch.zeros(50, 8)} if key == arm else grads for key, grads in arms.items()}
    if how == "none":
        arms[arm]["embed"] = None
    else:
        del arms[arm]["embed"]

    found = judge(outcome(arms["eager"]), outcome(arms["compiled"]))

    assert found.grad_rel == pytest.approx(oracle(zeroed["eager"], zeroed["compiled"])[0], rel=1e-12)
    assert found.worst_parameter == "embed"
    assert found.within_tolerance is False


def test_zero_against_zero_is_equal():
    """All-zero gradients and a zero loss on both sides: distance 0, no direction."""
    zeros = {"w": torch.zeros(5)}

    found = judge(outcome(zeros, 0.0), outcome(zeros, 0.0))

    assert (found.loss_rel, found.grad_rel, found.grad_cosine) == (0.0, 0.0, None)
    assert found.within_tolerance is True


def test_a_difference_from_zero_has_no_size_but_is_refused():
    """Eager computed exact zeros, compiled did not: no relative distance exists, and it is not within tolerance."""
    found = judge(outcome({"w": torch.zeros(5)}, 0.0), outcome({"w": torch.ones(5)}, 0.5))

    assert (found.loss_rel, found.grad_rel, found.grad_cosine) == (None, None, None)
    assert (found.worst_parameter, found.within_tolerance) == ("w", False)
    assert (found.eager_finite, found.compiled_finite) == (True, True)


def test_nothing_to_compare_is_unknown():
    """No loss and no gradient in either arm: every figure is None."""
    found = judge(outcome({"frozen": None}, None), outcome({}, None))

    assert (found.loss_rel, found.grad_rel, found.grad_cosine, found.worst_parameter) == (None,) * 4
    assert (found.within_tolerance, found.eager_finite, found.compiled_finite) == (None,) * 3
    assert distance(outcome({}, None), outcome({}, None)) is None


def test_gradients_are_judged_without_a_loss():
    """A step that returns no loss still has gradients to compare."""
    found = judge(outcome(gradients(), None), outcome(gradients(), None))

    assert (found.loss_rel, found.grad_rel, found.within_tolerance) == (None, 0.0, True)


def test_an_empty_gradient_is_no_difference():
    """A parameter without elements neither fails nor counts."""
    eager, compiled = ({**gradients(seed=seed), "empty": torch.empty(0, 4)} for seed in (0, 1))

    assert judge(outcome(eager), outcome(compiled)).grad_rel == pytest.approx(oracle(eager, compiled)[0], rel=1e-12)


def test_a_sparse_gradient_is_its_dense_self():
    """Rows that occur twice add up; sparse against dense is a fair comparison."""
    sparse = torch.sparse_coo_tensor([[1, 1, 3]], torch.tensor([[1.0], [2.0], [4.0]]), (5, 1), check_invariants=True)
    dense = torch.tensor([[0.0], [3.0], [0.0], [4.0], [0.0]])

    assert distance(outcome({"embed": sparse}), outcome({"embed": dense})) == 0.0
    assert distance(outcome({"embed": sparse}), outcome({"embed": 1.5 * dense})) == pytest.approx(0.5)


def test_strides_do_not_matter():
    """A compiler may lay a gradient out differently."""
    eager = torch.randn(2, 3, 4, 4)

    compiled = eager.to(memory_format=torch.channels_last)

    assert distance(outcome({"w": eager}), outcome({"w": compiled})) == 0.0


def test_a_gradient_that_is_all_rounding_is_not_the_worst():
    """A bias in front of BatchNorm has pure noise for a gradient; the parameter with a real fault is named."""
    eager = {"noise": torch.tensor([1e-9, -1e-9]), "real": torch.ones(4)}
    compiled = {"noise": -eager["noise"], "real": eager["real"] * 1.001}

    assert judge(outcome(eager), outcome(compiled)).worst_parameter == "real"


@pytest.mark.parametrize(("rng", "expected"), [("none", False), ("matched", False), ("unmatched", None)])
def test_different_random_numbers_are_not_judged(rng, expected):
    """Where the arms drew different numbers the distance is shown and nothing is concluded."""
    found = judge(outcome(gradients()), outcome(gradients(seed=1)), rng=rng)

    assert found.grad_rel is not None
    assert (found.rng, found.within_tolerance) == (rng, expected)


def test_without_a_tolerance_nothing_is_judged():
    """No limit, no judgement."""
    assert judge(outcome(gradients()), outcome(gradients()), tolerance=None).within_tolerance is None


@pytest.mark.parametrize(("noise_floor", "expected"), [(None, False), (0.001, False), (0.004, True)])
def test_what_eager_does_to_itself_is_not_blamed_on_compiling(noise_floor, expected):
    """A distance of 1 % passes where eager against eager shows 0.4 %, not where it shows 0.1 %."""
    compiled = {name: g * 1.01 for name, g in gradients().items()}

    found = judge(outcome(gradients()), outcome(compiled), noise_floor=noise_floor)

    assert (found.noise_floor, found.tolerance, found.within_tolerance) == (noise_floor, 1e-4, expected)


def test_outcomes_are_left_alone():
    """Comparing writes to no gradient and leaves no graph behind."""
    eager, compiled = gradients(), gradients(seed=1)
    eager["embed"].requires_grad_()
    kept = {name: g.detach().clone() for name, g in eager.items()}

    judge(outcome(eager), outcome(compiled))

    assert all(torch.equal(kept[name], g) for name, g in eager.items())
    assert eager["embed"].grad_fn is None


@pytest.mark.parametrize(
    ("arguments", "clean", "faulty"),
    [
        ({"dtype": torch.float64}, 5e-15, 1e-6),
        ({"dtype": torch.float32}, 1.7e-7, 0.01),
        ({"dtype": torch.complex64}, 1.7e-7, 0.01),
        ({"dtype": torch.float32, "tf32": True}, 3e-4, 0.01),
        ({"dtype": torch.float32, "autocast_dtype": torch.bfloat16}, 4e-3, 0.1),
        ({"dtype": torch.float32, "autocast_dtype": torch.float16}, 2e-2, 0.1),
        ({"dtype": torch.bfloat16}, 8e-3, 0.1),
        ({"dtype": torch.float64, "autocast_dtype": torch.bfloat16}, 5e-15, 1e-6),
        ({"dtype": torch.bfloat16, "tf32": True}, 8e-3, 0.1),
    ],
    ids=str,
)
def test_limits_lie_between_clean_and_faulty(arguments, clean, faulty):
    """Above the largest distance measured on clean runs, below the smallest fault that must be found."""
    assert 1.5 * clean < tolerance_for(**arguments) < faulty / 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_unit_roundoff_is_half_the_gap_above_one(dtype):
    """By the definition, with torch's own machine epsilon."""
    assert unit_roundoff_for(dtype) == torch.finfo(dtype).eps / 2


def test_the_coarsest_precision_rounds():
    """TF32 keeps 10 bits after the point, and counts only where float32 is at work."""
    assert unit_roundoff_for(torch.float32, tf32=True) == 2.0**-11
    assert unit_roundoff_for(torch.float64, tf32=True) == 2.0**-53
    assert unit_roundoff_for(torch.float32, autocast_dtype=torch.bfloat16, tf32=True) == 2.0**-8


def test_an_unknown_dtype_is_refused():
    """The message names it and what is known."""
    with pytest.raises(ValueError, match=r"for torch\.int32, expected one of torch\.float64"):
        tolerance_for(torch.int32)


def effects(name, eager, compiled):
    return [Outcome(loss=None, gradients={}, effects={name: torch.tensor(value)}) for value in (eager, compiled)]


def test_a_loss_near_zero_is_judged_by_what_rounding_can_resolve_of_it():
    """A loss that is a difference of large numbers: 1e-6 is all rounding, 1e-2 is not."""
    spread = torch.tensor(5.0)
    eager = Outcome(loss=torch.tensor(1e-7), gradients=gradients(), loss_spread=spread)
    near, far = (Outcome(loss=torch.tensor(1e-7 + moved), gradients=gradients()) for moved in (1e-6, 1e-2))

    assert judge(eager, near).loss_rel == pytest.approx(2e-7, rel=1e-3)
    assert judge(eager, near).within_tolerance is True
    assert judge(eager, far).within_tolerance is False


@pytest.mark.parametrize(("moved", "expected"), [(0.0, True), (1e-7, False), (4e-3, True)])
def test_a_logged_value_is_judged_only_where_rounding_moves_it_and_by_that(moved, expected):
    found, floor = (measured(*effects("logged x", 1.0, other)) for other in (1.01, 1.0 + moved))

    verdict = drift.judged(found, noise_floor=None, rng="none", tolerance=1e-4, nudged=floor)

    assert verdict.within_tolerance is expected
    assert (verdict.worst_effect, verdict.effect_rel) == ("logged x", pytest.approx(0.01, rel=1e-4))


def test_a_buffer_is_judged_as_gradients_are():
    found = measured(*effects("buffer x", 1.0, 1.01))

    assert drift.judged(found, noise_floor=None, rng="none", tolerance=1e-4).within_tolerance is False
    assert drift.judged(found, noise_floor=None, rng="unmatched", tolerance=1e-4).within_tolerance is None


@pytest.mark.parametrize(("name", "expected"), [("output x", False), ("buffer x", False), ("logged x", None)])
def test_an_output_or_a_buffer_that_compiled_code_spoils_is_a_finding_at_once(name, expected):
    found = drift.judged(measured(*effects(name, 1.0, torch.nan)), noise_floor=None, rng="none", tolerance=1e-4)

    assert (found.eager_finite, found.compiled_finite) == (None if expected is None else True, expected)


def test_effects_of_another_size_are_apart():
    found = measured(*effects("buffer x", [1.0, 2.0], [1.0]))

    assert drift.judged(found, noise_floor=None, rng="none", tolerance=1e-4).within_tolerance is False


def test_a_comparison_lets_go_of_what_it_has_compared():
    expected = outcome(gradients(), None)
    held = weakref.ref(expected.gradients["embed"])
    comparison = Comparison(expected, frees=True)

    comparison.gradient("embed", torch.ones(50, 8))

    assert held() is None
    assert comparison.end().gradients["scale"].compiled == 0  # never came, so it counts as zero
