"""Follow what is compiled from start to stop, and tell it in events."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from compile_profiler.compiler import BackendLog, Sources, counts_parameters, recompile_limit
from compile_profiler.events import Seen, below, function_number, function_of, has_graph, of_break, of_record
from compile_profiler.places import Place, calling_place
from compile_profiler.records import Compiles, Event, Stage
from compile_profiler.shortfalls import of_heard, untold_skip
from compile_profiler.tally import Tally

WARN_BEFORE_LIMIT = 2
"""So many graphs before torch's limit a function that keeps recompiling is told: late enough for a few that are healthy
to have settled, early enough to act."""


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


@dataclass(slots=True)
class Subject:
    """What the compiler has made of one target.

    Attributes:
        tally: counts and events.
        own_functions: file and name of the functions that were to be compiled, as distinct from what they call.
        own_skip: where one of them was left in eager as a whole.
        own_graph: whether there is a graph of one of them, or one with parameters in it.
    """

    tally: Tally
    own_functions: frozenset[tuple[str, str]] = frozenset()
    own_skip: Event | None = None
    own_graph: bool = False


class Observer:
    """Follows what is compiled between ``start`` and ``stop``.

    torch counts for the whole process; ``skip`` leaves out what was compiled since the last look by somebody else,
    ``poll`` takes what is new as events of one stage. Both are two calls or so while nothing compiles.

    What is counted, by stage:

    * ``graph``: graphs handed to the backend, those of recompiles included.
    * ``recompile``: times torch set out to compile a function again because a guard failed, the last one included, at
      which it met its limit and gave up: the "Recompiling function" lines of ``TORCH_LOGS=recompiles``.
    * ``graph_break``: distinct lines of code that end a graph, wherever they are called from: the distinct places in
      "Graph break in user code at ..." of ``TORCH_LOGS=graph_breaks``. An event counts how often the line was traced.
    * ``skipped_frame``: functions left in eager as a whole. ``TORCH_LOGS`` calls what stopped them a graph break too;
      torch's own break counter does not have them.
    * ``limit_hit``: functions that are in eager from now on because they were recompiled too often.
    * ``cudagraph_skip``: graphs that run without the CUDA graph asked for, forward and backward each.
    * ``backend_fallback``: operators that inductor runs as eager does.

    ``news`` is what the last look that found anything has found; ``subject`` is whose compiling it is taken for.

    Args:
        sources: what torch tells; a source left out shows what its lack costs.
        inductor: whether inductor is the backend, so that it is worth listening to.
        cuda_graphs: whether CUDA graphs were asked for.
    """

    def __init__(self, sources: Sources | None = None, *, inductor: bool = False, cuda_graphs: bool = False) -> None:
        self._sources = Sources.of_torch() if sources is None else sources
        self.subject = self.new_subject()
        # A function that meets the recompile limit, or anything after a reset, wakes no listener but leaves a record.
        self._misses_some = self._sources.listeners is None or self._sources.records is None
        self._log = BackendLog()
        self._inductor = inductor
        self._recorded: set[str] | None = set() if cuda_graphs and self._sources.tells_cuda_graphs else None
        self.news = News()
        self._told_places: set[tuple[Any, ...]] = set()
        self._began_s: float | None = None
        self._compile_s = 0.0
        self._began = False
        self._broken_off = False
        self._caller: Place | None = None
        self._trouble: Exception | None = None  # of a listener, for the next look to raise
        self._last_record: Any = None
        self._last_reason: Any = None
        self._records: list[Seen] = []
        self._reasons: list[Seen] = []
        self._stacks: dict[str, list[Place]] = {}
        self._num_graphs = 0
        self._num_cudagraph_skips = 0

    def new_subject(self, own_functions: frozenset[tuple[str, str]] = frozenset()) -> Subject:
        """Another target, of which nothing has been compiled yet; it is followed once it is set as ``subject``."""
        return Subject(Tally(self._sources.uncounted), own_functions)

    @property
    def sees_compiling(self) -> bool:
        """Whether a step in which something was compiled can be told from one in which nothing was."""
        return self._sources.sees_compiling

    # -- listening -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Register the listeners."""
        if self._inductor:
            self._log.open()
        self._listen()

    def _listen(self) -> None:
        handler = self._sources.listeners
        if handler is None:
            return
        if self._on_start not in handler.start_callbacks:
            handler.register_start_callback(self._on_start)
        if self._on_end not in handler.end_callbacks:
            handler.register_end_callback(self._on_end)

    def stop(self) -> None:
        """Remove the listeners; harmless when they are gone."""
        self._log.close()
        handler = self._sources.listeners
        if handler is None:
            return
        if self._on_start in handler.start_callbacks:
            handler.remove_start_callback(self._on_start)
        if self._on_end in handler.end_callbacks:
            handler.remove_end_callback(self._on_end)

    def _on_start(self, *args: Any) -> None:  # torch 2.7 passes nothing, later versions a CallbackArgs
        self._began = True
        try:
            self._collect()
            self._caller = calling_place()
            if self._recorded is not None and args and args[0].callback_trigger.name == "CUDAGRAPH_RECORDING":
                self._recorded.add(str(args[0].compile_id))
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
        records, reasons = self._sources.all_records(), self._sources.all_break_reasons()
        if records and records[-1] is not self._last_record:
            self._records += [Seen(record, self._caller) for record in _after(self._last_record, records)]
            self._last_record = records[-1]
        if reasons and reasons[-1] is not self._last_reason:
            self._reasons += [Seen(reason, self._caller) for reason in _after(self._last_reason, reasons)]
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
        self._log.heard.clear()
        self._compile_s = 0.0
        self._num_graphs = self._sources.counter("stats", "unique_graphs")
        self._num_cudagraph_skips = self._sources.counter("inductor", "cudagraph_skips")

    def failed(self, error: BaseException) -> bool:
        """Whether ``error`` comes from compiling rather than from what was compiled.

        The compiler's own errors say so by their class; one in the lazily compiled backward is a bare RuntimeError.
        """
        return self._broken_off or type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))

    def compiling(self) -> bool:
        """Whether anything was compiled, or given up, since the last look.

        Raises:
            Exception: what a listener has met, in the midst of a compile that it could not stop.
        """
        handler = self._sources.listeners
        if handler is not None and self._on_start not in handler.start_callbacks:
            self._listen()  # again: ``torch._dynamo.reset()`` drops everybody's listeners
        if self._trouble is not None:
            raise self._trouble
        records = self._sources.records
        if records is not None and (known := records()) and known[-1] is not self._last_record:
            self._collect()
        if self._began or self._records or self._log.heard:
            return True
        return self._misses_some and self._sources.counter("stats", "unique_graphs") != self._num_graphs

    def poll(self, stage: Stage, *, step: int, epoch: int, shapes: Callable[[], str | None] | None = None) -> bool:
        """Take what was compiled since the last look as events of ``stage``; whether there was anything.

        Args:
            stage: of the step at hand.
            step: its x-axis number.
            epoch: its epoch.
            shapes: tells those of its batch; called only if something was compiled.
        """
        if not self.compiling():
            return False
        self._collect()
        here: dict[str, Any] = {"stage": stage, "step": step, "epoch": epoch, "shapes": shapes() if shapes else None}
        num_graphs = 0
        found: list[Event] = []
        near_limit: list[tuple[Event, int, int]] = []
        for seen in self._records:
            self._remember(seen)
            num_graphs += has_graph(seen.what)
            events = list(of_record(seen.what, self._stacks.get(function_number(seen.what), []), here))
            for event in events:
                self.subject.tally.add(event)
            near_limit += self._near_limit(seen.what, events)
            if stage == "train":
                self._follow_own(seen.what, events)
            found += events
        self.news = News(tuple(found), tuple(near_limit), self._compile_s)
        for seen in self._reasons:
            self.subject.tally.add_break(*of_break(seen, here))
        # A counter that has been cleared in between counts too little, a ring that is too small records too little.
        graphs = max(num_graphs, _risen(self._sources.counter("stats", "unique_graphs"), self._num_graphs))
        self.subject.tally.count(stage, "graph", graphs)
        self._add_shortfalls(here)
        self._forget()
        return True

    def _add_shortfalls(self, here: dict[str, Any]) -> None:
        """What inductor said, and CUDA graphs that it skipped without a word."""
        compiled = [self._stacks.get(function_number(seen.what), []) for seen in self._records]
        stack = next((stack for stack in compiled if stack), [])
        events = [found for heard in self._log.heard if (found := of_heard(heard, stack, here)) is not None]
        told = sum(event.kind == "cudagraph_skip" for event in events)
        counted = _risen(self._sources.counter("inductor", "cudagraph_skips"), self._num_cudagraph_skips)
        if counted > told:
            events.append(untold_skip(counted - told, stack, here))
        for event in events:
            self.subject.tally.add(event)

    def forget_warnings(self) -> None:
        """Tell again what is close to torch's limit: something has been changed that should have mended it."""
        self._told_places.clear()

    def compiles(self) -> Compiles:
        """Counts and events so far."""
        recorded = None if self._recorded is None else len(self._recorded)
        return replace(self.subject.tally.compiles(), cudagraphed=recorded)

    def _remember(self, seen: Seen) -> None:
        """Where a function is and who called it: the record of a later limit hit has only the function's number."""
        function = function_of(seen.what)
        if function is not None:
            self._stacks[function_number(seen.what)] = below(seen.caller, [function])

    # -- what follows from a record ------------------------------------------------------------------------------

    @property
    def left_out(self) -> Event | None:
        """Where the target's own function was left in eager as a whole, if what was compiled is helpers alone.

        Helpers are functions that it calls and whose graphs hold no parameter of the module, such as a loss; a
        compiled part of the network may well be worth having. ``None`` also where torch's records do not tell.
        """
        return None if self.subject.own_graph else self.subject.own_skip

    def _follow_own(self, record: Any, events: Sequence[Event]) -> None:
        """Note whether this record says that the target's own function was compiled, or was left out."""
        subject, function = self.subject, function_of(record)
        own = function is not None and (function.file, function.function) in subject.own_functions
        if own and subject.own_skip is None:
            subject.own_skip = next((event for event in events if event.kind == "skipped_frame"), None)
        # The number of parameters is None where there are none, and where torch does not count them.
        with_parameters = not counts_parameters() or bool(getattr(record, "param_count", 1))
        subject.own_graph |= has_graph(record) and (own or with_parameters)

    def _near_limit(self, record: Any, events: Sequence[Event]) -> Iterator[tuple[Event, int, int]]:
        """The recompile in ``events`` if it brings its function close to the limit, once for each place."""
        before, limit = getattr(record, "cache_size", None), recompile_limit()
        if before is None or limit is None or getattr(record, "fail_type", None) is not None:
            return
        for event in events:
            place = (event.file, event.line, event.function)
            if event.kind == "recompile" and before + 1 + WARN_BEFORE_LIMIT >= limit and place not in self._told_places:
                self._told_places.add(place)
                yield event, before + 1, limit


def _after(last: Any, items: Sequence[Any]) -> Sequence[Any]:
    """The items behind ``last``; all of them if it is gone."""
    items = list(items)
    for position in range(len(items) - 1, -1, -1):
        if items[position] is last:
            return items[position + 1 :]
    return items


def _risen(now: int, before: int) -> int:
    """By how much a counter rose that somebody may have cleared."""
    return now - before if now >= before else now
