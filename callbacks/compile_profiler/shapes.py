"""The shapes of a batch's tensors, in plain values."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def shapes_of(batch: Any) -> str:
    """Shape and dtype of each tensor in a batch, in order; containers and dataclasses are looked into.

    >>> import torch
    >>> shapes_of({"x": torch.ones(2, 3), "y": [torch.ones(2, dtype=torch.int64), "a text"]})
    '(2, 3):float32 (2,):int64'
    """
    return " ".join(f"{tuple(tensor.shape)}:{str(tensor.dtype).removeprefix('torch.')}" for tensor in _tensors(batch))


def layout_of(batch: Any, *, sizes: bool = True) -> Any:
    """How a batch is built, in plain values: containers with their keys, shape and dtype of each tensor, other types.

    Equal neighbours in a sequence are one item and their number.

    Args:
        batch: as the step gets it.
        sizes: ``False`` tells of a tensor only how many dimensions it has and leaves lengths out: the same for all
            batches of a loader that pads each to its own longest sequence.

    >>> import torch
    >>> layout_of({"x": torch.ones(2, 3), "id": ["a", "b"]})
    {'dict': {'x': '(2, 3):float32', 'id': {'list': [['str', 2]]}}}
    >>> layout_of([torch.ones(2, 3)], sizes=False)
    {'list': [['2d:float32', None]]}
    """
    if isinstance(batch, Tensor):
        shape = tuple(batch.shape) if sizes else f"{batch.dim()}d"
        return f"{shape}:{str(batch.dtype).removeprefix('torch.')}"
    kind, inner = type(batch).__qualname__, _parts(batch)
    if isinstance(inner, Mapping):
        return {kind: {str(key): layout_of(value, sizes=sizes) for key, value in inner.items()}}
    if inner is None:
        return kind
    runs = itertools.groupby(layout_of(value, sizes=sizes) for value in inner)
    return {kind: [[layout, len(list(run)) if sizes else None] for layout, run in runs]}


def _parts(value: Any) -> Mapping[Any, Any] | list[Any] | tuple[Any, ...] | None:
    """What a container or a dataclass holds, ``None`` for anything else."""
    if isinstance(value, (Mapping, list, tuple)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    inner = _parts(value)
    for item in inner.values() if isinstance(inner, Mapping) else inner or ():
        yield from _tensors(item)
