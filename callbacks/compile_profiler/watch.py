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

    On a CPU both are read at once, for about a microsecond. On CUDA one small kernel adds the loss to a sum in which
    NaN and infinity stay; the sum and the scale are copied every ``LOOK_EVERY`` steps and read when the copy has
    arrived, so an alarm comes some steps late and no step waits. Other devices are not watched.

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
        self._rest_steps = rest_steps
        self._num_alarms = 0
        self._num_resting = 0
        self._num_seen = 0
        self._sum: Tensor | None = None
        self._last_scale: float | None = None
        self._fetched: tuple[Tensor, Any] | None = None  # values on their way, the event of their arrival
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
            self._read(loss.item(), self._scale.tensor.item() if self._scale.tensor is not None else None)
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

    @torch.no_grad()
    def _see_from_afar(self, loss: Tensor) -> None:
        loss = loss.detach().reshape(())
        if self._sum is None:
            self._sum = torch.zeros((), dtype=torch.float32, device=loss.device)
        torch.add(self._sum, loss, alpha=0, out=self._sum)  # 0 * inf is NaN, and NaN stays
        self._num_seen += 1
        if self._fetched is not None:
            values, arrival = self._fetched
            if arrival.query():
                self._fetched = None
                total, *scale = values.tolist()
                self._read(total, scale[0] if scale else None)
                if not math.isfinite(total):
                    self._sum.zero_()
        elif self._num_seen % LOOK_EVERY == 0:
            scale_here = self._scale.tensor
            parts = [self._sum] if scale_here is None else [self._sum, scale_here.to(self._sum.dtype).reshape(())]
            here = torch.stack(parts)
            values = torch.empty(len(parts), dtype=here.dtype, pin_memory=True)
            values.copy_(here, non_blocking=True)
            arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrival.record(torch.cuda.current_stream(loss.device))
            self._fetched = values, arrival
