"""Read, compare and write back one mutable object, whatever its kind."""

from __future__ import annotations

import array
import contextlib
import copy
import enum
import functools
import operator
import random
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, MutableSet
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from compile_profiler.hooks import Globals, read_cell, write_cell

ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Size}
    | {types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType}
)
# Objects of these packages that are no tensors, modules or containers manage themselves (trainers, loggers,
# loaders, optimizers, locks, files). Optimizers and logged results that a step does write are roots of their own.
_FOREIGN_PACKAGES = frozenset(
    {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "numpy", "threading", "_thread", "logging", "io"}
    | {"_io", "queue", "multiprocessing", "concurrent", "asyncio", "tensorboard", "matplotlib", "functools", "weakref"}
    | {"wandb", "mlflow", "comet_ml", "neptune", "aim", "clearml"}
)
# The user's own classes derived from these do so too: a Trainer, a data set, an optimizer of theirs.
_FOREIGN_BASES = (torch.optim.Optimizer, torch.utils.data.Dataset, torch.utils.data.DataLoader, threading.Thread)


_F = TypeVar("_F", bound=Callable[..., Any])


def _by_class(function: _F) -> _F:
    """Remember what is known about a class: asking each time made a snapshot cost half as much again."""
    return cast("_F", functools.lru_cache(maxsize=4096)(function))


VALUES = (type, bool, int, float, complex, str, bytes, torch.Size, enum.Enum, types.FunctionType, types.MethodType)
"""Nothing mutable is behind these and their subclasses."""


@_by_class
def is_foreign(kind: type, *, itself: bool = False) -> bool:
    """Whether objects of this class are left alone; with ``itself``, whether the class is."""
    package = kind.__module__.partition(".")[0]
    if package in _FOREIGN_PACKAGES:
        return True
    if itself:
        return package in ("builtins", "abc", "typing", "collections", "enum")
    return issubclass(kind, _FOREIGN_BASES) or any(_manages_itself(base) for base in kind.__mro__[1:])


def _manages_itself(base: type) -> bool:
    return base.__module__.startswith(("lightning.", "pytorch_lightning.", "lightning_fabric.", "logging"))


@_by_class
def is_callback(kind: type) -> bool:
    """Whether this is a class of the user's, derived from Lightning's ``Callback``, which ``is_foreign``.

    What its hooks on the module count must not count a pair.
    """
    return not is_foreign(kind, itself=True) and any(base.__name__ == "Callback" for base in kind.__mro__[1:])


class _Kind(NamedTuple):
    """How one kind of object is read, compared with an earlier reading of it, and written back."""

    read: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]
    write: Callable[[Any, Any], None]


