"""Remember on disk what earlier runs of a job have found.

What is read decides nothing but where a search begins: an entry is believed only if it is a file of this user's that
nobody else can write to, and of what it says only that counts which the caller offers anyway. The worst that a forged
one can do is to let a run begin with a slow candidate.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

from compile_profiler.plain import Record

SCHEMA = 1
MAX_ENTRIES = 512
MAX_BYTES = 64 * 1024
"""Of one entry; with 50 candidates it has about 10 KiB."""

FOLDER_VARIABLE = "COMPILE_PROFILER_CACHE_DIR"
_KEY = re.compile(r"[0-9a-f]{64}")
_DRAFT = re.compile(r"\.compile-profiler-\w+\.tmp")
_DRAFT_AGE_S = 3600.0  # an older draft is that of a process which was killed
_MAX_DEPTH = 4  # of a candidate: its options, a list in them
_MOST = 1e12  # of any number here
_LEAST_SPEEDUP = 1e-6  # a log of it is finite
_NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried(Record):
    """What one candidate cost and gained.

    Attributes:
        candidate: how the step was run, as plain values.
        compile_s: seconds of compiling it, from an empty or a filled cache of the compiler's.
        speedup: over eager, with its interval from ``low`` to ``high``.
    """

    candidate: dict[str, Any]
    compile_s: float | None = None
    speedup: float | None = None
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        _check_candidate("Tried.candidate", self.candidate)
        _check_number("Tried.compile_s", self.compile_s)
        for name in ("speedup", "low", "high"):
            _check_number(f"Tried.{name}", getattr(self, name), least=_LEAST_SPEEDUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(Record):
    """What a finished search says to the next run of its job.

    Attributes:
        key: of the job.
        job: name of the module's class; ``device`` and ``torch`` likewise are for people to read.
        winner: the candidate to begin with.
        tried: all that were compiled or measured.
        when_s: when it was found, in seconds since 1970.
    """

    schema: int = SCHEMA
    key: str
    job: str
    device: str | None = None
    torch: str | None = None
    winner: dict[str, Any]
    tried: tuple[Tried, ...] = ()
    when_s: float

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if self.schema != SCHEMA:
            raise ValueError(f"schema must be {SCHEMA}, got {self.schema}: another version of this package wrote it.")
        if not _KEY.fullmatch(self.key):
            raise ValueError(f"key must be 64 hexadecimal digits, got {self.key!r}.")
        _check_candidate("winner", self.winner)
        _check_number("when_s", self.when_s)

    @property
    def result(self) -> Tried:
        """What is known of the winner."""
        known = (each for each in self.tried if _text(each.candidate) == _text(self.winner))
        return next(known, Tried(candidate=self.winner))


def default_folder() -> Path | None:
    """Where entries are kept; ``None`` where this user has no home.

    ``COMPILE_PROFILER_CACHE_DIR``, or else ``compile_profiler`` in ``XDG_CACHE_HOME`` or in ``~/.cache``.
    """
    with suppress(RuntimeError):  # no home
        if asked := os.environ.get(FOLDER_VARIABLE):
            return Path(asked).expanduser().absolute()
        caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
        # By its standard, a path that is not absolute is to be ignored.
        return (caches if caches.is_absolute() else Path.home() / ".cache") / "compile_profiler"
    return None


class VerdictCache:
    """A folder of entries, a file for each job. Any number of processes may use it at the same time.

    Args:
        folder: where; ``None``: nothing is found or kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def get(self, keys: Sequence[str], candidates: Sequence[Mapping[str, Any]]) -> Entry | None:
        """What is known of a job, reduced to what is offered now; ``None`` if that is nothing.

        Args:
            keys: of the job, the one that says most first.
            candidates: what could be chosen; others than these are not in what is returned, and are not chosen.
        """
        for key in keys:
            found = None if self.folder is None else _read(self._file(key))
            if found is None or (entry := found[0]).key != key:  # a file that was renamed
                continue
            said = {_text(each.candidate): each for each in entry.tried}
            for mine in candidates:
                if _text(mine) == _text(entry.winner):
                    tried = (replace(said[_text(c)], candidate=dict(c)) for c in candidates if _text(c) in said)
                    return replace(entry, winner=dict(mine), tried=tuple(tried))
        return None

    def put(self, entry: Entry) -> bool:
        """Keep an entry in place of an earlier one of its job; the oldest go where there are more than 512.

        Returns:
            Whether it was kept: a folder that cannot be written to, a full disk and an entry that is too large keep
            nothing, and what was there before stays.
        """
        if self.folder is None:
            return False
        content = json.dumps(entry.to_dict(), allow_nan=False).encode()
        if len(content) > MAX_BYTES:
            return False
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            # Unique, and 0600 from its first moment; what is renamed is never half a file.
            handle, draft = tempfile.mkstemp(dir=self.folder, prefix=".compile-profiler-", suffix=".tmp")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(content)
                Path(draft).replace(self._file(entry.key))
            except OSError:
                Path(draft).unlink()
                raise
            self._make_room()
        except OSError:
            return False
        return True

    def entries(self) -> list[tuple[Entry, int]]:
        """All that can be believed, the newest first, each with the bytes of its file.

        Raises:
            OSError: the folder is there and cannot be read.
        """
        read = (_read(file) for file in self.files())
        return sorted((found for found in read if found is not None), key=lambda found: -found[0].when_s)

    def files(self) -> list[Path]:
        """Every file that goes by an entry's name, whatever is in it.

        Raises:
            OSError: the folder is there and cannot be read.
        """
        return sorted(file for file in self._all_files() if file.suffix == ".json" and _KEY.fullmatch(file.stem))

    def clear(self, *, prefix: str = "", older_than_s: float | None = None) -> int:
        """Remove entries, damaged ones too; how many.

        Args:
            prefix: only those whose key begins with it.
            older_than_s: only those that were written so many seconds ago or earlier; ``None``: also those that a clock
                ahead of this one has written.

        Raises:
            OSError: the folder cannot be read, or an entry not removed.
        """
        latest_s = inf if older_than_s is None else time.time() - older_than_s
        chosen = [file for file in self.files() if file.name.startswith(prefix) and _written_s(file) <= latest_s]
        for file in chosen:
            file.unlink(missing_ok=True)
        self._drop_drafts()
        return len(chosen)

    def _make_room(self) -> None:
        files = self.files()
        if len(files) > MAX_ENTRIES:
            for file in sorted(files, key=_written_s)[:-MAX_ENTRIES]:
                _drop(file)
        self._drop_drafts()

    def _drop_drafts(self) -> None:
        for file in self._all_files():
            if _DRAFT.fullmatch(file.name) and _written_s(file) < time.time() - _DRAFT_AGE_S:
                _drop(file)

    def _all_files(self) -> list[Path]:
        try:
            return [] if self.folder is None else list(self.folder.iterdir())
        except FileNotFoundError:
            return []

    def _file(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{key}.json"


def _read(file: Path) -> tuple[Entry, int] | None:
    """An entry and its size, if it is a file of this user's alone, of a sensible size, with what an entry has in it."""
    try:
        if not _NO_FOLLOW and file.is_symlink():
            return None
        # Without waiting: the name may be that of a pipe.
        handle = os.open(file, os.O_RDONLY | _NO_FOLLOW | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        try:
            if not _is_believable(os.fstat(handle)):
                return None
            content = os.read(handle, MAX_BYTES)
        finally:
            os.close(handle)
        return Entry.from_dict(json.loads(content)), len(content)
    except (OSError, ValueError, RecursionError):
        return None


def _is_believable(facts: os.stat_result) -> bool:
    is_ours = os.name != "posix" or (facts.st_uid == os.geteuid() and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    return is_ours and stat.S_ISREG(facts.st_mode) and facts.st_size <= MAX_BYTES


def _check_number(name: str, value: float | None, *, least: float = 0.0) -> None:
    # A number that a float cannot hold is an int and passes as one.
    if value is not None and not least <= value <= _MOST:
        raise ValueError(f"{name} must be a number from {least} to {_MOST}, or None, got {value!r:.40}.")


def _check_candidate(name: str, value: Any, depth: int = 0) -> None:
    """Plain values in few layers: what can be compared, shown and written whatever it is."""
    if depth == 0 or isinstance(value, (dict, list, tuple)):
        if depth >= _MAX_DEPTH or not isinstance(value, (dict, list, tuple)):
            raise ValueError(f"{name} must be an object of at most {_MAX_DEPTH} layers, got {type(value).__name__}.")
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            _check_candidate(name, item, depth + 1)
    elif not isinstance(value, (str, int, float, type(None))) or (isinstance(value, float) and not isfinite(value)):
        raise ValueError(f"{name} must be made of plain values, got {value!r:.40}.")


def _text(candidate: Mapping[str, Any]) -> str:
    """The same for equal candidates, on disk or not; what cannot be there is like nothing that is."""
    return json.dumps(candidate, sort_keys=True, default=repr)


def _written_s(file: Path) -> float:
    """When a file was written; one that has gone meanwhile is the newest, so that nobody touches it."""
    try:
        return file.lstat().st_mtime
    except OSError:
        return inf


def _drop(file: Path) -> None:
    with suppress(OSError):  # gone, or not ours
        file.unlink()
