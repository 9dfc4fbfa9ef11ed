"""Keep the state that a training step can change, give it back in place.

A snapshot is a flat list of cells. A cell is one mutable object (a tensor, a list, the ``__dict__`` of a submodule)
with its value at the time of the snapshot; whatever is reachable from the roots gets a cell. Restoring writes the
values back into the same objects, so that everybody who holds a reference sees the old value again.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compile_profiler.cells import (
    ATOMS,
    BUILTIN,
    CLASS,
    DICT,
    SLOTS,
    VALUES,
    Cell,
    TensorState,
    is_callback,
    is_foreign,
    kind_of,
    read_class,
    read_slots,
    same_random_state,
    slots_of,
)
from compile_profiler.hooks import Globals, behind_hooks

MAX_CELLS = 200_000
"""A state with more mutable objects than this is not copied: a pair would take longer than it is worth."""


OWN_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
"""Classes of random number generators that a module may hold for itself."""


class StateTooLargeError(RuntimeError):
    """More mutable objects hang on the module than a pair can copy in reasonable time."""


class Snapshot:
    """The values of everything mutable that can be reached from ``roots``.

    Tensors (parameters, buffers, tensors in attributes or containers) are cloned, so a snapshot needs as much
    memory as they do. Modules and plain Python objects are followed through their attributes and those of their
    classes, containers through their items; trainers, loggers, optimizers, data sets, code and open files are not.

    Args:
        roots: objects to start from; a root is followed whatever its type.
        parameters: whether to clone parameters too. Without them a snapshot is small, but a step that writes
            its own parameters cannot be undone.
        tensors: whether to clone tensors at all. Without them only Python's own objects are kept.
        submodules: whether to follow modules into their submodules.

    Raises:
        StateTooLargeError: more than ``MAX_CELLS`` mutable objects.
    """

    def __init__(
        self, roots: Iterable[Any], *, parameters: bool = True, tensors: bool = True, submodules: bool = True
    ) -> None:
        self._skipped = () if parameters and tensors else (Tensor,) if not tensors else (nn.Parameter,)
        plain = ATOMS if tensors else ATOMS | {Tensor, nn.Parameter}
        self._cells: list[Cell] = []
        seen: set[int] = set()
        stack = [(root, root, True) for root in roots]
        while stack:
            item, owner, is_root = stack.pop()
            if isinstance(item, VALUES) or id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, nn.Module):
                if not (submodules or is_root):
                    continue
                owner = item
            children = self._visit(item, owner, is_root, seen)
            if isinstance(item, nn.Module):
                stack.extend([(behind, owner, is_callback(type(behind))) for behind in behind_hooks(item)])
            # By exact type first: a history of a hundred thousand numbers must not cost a step 30 ms.
            stack.extend([(child, owner, False) for child in children if type(child) not in plain])
            if len(self._cells) > MAX_CELLS:
                raise StateTooLargeError(
                    f"more than {MAX_CELLS} mutable Python objects hang on the module; "
                    "keep data sets and caches outside the module to have it measured."
                )

    def _visit(self, item: Any, owner: Any, is_root: bool, seen: set[int]) -> Iterable[Any]:
        """Make the cells of one object, return its children."""
        if isinstance(item, self._skipped):
            return ()
        kind = kind_of(type(item))
        if kind is not None:
            value = kind.read(item)
            self._cells.append(Cell(item, kind, value, owner))
            if isinstance(value, TensorState):
                return () if value.grad is None else (value.grad,)
            if isinstance(value, (dict, list, set)):
                items = value.values() if isinstance(value, dict) else value
                return (
                    items if type(item) in BUILTIN or isinstance(item, Globals) else [*items, *self._own(item, owner)]
                )
            return ()
        if isinstance(item, (tuple, frozenset)):
            return [*item, *self._own(item, owner)]
        if is_root or isinstance(item, nn.Module) or not is_foreign(type(item)):
            return [*self._own(item, owner), *self._of_classes(type(item), owner, seen)]
        return ()

    def _own(self, item: Any, owner: Any) -> list[Any]:
        """Cells for the attributes of an object, in its ``__dict__`` or its slots."""
        children: list[Any] = []
        try:
            attributes = object.__getattribute__(item, "__dict__")
        except AttributeError:  # an object with slots only
            attributes = None
        if isinstance(attributes, dict):
            self._cells.append(Cell(attributes, DICT, dict(attributes), owner))
            children.extend(attributes.values())
        slotted = read_slots(item)
        if slots_of(type(item)):
            self._cells.append(Cell(item, SLOTS, slotted, owner))
            children.extend(slotted.values())
        return children

    def _of_classes(self, kind: type, owner: Any, seen: set[int]) -> Iterator[Any]:
        """Cells for the attributes of the user's classes: a list or a counter there is shared by all objects."""
        for base in kind.__mro__:
            if id(base) not in seen and not is_foreign(base, itself=True):
                seen.add(id(base))
                attributes = read_class(base)
                self._cells.append(Cell(base, CLASS, attributes, owner))
                yield from (value for value in attributes.values() if not hasattr(type(value), "__get__"))

    def restore(self) -> None:
        """Write every value back; may be called any number of times."""
        with torch.no_grad():
            for cell in self._cells:
                cell.restore()

    def rewind(self) -> Callable[[], None]:
        """Restore for a second try; returns what to call after it.

        That brings back what has been written since the snapshot and the second try has not written: by hooks between
        the first try and its failure.
        """
        with torch.no_grad():
            later = [(cell, cell.kind.read(cell.target)) for cell in self._cells if cell.changed()]
        self.restore()

        def bring_back() -> None:
            with torch.no_grad():
                for cell, value in later:
                    cell.merge(value)

        return bring_back

    def changed(self) -> list[tuple[Any, Any]]:
        """The objects whose value differs from the snapshot, each with the module or root it hangs on."""
        with torch.no_grad():
            return [(cell.target, cell.owner) for cell in self._cells if cell.changed()]

    def written(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """Those of ``tensors`` that differ from the snapshot, by name; each with its value there, if it was there."""
        cells = {id(cell.target): cell for cell in self._cells if isinstance(cell.target, Tensor)}
        known = {name: cells.get(id(tensor)) for name, tensor in tensors.items()}
        with torch.no_grad():
            return {
                name: None if cell is None else cell.value.value
                for name, cell in known.items()
                if cell is None or cell.changed()
            }

    def has_drawn(self) -> bool:
        """Whether a random number generator among the objects has moved since."""
        return any(isinstance(cell.target, OWN_GENERATORS) and cell.changed() for cell in self._cells)

    def tensors(self) -> list[Tensor]:
        """The tensors in this snapshot."""
        return [cell.target for cell in self._cells if isinstance(cell.target, Tensor)]

    def duplicate(self, item: Any, *, dtype: torch.dtype | None = None) -> Any:
        """A deep copy of ``item``, one of the roots, with the values of the snapshot, which are restored for it.

        ``copy.deepcopy`` alone refuses tensors that have a gradient history.

        Args:
            item: what to copy.
            dtype: of the floating point tensors in the copy, ``None`` for their own.
        """
        self.restore()
        memo = {}
        for cell in self._cells:
            if isinstance(cell.target, Tensor):
                value = cell.value.value
                wanted = dtype if value.is_floating_point() else None
                memo[id(cell.target)] = value.to(wanted, copy=True).requires_grad_(cell.value.requires_grad)
        return copy.deepcopy(item, memo)

    def forget_unchanged(self) -> None:
        """Keep only what has changed since: a later ``restore`` then undoes that and nothing else."""
        with torch.no_grad():
            self._cells = [cell for cell in self._cells if cell.changed()]


GENERATORS = ("python", "numpy", "torch")


class RandomState:
    """The state of the global random number generators that a step on ``device`` can draw from.

    Args:
        device: where the step runs; its own generator belongs to ``torch``.
        generators: which of ``GENERATORS`` to read. All three cost about 60 microseconds, NumPy's the most.
    """

    def __init__(self, device: torch.device, generators: Iterable[str] = GENERATORS) -> None:
        self._device = device
        self._state: dict[str, Any] = {name: self._read(name) for name in generators}

    def _read(self, name: str) -> Any:
        if name == "python":
            return random.getstate()
        if name == "numpy":
            return np.random.get_state(legacy=True)
        accelerator = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        return [torch.get_rng_state(), *accelerator]

    def restore(self) -> None:
        """Set the generators back to this state."""
        for name, state in self._state.items():
            if name == "python":
                random.setstate(state)
            elif name == "numpy":
                np.random.set_state(state)
            else:
                torch.set_rng_state(state[0])
                if len(state) > 1:
                    torch.cuda.set_rng_state(state[1], self._device)

    def moved(self) -> set[str]:
        """Names of the generators from which something was drawn since."""
        return {name for name, state in self._state.items() if not same_random_state(self._read(name), state)}
