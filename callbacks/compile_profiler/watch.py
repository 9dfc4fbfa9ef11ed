"""Notice that a real step went wrong, without waiting for the device."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from compile_profiler.scaling import LossScale

LOOK_EVERY = 8
"""On a device that lags, what has gathered there is fetched once in so many steps."""
MAX_BACKOFF = 10

Alarm = Literal["loss", "skip"]


class Watch:
    """Watches the loss of real steps for NaN and infinity, and a gradient scaler for steps that it skips.

    On a CPU both are read at once, for about a microsecond. On CUDA the losses of ``LOOK_EVERY`` steps are
    copied together, with the scale, and read when the copy has arrived, so an alarm comes some steps late and no step
    waits. Other devices are not watched.

    Args:
        scale: of the loss; a scale that has fallen is a step that the scaler has skipped.
        rest_steps: steps without another alarm after the first; twice as many after each further one.

    >>> watch = Watch(LossScale(None), rest_steps=5)
    >>> watch.see(torch.tensor(1.0)), watch.alarm
    (None, None)
    >>> watch.see(torch.tensor(float("nan"))), watch.alarm
    (None, 'loss')
    """

    def __init__(self, scale: LossScale, *, rest_steps: int) -> None:
        self._scale = scale
        self._has_scale = scale.is_there
        self._rest_steps = rest_steps
        self._num_alarms = 0
        self._num_resting = 0
        self._last_scale: float | None = None
        self._losses: list[Tensor] = []  # on the device
        self._here: Tensor | None = None  # where copies arrive: losses, then the scale
        self._on_their_way: tuple[Tensor, bool, Any] | None = None  # values, whether a scale ends them, their arrival
        self.alarm: Alarm | None = None
        self.scale_before: float | None = None
        """Of the loss, before the scaler had skipped a step."""

    def see(self, loss: Tensor | None) -> None:
        """Take the loss of one more step; ``alarm`` tells what has been noticed."""
        if self._num_resting:
            self._num_resting -= 1
        if loss is None or loss.numel() != 1:
            return
        if loss.is_cpu:
            scale = self._scale.tensor if self._has_scale else None
            # As ``item`` does, by a way through torch that is half as long.
            value: Any = loss.tolist() if loss.dim() == 0 else loss.item()
            self._read(value, None if scale is None else scale.item())
        elif loss.is_cuda:
            self._see_from_afar(loss)

    def rest(self) -> None:
        """The alarm has been looked into: no other one for a while."""
        self.alarm = None
        self._num_resting = self._rest_steps << min(self._num_alarms, MAX_BACKOFF)
        self._num_alarms += 1

    def _read(self, loss: float, scale: float | None) -> None:
        before, self._last_scale = self._last_scale, scale
        if self._num_resting or (math.isfinite(loss) and scale == before):
            return
        if scale is not None and before is not None and scale < before:
            self.alarm, self.scale_before = "skip", before
        elif not math.isfinite(loss):
            self.alarm = "loss"

    def _see_from_afar(self, loss: Tensor) -> None:
        # Lightning's own copy of the loss: what a CUDA graph computes next is not written there.
        self._losses.append(loss.detach() if loss.requires_grad else loss)
        if self._on_their_way is not None:
            values, has_scale, arrival = self._on_their_way
            if not arrival.query():
                return
            self._on_their_way = None
            losses = values.tolist()
            scale = losses.pop() if has_scale else None
            self._read(sum(losses), scale)  # NaN and infinity stay in a sum
        if len(self._losses) >= LOOK_EVERY:
            self._fetch(loss.device)

    def _fetch(self, device: torch.device) -> None:
        """Send for what has gathered, without waiting for it."""
        scale = self._scale.tensor
        parts, self._losses = self._losses, []
        there = torch.stack([part.reshape(()).double() for part in (parts if scale is None else [*parts, scale])])
        if self._here is None or len(self._here) < len(there):
            self._here = torch.empty(len(there), dtype=there.dtype, pin_memory=True)
        values = self._here[: len(there)]
        values.copy_(there, non_blocking=True)
        arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrival.record(torch.cuda.current_stream(device))
        self._on_their_way = values, scale is not None, arrival
