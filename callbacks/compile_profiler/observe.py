"""The door to what ``torch._dynamo`` tells about compiling: listeners, records and counters, turned into events.

Everything here reads private parts of torch (names checked on 2.11 and 2.13). A part that another version lacks costs
its own figures alone: without records, no recompiles and no skipped functions are told; graphs are still counted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch._dynamo
from torch._dynamo import callback as dynamo_callback
from torch._dynamo import utils as dynamo_utils

from compile_profiler.causes import Explanation, detail_of, explain_break, explain_recompile, library_in
from compile_profiler.places import Place, calling_place, innermost, places_in, resolved, to_blame, written_name
from compile_profiler.records import Compiles, Event, Kind, Stage

MAX_DETAIL = 300
WARN_BEFORE_LIMIT = 2
"""So many graphs before torch's limit a function that keeps recompiling is told: late enough for a few that are healthy
to have settled, early enough to act."""


def shares_cache(backend: Any) -> bool:
    """Whether what one process compiles is read from disk by another on its machine."""
    if backend != "inductor":
        return False
    from torch._inductor import config  # imported late: loads the compiler

    return bool(getattr(config, "fx_graph_cache", False)) and not getattr(config, "force_disable_caches", False)


def _recompile_limit() -> int | None:
    """Graphs that torch makes of one function before it leaves it in eager; ``None`` where that is not known."""
    config = torch._dynamo.config
    # The second is its name in older versions.
    limit = getattr(config, "recompile_limit", None) or getattr(config, "cache_size_limit", None)
    return int(limit) if limit else None


class _Seen(NamedTuple):
    """A compilation record or a graph-break reason of torch, with the user's frame that had led to it."""

    what: Any
    caller: Place | None


class News(NamedTuple):
    """What one look has found.

    Attributes:
        events: what the compiler did, in order.
        near_limit: functions that are close to torch's recompile limit for the first time: their last recompile, the
            graphs that they have, the limit.
        compile_s: wall seconds of compiling.
    """

    events: tuple[Event, ...] = ()
    near_limit: tuple[tuple[Event, int, int], ...] = ()
    compile_s: float = 0.0


