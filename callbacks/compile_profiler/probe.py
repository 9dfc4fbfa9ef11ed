"""One batch in, one sample out: both arms on the same batch, and no trace of it afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from compile_profiler.arms import Arm
from compile_profiler.clock import BlockTime, Clock, passes_for, peak_bytes
from compile_profiler.contrast import Contrast, Kept, OnePass
from compile_profiler.hooks import without_gradient_hooks
from compile_profiler.records import Memory, Sample
from compile_profiler.sandbox import RandomState, Snapshot

MIN_BLOCK_S = 0.02
"""A block this long keeps the clock, the first launch and most wake-ups of other processes below a per cent."""
MAX_BLOCK_S = 0.5
MIN_LAGGING_PASSES = 4
"""On a device that lags behind Python the last pass of a block shows the device's tail, the others hide it as training
does: at least so many passes in a block, unless they take longer than ``MAX_BLOCK_S``."""


class Probe:
    """Measures pairs: the same batch through the eager and the compiled arm, forward and backward.

    A pair costs one untimed pass of each arm, from which drift is read, and a timed block of passes of each, in an
    order tossed by a private coin. Memory: a copy of all parameters, buffers and the batch, a set of gradients.

    Args:
        module: the LightningModule.
        one_pass: runs one arm on one batch.
        contrast: compares what the arms compute.
        quiet: context in which nothing that the step sends to loggers arrives.
        roots: further objects that a step may write.
        clock: seconds on the module's device.
        overwrites_gradients: whether the compiled arm replays CUDA graphs, whose next run writes into the memory that
            the gradients of the last one live in.
        writes_gradients: whether the step may write into gradients that are there, because it runs backward itself.
        seed: of the coin.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        one_pass: OnePass,
        contrast: Contrast,
        quiet: Callable[[], AbstractContextManager[None]],
        roots: Callable[[], Iterable[Any]],
        clock: Clock,
        overwrites_gradients: bool = False,
        writes_gradients: bool = False,
        seed: int,
    ) -> None:
        self._module = module
        self._one_pass = one_pass
        self._contrast = contrast
        self._quiet = quiet
        self._roots = roots
        self._clock = clock
        self._overwrites_gradients = overwrites_gradients
        self._writes_gradients = writes_gradients
        self._coin = random.Random(seed)
        self._num_passes: dict[str, int] = {}
        self.memory: Memory | None = None

    def measure(
        self,
        eager: Arm,
        compiled: Arm,
        *args: Any,
        step: int,
        compiled_something: Callable[[], bool],
        **kwargs: Any,
    ) -> Sample:
        """Run one pair on the batch in ``args`` and put everything back.

        Args:
            eager: the arm that serves as the measure.
            compiled: the arm that is measured.
            *args: what ``training_step`` was called with.
            step: x-axis number of the batch.
            compiled_something: whether anything was compiled since the pair began; its times are void then.
            **kwargs: likewise.

        Raises:
            Exception: whatever a pass raises; everything has been put back then, too.
        """
        with self._kept(args, kwargs) as kept:
            back, batch = kept.back, kept.batch
            drift, wrote_batch, drafts_s = self._contrast.training(eager, compiled, (args, kwargs), kept)
            shape = _shape_of(batch)
            num_passes = self._num_passes.setdefault(shape, self._passes_for(*drafts_s))
            copies = [batch.duplicate((args, kwargs)) for _ in range(num_passes)] if wrote_batch else None
            order = [eager, compiled]
            self._coin.shuffle(order)
            times: dict[str, BlockTime] = {}
            for arm in order:
                back()
                inputs = iter(copies) if copies is not None else _repeated((args, kwargs))
                times[arm.name] = self._clock.timed(partial(self._pass, arm, inputs), num_passes)
                if copies is not None:
                    copies = [batch.duplicate((args, kwargs)) for _ in range(num_passes)]
            # The untimed passes were a rough guide, and a stall in one of them would shorten all blocks to come.
            self._num_passes[shape] = self._passes_for(times[eager.name].pass_s, times[compiled.name].pass_s)
            void = "compiled" if compiled_something() else None
            if void is None and self.memory is None:
                self.memory = Memory(
                    eager_peak_bytes=self._peak(eager, args, kwargs, back),
                    compiled_peak_bytes=self._peak(compiled, args, kwargs, back),
                )
        return Sample(
            step=step,
            eager_s=times[eager.name].pass_s,
            compiled_s=times[compiled.name].pass_s,
            eager_host_s=times[eager.name].host_s,
            compiled_host_s=times[compiled.name].host_s,
            num_passes=num_passes,
            shape=shape,
            void=void,
            drift=drift,
        )

    def rehearse(self, arm: Arm, *args: Any, **kwargs: Any) -> None:
        """Run one pass of one arm on the batch in ``args``, untimed, and put everything back."""
        with self._kept(args, kwargs):
            self._one_pass(arm, self._parameters, _leave, *args, **kwargs)

    def validation(self, eager: Arm, compiled: Arm, *args: Any, step: int, **kwargs: Any) -> Sample:
        """What the arms compute differently on a batch of validation; no times. Everything is put back."""
        with self._kept(args, kwargs) as kept:
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
        numbers = RandomState(self._clock.device)
        state = Snapshot([self._module, *self._roots()])
        batch = Snapshot([args, kwargs])

        def back(*, last: bool = False) -> None:
            state.restore()
            batch.restore()
            numbers.restore()
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

    def _peak(self, arm: Arm, args: Any, kwargs: Any, back: Callable[[], None]) -> int | None:
        back()
        return peak_bytes(partial(self._one_pass, arm, self._parameters, _leave, *args, **kwargs), self._clock.device)


def _leave(_parameters: Iterable[nn.Parameter]) -> None:
    """Of a pass whose gradients nobody reads."""


def _repeated(item: Any) -> Iterator[Any]:
    while True:
        yield item


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
