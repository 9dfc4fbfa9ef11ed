"""How far apart two arms came out on the same batch with the same weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from compile_profiler.records import Drift, Rng

# Elements widened to float64 at a time (32 MiB a copy), so that comparing a large embedding needs no room of its size.
_CHUNK = 1 << 22

# A gradient below this share of the whole is judged against that share. An attention's key bias, or a bias in front
# of BatchNorm, has gradient zero but for rounding: relative to itself it would be the worst parameter of every run.
_MIN_SHARE = 1e-3

# A noise floor is one draw of a random distance: eager against itself, repeated or with its weights moved by one
# roundoff. That of a correct compiled arm is another draw, and may well be this many times as large.
NOISE_FACTOR = 3.0


class _Precision(NamedTuple):
    unit_roundoff: float
    growth: float


# By how much two correct runs may differ: the unit roundoff u of the working precision times a growth factor, because
# errors of n operations grow like sqrt(n) u, at worst n u (Higham, Accuracy and Stability of Numerical Algorithms,
# 2nd ed., chapter 4; the root: Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019).
# Where sums are kept in the working precision, a compiler reorders them: sqrt(4096 terms), through 32 layers in a row.
# Lower precisions add up in float32 and round results only, of which fusion leaves some out: sqrt(64 in a row).
# For scale, torch.testing.assert_close allows a single operation 1.3e-6 (float32), 1e-3 (float16), 1.6e-2 (bfloat16).
# No limit by dtype fits every model: deep stacks of BatchNorm and ReLU amplify a rounding many times over, and eager is
# then as far from the exact result as compiled is. There the noise floor speaks.
_REORDERED_SUMS = 64 * 32
_ROUNDED_RESULTS = 8
_PRECISIONS = {
    torch.float64: _Precision(2.0**-53, _REORDERED_SUMS),  # 2.3e-13
    torch.float32: _Precision(2.0**-24, _REORDERED_SUMS),  # 1.2e-4
    torch.bfloat16: _Precision(2.0**-8, _ROUNDED_RESULTS),  # 3.1e-2
    # As much as bfloat16: small gradients lose more bits to float16's narrow exponent than to its roundoff.
    torch.float16: _Precision(2.0**-11, 8 * _ROUNDED_RESULTS),  # 3.1e-2
}
_TF32 = _Precision(2.0**-11, _ROUNDED_RESULTS)  # 3.9e-3: TensorFloat-32 keeps as many bits of a factor as float16


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one arm computed in one forward and backward pass.

    Attributes:
        loss: detached scalar, or ``None`` where the step returned none.
        gradients: by parameter name; ``None`` where backward did not reach the parameter.
    """

    loss: Tensor | None
    gradients: Mapping[str, Tensor | None]


