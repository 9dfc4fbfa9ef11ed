"""Drift as metrics of torchmetrics, for a training loop of one's own; each adds up over batches and ranks.

Importing it costs what importing torchmetrics costs; the callback does not need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from compile_profiler.sums import sums_of


class _SumsMetric(Metric):
    """Adds up the four sums of ``sums.Sums``; they are plain sums, so they reduce across ranks as such."""

    full_state_update = False
    is_differentiable = False
    sums: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("sums", torch.zeros(4, dtype=torch.float64), dist_reduce_fx="sum")

    @torch.no_grad()
    def _add(self, eager: Tensor | None, compiled: Tensor | None) -> None:
        row = sums_of(eager, compiled)
        if row is not None:
            self.sums += row.to(self.sums.device)

    def _relative(self) -> Tensor:
        eager, _, difference, _ = self.sums
        if difference == 0:
            return torch.zeros_like(difference)
        ratio: Tensor = difference / eager
        return ratio.sqrt()


class LossDrift(_SumsMetric):
    """Distance of the losses of all batches, ``|c - e| / |e|`` with both seen as vectors over the batches.

    0 where all are equal, infinite where eager's are all zero and compiled's are not.

    >>> drift = LossDrift()
    >>> drift.update(torch.tensor(3.0), torch.tensor(3.0))
    >>> drift.update(torch.tensor(4.0), torch.tensor(4.5))
    >>> drift.compute()
    tensor(0.1000, dtype=torch.float64)
    """

    higher_is_better = False

    def update(self, eager: Tensor | None, compiled: Tensor | None) -> None:
        """Take the losses of one batch; one that is ``None`` counts as zero if the other is not."""
        self._add(eager, compiled)

    def compute(self) -> Tensor:
        """The distance, a float64 scalar."""
        return self._relative()


class _GradientMetric(_SumsMetric):
    def update(self, eager: Mapping[str, Tensor | None], compiled: Mapping[str, Tensor | None]) -> None:
        """Take the gradients of one batch by parameter name; one that is ``None`` or absent counts as zero.

        Real and complex, of any float dtype, empty and sparse ones alike.
        """
        for name in dict.fromkeys([*eager, *compiled]):
            self._add(eager.get(name), compiled.get(name))


class GradientDrift(_GradientMetric):
    """Distance of the gradients of all batches, ``|c - e| / |e|`` with all of them seen as one vector.

    0 where all are equal, infinite where eager's are all zero and compiled's are not.

    >>> drift = GradientDrift()
    >>> drift.update({"weight": torch.tensor([3.0, 4.0])}, {"weight": torch.tensor([3.0, 4.5])})
    >>> drift.compute()
    tensor(0.1000, dtype=torch.float64)
    """

    higher_is_better = False

    def compute(self) -> Tensor:
        """The distance, a float64 scalar."""
        return self._relative()


class GradientCosine(_GradientMetric):
    """Cosine of the angle between the gradients of all batches, seen as one vector; NaN where one of them is zero.

    >>> cosine = GradientCosine()
    >>> cosine.update({"weight": torch.tensor([3.0, 4.0])}, {"weight": torch.tensor([-3.0, -4.0])})
    >>> cosine.compute()
    tensor(-1., dtype=torch.float64)
    """

    higher_is_better = True

    def compute(self) -> Tensor:
        """The cosine, a float64 scalar."""
        eager, compiled, _, product = self.sums
        cosine: Tensor = product / (eager.sqrt() * compiled.sqrt())
        return cosine.clamp(-1, 1)
