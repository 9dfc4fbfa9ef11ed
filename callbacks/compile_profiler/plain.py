"""Frozen records, to plain values and back: what a report is made of and how it is kept in a file."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

AnyRecord = TypeVar("AnyRecord", bound="Record")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Base of everything that travels: no NaN or infinity may enter, unknown is ``None``."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:  # not fields(), which takes longer than all of the rest
            value = getattr(self, name)
            if value is None or isinstance(value, (int, str)):
                continue
            for item in value.values() if isinstance(value, Mapping) else (value,):
                if isinstance(item, float) and not math.isfinite(item):
                    raise ValueError(
                        f"{type(self).__name__}.{name} must be a finite number or None, got {item}. "
                        "A figure that is not known is None."
                    )

    def to_dict(self) -> dict[str, Any]:
        """The record as plain dicts and lists, ready for ``json.dump``.

        >>> from compile_profiler.records import Report
        >>> Report().to_dict()["verdict"]["reason"]
        'pending'
        """
        return typing.cast("dict[str, Any]", _plain(self))

    @classmethod
    def from_dict(cls: type[AnyRecord], data: Mapping[str, Any]) -> AnyRecord:
        """The record that ``to_dict`` was called on.

        Raises:
            ValueError: ``data`` is no such record, or has a field of the wrong type.

        >>> from compile_profiler.records import Speedup
        >>> Speedup.from_dict(Speedup(num_pairs=3).to_dict()).num_pairs
        3
        """
        return typing.cast("AnyRecord", build(cls, data, cls.__name__.lower()))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {spec.name: _plain(getattr(value, spec.name)) for spec in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


# Without the cache, half of the time of reading a report.
_hints_of = functools.cache(typing.get_type_hints)


def _is_required(spec: dataclasses.Field[Any]) -> bool:
    return spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING


def build(kind: Any, value: Any, where: str) -> Any:
    """``value`` as an instance of the annotation ``kind``; ``where`` names it in errors."""
    origin = typing.get_origin(kind)
    if kind is Any:
        return value
    if origin is Literal:
        matches, built = value in typing.get_args(kind), value
    elif origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        kinds = [option for option in typing.get_args(kind) if option is not type(None)]
        return build(kinds[0], value, where)
    elif dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be an object, got {value!r}.")
        hints = _hints_of(typing.cast(type, kind))
        known = {key: build(hints[key], item, f"{where}.{key}") for key, item in value.items() if key in hints}
        missing = [spec.name for spec in dataclasses.fields(kind) if _is_required(spec) and spec.name not in known]
        if missing:
            raise ValueError(f"{where} lacks {', '.join(missing)}.")
        return typing.cast(type, kind)(**known)
    elif origin is tuple:
        matches = isinstance(value, (list, tuple))
        item_kind = typing.get_args(kind)[0]
        built = tuple(build(item_kind, item, f"{where}[{i}]") for i, item in enumerate(value)) if matches else None
    elif origin is dict:
        matches = isinstance(value, Mapping)
        item_kind = typing.get_args(kind)[1]
        built = {key: build(item_kind, item, f"{where}.{key}") for key, item in value.items()} if matches else None
    elif kind is float:
        matches, built = isinstance(value, (int, float)) and not isinstance(value, bool), value
    else:
        matches, built = isinstance(value, kind) and (kind is bool or not isinstance(value, bool)), value
    if not matches:
        options = ", ".join(repr(option) for option in typing.get_args(kind))
        expected = f"one of {options}" if origin is Literal else getattr(kind, "__name__", kind)
        raise ValueError(f"{where} must be {expected}, got {value!r}.")
    return built
