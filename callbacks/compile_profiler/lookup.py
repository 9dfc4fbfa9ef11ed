"""Find what a user names on the command line: ``FILE.py:NAME`` or ``PACKAGE.MODULE:NAME``."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any


class RequestError(ValueError):
    """What was asked for cannot be done as asked: the request is at fault, not the code that it names."""


def named(where_and_name: str) -> Any:
    """The object that is named; its module is imported, which runs code of the user's.

    A file is imported as Python would find it beside itself, a package as from the current folder. Either is imported
    once in a process.

    Raises:
        RequestError: there is no such file, module or name.
        Exception: whatever the module raises while it is imported.

    >>> named("math:pi") > 3
    True
    """
    where, _, name = where_and_name.rpartition(":")
    if not where or not name:
        raise RequestError(f"expected FILE.py:NAME or PACKAGE.MODULE:NAME, got {where_and_name!r}.")
    module = _from_file(Path(where)) if where.endswith(".py") else _from_package(where)
    try:
        return reduce(getattr, name.split("."), module)
    except AttributeError:
        there = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise RequestError(f"{where} has no {name!r}; it defines {', '.join(there) or 'nothing'}.") from None


def arguments(pairs: Iterable[str]) -> dict[str, Any]:
    """``KEY=VALUE`` texts as arguments: a value is read as a Python literal, or else taken as it stands.

    Raises:
        RequestError: a text is no ``KEY=VALUE``.

    >>> arguments(["width=16", "name=small", "sizes=(1, 2)"])
    {'width': 16, 'name': 'small', 'sizes': (1, 2)}
    """
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise RequestError(f"expected KEY=VALUE, got {pair!r}.")
        try:
            found[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[key] = value
    return found


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise RequestError(f"there is no file {str(path)!r}.")
    path = path.resolve()
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    name = path.stem if known is None else f"_{path.stem}"  # a file called random.py must not become everybody's
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.modules[name] = module  # the compiler and pickle look it up there
    spec.loader.exec_module(module)
    return module


def _from_package(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # something that the user's module needs
        raise RequestError(f"there is no module {name!r}; for a file write its path, ending in .py.") from None
