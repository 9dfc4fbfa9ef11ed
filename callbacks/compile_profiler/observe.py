"""The door to what ``torch._dynamo`` tells about compiling: listeners, records and counters, turned into events.

Everything here reads private parts of torch (names checked on 2.11 and 2.13). A part that is missing in another
version leaves its figures at zero events, never a wrong number.
"""

from __future__ import annotations

import re
import sysconfig
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo
from torch._dynamo import callback as dynamo_callback
from torch._dynamo import utils as dynamo_utils

from compile_profiler.records import Cause, Compiles, Event, Kind, Owner, Stage

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_GUARD_COMMENT = re.compile(r"#.*?(?P<file>[^\s/]+):(?P<line>\d+) in (?P<function>\S+)")
_SITE = tuple({str(Path(sysconfig.get_path(name))) for name in ("purelib", "platlib", "stdlib", "platstdlib")})
_TORCH, _OWN = str(Path(torch.__file__).parent), str(Path(__file__).parent)

# First match wins. The texts are those of torch's guards and graph-break reasons.
_CAUSES: tuple[tuple[str, Cause, str], ...] = (
    (
        r"size mismatch|stride mismatch|rank mismatch|\.size\(\)|\.shape\[|symbolic shape",
        "shape",
        "A tensor's shape changed. Pad or bucket the batches, drop the ragged last one, or pass dynamic=True.",
    ),
    (
        r"requires_grad mismatch|grad_mode|\.training\b|inference_mode|dispatch key set mismatch",
        "stage",
        "Another grad mode or train/eval flag needs its own graph; one or two of these are normal.",
    ),
    (
        r"\.item\(\)|[Dd]ata.dependent|nonzero|_local_scalar_dense",
        "data_dependent",
        "The code depends on a tensor's value. Use torch.where or a mask, or move .item() out of the step.",
    ),
    (
        r"builtin `print`|torch\.compiler\.disable|logging|side effect|STORE_GLOBAL",
        "side_effect",
        "Printing, metrics and logging cannot be compiled. Move the call out of the compiled code.",
    ),
    (
        r"___check_obj_id|___check_type_id|\bid\(|___check_current_mode| is not ",
        "object_identity",
        "A new object is made on every step. Make it once and keep it on the module.",
    ),
    (
        r"== -?\d|== True|== False|== None|== '",
        "python_scalar",
        "A Python number that changes is part of the graph. Keep it as a tensor (register_buffer).",
    ),
    (
        r"[Uu]nsupported|does not (know|support)|not supported|[Ff]ailed to trace|[Ss]kip",
        "unsupported",
        "torch.compile cannot trace this construct. Move it out of the step, or compile another target.",
    ),
)


class Place(NamedTuple):
    """A line of source code."""

    file: str
    line: int
    function: str


def owner_of(file: str) -> Owner:
    """Whose code a file is.

    >>> owner_of("train.py")
    'user'
    >>> owner_of(torch.__file__)
    'torch'
    """
    parts = Path(file).parts
    if file.startswith((_OWN, _TORCH, "<")):
        return "torch"
    if {"lightning", "pytorch_lightning", "lightning_fabric"} & set(parts) and file.startswith(_SITE):
        return "lightning"
    return "third_party" if file.startswith(_SITE) else "user"


def innermost(places: Iterable[Place]) -> Place | None:
    """The user's innermost frame, or the innermost of all where no frame is the user's."""
    frames = list(places)
    mine = [place for place in frames if owner_of(place.file) == "user"]
    return (mine or frames)[-1] if frames else None


def explain(text: str) -> tuple[Cause, str]:
    """The cause behind a guard or graph-break text, with what to do about it.

    >>> explain("tensor 'x' size mismatch at index 0. expected 4, actual 3")[0]
    'shape'
    """
    for pattern, cause, hint in _CAUSES:
        if re.search(pattern, text):
            return cause, hint
    return "other", ""