def _identical(now: Collection[Any], before: Collection[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _identical_items(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return _identical(now.keys(), before.keys()) and _identical(now.values(), before.values())


def _base_of(item: dict[Any, Any]) -> type[dict[Any, Any]]:
    """Whose methods to use: a subclass of the user's may do more than store, an OrderedDict keeps a list beside."""
    return OrderedDict if isinstance(item, OrderedDict) else dict


def _read_dict(item: dict[Any, Any]) -> dict[Any, Any]:
    return dict(_base_of(item).items(item))


def _same_dict(item: dict[Any, Any], before: dict[Any, Any]) -> bool:
    base = _base_of(item)
    return _identical(base.keys(item), before.keys()) and _identical(base.values(item), before.values())


def _write_dict(target: dict[Any, Any], before: dict[Any, Any]) -> None:
    base = _base_of(target)
    if not _identical(base.keys(target), before.keys()):
        base.clear(target)
    for key, value in before.items():
        if dict.get(target, key, _MISSING) is not value:
            base.__setitem__(target, key, value)


def _write_list(target: list[Any], before: list[Any]) -> None:
    list.__setitem__(target, slice(None), before)


def _write_deque(target: deque[Any], before: list[Any]) -> None:
    target.clear()
    target.extend(before)


def _write_set(target: MutableSet[Any], before: set[Any]) -> None:
    target.clear()
    for item in before:
        target.add(item)


@_by_class
def slots_of(kind: type) -> tuple[tuple[str, Any], ...]:
    """Names and descriptors of a class's slots, those of its bases and private ones included.

    >>> class Point:
    ...     __slots__ = ("x", "y")
    >>> [name for name, _ in slots_of(Point)]
    ['x', 'y']
    """
    owners = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    slots = [item for attributes in owners for item in attributes.items()]
    return tuple((name, slot) for name, slot in slots if isinstance(slot, types.MemberDescriptorType))


def read_slots(item: Any) -> dict[str, Any]:
    """The slots of an object that are filled."""
    values = {}
    for name, slot in slots_of(type(item)):
        with contextlib.suppress(AttributeError):  # a slot that is empty
            values[name] = slot.__get__(item)
    return values


def _write_slots(target: Any, before: dict[str, Any]) -> None:
    now = read_slots(target)
    for name, slot in slots_of(type(target)):  # through the slot itself: a frozen dataclass refuses the usual way
        if name in before:
            slot.__set__(target, before[name])
        elif name in now:
            slot.__delete__(target)


def read_class(kind: type) -> dict[str, Any]:
    """The attributes that a class itself carries, without Python's own."""
    return {name: value for name, value in vars(kind).items() if not name.startswith("__")}


def _write_class(kind: type, before: dict[str, Any]) -> None:
    now = read_class(kind)
    for name in now.keys() - before.keys():
        type.__delattr__(kind, name)
    for name, value in before.items():
        if now.get(name, _MISSING) is not value:
            type.__setattr__(kind, name, value)


class TensorState(NamedTuple):
    """``alias`` shares the tensor's storage as it was, also after somebody has assigned ``tensor.data``."""

    alias: Tensor
    value: Tensor
    requires_grad: bool
    grad: Tensor | None


def _read_tensor(tensor: Tensor) -> TensorState:
    alias = tensor.data
    # The gradient of a parameter is its optimizer's business, that of any other leaf nobody else's.
    mine = tensor.is_leaf and tensor.requires_grad and not isinstance(tensor, nn.Parameter)
    return TensorState(alias, alias.clone(), tensor.requires_grad, tensor.grad if mine else None)


def _same_tensor(tensor: Tensor, before: TensorState) -> bool:
    if tensor.requires_grad != before.requires_grad or not _same_place(tensor.data, before.alias):
        return False
    return same_bits(tensor.data, before.value)


def _same_place(a: Tensor, b: Tensor) -> bool:
    if a.layout is not b.layout or a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if a.layout is torch.sparse_coo:
        return _same_place(a._values(), b._values()) and _same_place(a._indices(), b._indices())
    return a.layout is not torch.strided or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bits, not values: NaN equals itself, 0.0 differs from -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.layout is not torch.strided:
        return all(same_bits(x, y) for x, y in zip(_parts(a), _parts(b), strict=True))
    return torch.equal(_bytes_of(a), _bytes_of(b))


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors that a sparse one is made of."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor.to_dense(),)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _write_tensor(tensor: Tensor, before: TensorState) -> None:
    # Through .data: no version counter moves, so a graph that is still alive stays valid. A tensor made in inference
    # mode (an output that validation has kept) can be written only there.
    with torch.inference_mode() if tensor.is_inference() else contextlib.nullcontext():
        if tensor.requires_grad != before.requires_grad and tensor.is_leaf:
            tensor.requires_grad_(before.requires_grad)
        if not _same_place(tensor.data, before.alias):
            tensor.data = before.alias
        _copy_bits(before.alias, before.value)
    if tensor.is_leaf and before.requires_grad and not isinstance(tensor, nn.Parameter):
        tensor.grad = before.grad


def _copy_bits(target: Tensor, value: Tensor) -> None:
    if target.layout is not torch.strided:  # part by part: copy_ would give the sparse tensor new ones
        for part, its_value in zip(_parts(target), _parts(value), strict=True):
            part.copy_(its_value)
        return
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and size > 1:  # expanded: all of these are one element in memory
            target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    target.copy_(value)


def _read_generator(target: torch.Generator) -> Tensor:
    return target.get_state()


def _same_generator(target: np.random.Generator, before: dict[str, Any]) -> bool:
    return str(target.bit_generator.state) == str(before)


def _same_legacy(target: np.random.RandomState, before: Any) -> bool:
    return same_random_state(target.get_state(), before)


def _write_generator(target: np.random.Generator, before: dict[str, Any]) -> None:
    target.bit_generator.state = before


def _write_torch_generator(target: torch.Generator, before: Tensor) -> None:
    target.set_state(before)


def _write_array(target: np.ndarray[Any, Any], before: np.ndarray[Any, Any]) -> None:
    target[...] = before


def _write_buffer(target: Any, before: Any) -> None:
    target[:] = before


_MISSING = object()
BUILTIN = frozenset({dict, list, deque, set})
DICT = _Kind(_read_dict, _same_dict, _write_dict)
CLASS = _Kind(read_class, lambda item, before: _identical_items(read_class(item), before), _write_class)
SLOTS = _Kind(read_slots, lambda item, before: _identical_items(read_slots(item), before), _write_slots)
_KINDS: tuple[tuple[type | tuple[type, ...], _Kind], ...] = (
    (Tensor, _Kind(_read_tensor, _same_tensor, _write_tensor)),
    (dict, DICT),
    (list, _Kind(list, _identical, _write_list)),
    (deque, _Kind(list, _identical, _write_deque)),
    (set, _Kind(set, lambda item, before: item == before, _write_set)),
    (np.ndarray, _Kind(np.copy, lambda item, before: item.tobytes() == before.tobytes(), _write_array)),
    (torch.Generator, _Kind(_read_generator, lambda g, b: torch.equal(g.get_state(), b), _write_torch_generator)),
    (random.Random, _Kind(random.Random.getstate, lambda g, b: g.getstate() == b, random.Random.setstate)),
    (np.random.Generator, _Kind(lambda g: g.bit_generator.state, _same_generator, _write_generator)),
    (np.random.RandomState, _Kind(np.random.RandomState.get_state, _same_legacy, np.random.RandomState.set_state)),
    ((bytearray, array.array), _Kind(copy.copy, operator.eq, _write_buffer)),
    (types.CellType, _Kind(read_cell, lambda cell, before: _identical(read_cell(cell), before), write_cell)),
    (Globals, _Kind(Globals.read, lambda item, before: _identical_items(item.read(), before), Globals.write)),
)


@_by_class
def kind_of(type_: type) -> _Kind | None:
    """How objects of this class are read, compared and written; ``None`` if only their attributes can change.

    >>> kind_of(deque) is None, kind_of(range) is None
    (False, True)
    """
    return next((kind for types_, kind in _KINDS if issubclass(type_, types_)), None)


@dataclass(slots=True)
class Cell:
    """One mutable object with its value at the time of the snapshot; ``owner`` is the module or root it hangs on."""

    target: Any
    kind: _Kind
    value: Any
    owner: Any

    def changed(self) -> bool:
        """Whether the object differs from its value at the snapshot."""
        return not self.kind.same(self.target, self.value)

    def restore(self) -> None:
        """Write the value at the snapshot back."""
        if isinstance(self.target, Tensor) or self.changed():
            self.kind.write(self.target, self.value)

    def merge(self, later: Any) -> None:
        """Write of ``later`` what is as it was at the snapshot: what has been written anew since stays."""
        now, merged = self.kind.read(self.target), later
        if isinstance(later, dict):
            merged = dict(now)
            for key in [*later, *(key for key in self.value if key not in later)]:
                before, after = self.value.get(key, _MISSING), later.get(key, _MISSING)
                if after is before or now.get(key, _MISSING) is not before:
                    continue
                if after is _MISSING:
                    del merged[key]
                else:
                    merged[key] = after
        elif isinstance(later, set):
            merged = (now | (later - self.value)) - (self.value - later)
        elif self.changed() and not (isinstance(later, list) and _starts_with(later, now)):
            return
        self.kind.write(self.target, merged)


def _starts_with(items: list[Any], beginning: list[Any]) -> bool:
    same = (a is b or (isinstance(a, VALUES) and a == b) for a, b in zip(items, beginning, strict=False))
    return len(items) >= len(beginning) and all(same)


def same_random_state(now: Any, before: Any) -> bool:
    """Whether two states of one random number generator are equal.

    >>> same_random_state(random.Random(1).getstate(), random.Random(2).getstate())
    False
    """
    same = np.array_equal if isinstance(now, tuple) else torch.equal
    if isinstance(now, tuple) and not any(isinstance(part, np.ndarray) for part in now):
        return bool(now == before)
    return all(same(a, b) for a, b in zip(now, before, strict=True))
