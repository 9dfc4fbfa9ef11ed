"""Run both arms untimed on one batch, so that what they compute can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from compile_profiler.arms import Arm
from compile_profiler.arrivals import Arrivals, ArrivedTwiceError
from compile_profiler.clock import Clock
from compile_profiler.drift import Comparison, Measured, Outcome, is_suspect, judged, measured
from compile_profiler.effects import Constant, buffers, logged, outputs
from compile_profiler.records import Drift, Rng
from compile_profiler.sandbox import RandomState, Snapshot
from compile_profiler.sums import spread_of

NOISE_EVERY = 10
"""One pair in so many also compares eager with eager, which costs one more pass."""

_SMALL_WEIGHT = 0.02  # the usual scale of a fresh weight: nothing overflows, nothing vanishes
OVERFLOW = "overflow under the loss scale"

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""What a step was called with."""
OnePass = Callable[..., "Tensor | None"]
"""``(arm, parameters, take, *args, **kwargs) -> loss``: forward and backward of one batch. Gradients are in ``.grad``
when ``take(parameters)`` is called, for those whose optimizer the step moves itself, or else at the end."""


class Kept(NamedTuple):
    """What a pass can change, kept, with how to put it back."""

    back: Callable[[], None]
    state: Snapshot
    batch: Snapshot
    numbers: RandomState
    parameters: list[nn.Parameter]


def _one() -> float:
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """How to run one pass, and what is known about passes.

    Attributes:
        one_pass: runs one arm on one batch.
        plain_pass: ``(take, *args, **kwargs) -> loss`` in the module's own dtype, to compare both arms with a run in
            float64; ``None`` to leave that out.
        validation_pass: ``(arm, *args, **kwargs) -> output`` of one validation step.
        gradient_scale: by how much gradients in ``.grad`` are larger than those of the loss.
        unscaled: context in which no gradient scaler scales; ``None`` without one.
        streams: whether gradients may be taken as they arrive: nobody needs them all at the end of backward.
        matched_rng: whether the compiled arm draws the same random numbers as eager.
        matching: gives an arm that does, if the first one does not and that is affordable.
    """

    one_pass: OnePass
    plain_pass: Callable[..., Tensor | None] | None = None
    validation_pass: Callable[..., Any] | None = None
    gradient_scale: Callable[[], float] = _one
    unscaled: Callable[[], AbstractContextManager[None]] | None = None
    streams: bool = False
    matched_rng: bool = True
    matching: Callable[[], Arm | None] | None = None


