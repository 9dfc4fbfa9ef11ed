"""The code that a step leads to, as texts.

Bytecode, not source: it is what runs, also in a notebook or where a file has been edited since it was imported; a
comment does not change it, and reading it takes microseconds.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from compile_profiler.places import owner_of

_HEAP_TYPE = 1 << 9  # the flag of a class that was made at run time, so is not the interpreter's own
_PLAIN = {type(None), bool, int, float, str, dict, OrderedDict, torch.Tensor}  # what attributes mostly are: no code
_MAX_DEPTH = 20  # of values in values: deeper is a knot


class UnreadableError(ValueError):
    """Some of the code is no Python code."""


def code_of(module: nn.Module) -> list[str]:
    """The bytecode of a module's step and of what it leads to, sorted: the same in every process.

    That is, of the module itself, what ``training_step`` and ``forward`` name, directly or not; every class of its
    submodules with its bases; functions and objects that they have as attributes; and, of the user's own files, the
    functions, classes and whole numbers that any of it names. The code of torch and Lightning is left to their version
    numbers. Names of files and modules do not count: a script is ``__main__`` in one process and not in another.

    Args:
        module: the LightningModule; nothing of it is called or changed.

    Raises:
        UnreadableError: the step or a submodule is compiled to something else than bytecode.

    >>> code_of(nn.Linear(1, 1)) == code_of(nn.Linear(2, 2))
    True
    >>> code_of(nn.Sequential(nn.ReLU())) == code_of(nn.Sequential(nn.Tanh()))
    False
    """
    found = _Found()
    entries = [name for name in ("training_step", "forward") if hasattr(type(module), name)]
    _check(type(module), entries)
    for child in module.modules():
        if child is not module and found.add_class(type(child)):
            _check(type(child), ("forward",))
        for value in vars(child).values():
            if type(value) not in _PLAIN:
                found.add(value)
    found.add_named(type(module), entries)
    return found.texts()


def _check(kind: type, entries: Iterable[str]) -> None:
    if issubclass(kind, torch.jit.ScriptModule):
        raise UnreadableError(f"{kind.__qualname__} is TorchScript, whose code cannot be read")
    for entry in entries:
        if not any(_functions(inspect.getattr_static(kind, entry))):
            raise UnreadableError(f"{kind.__qualname__}.{entry} is not written in Python, so it cannot be read")


class _Found:
    """Functions and classes come across so far, each once."""

    def __init__(self) -> None:
        self._texts: set[str] = set()
        self._seen: dict[int, Any] = {}  # by id, which is good as long as its object lives
        self._names: set[str] = set()  # that the code mentions

    def texts(self) -> list[str]:
        """What was found, in an order that does not depend on that of finding."""
        return sorted(self._texts)

    def add_named(self, kind: type, names: Iterable[str]) -> None:
        """What a class has under these names, and under all that are mentioned there."""
        self._names |= set(names)
        done = {"__init__"}  # which calls that of a base
        while todo := self._names - done:
            done |= todo
            for base in kind.__mro__:
                self._add_members(base, todo & vars(base).keys())

    def add_class(self, kind: type) -> bool:
        """What a class and its bases consist of; whether that is new."""
        if not self._is_new(kind):
            return False
        self._note("class", kind.__qualname__, [base.__qualname__ for base in kind.__bases__])
        self._add_members(kind, vars(kind).keys())
        for base in kind.__bases__:
            if base.__flags__ & _HEAP_TYPE:
                self.add_class(base)
        return True

    def add(self, value: Any) -> None:
        """The functions in a value, or the class of an object of the user's."""
        functions = list(_functions(value))
        for function in functions:
            self._add_function(function)
        kind = value if isinstance(value, type) else type(value)
        if not functions and not issubclass(kind, nn.Module) and _owner(_file_of(kind)) == "user":
            self.add_class(kind)

    def _add_members(self, kind: type, names: Iterable[str]) -> None:
        is_framework = _owner(_file_of(kind)) in ("torch", "lightning")
        for name in names:
            if name.startswith("__annot"):  # from Python 3.14 on a function, which nothing of a step calls
                continue
            value = vars(kind)[name]
            functions = list(_functions(value))
            for function in functions:  # also of a framework's class: torch.fx makes one, and writes its forward
                self._add_function(function)
            if not is_framework and (functions or not name.startswith("__")):
                self._note("member", kind.__qualname__, name, _told(value))

    def _add_function(self, function: types.FunctionType) -> None:
        owner = _owner(function.__code__.co_filename)
        if owner not in ("torch", "lightning") and self._is_new(function):
            names = set(_names(function.__code__))
            self._names |= names
            self._note("function", _bytecode(function.__code__), *map(_told, _held(function)))
            if owner == "user":  # what a library's function calls is the library's
                self._add_globals(function.__globals__, names, set())

    def _add_globals(self, namespace: Mapping[str, Any], names: set[str], done: set[str]) -> None:
        for name in names & namespace.keys():
            value = namespace[name]
            if isinstance(value, int):
                self._note("number", name, repr(value))
            elif isinstance(value, types.ModuleType):
                is_users = _owner(getattr(value, "__file__", None) or "<built in>") == "user"
                if is_users and value.__name__ not in done:  # modules import each other
                    done.add(value.__name__)
                    self._add_globals(vars(value), names, done)
            else:
                self.add(value)

    def _note(self, *parts: Any) -> None:
        self._texts.add(json.dumps(parts))

    def _is_new(self, thing: Any) -> bool:
        if id(thing) in self._seen:
            return False
        self._seen[id(thing)] = thing
        return True


