"""How far apart two arms came out on the same batch with the same weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compile_profiler.records import Drift, Rng, Stage
from compile_profiler.sums import Sums, read, sums_of

# A gradient below this share of the whole is judged against that share. An attention's key bias, or a bias in front
# of BatchNorm, has gradient zero but for rounding: relative to itself it would be the worst parameter of every run.
_MIN_SHARE = 1e-3

# A noise floor is one draw of a random distance: eager against itself, repeated or with its weights moved by one
# roundoff. That of a correct compiled arm is another draw, and may well be this many times as large.
NOISE_FACTOR = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one arm computed in one pass.

    Attributes:
        loss: detached scalar, or ``None`` where the step returned none.
        gradients: by parameter name; ``None`` where backward did not reach the parameter.
        effects: what else the step left behind, by name: ``"buffer ..."``, ``"logged ..."``, ``"output ..."``.
        loss_spread: how far the loss moves, to first order, if every weight moves by its own size at random:
            ``sqrt(sum((w * dL/dw)**2))``, a scalar; ``None`` where nobody has looked.
    """

    loss: Tensor | None
    gradients: Mapping[str, Tensor | None]
    effects: dict[str, Tensor] = field(default_factory=dict)
    loss_spread: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Two outcomes, reduced to sums; attributes as in ``Outcome``."""

    loss: Sums | None
    gradients: Mapping[str, Sums]
    effects: Mapping[str, Sums] = field(default_factory=dict)
    loss_spread: float = 0.0
    half: bool = False  # whether gradients have 16 bits

    @property
    def whole(self) -> Sums | None:
        """All gradients as one vector."""
        return Sums(*map(sum, zip(*self.gradients.values(), strict=True))) if self.gradients else None

    @property
    def grad_rel(self) -> float | None:
        """Distance of the gradients over eager's."""
        return self.whole.relative if self.whole else None

    @property
    def loss_rel(self) -> float | None:
        """Distance of the losses over eager's, or over ``loss_spread`` where that is more.

        A loss near zero is a difference of large numbers: relative to itself any rounding is huge. A roundoff of ``u``
        in each weight moves it by ``u * loss_spread``, and no way to compute it does better (the condition number of a
        sum, Higham, Accuracy and Stability, section 1.6, with independent errors added as squares).
        """
        return self.loss.relative_to(self.loss_spread) if self.loss else None


class Comparison:
    """A finished outcome against one that arrives piece by piece, so that both never have to be there at once.

    Each gradient costs one read of both, on the device; only ``end`` waits for it.

    Args:
        expected: the finished one.
        frees: whether to let go of each of its gradients as soon as it has been compared; its mapping is emptied.

    >>> before = Outcome(loss=None, gradients={"weight": torch.tensor([3.0, 4.0])})
    >>> comparison = Comparison(before)
    >>> comparison.gradient("weight", torch.tensor([3.0, 4.5]))
    >>> comparison.end().grad_rel
    0.1
    """

    def __init__(self, expected: Outcome, *, frees: bool = False) -> None:
        self._expected = expected
        self._gradients = expected.gradients if frees and isinstance(expected.gradients, dict) else None
        self._waiting = set(expected.gradients)
        self._order = list(expected.gradients)
        self._rows: dict[str, Tensor] = {}
        self._half = any(g is not None and g.element_size() <= 2 for g in expected.gradients.values())

    @torch.no_grad()
    def gradient(self, name: str, gradient: Tensor | None) -> None:
        """The other outcome's gradient of one parameter, which is not kept."""
        expected = self._expected.gradients.get(name)
        self._waiting.discard(name)
        row = sums_of(expected, gradient)
        if row is not None:
            self._rows[name] = row
        if self._gradients is not None:
            self._gradients.pop(name, None)

    @torch.no_grad()
    def end(self, loss: Tensor | None = None, effects: Mapping[str, Tensor] | None = None) -> Measured:
        """The rest of the other outcome; waits for the device once.

        Effects that one of the two lacks are left out: a step may log on some condition.
        """
        for name in list(self._waiting):
            self.gradient(name, None)
        effects = effects or {}
        rows = {"loss": sums_of(self._expected.loss, loss)}
        both = [name for name in self._expected.effects if name in effects]
        rows |= {f"effect {name}": sums_of(self._expected.effects[name], effects[name]) for name in both}
        order = [name for name in (*self._order, *self._rows) if name in self._rows]  # not that of arrival: sums repeat
        rows |= {f"gradient {name}": self._rows[name] for name in order}
        spread = self._expected.loss_spread
        values = read({name: row for name, row in rows.items() if row is not None}, spread)
        return Measured(
            loss=values.get("loss"),
            gradients=_named("gradient ", values),
            effects=_named("effect ", values),
            loss_spread=0.0 if spread is None else values["spread"].eager,
            half=self._half,
        )


