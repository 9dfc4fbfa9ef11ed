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
from torch import nn

from compile_profiler.arms import Arm
from compile_profiler.clock import BlockTime, Clock, passes_for, peak_bytes
from compile_profiler.contrast import Contrast, Kept, OnePass
from compile_profiler.hooks import without_gradient_hooks
from compile_profiler.records import Drift, Memory, Sample
from compile_profiler.sandbox import RandomState, Snapshot
from compile_profiler.shapes import shapes_of

MIN_BLOCK_S = 0.02
"""A block this long keeps the clock, the first launch and most wake-ups of other processes below a per cent."""
MAX_BLOCK_S = 0.5
MIN_LAGGING_PASSES = 4
"""On a device that lags behind Python the last pass of a block shows the device's tail, the others hide it as training
does: at least so many passes in a block, unless they take longer than ``MAX_BLOCK_S``."""


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
    order tossed by a private coin. Memory: a copy of all parameters, buffers and the batch, a set of gradients.

    Args:
        module: the LightningModule.
        one_pass: runs one arm on one batch.
        alone: context in which a pass waits for no other process.
        contrast: compares what the arms compute.
        quiet: context in which nothing that the step sends to loggers arrives.
        roots: further objects that a step may write.
        clock: seconds on the module's device.
        overwrites_gradients: whether the compiled arm replays CUDA graphs, whose next run writes into the memory that
            the gradients of the last one live in.
        shares_gradients: whether gradients live in memory that the next pass writes, and that they must not leave.
        writes_gradients: whether the step may write into gradients that are there, because it runs backward itself.
        seed: of the coin.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        one_pass: OnePass,
        alone: Callable[[], AbstractContextManager[None]] = nullcontext,
        contrast: Contrast,
        quiet: Callable[[], AbstractContextManager[None]],
        roots: Callable[[], Iterable[Any]],
        clock: Clock,
        overwrites_gradients: bool = False,
        shares_gradients: bool = False,
        writes_gradients: bool = False,
        seed: int,
    ) -> None:
        self._module = module
        self._one_pass = one_pass
        self._alone = alone
        self._contrast = contrast
        self._quiet = quiet
        self._roots = roots
        self._clock = clock
        self._overwrites_gradients = overwrites_gradients
        self._shares_gradients = shares_gradients
        self._writes_gradients = writes_gradients
        self._coin = random.Random(seed)
        self._num_passes: dict[str, int] = {}
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
        with self._kept(args, kwargs) as kept:
            with self._alone():
                drift, wrote_batch, drafts_s = self._contrast.training(eager, compiled, (args, kwargs), kept)
            shape = shapes_of(list(kept.batch.tensors()))
            yield Draft(
                drift=drift,
                shape=shape,
                num_passes=self._num_passes.setdefault(shape, self._passes_for(*drafts_s)),
                drafts_s=drafts_s,
                order=tuple(order),
                back=kept.back,
                inputs=lambda: kept.batch.duplicate((args, kwargs)) if wrote_batch else (args, kwargs),
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

    def validation(self, eager: Arm, compiled: Arm, *args: Any, step: int, **kwargs: Any) -> Sample:
        """What the arms compute differently on a batch of validation; no times. Everything is put back."""
        with self._kept(args, kwargs) as kept, self._alone():
            drift = self._contrast.validation(eager, compiled, (args, kwargs), kept)
        return Sample(step=step, eager_s=0.0, compiled_s=0.0, void="validation", drift=drift)

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
    def _kept(self, args: Any, kwargs: Any) -> Iterator[Kept]:
        """Keep everything a pass can change."""
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

        try:
            with self._quiet(), without_gradient_hooks(self._parameters):
                if self._writes_gradients:
                    back()
                yield Kept(back, state, batch, numbers, self._parameters)
        finally:
            try:
                back(last=True)
            except BaseException:  # Ctrl-C, out of memory: half a state is the worst to train on
                back(last=True)
                raise
            finally:
                self._parameters = []


def _leave(_parameters: Iterable[nn.Parameter]) -> None:
    """Of a pass whose gradients nobody reads."""


def module_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of most of the module's floating point parameters' elements; the default dtype without any."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in module.parameters():
        if parameter.dtype.is_floating_point or parameter.dtype.is_complex:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.get_default_dtype())