def _functions(value: Any, seen: set[int] | None = None) -> Iterator[types.FunctionType]:
    """The Python functions that calling a value, or looking it up in a class, may run."""
    seen = set() if seen is None else seen  # functions hold each other
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, types.FunctionType):
        yield value
        # What a decorator wraps is in its closure.
        inner: Iterable[Any] = (cell for cell in _held(value) if callable(cell) and not isinstance(cell, type))
    elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
        inner = (value.__func__,)
    elif isinstance(value, property):
        inner = (value.fget, value.fset, value.fdel)
    elif isinstance(value, (functools.partial, functools.partialmethod)):
        inner = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, functools.cached_property):
        inner = (value.func,)
    elif isinstance(value, functools._lru_cache_wrapper):
        inner = (value.__wrapped__,)
    else:
        return
    for each in inner:
        yield from _functions(each, seen)


def _held(function: types.FunctionType) -> list[Any]:
    """Defaults and what the closure holds; an empty cell is one of a function that is still being made."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *cells]


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _bytecode(code: types.CodeType) -> list[Any]:
    """All of a code object but its places: the same text, the same bytecode."""
    return [
        code.co_name,
        code.co_code.hex(),
        getattr(code, "co_exceptiontable", b"").hex(),  # since Python 3.11
        [code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount],
        [code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars],
        [_bytecode(each) if isinstance(each, types.CodeType) else _told(each) for each in code.co_consts],
    ]


def _told(value: Any, depth: int = 0) -> Any:
    """A value in plain values: constants as they are, functions and classes by name, other objects by type."""
    if isinstance(value, (str, bytes, bool, int, float, complex, type(None), type(...), torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, (types.FunctionType, type)):
        return value.__qualname__
    if depth < _MAX_DEPTH:
        if isinstance(value, (list, tuple)):
            return [_told(item, depth + 1) for item in value]
        if isinstance(value, (set, frozenset)):
            return sorted((_told(item, depth + 1) for item in value), key=json.dumps)  # whose order is of the process
        if isinstance(value, Mapping):
            return [[_told(key, depth + 1), _told(item, depth + 1)] for key, item in value.items()]
    return type(value).__qualname__


def _file_of(kind: type) -> str:
    """The file that a class is written in; one typed into a notebook or made by ``exec`` counts as the user's."""
    if kind.__module__ in sys.builtin_module_names and kind.__module__ != "builtins":
        return "<built in>"
    if not kind.__flags__ & _HEAP_TYPE:
        return "<built in>"
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or "<typed in>"


@functools.cache
def _owner(file: str) -> str:
    if file.startswith("<"):
        return "third_party" if file.startswith(("<built in>", "<frozen")) else "user"
    return owner_of(file)
