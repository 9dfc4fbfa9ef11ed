"""Keep the state that a training step can change, give it back in place.

A snapshot is a flat list of cells. A cell is one mutable object (a tensor, a list, the ``__dict__`` of a submodule)
with its value at the time of the snapshot; whatever is reachable from the roots gets a cell. Restoring writes the
values back into the same objects, so that everybody who holds a reference sees the old value again.
"""

from __future__ import annotations

import copy
import operator
import random
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, MutableSet
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

MAX_CELLS = 200_000
"""A state with more mutable objects than this is not copied: a pair would take longer than it is worth."""

_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Size)
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
# Objects of these packages that are no tensors, modules or containers manage themselves (trainers, loggers,
# loaders, optimizers, locks, files). Optimizers and logged results that a step does write are roots of their own.
_FOREIGN = frozenset(
    {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "numpy", "threading", "_thread", "logging", "io"}
    | {"_io", "queue", "multiprocessing", "concurrent", "asyncio", "tensorboard", "matplotlib", "functools", "weakref"}
)


class StateTooLargeError(RuntimeError):
    """More mutable objects hang on the module than a pair can copy in reasonable time."""


class _Kind(NamedTuple):
    """How one kind of object is read, compared with an earlier reading of it, and written back."""

    read: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]
    write: Callable[[Any, Any], None]