def disabled() -> str | None:
    """Why compiling is switched off in this process by environment variable or stance, or ``None``."""
    if getattr(torch._dynamo.config, "disable", False):
        return "torch.compile is disabled by TORCH_COMPILE_DISABLE or torch._dynamo.config.disable"
    stance = getattr(getattr(torch._dynamo.eval_frame, "_stance", None), "stance", "default")
    return "torch.compiler.set_stance('force_eager') is in force" if stance == "force_eager" else None


class Observer:
    """Follows what is compiled between ``start`` and ``stop``.

    torch counts for the whole process; ``skip`` leaves out what was compiled since the last look by somebody else,
    ``poll`` takes what is new as events of one stage. Both cost about a microsecond while nothing compiles.
    """

    def __init__(self) -> None:
        self._compiling_since: float | None = None
        self._began = False
        self._records: list[Any] = []
        self._num_reasons = 0
        self._num_graphs = 0
        self._num_cudagraph_skips = 0
        self._events: dict[tuple[Any, ...], Event] = {}
        self._by_stage: dict[str, dict[str, int]] = {}

    # -- listening -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Register the listeners; again after ``torch._dynamo.reset()``, which drops everybody's."""
        handler = dynamo_callback.callback_handler
        if self._on_start not in handler.start_callbacks:
            handler.register_start_callback(self._on_start)
        if self._on_end not in handler.end_callbacks:
            handler.register_end_callback(self._on_end)

    def stop(self) -> None:
        """Remove the listeners; harmless when they are gone."""
        handler = dynamo_callback.callback_handler
        if self._on_start in handler.start_callbacks:
            handler.remove_start_callback(self._on_start)
        if self._on_end in handler.end_callbacks:
            handler.remove_end_callback(self._on_end)

    def _on_start(self, *_args: Any) -> None:  # torch 2.7 passes nothing, later versions a CallbackArgs
        self._compiling_since = time.perf_counter()
        self._began = True

    def _on_end(self, *_args: Any) -> None:
        self._compiling_since = None

    # -- reading -------------------------------------------------------------------------------------------------

    def skip(self) -> None:
        """Forget what was compiled up to now."""
        self._began = False
        self._records = self._all_records()
        self._num_reasons = len(self._all_reasons())
        self._num_graphs = self._counter("stats", "unique_graphs")
        self._num_cudagraph_skips = self._counter("inductor", "cudagraph_skips")

    def compiling(self) -> bool:
        """Whether anything began to compile since the last look."""
        return self._began

    def poll(self, stage: Stage, *, step: int, epoch: int) -> bool:
        """Take what was compiled since the last look as events of ``stage``; whether there was anything."""
        self.start()
        if not self._began:
            return False
        here: dict[str, Any] = {"stage": stage, "step": step, "epoch": epoch}
        seen = {id(record) for record in self._records}
        for record in self._all_records():
            if id(record) not in seen:
                for event in _events_of(record, here):
                    self._add(event)
        for reason in self._all_reasons()[self._num_reasons :]:
            self._add(_break_event(reason, here))
        counts = self._by_stage.setdefault(stage, {})
        graphs = self._counter("stats", "unique_graphs") - self._num_graphs
        skips = self._counter("inductor", "cudagraph_skips") - self._num_cudagraph_skips
        counts["graph"] = counts.get("graph", 0) + max(0, graphs)
        if skips > 0:
            text = "A CUDA graph was skipped: inputs on the CPU, written in place, or of changing shape."
            self._add(Event(**here, kind="cudagraph_skip", cause="other", detail=text, count=skips))
        self.skip()
        return True

    def compiles(self) -> Compiles:
        """Counts and events so far; ``graph_breaks`` counts places, each event how often it was met."""
        train = self._by_stage.get("train", {})
        return Compiles(
            graphs=train.get("graph", 0),
            recompiles=train.get("recompile", 0),
            graph_breaks=train.get("graph_break", 0),
            eager_frames=train.get("skipped_frame", 0),
            limit_hits=train.get("limit_hit", 0),
            cudagraph_skips=train.get("cudagraph_skip", 0),
            by_stage={stage: dict(counts) for stage, counts in self._by_stage.items()},
            events=tuple(self._events.values()),
        )

    def _add(self, event: Event) -> None:
        key = (event.stage, event.kind, event.file, event.line, event.function, event.cause)
        known = self._events.get(key)
        counts = self._by_stage.setdefault(event.stage, {})
        if event.kind != "graph" and (event.kind != "graph_break" or known is None):
            counts[event.kind] = counts.get(event.kind, 0) + event.count
        if known is not None:
            seconds = None if event.seconds is known.seconds is None else (event.seconds or 0) + (known.seconds or 0)
            event = replace(known, count=known.count + event.count, seconds=seconds)
        self._events[key] = event

    # -- private parts of torch ----------------------------------------------------------------------------------

    @staticmethod
    def _all_records() -> list[Any]:
        """The ring of the last compilations of this process (64 of them in torch 2.13)."""
        read = getattr(dynamo_utils, "get_compilation_metrics", None)
        return list(read()) if read is not None else []

    @staticmethod
    def _all_reasons() -> list[Any]:
        return getattr(dynamo_utils, "graph_break_reasons", [])

    @staticmethod
    def _counter(group: str, name: str) -> int:
        return int(dynamo_utils.counters[group][name])