def measured(eager: Outcome, compiled: Outcome) -> Measured:
    """Both outcomes, reduced to sums. A gradient (or loss) that one of them lacks counts as zero there."""
    comparison = Comparison(eager)
    for name, gradient in compiled.gradients.items():
        comparison.gradient(name, gradient)
    return comparison.end(compiled.loss, compiled.effects)


def judged(
    found: Measured,
    *,
    noise_floor: float | None,
    rng: Rng,
    tolerance: float | None,
    nudged: Measured | None = None,
    frozen: Collection[str] = (),
    reference: tuple[Measured, Measured] | None = None,
    stage: Stage = "train",
) -> Drift:
    """What the distances mean.

    ``within_tolerance`` is

    * ``None`` where there is nothing to judge: ``rng`` is ``"unmatched"``, an arm is not finite (a finding of its own,
      see the flags), ``tolerance`` is ``None``, or there was nothing to compare;
    * ``False`` where something differs although eager is exactly zero;
    * otherwise whether all distances are at most ``tolerance``, or 3 times ``noise_floor`` or ``nudged`` if that is
      more: what rounding does to eager itself is not held against compiling.

    Logged values and outputs are judged only where ``nudged`` shows that rounding moves them, and by that. Others are
    counts in disguise, such as an accuracy, of which one rounding can flip one; a frozen one is found by ``frozen``.

    With ``reference`` (a double precision run against eager, and against compiled) loss and gradients are judged by
    the rule of PyTorch's own benchmarks (``torch._dynamo.utils.same``): compiled may be 2 times as far from it as
    eager, 3 times for gradients of 16 bits, plus the tolerance as a floor for an eager run that happens to be exact.

    ``worst_parameter`` and ``worst_effect`` are ``None`` where all are equal. One that is not finite is the worst.

    Args:
        found: eager against compiled.
        noise_floor: distance of two eager outcomes, if known.
        rng: whether both arms drew the same random numbers.
        tolerance: limit on all relative distances, for example from ``tolerance_for``.
        nudged: eager against eager with its weights moved by one roundoff, if known.
        frozen: effects that never change in the compiled arm while they do in eager.
        reference: see above.
        stage: whose step it was.
    """
    whole = found.whole
    sums = [each for each in (found.loss, whole) if each is not None]
    spoilt = [name for name, each in found.effects.items() if not name.startswith("logged ") and _is_spoilt(each)]
    eager_finite = all(math.isfinite(each.eager) for each in sums)
    compiled_finite = all(math.isfinite(each.compiled) for each in sums) and not spoilt

    limit = tolerance
    if tolerance is not None:
        moved = [] if nudged is None else [nudged.grad_rel, nudged.loss_rel]
        limit = max([tolerance, *(NOISE_FACTOR * each for each in moved if each is not None)])
    within = None
    if (sums or found.effects) and rng != "unmatched" and eager_finite and compiled_finite and limit is not None:
        allowed = max(limit, NOISE_FACTOR * (noise_floor or 0.0))
        distances = [distance for here, distance in ((found.loss, found.loss_rel), (whole, found.grad_rel)) if here]
        if reference is None:
            within = all(distance is not None and distance <= allowed for distance in distances)
        else:
            within = _is_no_further(*reference, allowed=limit)
        within &= not frozen and not any(_exceeds(name, found, nudged, allowed) for name in found.effects)
    worst_effect = next(iter(frozen), None) or _worst_effect(found.effects)
    return Drift(
        loss_rel=found.loss_rel,
        grad_rel=found.grad_rel,
        grad_cosine=whole.cosine if whole else None,
        worst_parameter=_worst(found.gradients, whole),
        effect_rel=found.effects[worst_effect].relative if worst_effect else 0.0 if found.effects else None,
        worst_effect=worst_effect,
        noise_floor=noise_floor,
        rng=rng,
        tolerance=limit,
        within_tolerance=within,
        eager_finite=eager_finite if sums or spoilt else None,
        compiled_finite=compiled_finite if sums or spoilt else None,
        reference=_errors(reference),
        stage=stage,
    )


