"""What a step leaves behind besides loss and gradients, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compile_profiler.sandbox import Snapshot
from compile_profiler.sums import Sums

MIN_SEEN = 3
"""Values that eager must have given, all different, before one that compiled never changes is called frozen."""


def buffers(module: nn.Module, state: Snapshot) -> dict[str, tuple[Tensor, Tensor | None]]:
    """The buffers that differ from the snapshot: as they are now, and as they were if they were there."""
    now = dict(module.named_buffers())
    return {f"buffer {name}": (now[name], before) for name, before in state.written(now).items()}


def logged(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """The numbers among the logged values; metric objects are left out, which run outside of compiled code.

    >>> logged({"loss": torch.tensor(0.5), "lr": 0.1, "name": "x"})
    {'logged loss': tensor(0.5000), 'logged lr': tensor(0.1000, dtype=torch.float64)}
    """
    return {f"logged {name}": number for name, value in values.items() if (number := _number(value)) is not None}


def outputs(output: Any) -> dict[str, Tensor]:
    """The floating point tensors in what a step returned, by their place in it.

    >>> list(outputs({"loss": torch.ones(()), "ids": torch.ones(2, dtype=torch.int64), "parts": [torch.ones(1)]}))
    ['output loss', 'output parts.0']
    """
    return {f"output {name}".rstrip(): tensor.detach() for name, tensor in _leaves(output, "")}


class Constant:
    """Notices logged values that stay the same in the compiled arm, to the bit, while eager's change.

    A value that was read while compiling and is not read again does so. A count, such as an accuracy, may differ by
    rounding and may repeat, but does not stay the same for ever. Outputs count too: stale weights freeze them.

    >>> constant, one = Constant(), 1.0
    >>> now = lambda eager: {"logged scale": Sums(eager=eager, compiled=one, difference=abs(eager - one), product=one)}
    >>> [constant.see(now(eager)) for eager in (1.0, 0.9, 0.9, 0.8)]
    [[], [], [], ['logged scale']]
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, set[float]]] = {}

    def see(self, effects: Mapping[str, Sums]) -> list[str]:
        """Take the values of one more pair; names of those that are found constant and, here, wrong."""
        found = []
        for name, sums in effects.items():
            if name.startswith("buffer "):
                continue  # it starts from the same value in both arms
            compiled, eager = self._seen.setdefault(name, (sums.compiled, set()))
            if compiled != sums.compiled:
                self._seen[name] = (float("nan"), eager)  # it does change: never again equal to itself
                continue
            if len(eager) < MIN_SEEN:
                eager.add(sums.eager)
            if len(eager) >= MIN_SEEN and sums.difference > 0:
                found.append(name)
        return found


def _number(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, (bool, int, float)):
        return torch.tensor(float(value), dtype=torch.float64)
    return None


def _leaves(item: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(item, Tensor):
        if item.is_floating_point() or item.is_complex():
            yield name, item
    elif isinstance(item, Mapping):
        for key, value in item.items():
            yield from _leaves(value, f"{name}.{key}".lstrip("."))
    elif isinstance(item, (list, tuple)):
        for index, value in enumerate(item):
            yield from _leaves(value, f"{name}.{index}".lstrip("."))