class Observer:
    """Follows what is compiled between ``start`` and ``stop``.

    torch counts for the whole process; ``skip`` leaves out what was compiled since the last look by somebody else,
    ``poll`` takes what is new as events of one stage. Both cost about a microsecond while nothing compiles.

    What is counted, by stage:

    * ``graph``: graphs handed to the backend, those of recompiles included.
    * ``recompile``: times torch set out to compile a function again because a guard failed, the last one included, at
      which it met its limit and gave up: the "Recompiling function" lines of ``TORCH_LOGS=recompiles``.
    * ``graph_break``: distinct lines of code that end a graph, wherever they are called from: the distinct places in
      "Graph break in user code at ..." of ``TORCH_LOGS=graph_breaks``. An event counts how often the line was traced.
    * ``skipped_frame``: functions left in eager as a whole. ``TORCH_LOGS`` calls what stopped them a graph break too;
      torch's own break counter does not have them.
    * ``limit_hit``: functions that are in eager from now on because they were recompiled too often.
    * ``cudagraph_skip``: graphs that run without the CUDA graph asked for.

    ``news`` is what the last look that found anything has found. ``own_functions`` are file and name of the functions
    that were to be compiled, as distinct from what they call.
    """

    def __init__(self) -> None:
        self.news = News()
        self.own_functions: frozenset[tuple[str, str]] = frozenset()
        self._own_skip: Event | None = None
        self._own_graph = False  # of one of those functions, or with parameters in it
        self._told_places: set[tuple[Any, ...]] = set()
        self._began_s: float | None = None
        self._compile_s = 0.0
        self._began = False
        self._broken_off = False
        self._caller: Place | None = None
        self._trouble: Exception | None = None  # of a listener, for the next look to raise
        self._last_record: Any = None
        self._last_reason: Any = None
        self._records: list[_Seen] = []
        self._reasons: list[_Seen] = []
        self._stacks: dict[str, list[Place]] = {}
        self._num_graphs = 0
        self._num_cudagraph_skips = 0
        self._events: dict[tuple[Any, ...], Event] = {}
        self._break_places: set[tuple[Any, ...]] = set()
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
        self._began = True
        try:
            self._collect()
            self._caller = calling_place()
        except Exception as error:  # here it would fail a compile that may be somebody else's
            self._trouble = error
        self._began_s = time.perf_counter()
        self._broken_off = False

    def _on_end(self, *_args: Any) -> None:
        # torch calls this from a ``finally``: an error on its way out is one of compiling.
        self._broken_off = sys.exc_info()[1] is not None
        if self._began_s is not None:
            self._compile_s += time.perf_counter() - self._began_s
            self._began_s = None
        try:
            self._collect()
        except Exception as error:
            self._trouble = error

    def _collect(self) -> None:
        """Take what torch has noted since the last time.

        At every compile, not only at a look: the ring of records holds 64, and ``torch._dynamo.reset()`` empties the
        list of reasons. A record is written after the end listener has run, and so is met at the next start.
        """
        records, reasons = self._all_records(), self._all_reasons()
        if records and records[-1] is not self._last_record:
            self._records += [_Seen(record, self._caller) for record in _after(self._last_record, records)]
            self._last_record = records[-1]
        if reasons and reasons[-1] is not self._last_reason:
            self._reasons += [_Seen(reason, self._caller) for reason in _after(self._last_reason, reasons)]
            self._last_reason = reasons[-1]

    # -- reading -------------------------------------------------------------------------------------------------

    def skip(self) -> None:
        """Forget what was compiled up to now."""
        self._collect()
        self._forget()

    def _forget(self) -> None:
        self._began = False
        self._records.clear()
        self._reasons.clear()
        self._compile_s = 0.0
        self._num_graphs = self._counter("stats", "unique_graphs")
        self._num_cudagraph_skips = self._counter("inductor", "cudagraph_skips")

    def failed(self, error: BaseException) -> bool:
        """Whether ``error`` comes from compiling rather than from what was compiled.

        The compiler's own errors say so by their class; one in the lazily compiled backward is a bare RuntimeError.
        """
        return self._broken_off or type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))

    def compiling(self) -> bool:
        """Whether anything was compiled, or given up, since the last look."""
        self._collect()
        return self._began or bool(self._records)

    def poll(self, stage: Stage, *, step: int, epoch: int) -> bool:
        """Take what was compiled since the last look as events of ``stage``; whether there was anything."""
        self.start()
        if self._trouble is not None:
            raise self._trouble
        # A function that meets the recompile limit, or anything after a reset, wakes no listener but leaves a record.
        if not self.compiling():
            return False
        here: dict[str, Any] = {"stage": stage, "step": step, "epoch": epoch}
        num_graphs = 0
        found: list[Event] = []
        near_limit: list[tuple[Event, int, int]] = []
        for seen in self._records:
            self._remember(seen)
            num_graphs += _has_graph(seen.what)
            events = list(self._events_of(seen.what, here))
            for event in events:
                self._add(event)
            near_limit += self._near_limit(seen.what, events)
            if stage == "train":
                self._follow_own(seen.what, events)
            found += events
        self.news = News(tuple(found), tuple(near_limit), self._compile_s)
        for seen in self._reasons:
            self._add_break(seen, here)
        # A counter that has been cleared in between counts too little, a ring that is too small records too little.
        graphs = max(num_graphs, _risen(self._counter("stats", "unique_graphs"), self._num_graphs))
        self._count(stage, "graph", graphs)
        skips = _risen(self._counter("inductor", "cudagraph_skips"), self._num_cudagraph_skips)
        if skips:
            text = "A CUDA graph was skipped: inputs on the CPU, written in place, or of changing shape."
            self._add(Event(**here, kind="cudagraph_skip", cause="other", detail=text, count=skips))
        self._forget()
        return True

    @property
    def left_out(self) -> Event | None:
        """Where the target's own function was left in eager as a whole, if what was compiled is helpers alone.

        Helpers are functions that it calls and whose graphs hold no parameter of the module, such as a loss; a
        compiled part of the network may well be worth having. ``None`` also where torch's records do not tell.
        """
        return None if self._own_graph else self._own_skip

    def _follow_own(self, record: Any, events: Sequence[Event]) -> None:
        """Note whether this record says that the target's own function was compiled, or was left out."""
        name = written_name(getattr(record, "co_name", None) or "")
        own = (getattr(record, "co_filename", None), name) in self.own_functions
        if own and self._own_skip is None:
            self._own_skip = next((event for event in events if event.kind == "skipped_frame"), None)
        self._own_graph |= _has_graph(record) and (own or _may_hold_parameters(record))

    def _near_limit(self, record: Any, events: Sequence[Event]) -> Iterator[tuple[Event, int, int]]:
        """The recompile in ``events`` if it brings its function close to the limit, once for each place."""
        before, limit = getattr(record, "cache_size", None), _recompile_limit()
        if before is None or limit is None or getattr(record, "fail_type", None) is not None:
            return
        for event in events:
            place = (event.file, event.line, event.function)
            if event.kind == "recompile" and before + 1 + WARN_BEFORE_LIMIT >= limit and place not in self._told_places:
                self._told_places.add(place)
                yield event, before + 1, limit

    def compiles(self) -> Compiles:
        """Counts and events so far."""
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

    def _count(self, stage: Stage, kind: Kind, num: int) -> None:
        if num:
            counts = self._by_stage.setdefault(stage, {})
            counts[kind] = counts.get(kind, 0) + num

    def _add(self, event: Event) -> None:
        if event.kind not in ("graph", "graph_break"):  # those two are not counted by event
            self._count(event.stage, event.kind, event.count)
        key = (event.stage, event.kind, event.file, event.line, event.function, event.cause)
        known = self._events.get(key)
        if known is not None:
            seconds = None if event.seconds is known.seconds is None else (event.seconds or 0) + (known.seconds or 0)
            event = replace(known, count=known.count + event.count, seconds=seconds)
        self._events[key] = event

    def _add_break(self, seen: _Seen, here: dict[str, Any]) -> None:
        reason = str(seen.what.reason)
        stack = [Place(frame.filename, frame.lineno or 0, written_name(frame.name)) for frame in seen.what.user_stack]
        place = (here["stage"], *stack[-1][:2]) if stack else (here["stage"], reason)
        if place not in self._break_places:
            self._break_places.add(place)
            self._count(here["stage"], "graph_break", 1)
        self._add(_event("graph_break", reason, explain_break(reason), _below(seen.caller, stack), here, None))

    def _remember(self, seen: _Seen) -> None:
        """Where a function is and who called it: the record of a later limit hit has only the function's number."""
        file = getattr(seen.what, "co_filename", None)
        if file:
            line, function = getattr(seen.what, "co_firstlineno", None), getattr(seen.what, "co_name", None)
            frame = Place(file, line or 0, written_name(function or ""))
            self._stacks[_function_number(seen.what)] = _below(seen.caller, [frame])

    def _events_of(self, record: Any, here: dict[str, Any]) -> Iterator[Event]:
        """A compilation record as events: a graph, a recompile, a function left in eager, a limit hit."""
        if not _is_of_frame(record):
            return
        guard, failure = getattr(record, "recompile_reason", None) or "", getattr(record, "fail_reason", None) or ""
        fail_type = getattr(record, "fail_type", None)
        seconds = getattr(record, "entire_frame_compile_time_s", None)
        stack = self._stacks.get(_function_number(record), [])
        at_guard = [*stack, *(places_in(guard) or resolved(guard, stack[-1:]))]
        if guard:
            yield _event("recompile", guard, explain_recompile(guard), at_guard, here, seconds)
        elif _has_graph(record):
            yield _event("graph", "", None, stack, here, seconds)
        if fail_type is None or fail_type == "SkipFrame":  # compiled, or nothing in it to compile
            return
        if "recompile limit" in failure or "RecompileLimit" in fail_type:
            cause, hint = explain_recompile(guard)
            explained = Explanation(cause, f"From now on this function runs in eager. {hint}".strip())
            yield _event("limit_hit", guard or failure, explained, at_guard, here, None)
            return
        file = getattr(record, "fail_user_frame_filename", None)
        if file:
            line = getattr(record, "fail_user_frame_lineno", None) or 0
            stack = [*stack, Place(file, line, stack[-1].function if stack else "")]
        yield _event("skipped_frame", failure, explain_break(failure), stack, here, None if guard else seconds)

    # -- private parts of torch ----------------------------------------------------------------------------------

    @staticmethod
    def _all_records() -> list[Any]:
        """The last compilations of this process."""
        read = getattr(dynamo_utils, "get_compilation_metrics", None)
        return list(read()) if read is not None else []

    @staticmethod
    def _all_reasons() -> Sequence[Any]:
        return getattr(dynamo_utils, "graph_break_reasons", [])

    @staticmethod
    def _counter(group: str, name: str) -> int:
        return int(getattr(dynamo_utils, "counters", {}).get(group, {}).get(name, 0))