class Contrast:
    """Compares two arms: a pass of each, more where one is not enough.

    Memory beside the sandbox's: one set of gradients, each freed when the second arm's has arrived and been compared;
    two sets of double precision more with a reference.

    Args:
        module: the LightningModule.
        ways: how to run passes.
        clock: seconds on the module's device.
        tolerance: limit on drift, ``None`` to show drift without judging it.
        roundoff: unit roundoff of the precision at work, by which a distance beyond the tolerance is checked against
            what rounding does to eager itself; ``None`` where the tolerance is the user's own.
    """

    def __init__(
        self, module: nn.Module, *, ways: Ways, clock: Clock, tolerance: float | None, roundoff: float | None
    ) -> None:
        self._module = module
        self._ways = ways
        self._clock = clock
        self._tolerance = tolerance
        self._roundoff = roundoff
        self._streams = ways.streams
        self._matches = True  # whether an arm with eager's random numbers can be had
        self._noise_floor: float | None = None
        self._constant = {"train": Constant(), "validate": Constant()}
        self._num_pairs = 0
        self.nudged: Measured | None = None
        """Eager against eager with its weights moved by one roundoff, if the last batch needed it."""

    def training(self, eager: Arm, compiled: Arm, call: Call, kept: Kept) -> tuple[Drift, bool, tuple[float, float]]:
        """Drift on one batch, whether the step writes its batch, rough seconds of a pass of each arm."""
        try:
            return self._training(eager, compiled, call, kept)
        except ArrivedTwiceError:  # a backward inside the backward, as of reentrant checkpoints
            self._streams = False
            kept.back()
            return self._training(eager, compiled, call, kept)
        finally:
            self._num_pairs += 1

    def _training(self, eager: Arm, compiled: Arm, call: Call, kept: Kept) -> tuple[Drift, bool, tuple[float, float]]:
        expected, eager_s = self._outcome(eager, call, kept)
        wrote_batch = bool(kept.batch.changed())
        drawn = _Drawn(kept, self._clock.device)
        if self._num_pairs % NOISE_EVERY == 0:
            kept.back()
            self._noise_floor = self._against([expected], eager, call, kept)[0][0].grad_rel
        sides, errors = [expected], None
        if self._ways.plain_pass is not None and drawn.nothing:
            kept.back()
            exact = self._exact(self._ways.plain_pass, call, kept)
            errors = measured(exact, expected)
            sides.append(exact)
        matching = self._ways.matching() if self._ways.matching and self._matches and drawn.by_torch_alone else None
        kept.back()
        (real, *further), compiled_s = self._against(sides, compiled, call, kept, frees=matching is None)
        rng = drawn.same(matched=self._ways.matched_rng)
        found = real
        if matching is not None:
            kept.back()
            try:
                found = self._against([expected], matching, call, kept, frees=True)[0][0]
                rng = drawn.same(matched=True)
            except Exception:  # a second compile can fail by itself; the first arm goes on
                self._matches = False
        del expected, sides
        reference = None if errors is None else (errors, further[0])
        drift = self._judge(found, rng, lambda: self._nudge(eager, call, kept), reference=reference)
        if judged(real, noise_floor=None, rng=rng, tolerance=None).compiled_finite is False:
            drift = replace(drift, compiled_finite=False, within_tolerance=None)
        if drift.eager_finite and drift.compiled_finite is False and self._ways.unscaled is not None:
            drift = self._unscaled(self._ways.unscaled, drift, eager, compiled, call, kept)
        if drift.eager_finite is False and not all(map(_is_finite, kept.parameters)):
            drift = self._on_mended_weights(drift, eager, compiled, call, kept)
        return drift, wrote_batch, (eager_s, compiled_s)

    def validation(self, eager: Arm, compiled: Arm, call: Call, kept: Kept) -> Drift:
        """Drift of outputs, logged values and buffers on one batch of validation."""
        assert self._ways.validation_pass is not None
        run = self._ways.validation_pass

        def outcome(arm: Arm) -> Outcome:
            with _logs_kept(arm) as values:
                output = run(arm, *call[0], **call[1])
            written = {name: now.clone() for name, (now, _) in buffers(self._module, kept.state).items()}
            found = {name: value.clone() for name, value in outputs(output).items()}
            return Outcome(loss=None, gradients={}, effects={**written, **logged(values), **found})

        def nudge() -> Measured:
            self._move(kept)
            moved = outcome(eager)
            kept.back()
            return measured(moved, outcome(eager))

        expected = outcome(eager)
        drawn = _Drawn(kept, self._clock.device)
        kept.back()
        found = measured(expected, outcome(compiled))
        rng = drawn.same(matched=self._ways.matched_rng)
        kept.back()
        return self._judge(found, rng, nudge, stage="validate")

    def _judge(
        self,
        found: Measured,
        rng: Rng,
        nudge: Callable[[], Measured],
        *,
        reference: tuple[Measured, Measured] | None = None,
        stage: Literal["train", "validate"] = "train",
    ) -> Drift:
        self.nudged, frozen = None, []
        if rng != "unmatched":
            frozen = self._constant[stage].see(found.effects)
            if self._tolerance is not None and self._roundoff is not None and is_suspect(found, self._tolerance):
                self.nudged = nudge()
        return judged(
            found,
            noise_floor=self._noise_floor if stage == "train" else None,
            rng=rng,
            tolerance=self._tolerance,
            nudged=self.nudged,
            frozen=frozen,
            reference=reference,
            stage=stage,
        )

    def _unscaled(
        self,
        unscaled: Callable[[], AbstractContextManager[None]],
        drift: Drift,
        eager: Arm,
        compiled: Arm,
        call: Call,
        kept: Kept,
    ) -> Drift:
        """What is left of a compiled arm that is not finite, without the loss scale.

        A scaler scales until something overflows: at that edge one rounding decides which arm does so first. It is
        drift, if it lasts, and no NaN.
        """
        with unscaled():
            kept.back()
            expected, _ = self._outcome(eager, call, kept)
            kept.back()
            (found, *_), _ = self._against([expected], compiled, call, kept, frees=True)
        without = judged(found, noise_floor=None, rng=drift.rng or "none", tolerance=self._tolerance)
        if without.compiled_finite is False:
            return drift
        within = None if drift.rng == "unmatched" else False
        return replace(without, within_tolerance=within, worst_effect=OVERFLOW, effect_rel=None)

    def _on_mended_weights(self, drift: Drift, eager: Arm, compiled: Arm, call: Call, kept: Kept) -> Drift:
        """Who gives NaN, asked again on weights without: a NaN from one arm is in the weights one step later.

        Small random numbers stand for the spoilt weights; both arms get the same.
        """
        kept.back()
        self._mend(kept)
        expected, _ = self._outcome(eager, call, kept)
        kept.back()
        self._mend(kept)
        (found, *_), _ = self._against([expected], compiled, call, kept, frees=True)
        again = judged(found, noise_floor=None, rng=drift.rng or "none", tolerance=self._tolerance)
        return again if again.eager_finite and again.compiled_finite is False else drift

    @torch.no_grad()
    def _mend(self, kept: Kept) -> None:
        coin = torch.Generator(self._clock.device).manual_seed(self._num_pairs)
        for tensor in [*kept.parameters, *self._module.buffers()]:
            if not _is_finite(tensor):
                fresh = torch.randn(tensor.shape, generator=coin, device=tensor.device) * _SMALL_WEIGHT
                tensor.data.copy_(torch.where(torch.isfinite(tensor), tensor, fresh.to(tensor.dtype)))

    def _nudge(self, eager: Arm, call: Call, kept: Kept) -> Measured:
        """How far eager itself moves when each weight moves by one rounding.

        A deep network of ReLU and BatchNorm amplifies a rounding many times over, so that no limit by dtype fits it;
        what rounding does to eager, compiling may do too.
        """
        kept.back()
        self._move(kept)
        moved, _ = self._outcome(eager, call, kept)
        kept.back()
        return self._against([moved], eager, call, kept, frees=True)[0][0]

    def _move(self, kept: Kept) -> None:
        """Each weight by one roundoff, up or down."""
        assert self._roundoff is not None
        coin = torch.Generator(self._clock.device).manual_seed(self._num_pairs)
        with torch.no_grad():
            for parameter in kept.parameters:
                if parameter.dtype.is_floating_point:
                    toss = torch.rand(parameter.shape, generator=coin, device=parameter.device) < 0.5
                    parameter.data.mul_(torch.where(toss, 1 + self._roundoff, 1 - self._roundoff))

    def _exact(self, plain_pass: Callable[..., Tensor | None], call: Call, kept: Kept) -> Outcome:
        """The same step in float64, far closer to the exact result than either arm."""
        args, kwargs = kept.batch.duplicate(call, dtype=torch.float64)
        for parameter in kept.parameters:
            parameter.grad = None
        self._module.double()
        gradients: dict[str, Tensor | None] = {}
        arrivals = self._arrivals(gradients.__setitem__)
        loss = plain_pass(arrivals.take, *args, **kwargs)
        arrivals.take(kept.parameters)
        return Outcome(loss=None if loss is None else loss.clone(), gradients=gradients)

    def _outcome(self, arm: Arm, call: Call, kept: Kept) -> tuple[Outcome, float]:
        """Run one pass and keep what it computes; with its seconds."""
        gradients: dict[str, Tensor | None] = {}
        arrivals = self._arrivals(gradients.__setitem__)
        loss, values, seconds = self._pass(arm, call, kept, arrivals, early=False)
        by_name = dict(self._module.named_parameters())
        spread = spread_of([(by_name[name], g) for name, g in gradients.items() if g is not None])
        scale = self._ways.gradient_scale()
        written = {name: now.clone() for name, (now, _) in buffers(self._module, kept.state).items()}
        outcome = Outcome(
            loss=None if loss is None else loss.clone(),
            gradients=gradients,
            effects={**written, **logged(values)},
            loss_spread=None if spread is None else spread / scale,
        )
        return outcome, seconds

    def _against(
        self, expected: Sequence[Outcome], arm: Arm, call: Call, kept: Kept, *, frees: bool = False
    ) -> tuple[list[Measured], float]:
        """Run one pass and compare it with each of ``expected``, gradient by gradient; with its seconds."""
        comparisons = [Comparison(outcome, frees=frees) for outcome in expected]

        def compare_with_each(name: str, gradient: Tensor) -> None:
            for comparison in comparisons:
                comparison.gradient(name, gradient)

        arrivals = self._arrivals(compare_with_each, copies=False)
        loss, values, seconds = self._pass(arm, call, kept, arrivals, early=True)
        effects = dict(logged(values))
        for name, (now, before) in buffers(self._module, kept.state).items():
            effects[name] = now
            if before is not None:  # eager has left it as it was
                for outcome in expected:
                    outcome.effects.setdefault(name, before)
        for name, buffer in self._module.named_buffers():  # or this arm has
            effects.setdefault(f"buffer {name}", buffer)
        return [comparison.end(loss, effects) for comparison in comparisons], seconds

    def _arrivals(self, receive: Callable[[str, Tensor], None], *, copies: bool = True) -> Arrivals:
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        # What only this pass has, it can give away; under DDP or manual optimization others hold it too.
        return Arrivals(names, receive, gives_away=self._ways.streams, copies=copies and not self._ways.streams)

    def _pass(
        self, arm: Arm, call: Call, kept: Kept, arrivals: Arrivals, *, early: bool
    ) -> tuple[Tensor | None, dict[str, Any], float]:
        self._clock.synchronize()
        start_s = self._clock.now()
        with _logs_kept(arm) as values, arrivals.listening(kept.parameters if self._streams else (), early=early):
            loss = self._ways.one_pass(arm, kept.parameters, arrivals.take, *call[0], **call[1])
        self._clock.synchronize()
        seconds = self._clock.now() - start_s - arrivals.spent_s
        if arrivals.twice:
            raise ArrivedTwiceError
        arrivals.take(kept.parameters)
        return loss, values, max(seconds, 0.0)


