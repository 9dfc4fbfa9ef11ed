"""The shapes of a batch's tensors, as one text."""

from __future__ import annotations

import dataclasses
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


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (list, tuple)):
        items = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = (getattr(value, field.name) for field in dataclasses.fields(value))
    for item in items:
        yield from _tensors(item)