def _after(last: Any, items: Sequence[Any]) -> Sequence[Any]:
    """The items behind ``last``; all of them if it is gone."""
    for position in range(len(items) - 1, -1, -1):
        if items[position] is last:
            return items[position + 1 :]
    return items


def _risen(now: int, before: int) -> int:
    """By how much a counter rose that somebody may have cleared."""
    return now - before if now >= before else now


def _is_of_frame(record: Any) -> bool:
    """Not the backward half of a graph, nor what a backend does at run time: those have records of their own."""
    return getattr(record, "is_forward", None) is not False and not getattr(record, "is_runtime", False)


def _has_graph(record: Any) -> bool:
    compiled = _is_of_frame(record) and getattr(record, "fail_type", None) is None
    return compiled and bool(getattr(record, "graph_op_count", None))


def _may_hold_parameters(record: Any) -> bool:
    """Whether a graph reads parameters; yes where torch does not count them."""
    config = torch._dynamo.config
    counted = all(getattr(config, name, False) for name in ("log_compilation_metrics", "inline_inbuilt_nn_modules"))
    return not counted or bool(getattr(record, "param_count", 1))  # the field is None where there are none


def _function_number(record: Any) -> str:
    """The function's part of a compile id such as ``3/1``."""
    return str(getattr(record, "compile_id", None)).rpartition("/")[0]


def _below(caller: Place | None, stack: list[Place]) -> list[Place]:
    """A stack with the user's frame that led to it, for torch sees only what was called from there."""
    return stack if caller is None else [caller, *stack]


def _event(
    kind: Kind,
    text: str,
    explained: Explanation | None,
    stack: Sequence[Place],
    here: dict[str, Any],
    seconds: float | None,
) -> Event:
    place = innermost(stack)
    return Event(
        **here,
        kind=kind,
        function=place.function if place else None,
        file=place.file if place else None,
        line=place.line if place else None,
        owner=to_blame(stack, library_in(text)),
        cause=explained.cause if explained else None,
        detail=detail_of(text)[:MAX_DETAIL],
        hint=explained.hint if explained else "",
        seconds=seconds,
    )