def _events_of(record: Any, here: dict[str, Any]) -> Iterator[Event]:
    """A compilation record as events: a graph, a recompile, a frame left in eager, a limit hit."""
    if getattr(record, "is_forward", None) is False:  # the backward half of a graph that has its own record
        return
    recompile_reason = getattr(record, "recompile_reason", None) or ""
    fail_type, fail_reason = getattr(record, "fail_type", None), getattr(record, "fail_reason", None) or ""
    seconds = getattr(record, "entire_frame_compile_time_s", None)
    file, function = getattr(record, "co_filename", None), getattr(record, "co_name", None)
    frame = Place(file, getattr(record, "co_firstlineno", None) or 0, function or "") if file else None
    if recompile_reason:
        yield _event("recompile", recompile_reason, _place_in(recompile_reason, frame), here, seconds)
    if fail_type is None:
        if not recompile_reason and getattr(record, "graph_op_count", None):
            yield _event("graph", "", frame, here, seconds)
        return
    kind: Kind = "limit_hit" if "limit" in f"{fail_type} {fail_reason.partition('Hint')[0]}" else "skipped_frame"
    failed_at = getattr(record, "fail_user_frame_filename", None)
    if failed_at:
        frame = Place(failed_at, getattr(record, "fail_user_frame_lineno", None) or 0, function or "")
    yield _event(kind, recompile_reason or fail_reason, _place_in(recompile_reason, frame), here, seconds)


def _break_event(reason: Any, here: dict[str, Any]) -> Event:
    stack = [Place(frame.filename, frame.lineno or 0, frame.name) for frame in reason.user_stack]
    return _event("graph_break", str(reason.reason), innermost(stack), here, None)


def _place_in(text: str, frame: Place | None) -> Place | None:
    """The user's line named in a recompile reason, or else the frame that was compiled."""
    stack = [Place(m["file"], int(m["line"]), m["function"]) for m in _FRAME.finditer(text)]
    place = innermost(stack)
    if place is None and frame is not None:  # before torch 2.12: a comment behind the guard, with a shortened path
        comment = _GUARD_COMMENT.search(text)
        if comment and Path(frame.file).name == comment["file"]:
            return Place(frame.file, int(comment["line"]), comment["function"])
    return place or frame


def _event(kind: Kind, text: str, place: Place | None, here: dict[str, Any], seconds: float | None) -> Event:
    cause, hint = explain(text) if text else (None, "")
    detail = " ".join(text.partition("\nUser stack trace")[0].partition("#")[0].split())[:300]
    file, line, function = place or (None, None, None)
    owner = owner_of(file) if file else None
    return Event(
        **here,
        kind=kind,
        function=function,
        file=file,
        line=line,
        owner=owner,
        cause=cause,
        detail=detail,
        hint=hint,
        seconds=seconds,
    )