class _Sums(NamedTuple):
    """Sums over the elements of an eager tensor ``e`` and its compiled twin ``c``; all else follows from them."""

    eager: float  # |e|^2
    compiled: float  # |c|^2
    difference: float  # |c - e|^2
    product: float  # <e, c>, the real part of it for complex tensors

    @property
    def relative(self) -> float | None:
        """``|c - e| / |e|``; 0 where both are equal, so also both zero; ``None`` where no finite number says it."""
        if self.difference == 0:
            return 0.0
        ratio = math.sqrt(self.difference / self.eager) if self.eager > 0 else math.inf
        return ratio if math.isfinite(ratio) else None

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between ``e`` and ``c``; ``None`` where one of them has no direction."""
        norms = math.sqrt(self.eager) * math.sqrt(self.compiled)
        if not (0 < norms < math.inf and math.isfinite(self.product)):
            return None
        return max(-1.0, min(1.0, self.product / norms))


def compare(
    eager: Outcome, compiled: Outcome, *, noise_floor: float | None, rng: Rng, tolerance: float | None
) -> Drift:
    """Distances between the outcomes of two arms.

    A gradient (or loss) that one arm lacks counts as zero there; one that both lack is left out. What no finite number
    expresses is ``None``: a distance from an eager zero, to NaN or infinity, or where neither arm has anything. Sums
    are taken in float64, in which only float64 input beyond 1e154 overflows; it is reported as not finite.

    ``within_tolerance`` is

    * ``None`` where there is nothing to judge: ``rng`` is ``"unmatched"``, an arm is not finite (a finding of its own,
      see the flags), ``tolerance`` is ``None``, or there was nothing to compare;
    * ``False`` where loss or gradients differ although eager is exactly zero;
    * otherwise whether both distances are at most ``tolerance``, or 3 times ``noise_floor`` if that is more: what
      eager does to itself is not held against compiling.

    ``worst_parameter`` is ``None`` where all gradients are equal. A gradient that is not finite is the worst.

    Costs about one read of all gradients, and waits for the device once.

    Args:
        eager: what the reference arm computed.
        compiled: what the other arm computed.
        noise_floor: ``distance`` of two eager outcomes, if known.
        rng: whether both arms drew the same random numbers.
        tolerance: limit on both relative distances, for example from ``tolerance_for``.

    >>> before = Outcome(loss=torch.tensor(2.0), gradients={"weight": torch.tensor([3.0, 4.0])})
    >>> after = Outcome(loss=torch.tensor(2.0), gradients={"weight": torch.tensor([3.0, 4.5])})
    >>> drift = compare(before, after, noise_floor=0.0, rng="none", tolerance=1e-4)
    >>> drift.grad_rel, drift.worst_parameter, drift.within_tolerance
    (0.1, 'weight', False)
    """
    loss, gradients = _measure(eager, compiled)
    whole = _total(gradients)
    found = [sums for sums in (loss, whole) if sums is not None]
    eager_finite = all(math.isfinite(sums.eager) for sums in found)
    compiled_finite = all(math.isfinite(sums.compiled) for sums in found)

    within = None
    if found and rng != "unmatched" and eager_finite and compiled_finite and tolerance is not None:
        limit = max(tolerance, NOISE_FACTOR * (noise_floor or 0.0))
        within = all(sums.relative is not None and sums.relative <= limit for sums in found)
    return Drift(
        loss_rel=loss.relative if loss else None,
        grad_rel=whole.relative if whole else None,
        grad_cosine=whole.cosine if whole else None,
        worst_parameter=_worst(gradients, whole),
        noise_floor=noise_floor,
        rng=rng,
        tolerance=tolerance,
        within_tolerance=within,
        eager_finite=eager_finite if found else None,
        compiled_finite=compiled_finite if found else None,
    )


def distance(a: Outcome, b: Outcome) -> float | None:
    """``|b - a| / |a|`` over all gradients as one vector; ``None`` where no finite number says it.

    Of two eager outcomes it is the noise floor: what atomics and the choice of algorithms change from run to run.

    >>> once = Outcome(loss=None, gradients={"weight": torch.tensor([3.0, 4.0])})
    >>> distance(once, once)
    0.0
    """
    whole = _total(_measure(a, b)[1])
    return whole.relative if whole else None


def against_reference(drift: Drift, exact: Outcome, eager: Outcome, compiled: Outcome) -> Drift:
    """``drift`` with the gradient errors of both arms against a more precise run, judged by those.

    Rounding puts both arms off; compiled is at fault only where it is clearly further off than eager. The rule is that
    of PyTorch's own benchmarks (``torch._dynamo.utils.same``): at most 2 times eager's error, 3 times for gradients of
    16 bits, plus the tolerance as a floor for an eager run that happens to be exact.

    >>> outcome = lambda value: Outcome(loss=None, gradients={"weight": torch.tensor([value], dtype=torch.float64)})
    >>> drift = compare(outcome(1.1), outcome(1.15), noise_floor=None, rng="none", tolerance=1e-4)
    >>> judged = against_reference(drift, outcome(1.0), outcome(1.1), outcome(1.15))
    >>> drift.within_tolerance, judged.within_tolerance, round(judged.reference["eager"], 6)
    (False, True, 0.1)
    """
    eager_error, compiled_error = distance(exact, eager), distance(exact, compiled)
    if eager_error is None or compiled_error is None or drift.within_tolerance is None:
        return drift
    half = any(g is not None and g.element_size() <= 2 for g in eager.gradients.values())
    limit = (3 if half else 2) * eager_error + (drift.tolerance or 0.0)
    reference = {"eager": eager_error, "compiled": compiled_error}
    return replace(drift, reference=reference, within_tolerance=compiled_error <= limit)


def tolerance_for(dtype: torch.dtype, *, autocast_dtype: torch.dtype | None = None, tf32: bool = False) -> float:
    """Largest relative distance that reordering and fusing correct operations explains in an ordinary model.

    The coarsest precision at work decides. The limits leave clean runs room (a float32 MLP shows 1e-7 for a limit of
    1e-4, under bfloat16 autocast 4e-3 for 3e-2) and still find gradients that are 1 % off in float32, 10 % in bfloat16.

    Args:
        dtype: of the parameters; complex ones count as their real part.
        autocast_dtype: what autocast computes in, if it is on. It leaves float64 alone.
        tf32: float32 products may use TensorFloat-32.

    Raises:
        ValueError: no tolerance is known for a dtype.

    >>> f"{tolerance_for(torch.float32):.1e}, {tolerance_for(torch.float32, autocast_dtype=torch.bfloat16):.1e}"
    '1.2e-04, 3.1e-02'
    """
    return max(known.unit_roundoff * known.growth for known in _precisions(dtype, autocast_dtype, tf32))


def unit_roundoff_for(dtype: torch.dtype, *, autocast_dtype: torch.dtype | None = None, tf32: bool = False) -> float:
    """Largest relative error of one rounding in the coarsest precision at work; arguments as in ``tolerance_for``.

    Weights moved by so little are the same weights to this precision: how far eager's gradients move with them is the
    noise floor that reordering cannot stay below, also where eager itself repeats to the bit.

    >>> unit_roundoff_for(torch.bfloat16) == torch.finfo(torch.bfloat16).eps / 2
    True
    """
    return max(known.unit_roundoff for known in _precisions(dtype, autocast_dtype, tf32))


def _precisions(dtype: torch.dtype, autocast_dtype: torch.dtype | None, tf32: bool) -> list[_Precision]:
    """The precisions at work."""
    dtypes = [dtype.to_real()]
    if autocast_dtype is not None and dtypes[0] != torch.float64:
        dtypes.append(autocast_dtype)
    for known in dtypes:
        if known not in _PRECISIONS:
            expected = ", ".join(str(name) for name in _PRECISIONS)
            raise ValueError(f"no drift tolerance is known for {known}, expected one of {expected}; set one yourself.")
    at_work = [_PRECISIONS[known] for known in dtypes]
    return [*at_work, _TF32] if tf32 and torch.float32 in dtypes else at_work


@torch.no_grad()
def _measure(eager: Outcome, compiled: Outcome) -> tuple[_Sums | None, dict[str, _Sums]]:
    """Sums of the loss and of each parameter that has a gradient in either arm."""
    names = dict.fromkeys([*eager.gradients, *compiled.gradients])
    pairs = [(eager.loss, compiled.loss)]
    pairs += [(eager.gradients.get(name), compiled.gradients.get(name)) for name in names]
    rows = [_sums(*pair) for pair in pairs]
    known = [row for row in rows if row is not None]
    # A model may span devices; each row is four numbers. The only wait for the device is in tolist.
    values = iter(torch.stack([row.to(known[0].device) for row in known]).tolist() if known else [])
    loss, *gradients = [None if row is None else _Sums(*next(values)) for row in rows]
    return loss, {name: sums for name, sums in zip(names, gradients, strict=True) if sums is not None}


def _sums(eager: Tensor | None, compiled: Tensor | None) -> Tensor | None:
    """The four numbers of ``_Sums`` as one tensor, on the device."""
    e = None if eager is None else _flat(eager)
    c = None if compiled is None else _flat(compiled)
    if e is None:
        if c is None:
            return None
        e = torch.zeros_like(c)
    elif c is None:
        c = torch.zeros_like(e)
    parts = []
    for e_part, c_part in zip(torch.split(e, _CHUNK), torch.split(c, _CHUNK), strict=True):
        e64, c64 = e_part.double(), c_part.double()
        d64 = c64 - e64
        parts.append(torch.stack([e64.dot(e64), c64.dot(c64), d64.dot(d64), e64.dot(c64)]))
    return torch.stack(parts).sum(dim=0)


def _flat(tensor: Tensor) -> Tensor:
    """``tensor`` as one real vector in its own precision; strides, sparsity and complex numbers are gone."""
    dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
    if dense.device.type == "mps":  # has no float64
        dense = dense.cpu()  # pragma: no cover - needs that device
    return (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).flatten()


def _total(gradients: Mapping[str, _Sums]) -> _Sums | None:
    return _Sums(*map(sum, zip(*gradients.values(), strict=True))) if gradients else None


def _worst(gradients: Mapping[str, _Sums], whole: _Sums | None) -> str | None:
    """The parameter with the largest distance relative to itself, or to ``_MIN_SHARE`` of all gradients if more."""

    def badness(sums: _Sums) -> float:
        if sums.difference == 0:
            return 0.0
        scale = max(sums.eager, _MIN_SHARE**2 * whole.eager) if whole else 0.0
        ratio = sums.difference / scale if scale > 0 else math.inf
        return math.inf if math.isnan(ratio) else ratio

    name = max(gradients, key=lambda name: badness(gradients[name]), default=None)
    return name if name is not None and badness(gradients[name]) > 0 else None
