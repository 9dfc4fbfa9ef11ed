"""Two tensors reduced to the four sums that every distance between them follows from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

# Elements widened to float64 at a time (32 MiB a copy), so that comparing a large embedding needs no room of its size.
_CHUNK = 1 << 22


class Sums(NamedTuple):
    """Sums over the elements of an eager tensor ``e`` and its compiled twin ``c``; all else follows from them."""

    eager: float  # |e|^2
    compiled: float  # |c|^2
    difference: float  # |c - e|^2
    product: float  # <e, c>, the real part of it for complex tensors

    @property
    def relative(self) -> float | None:
        """``|c - e| / |e|``; 0 where both are equal, so also both zero; ``None`` where no finite number says it."""
        return self.relative_to(0.0)

    def relative_to(self, scale: float) -> float | None:
        """``|c - e|`` over ``|e|``, or over ``scale`` if that is more."""
        if self.difference == 0:
            return 0.0
        size = max(math.sqrt(self.eager), scale) if self.eager >= 0 else math.nan
        ratio = math.sqrt(self.difference) / size if size > 0 and self.difference > 0 else math.inf
        return ratio if math.isfinite(ratio) else None

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between ``e`` and ``c``; ``None`` where one of them has no direction."""
        norms = math.sqrt(self.eager) * math.sqrt(self.compiled)
        if not (0 < norms < math.inf and math.isfinite(self.product)):
            return None
        return max(-1.0, min(1.0, self.product / norms))


def spread_of(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor | None:
    """``sqrt(sum((w * g)**2))`` over weights and their gradients, on the device; ``None`` without any.

    >>> float(spread_of([(torch.tensor([3.0, 0.0]), torch.tensor([1.0, 9.0])), (torch.tensor(4.0), torch.tensor(1.0))]))
    5.0
    """
    with torch.no_grad():
        squares = [
            (w.double() * g.double()).square().sum()
            for weight, gradient in pairs
            if gradient.layout == torch.strided and weight.device.type != "mps"
            for w, g in zip(torch.split(_flat(weight), _CHUNK), torch.split(_flat(gradient), _CHUNK), strict=True)
        ]
        return torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt() if squares else None


def sums_of(eager: Tensor | None, compiled: Tensor | None) -> Tensor | None:
    """The four numbers of ``Sums`` as one float64 tensor, on the device; one that is missing counts as zero.

    Tensors of different size are infinitely far apart. Complex, sparse, half and empty tensors are handled.

    >>> sums_of(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])).tolist()
    [25.0, 29.25, 0.25, 27.0]
    """
    e = None if eager is None else _flat(eager)
    c = None if compiled is None else _flat(compiled)
    if e is None:
        if c is None:
            return None
        e = torch.zeros_like(c)
    elif c is None:
        c = torch.zeros_like(e)
    if e.numel() != c.numel():
        sizes = [part.double().square().sum() for part in (e, c)]
        return torch.stack([*sizes, *(sizes[0].new_tensor(value) for value in (torch.inf, 0.0))])
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


def read(rows: Mapping[str, Tensor], spread: Tensor | None) -> dict[str, Sums]:
    """The rows as numbers. A model may span devices; each row is four numbers. The only wait for the device."""
    if spread is not None:
        rows = {**rows, "spread": spread.double().reshape(1).expand(4)}
    if not rows:
        return {}
    device = next(iter(rows.values())).device
    values = torch.stack([row.to(device) for row in rows.values()]).tolist()
    return {name: Sums(*four) for name, four in zip(rows, values, strict=True)}
