"""What a step logs, remembered while it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor
from torch.compiler import is_compiling

Call = Callable[..., Any]


_AS_LOGGED = frozenset({Tensor, bool, int, float, str, type(None)})
"""Classes whose values tracing leaves as they are; told first, because every step passes here."""


class DeferredLogs:
    """Takes the place of ``self.log`` and ``self.log_dict`` inside compiled code: remembers, logs afterwards.

    Appending to a list is something torch.compile can trace; what Lightning does inside ``log`` is not (on torch 2.12
    and 2.13 it crashes, Lightning issue 21836). Values are copied at the call, as Lightning's own result does.
    """

    def __init__(self) -> None:
        entries: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.entries = entries

        def copied(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            graph = kwargs.get("enable_graph", False)
            kept = {key: _copied(value, graph) for key, value in kwargs.items()}
            return tuple([_copied(value, graph) for value in args]), kept

        def remember(name: str) -> Call:
            def stand_in(*args: Any, **kwargs: Any) -> None:
                if not is_compiling():
                    with suppress(Exception):  # a step that has moved its optimizers must not fail for that
                        args, kwargs = copied(args, kwargs)
                    entries.append((name, args, kwargs))
                else:
                    entries.append((name, *copied(args, kwargs)))

            return stand_in

        self.stand_ins = {name: remember(name) for name in ("log", "log_dict")}
        self.kept: dict[str, Any] | None = None  # values by name, of passes whose logs somebody wants to compare

    def drop(self) -> None:
        """Forget everything remembered, save for what somebody wants to compare."""
        if self.kept is not None:
            for name, args, kwargs in self.entries:
                key, value = _arguments(name, args, kwargs)
                self.kept.update(value if isinstance(value, Mapping) else {key: value})
        self.entries.clear()

    def taken(self, module: Any) -> list[Call]:
        """Everything remembered, as calls of the module's real ``log`` and ``log_dict``, in order."""
        if not self.entries:
            return []
        found: list[Call] = [
            functools.partial(
                getattr(module, name),
                *[value if type(value) in _AS_LOGGED else _given_back(value) for value in args],
                **{k: value if type(value) in _AS_LOGGED else _given_back(value) for k, value in kwargs.items()},
            )
            for name, args, kwargs in self.entries
        ]
        self.entries.clear()
        return found

    def plainly_taken(self, module: Any) -> list[Call]:
        """The same with values as they were traced, for when ``taken`` has failed in a step that cannot run again."""
        return [functools.partial(getattr(module, name), *args, **kwargs) for name, args, kwargs in self.entries]


def _arguments(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Name and value of a call of ``log``; of one of ``log_dict`` the values alone."""
    names = ("name", "value") if name == "log" else ("dictionary",)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return given.get("name"), given.get(names[-1])


def _copied(value: Any, graph: bool) -> Any:
    if isinstance(value, Tensor):
        return value.clone() if graph else value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item, graph) for key, item in value.items()}
    return value


def _given_back(value: Any) -> Any:
    """A value as eager code would have logged it: tracing turns NumPy scalars into arrays without dimensions."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return value[()]
    if isinstance(value, Mapping):
        return {key: _given_back(item) for key, item in value.items()}
    return value
