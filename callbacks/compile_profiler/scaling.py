"""The scale that a gradient scaler puts on the loss: read it, set it for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class LossScale:
    """The scale of one scaler, or a scale of 1 without one.

    Args:
        scaler: what the trainer's precision scales with, or ``None``.

    >>> LossScale(None).read()
    1.0
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self._scaler = scaler

    @property
    def is_there(self) -> bool:
        """Whether there is a scaler that scales."""
        return self._scaler is not None and self._scaler.is_enabled()

    @property
    def tensor(self) -> Tensor | None:
        """The scale where it lives; ``None`` until a loss has been scaled. A private part of torch (2.7 to 2.13)."""
        return None if self._scaler is None else getattr(self._scaler, "_scale", None)

    def read(self) -> float:
        """The scale now; waits for the device."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def of(self, loss: Tensor) -> Tensor:
        """The loss, scaled."""
        scaled: Tensor = loss if self._scaler is None else self._scaler.scale(loss)
        return scaled

    @contextmanager
    def set_to(self, value: float) -> Iterator[None]:
        """Inside, the scale is ``value``; nothing happens without a scaler."""
        scale = self.tensor
        if scale is None:
            yield
            return
        before = scale.clone()
        scale.fill_(value)
        try:
            yield
        finally:
            scale.copy_(before)
