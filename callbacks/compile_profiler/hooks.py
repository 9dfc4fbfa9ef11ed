"""Hooks that others have put on the module and its parameters: what they can write, when they change, silence."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(frozen=True, slots=True, eq=False)
class Globals:
    """The global variables that a function mentions.

    Attributes:
        names: what the function's code mentions.
        values: the globals of its module.
    """

    names: tuple[str, ...]
    values: dict[str, Any]

    def read(self) -> dict[str, Any]:
        """Their values."""
        return {name: self.values[name] for name in self.names if name in self.values}

    def write(self, before: dict[str, Any]) -> None:
        """Give them these values; those that had none lose theirs."""
        for name in self.read().keys() - before.keys():
            del self.values[name]
        self.values.update(before)


def behind_hooks(module: nn.Module) -> Iterator[Any]:
    """What the hooks of a module can write without being handed it: their object, closure and globals.

    >>> layer, seen = nn.Linear(1, 1), []
    >>> handle = layer.register_forward_hook(functools.partial(lambda seen, *_: seen.append(1), seen))
    >>> any(item is seen for item in behind_hooks(layer))
    True
    """
    for name in _HOOKS:
        for hook in vars(module).get(name, {}).values():
            yield from _behind(hook)


def _behind(function: Any) -> Iterator[Any]:
    if isinstance(function, functools.partial):
        yield from _behind(function.func)
        yield from (*function.args, *function.keywords.values())
    elif isinstance(function, types.MethodType):
        yield from _behind(function.__func__)
        yield function.__self__
    elif isinstance(function, types.FunctionType):
        yield Globals(function.__code__.co_names, function.__globals__)
        for cell in function.__closure__ or ():
            yield cell
            yield from read_cell(cell)
        yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    else:
        yield function


def read_cell(cell: types.CellType) -> list[Any]:
    """What the cell of a closure holds: one object, or none yet.

    >>> read_cell(types.CellType(1)), read_cell(types.CellType())
    ([1], [])
    """
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def write_cell(cell: types.CellType, before: list[Any]) -> None:
    """Give a cell what ``read_cell`` had found."""
    if before:
        cell.cell_contents = before[0]
    else:
        del cell.cell_contents


@contextlib.contextmanager
def without_gradient_hooks(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, hooks on these parameters (``register_hook``, post-accumulate ones) are not called.

    They belong to real steps: a watcher counts them, an optimizer in the backward pass moves the weights.
    """
    hooks = [held for p in parameters for held in (p._backward_hooks, p._post_accumulate_grad_hooks) if held]
    kept = [dict(held) for held in hooks]
    for held in hooks:  # emptied, not replaced: autograd and the handles of the hooks know these very dicts
        held.clear()
    try:
        yield
    finally:
        for held, before in zip(hooks, kept, strict=True):
            held.update(before)


class HookWatch:
    """Notices hooks put on the modules, or taken off, since the last look.

    Compiled code calls the hooks that were there when it was compiled: torch leaves them out of its guards
    (``skip_nnmodule_hook_guards``). A look costs less than a microsecond where no hook was registered.

    >>> layer = nn.Linear(1, 1)
    >>> watch = HookWatch(layer)
    >>> handle = layer.register_forward_hook(print)
    >>> watch.changed(), watch.changed()
    (True, False)
    >>> handle.remove()
    >>> watch.changed()
    True
    """

    def __init__(self, module: nn.Module) -> None:
        self._all = [vars(submodule)[name] for submodule in module.modules() for name in _HOOKS]
        self._look()

    def _look(self) -> None:
        self._next_id = RemovableHandle.next_id  # every registration, of whatever hook, takes a number
        self._hooked = [hooks for hooks in self._all if hooks]
        self._ids = list(map(tuple, self._hooked))

    def changed(self) -> bool:
        """Whether the hooks are others than at the last look."""
        if self._next_id == RemovableHandle.next_id and (
            not self._hooked or list(map(tuple, self._hooked)) == self._ids
        ):
            return False
        before = self._ids
        self._look()
        return before != self._ids