def _is_finite(tensor: Tensor) -> bool:
    return tensor.layout != torch.strided or bool(torch.isfinite(tensor).all())


class _Drawn:
    """The random numbers that the eager pass has just drawn."""

    def __init__(self, kept: Kept, device: torch.device) -> None:
        self._kept = kept
        self._moved = kept.numbers.moved()
        self._by_its_own = kept.state.has_drawn()
        self._after = RandomState(device) if self._moved else kept.numbers

    @property
    def nothing(self) -> bool:
        """Whether none was drawn."""
        return not self._moved and not self._by_its_own

    @property
    def by_torch_alone(self) -> bool:
        """Whether all of them came from torch, which can be told to draw the same ones in compiled code."""
        return self._moved == {"torch"} and not self._by_its_own

    def same(self, *, matched: bool) -> Rng:
        """Whether the pass of another arm, which has just ended, has drawn the same ones.

        Python's and NumPy's may choose the way that the step takes, and compiled code may have the choice built in.
        """
        if self.nothing:
            return "unmatched" if self._kept.numbers.moved() else "none"
        return "matched" if matched and self.by_torch_alone and not self._after.moved() else "unmatched"


@contextmanager
def _logs_kept(arm: Arm) -> Iterator[dict[str, Any]]:
    values: dict[str, Any] = {}
    arm.logs.kept = values
    try:
        yield values
    finally:
        arm.logs.kept = None