def _identical(now: Collection[Any], before: Collection[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _identical_items(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return _identical(now.keys(), before.keys()) and _identical(now.values(), before.values())


def _write_dict(target: dict[Any, Any], before: dict[Any, Any]) -> None:
    # dict's own methods: a subclass may do more in __setitem__ than store.
    if _identical(target.keys(), before.keys()):
        for key, value in before.items():
            if dict.__getitem__(target, key) is not value:
                dict.__setitem__(target, key, value)
    else:
        dict.clear(target)
        dict.update(target, before)


def _write_list(target: list[Any], before: list[Any]) -> None:
    list.__setitem__(target, slice(None), before)


def _write_deque(target: deque[Any], before: list[Any]) -> None:
    target.clear()
    target.extend(before)


def _write_set(target: MutableSet[Any], before: set[Any]) -> None:
    target.clear()
    for item in before:
        target.add(item)


def _slots(target: Any) -> Iterator[str]:
    for base in type(target).__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(target, name):
                yield name


def _write_slots(target: Any, before: dict[str, Any]) -> None:
    for name, value in before.items():
        object.__setattr__(target, name, value)


class _TensorState(NamedTuple):
    """``alias`` shares the tensor's storage as it was, also after somebody has assigned ``tensor.data``."""

    alias: Tensor
    value: Tensor
    requires_grad: bool


def _read_tensor(tensor: Tensor) -> _TensorState:
    alias = tensor.data
    return _TensorState(alias, alias.clone(), tensor.requires_grad)


def _same_tensor(tensor: Tensor, before: _TensorState) -> bool:
    return _same_storage(tensor.data, before.alias) and _same_bits(tensor.data, before.value)


def _same_storage(a: Tensor, b: Tensor) -> bool:
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return a is b
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.is_floating_point or a.dtype.is_complex:
        return bool(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) and torch.equal(a != a, b != b))
    return torch.equal(a, b)


def _write_tensor(tensor: Tensor, before: _TensorState) -> None:
    # Through .data: no version counter moves, so a graph that is still alive stays valid.
    if not _same_storage(tensor.data, before.alias):
        tensor.data = before.alias
    before.alias.copy_(before.value)
    if tensor.is_leaf and tensor.requires_grad != before.requires_grad:
        tensor.requires_grad_(before.requires_grad)


def _read_generator(target: torch.Generator) -> Tensor:
    return target.get_state()


def _same_generator(target: np.random.Generator, before: dict[str, Any]) -> bool:
    return str(target.bit_generator.state) == str(before)


def _write_generator(target: np.random.Generator, before: dict[str, Any]) -> None:
    target.bit_generator.state = before


def _write_torch_generator(target: torch.Generator, before: Tensor) -> None:
    target.set_state(before)


def _write_array(target: np.ndarray[Any, Any], before: np.ndarray[Any, Any]) -> None:
    target[...] = before


def _read_slots(item: Any) -> dict[str, Any]:
    return {name: getattr(item, name) for name in _slots(item)}


_DICT = _Kind(dict, _identical_items, _write_dict)
_SLOTS = _Kind(_read_slots, lambda item, before: _identical_items(_read_slots(item), before), _write_slots)
_KINDS: tuple[tuple[type, _Kind], ...] = (
    (Tensor, _Kind(_read_tensor, _same_tensor, _write_tensor)),
    (dict, _DICT),
    (list, _Kind(list, _identical, _write_list)),
    (deque, _Kind(list, _identical, _write_deque)),
    (set, _Kind(set, lambda item, before: item == before, _write_set)),
    (np.ndarray, _Kind(np.copy, lambda item, before: item.tobytes() == before.tobytes(), _write_array)),
    (torch.Generator, _Kind(_read_generator, lambda g, b: torch.equal(g.get_state(), b), _write_torch_generator)),
    (random.Random, _Kind(random.Random.getstate, lambda g, b: g.getstate() == b, random.Random.setstate)),
    (np.random.Generator, _Kind(lambda g: g.bit_generator.state, _same_generator, _write_generator)),
)


@dataclass(slots=True)
class _Cell:
    """One mutable object with its value at the time of the snapshot; ``owner`` is the module or root it hangs on."""

    target: Any
    kind: _Kind
    value: Any
    owner: Any

    def changed(self) -> bool:
        return not self.kind.same(self.target, self.value)

    def restore(self) -> None:
        if isinstance(self.target, Tensor) or self.changed():
            self.kind.write(self.target, self.value)


class Snapshot:
    """The values of everything mutable that can be reached from ``roots``.

    Tensors (parameters, buffers, tensors in attributes or containers) are cloned, so a snapshot needs as much
    memory as they do. Modules and plain Python objects are followed through their attributes, containers through
    their items; trainers, loggers, optimizers, loaders, code and open files are not.

    Args:
        roots: objects to start from; a root is followed whatever its type.
        parameters: whether to clone parameters too. Without them a snapshot is small, but a step that writes
            its own parameters cannot be undone.
        submodules: whether to follow modules into their submodules.

    Raises:
        StateTooLargeError: more than ``MAX_CELLS`` mutable objects.
    """

    def __init__(self, roots: Iterable[Any], *, parameters: bool = True, submodules: bool = True) -> None:
        self._parameters = parameters
        self._cells: list[_Cell] = []
        seen: set[int] = set()
        stack = [(root, root, True) for root in roots]
        while stack:
            item, owner, is_root = stack.pop()
            if isinstance(item, (*_ATOMS, *_CODE)) or id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, nn.Module):
                if not (submodules or is_root):
                    continue
                owner = item
            stack.extend((child, owner, False) for child in self._visit(item, owner, is_root))
            if len(self._cells) > MAX_CELLS:
                raise StateTooLargeError(
                    f"more than {MAX_CELLS} mutable Python objects hang on the module; "
                    "keep data sets and caches outside the module to have it measured."
                )

    def _visit(self, item: Any, owner: Any, is_root: bool) -> Iterable[Any]:
        """Make the cells of one object, return its children."""
        if isinstance(item, nn.Parameter) and not self._parameters:
            return ()
        if isinstance(item, (tuple, frozenset)):
            return item
        for types_, kind in _KINDS:
            if isinstance(item, types_):
                value = kind.read(item)
                self._cells.append(_Cell(item, kind, value, owner))
                if isinstance(item, dict):
                    return [*value.values(), *self._attributes(item, owner)]
                return value if isinstance(item, (list, deque, set)) else ()
        package = type(item).__module__.partition(".")[0]
        if is_root or isinstance(item, nn.Module) or package not in _FOREIGN:
            return self._attributes(item, owner)
        return ()

    def _attributes(self, item: Any, owner: Any) -> list[Any]:
        """Cells for the attributes of an object, in its ``__dict__`` or its slots."""
        children: list[Any] = []
        try:
            attributes = object.__getattribute__(item, "__dict__")
        except AttributeError:  # an object with slots only
            attributes = None
        if isinstance(attributes, dict):
            self._cells.append(_Cell(attributes, _DICT, dict(attributes), owner))
            children.extend(attributes.values())
        slotted = _read_slots(item)
        if slotted:
            self._cells.append(_Cell(item, _SLOTS, slotted, owner))
            children.extend(slotted.values())
        return children

    def restore(self) -> None:
        """Write every value back; may be called any number of times."""
        with torch.no_grad():
            for cell in self._cells:
                cell.restore()

    def changed(self) -> list[tuple[Any, Any]]:
        """The objects whose value differs from the snapshot, each with the module or root it hangs on."""
        with torch.no_grad():
            return [(cell.target, cell.owner) for cell in self._cells if cell.changed()]

    def tensors(self) -> list[Tensor]:
        """The tensors in this snapshot."""
        return [cell.target for cell in self._cells if isinstance(cell.target, Tensor)]

    def duplicate(self, item: Any, *, dtype: torch.dtype | None = None) -> Any:
        """A deep copy of ``item``, one of the roots, with the values of the snapshot.

        ``copy.deepcopy`` alone refuses tensors that have a gradient history.

        Args:
            item: what to copy.
            dtype: of the floating point tensors in the copy, ``None`` for their own.
        """
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
        return {name for name, state in self._state.items() if not _same_state(self._read(name), state)}


def _same_state(now: Any, before: Any) -> bool:
    same = np.array_equal if isinstance(now, tuple) else torch.equal
    if isinstance(now, tuple) and not any(isinstance(part, np.ndarray) for part in now):
        return bool(now == before)
    return all(same(a, b) for a, b in zip(now, before, strict=True))