def compare(
    eager: Outcome, compiled: Outcome, *, noise_floor: float | None, rng: Rng, tolerance: float | None
) -> Drift:
    """Distances between the outcomes of two arms, judged; arguments and meaning as in ``judged``.

    A gradient (or loss) that one arm lacks counts as zero there; one that both lack is left out. What no finite number
    expresses is ``None``: a distance from an eager zero, to NaN or infinity, or where neither arm has anything. Sums
    are taken in float64, in which only float64 input beyond 1e154 overflows; it is reported as not finite.

    Costs about one read of all gradients, and waits for the device once.

    >>> before = Outcome(loss=torch.tensor(2.0), gradients={"weight": torch.tensor([3.0, 4.0])})
    >>> after = Outcome(loss=torch.tensor(2.0), gradients={"weight": torch.tensor([3.0, 4.5])})
    >>> drift = compare(before, after, noise_floor=0.0, rng="none", tolerance=1e-4)
    >>> drift.grad_rel, drift.worst_parameter, drift.within_tolerance
    (0.1, 'weight', False)
    """
    return judged(measured(eager, compiled), noise_floor=noise_floor, rng=rng, tolerance=tolerance)


def distance(a: Outcome, b: Outcome) -> float | None:
    """``|b - a| / |a|`` over all gradients as one vector; ``None`` where no finite number says it.

    >>> once = Outcome(loss=None, gradients={"weight": torch.tensor([3.0, 4.0])})
    >>> distance(once, once)
    0.0
    """
    return measured(a, b).grad_rel


def is_suspect(found: Measured, tolerance: float) -> bool:
    """Whether anything, of whatever kind, is further apart than ``tolerance``.

    >>> far = Sums(eager=1.0, compiled=4.0, difference=1.0, product=2.0)
    >>> is_suspect(Measured(loss=None, gradients={}, effects={"logged accuracy": far}), 0.5)
    True
    """
    pairs = [(found.loss, found.loss_rel), (found.whole, found.grad_rel)]
    pairs += [(sums, sums.relative) for sums in found.effects.values() if math.isfinite(sums.eager)]
    return any(sums is not None and (rel is None or rel > tolerance) for sums, rel in pairs)


def _exceeds(name: str, found: Measured, nudged: Measured | None, limit: float) -> bool:
    """Whether an effect is further apart than rounding explains."""
    sums, floor = found.effects[name], nudged.effects.get(name) if nudged is not None else None
    if not math.isfinite(sums.eager):
        return False
    if _is_logged(name) and (floor is None or floor.difference == 0):
        return False
    moved = floor.relative if floor is not None else 0.0
    return sums.relative is None or sums.relative > max(limit, NOISE_FACTOR * (moved or 0.0))


def _is_logged(name: str) -> bool:
    """Whether this is for people to read; a buffer is what the next step computes with."""
    return not name.startswith("buffer ")


def _is_spoilt(sums: Sums) -> bool:
    return math.isfinite(sums.eager) and not math.isfinite(sums.compiled)


def _is_no_further(eager: Measured, compiled: Measured, *, allowed: float) -> bool:
    """Whether compiled is not clearly further from the exact result than eager is, in loss and in gradients."""
    factor = 3 if compiled.half else 2
    pairs = [(eager.loss_rel, compiled.loss_rel), (eager.grad_rel, compiled.grad_rel)]
    known = [(e, c) for e, c in pairs if e is not None]
    return all(c is not None and c <= factor * e + allowed for e, c in known)


def _errors(reference: tuple[Measured, Measured] | None) -> dict[str, float] | None:
    if reference is None:
        return None
    errors = {"eager": reference[0].grad_rel, "compiled": reference[1].grad_rel}
    return {name: error for name, error in errors.items() if error is not None} or None


def _named(prefix: str, values: Mapping[str, Sums]) -> dict[str, Sums]:
    return {name.removeprefix(prefix): sums for name, sums in values.items() if name.startswith(prefix)}


def _worst_effect(effects: Mapping[str, Sums]) -> str | None:
    def badness(sums: Sums) -> float:
        relative = sums.relative if math.isfinite(sums.eager) else 0.0
        return math.inf if relative is None else relative

    name = max(effects, key=lambda name: badness(effects[name]), default=None)
    return name if name is not None and badness(effects[name]) > 0 else None


def _worst(gradients: Mapping[str, Sums], whole: Sums | None) -> str | None:
    """The parameter with the largest distance relative to itself, or to ``_MIN_SHARE`` of all gradients if more."""

    def badness(sums: Sums) -> float:
        if sums.difference == 0:
            return 0.0
        scale = max(sums.eager, _MIN_SHARE**2 * whole.eager) if whole else 0.0
        ratio = sums.difference / scale if scale > 0 else math.inf
        return math.inf if math.isnan(ratio) else ratio

    name = max(gradients, key=lambda name: badness(gradients[name]), default=None)
    return name if name is not None and badness(gradients[name]) > 0 else None
