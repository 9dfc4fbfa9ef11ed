"""One batch in, one sample out: both arms on the same batch, and no trace of it afterwards."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compile_profiler.arms import Arm
from compile_profiler.clock import BlockTime, Clock, passes_for, peak_bytes
from compile_profiler.drift import NOISE_FACTOR, Outcome, against_reference, compare, distance
from compile_profiler.hooks import without_gradient_hooks
from compile_profiler.records import Drift, Memory, Rng
from compile_profiler.sandbox import RandomState, Snapshot

MIN_BLOCK_S = 0.02
"""A block this long keeps the clock, the first launch and most wake-ups of other processes below a per cent."""
MAX_BLOCK_S = 0.5
MIN_LAGGING_PASSES = 4
"""On a device that lags behind Python the last pass of a block shows the device's tail, the others hide it as training
does: at least so many passes in a block, unless they take longer than ``MAX_BLOCK_S``."""
NOISE_EVERY = 10
"""One pair in so many also compares eager with eager, which costs one more pass."""

OnePass = Callable[..., "Tensor | None"]
"""``(arm, parameters, take, *args, **kwargs) -> loss``: forward and backward of one batch. Gradients are in ``.grad``
when ``take(parameters)`` is called, for those whose optimizer the step moves itself, or else at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A pair that has been compared and not yet timed.

    Attributes:
        drift: what the two arms computed differently.
        shape: the batch's shape class.
        num_passes: passes that make a timed block long enough.
        drafts_s: rough seconds of an eager and a compiled pass.
        order: the arms as they are to be timed.
        back: puts everything back between two blocks.
        inputs: the batch as ``(args, kwargs)``, a copy of its own if the step writes it.
        writes_batch: whether it does.
    """

    drift: Drift
    shape: str
    num_passes: int
    drafts_s: tuple[float, float]
    order: tuple[Arm, ...]
    back: Callable[[], None]
    inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    writes_batch: bool


class Probe:
    """Measures pairs: the same batch through the eager and the compiled arm, forward and backward.

    A pair costs one untimed pass of each arm, from which drift is read, and a timed block of passes of each, in an
    order tossed by a private coin. Memory: a copy of all parameters, buffers and the batch, two sets of gradients.

    Args:
        module: the LightningModule.
        one_pass: runs one arm on one batch.
        alone: context in which a pass waits for no other process.
        quiet: context in which nothing that the step sends to loggers arrives.
        roots: further objects that a step may write.
        clock: seconds on the module's device.
        tolerance: limit on drift, ``None`` to show drift without judging it.
        roundoff: unit roundoff of the precision at work, by which a distance beyond the tolerance is checked against
            what rounding does to eager itself; ``None`` where the tolerance is the user's own.
        matched_rng: whether the compiled arm draws the same random numbers as eager.
        overwrites_gradients: whether the compiled arm replays CUDA graphs, whose next run writes into the memory that
            the gradients of the last one live in.
        shares_gradients: whether gradients live in memory that the next pass writes, and that they must not leave.
        writes_gradients: whether the step may write into gradients that are there, because it runs backward itself.
        plain_pass: ``(take, *args, **kwargs) -> loss`` in the module's own dtype, to compare both arms with a run in
            float64; ``None`` to leave that out.
        seed: of the coin.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        one_pass: OnePass,
        alone: Callable[[], AbstractContextManager[None]] = nullcontext,
        quiet: Callable[[], AbstractContextManager[None]],
        roots: Callable[[], Iterable[Any]],
        clock: Clock,
        tolerance: float | None,
        roundoff: float | None,
        matched_rng: bool,
        overwrites_gradients: bool = False,
        shares_gradients: bool = False,
        writes_gradients: bool = False,
        plain_pass: Callable[..., Tensor | None] | None = None,
        seed: int,
    ) -> None:
        self._module = module
        self._one_pass = one_pass
        self._alone = alone
        self._quiet = quiet
        self._roots = roots
        self._clock = clock
        self._tolerance = tolerance
        self._roundoff = roundoff
        self._matched_rng = matched_rng
        self._overwrites_gradients = overwrites_gradients
        self._shares_gradients = shares_gradients
        self._writes_gradients = writes_gradients
        self._plain_pass = plain_pass
        self._coin = random.Random(seed)
        self._num_passes: dict[str, int] = {}
        self._noise_floor: float | None = None
        self._conditioned: float | None = None
        self._num_pairs = 0
        self.memory: Memory | None = None

    @contextmanager
    def pair(self, eager: Arm, compiled: Arm, *args: Any, **kwargs: Any) -> Iterator[Draft]:
        """Compare both arms on the batch in ``args``; inside the context they can be timed. Puts everything back.

        No pass in here waits for another process.

        Args:
            eager: the arm that serves as the measure.
            compiled: the arm that is measured.
            *args: what ``training_step`` was called with.
            **kwargs: likewise.

        Raises:
            Exception: whatever a pass raises; everything has been put back then, too.
        """
        order = [eager, compiled]
        self._coin.shuffle(order)  # first of all: the coins of all processes fall alike
        with self._kept(args, kwargs) as (back, batch):
            with self._alone():
                drift, wrote_batch, drafts_s = self._compare(eager, compiled, args, kwargs, back, batch)
            shape = _shape_of(batch)
            self._num_pairs += 1
            yield Draft(
                drift=drift,
                shape=shape,
                num_passes=self._num_passes.setdefault(shape, self._passes_for(*drafts_s)),
                drafts_s=drafts_s,
                order=tuple(order),
                back=back,
                inputs=lambda: batch.duplicate((args, kwargs)) if wrote_batch else (args, kwargs),
                writes_batch=wrote_batch,
            )

    def times(self, draft: Draft, num_passes: int) -> dict[str, BlockTime]:
        """A timed block of so many passes of each arm, by name; several processes make them together.

        Raises:
            Exception: whatever a pass raises.
        """
        times: dict[str, BlockTime] = {}
        for arm in draft.order:
            draft.back()
            # Only a step that writes its batch needs one for each pass, made before the clock starts.
            inputs = [draft.inputs() for _ in range(num_passes if draft.writes_batch else 1)]
            times[arm.name] = self._clock.timed(partial(self._pass, arm, itertools.cycle(inputs)), num_passes)
        # The untimed passes were a rough guide, and a stall in one of them would shorten all blocks to come.
        self._num_passes[draft.shape] = self._passes_for(*[time.pass_s for time in times.values()])
        return times

    def peaks(self, draft: Draft) -> None:
        """Measure ``memory`` in one pass of each arm; several processes make it together.

        Raises:
            Exception: whatever a pass raises.
        """
        peaks: dict[str, int | None] = {}
        for arm in sorted(draft.order, key=lambda arm: arm.name, reverse=True):
            draft.back()
            run = partial(self._pass, arm, iter([draft.inputs()]))
            peaks[arm.name] = peak_bytes(run, self._clock.device)
        self.memory = Memory(eager_peak_bytes=peaks["eager"], compiled_peak_bytes=peaks["compiled"])

    def rehearse(self, arm: Arm, *args: Any, **kwargs: Any) -> None:
        """Run one pass of one arm on the batch in ``args``, untimed, for itself alone, and put everything back."""
        with self._kept(args, kwargs), self._alone():
            self._one_pass(arm, self._parameters, _leave, *args, **kwargs)

    def _passes_for(self, *drafts_s: float) -> int:
        """Passes that make the quicker arm's block long enough and the slower one's not too long."""
        num_passes = passes_for(min(drafts_s), min_block_s=MIN_BLOCK_S, max_block_s=MAX_BLOCK_S)
        if self._clock.lags:
            num_passes = max(num_passes, MIN_LAGGING_PASSES)
        return min(num_passes, passes_for(max(drafts_s), min_block_s=MAX_BLOCK_S, max_block_s=MAX_BLOCK_S))

    def _pass(self, arm: Arm, inputs: Iterator[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        args, kwargs = next(inputs)
        self._one_pass(arm, self._parameters, _leave, *args, **kwargs)

    @contextmanager
    def _kept(self, args: Any, kwargs: Any) -> Iterator[tuple[Callable[[], None], Snapshot]]:
        """Keep everything a pass can change; yields how to put it back between passes, and the kept batch."""
        self._parameters = list(self._module.parameters())
        gradients = [parameter.grad for parameter in self._parameters]
        if self._overwrites_gradients:
            gradients = [gradient if gradient is None else gradient.clone() for gradient in gradients]
        values = [gradient.clone() for gradient in gradients if gradient is not None] if self._shares_gradients else []
        numbers = RandomState(self._clock.device)
        state = Snapshot([self._module, *self._roots()])
        batch = Snapshot([args, kwargs])

        def back(*, last: bool = False) -> None:
            state.restore()
            batch.restore()
            numbers.restore()
            if values:
                with torch.no_grad():
                    torch._foreach_copy_([gradient for gradient in gradients if gradient is not None], values)
            # Real gradients in forward: a step that reads .grad would compile another graph without them.
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                working_copy = self._writes_gradients and not last
                parameter.grad = gradient.clone() if working_copy and gradient is not None else gradient

        self._numbers = numbers
        try:
            with self._quiet(), without_gradient_hooks(self._parameters):
                if self._writes_gradients:
                    back()
                yield back, batch
        finally:
            try:
                back(last=True)
            except BaseException:  # Ctrl-C, out of memory: half a state is the worst to train on
                back(last=True)
                raise
            finally:
                self._parameters = []

    def _compare(
        self, eager: Arm, compiled: Arm, args: Any, kwargs: Any, back: Callable[[], None], batch: Snapshot
    ) -> tuple[Drift, bool, tuple[float, float]]:
        """The untimed passes: drift, whether the step writes its batch, rough seconds of both."""
        expected, eager_s = self._outcome(eager, args, kwargs)
        wrote_batch = bool(batch.changed())
        rng: Rng = "none" if not self._numbers.moved() else "matched" if self._matched_rng else "unmatched"
        if self._num_pairs % NOISE_EVERY == 0:
            back()
            again, _ = self._outcome(eager, args, kwargs)
            self._noise_floor = distance(expected, again)
            del again
        back()
        found, compiled_s = self._outcome(compiled, args, kwargs)
        drift = compare(expected, found, noise_floor=self._noise_floor, rng=rng, tolerance=self._tolerance)
        if drift.within_tolerance is False and self._roundoff is not None:
            if self._conditioned is None or self._num_pairs % NOISE_EVERY == 0:
                back()
                self._conditioned = self._conditioning(eager, expected, args, kwargs)
            tolerance = max(self._tolerance or 0.0, NOISE_FACTOR * self._conditioned)
            drift = compare(expected, found, noise_floor=self._noise_floor, rng=rng, tolerance=tolerance)
        if self._plain_pass is not None and rng == "none":
            back()
            exact = self._exact(self._plain_pass, *batch.duplicate((args, kwargs), dtype=torch.float64))
            drift = against_reference(drift, exact, expected, found)
        return drift, wrote_batch, (eager_s, compiled_s)

    def _exact(self, plain_pass: Callable[..., Tensor | None], args: Any, kwargs: Any) -> Outcome:
        """The same step in float64, far closer to the exact result than either arm."""
        for parameter in self._parameters:
            parameter.grad = None
        self._module.double()
        taken = _Gradients()
        loss = plain_pass(taken.take, *args, **kwargs)
        return taken.outcome(self._module, loss)

    def _conditioning(self, eager: Arm, expected: Outcome, args: Any, kwargs: Any) -> float:
        """How far eager's own gradients move when each weight moves by one rounding.

        A deep network of ReLU and BatchNorm amplifies a rounding many times over, so that no limit by dtype fits it;
        what rounding does to eager, compiling may do too.
        """
        assert self._roundoff is not None
        coin = torch.Generator(self._clock.device).manual_seed(self._num_pairs)
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.dtype.is_floating_point:
                    toss = torch.rand(parameter.shape, generator=coin, device=parameter.device) < 0.5
                    parameter.data.mul_(torch.where(toss, 1 + self._roundoff, 1 - self._roundoff))
        moved, _ = self._outcome(eager, args, kwargs)
        return distance(expected, moved) or 0.0

    def _outcome(self, arm: Arm, args: Any, kwargs: Any) -> tuple[Outcome, float]:
        self._clock.synchronize()
        start_s = self._clock.now()
        taken = _Gradients()
        loss = self._one_pass(arm, self._parameters, taken.take, *args, **kwargs)
        self._clock.synchronize()
        seconds = self._clock.now() - start_s
        return taken.outcome(self._module, loss), seconds


class _Gradients:
    """The gradients of one pass, each as it was when its optimizer would first have used it.

    Cloned: the next pass may write into the same memory, with CUDA graphs also into that of the loss.
    """

    def __init__(self) -> None:
        self._taken: dict[int, Tensor] = {}

    def take(self, parameters: Iterable[nn.Parameter]) -> None:
        """Read the gradients of these parameters unless they have been read."""
        for parameter in parameters:
            if parameter.grad is not None and id(parameter) not in self._taken:
                self._taken[id(parameter)] = parameter.grad.detach().clone()

    def outcome(self, module: nn.Module, loss: Tensor | None) -> Outcome:
        """At the end of the pass: with the gradients that no optimizer would have used."""
        self.take(module.parameters())
        gradients = {name: self._taken.get(id(parameter)) for name, parameter in module.named_parameters()}
        return Outcome(loss=None if loss is None else loss.clone(), gradients=gradients)


def _leave(_parameters: Iterable[nn.Parameter]) -> None:
    """Of a pass whose gradients nobody reads."""


def _shape_of(batch: Snapshot) -> str:
    """The shape class of a batch: shapes and dtypes of its tensors."""
    return " ".join(f"{tuple(tensor.shape)}:{str(tensor.dtype).removeprefix('torch.')}" for tensor in batch.tensors())


def module_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of most of the module's floating point parameters' elements; the default dtype without any."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in module.parameters():
        if parameter.dtype.is_floating_point or parameter.dtype.is_complex:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.get_default_dtype())
