"""Say whose line of code it was: the frames torch lists, the user's among them, who is to blame."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

from compile_profiler.records import Owner


class Place(NamedTuple):
    """A line of source code."""

    file: str
    line: int
    function: str


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_COMMENT = re.compile(r"# (?P<file>\S+?):(?P<line>\d+) in (?P<function>\w+)")
_RESUMED = re.compile(r"torch_dynamo_resume_in_(\w+)_at_\d+")


def _folders(*paths: str | Path) -> tuple[str, ...]:
    return tuple({f"{path}{os.sep}" for path in paths})


_SITE = _folders(*(sysconfig.get_path(name) for name in ("purelib", "platlib")))
_STANDARD = _folders(*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")))
_TORCH = _folders(Path(torch.__file__).parent, Path(__file__).parent)
_TYPED_IN = ("<ipython-input", "<stdin>", "<python-input")
_INSTALLED = {"site-packages", "dist-packages"}
_LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}


def owner_of(file: str) -> Owner:
    """Whose code a file is; this package stands on torch's side.

    >>> owner_of("train.py")
    'user'
    >>> owner_of(torch.__file__)
    'torch'
    >>> owner_of("<ipython-input-1>"), owner_of("<eval_with_key>.3")
    ('user', 'torch')
    """
    generated = file.startswith("<") and not file.startswith(_TYPED_IN)
    if generated or file.startswith(_TORCH):
        return "torch"
    if _is_installed(file):
        return "lightning" if _LIGHTNING & set(Path(file).parts) else "third_party"
    return "third_party" if file.startswith(_STANDARD) else "user"


def _is_installed(file: str) -> bool:
    """In a folder of installed packages, this environment's or one that it builds on."""
    return file.startswith(_SITE) or bool(_INSTALLED & set(Path(file).parts))


def _is_plumbing(file: str) -> bool:
    """Code that only does what it was called for: its caller is to blame."""
    return owner_of(file) == "torch" or (file.startswith(_STANDARD) and not _is_installed(file))


def innermost(places: Iterable[Place]) -> Place | None:
    """The user's innermost frame; where no frame is the user's, the innermost that is not torch's."""
    frames = list(places)
    mine = [place for place in frames if owner_of(place.file) == "user"]
    others = [place for place in frames if not _is_plumbing(place.file)]
    chosen = mine or others or frames
    return chosen[-1] if chosen else None


def to_blame(places: Sequence[Place], library: str | None = None) -> Owner | None:
    """Whose code it was: that of the innermost frame that is not plumbing, or of a ``library`` called from there.

    >>> to_blame([Place("train.py", 3, "step"), Place(torch.__file__, 9, "call")])
    'user'
    """
    others = [place for place in places if not _is_plumbing(place.file)] or places
    owner = owner_of(others[-1].file) if others else None
    file = getattr(sys.modules.get(library or ""), "__file__", None) or ""
    return owner_of(file) if owner == "user" and _is_installed(file) and not _is_plumbing(file) else owner


def calling_place() -> Place | None:
    """The user's innermost frame below Lightning's loops right now, where there is one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = owner_of(frame.f_code.co_filename)
        if owner == "user":
            return Place(frame.f_code.co_filename, frame.f_lineno, written_name(frame.f_code.co_name))
        if owner == "lightning":
            return None
        frame = frame.f_back
    return None


def places_in(reason: str) -> list[Place]:
    r"""The frames that a reason lists, outermost first.

    >>> places_in('User stack trace:\n  File "train.py", line 34, in training_step')
    [Place(file='train.py', line=34, function='training_step')]
    """
    return [Place(m["file"], int(m["line"]), written_name(m["function"])) for m in _FRAME.finditer(reason)]


def resolved(reason: str, frames: Sequence[Place]) -> list[Place]:
    """The place named in the comment behind a guard, of which only the end of the path is known.

    torch before 2.12, and guards on symbolic numbers, have nothing else.

    >>> guard = "0/1: self.n == 2  # self.n += 1  # mine/train.py:34 in training_step"
    >>> resolved(guard, [Place("/home/mine/train.py", 30, "training_step")])
    [Place(file='/home/mine/train.py', line=34, function='training_step')]
    """
    comment = _COMMENT.search(reason)
    if comment is None:
        return []
    loaded = (getattr(module, "__file__", None) or "" for module in list(sys.modules.values()))
    for file in (*(frame.file for frame in frames), *loaded):
        if file.endswith(comment["file"]):
            return [Place(file, int(comment["line"]), written_name(comment["function"]))]
    return []


def written_name(function: str) -> str:
    """The function's name in the source: torch names the part behind a graph break differently.

    >>> written_name("torch_dynamo_resume_in_training_step_at_21")
    'training_step'
    """
    while match := _RESUMED.fullmatch(function):
        function = match[1]
    return function
