"""Events added up: by stage and kind, and by place and cause."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from compile_profiler.records import Compiles, Event, Kind, Stage


class Tally:
    """Counts of what was compiled; the same thing at the same place for the same cause is one event.

    Args:
        uncounted: kinds of which nobody tells, so that their number is not known.

    >>> tally = Tally()
    >>> for step in (3, 4):
    ...     tally.add(Event(step=step, epoch=0, stage="train", kind="recompile", function="training_step"))
    >>> [(event.step, event.count) for event in tally.compiles().events], tally.compiles().recompiles
    ([(3, 2)], 2)
    """

    def __init__(self, uncounted: Collection[Kind] = ()) -> None:
        self._uncounted = uncounted
        self._events: dict[tuple[Any, ...], Event] = {}
        self._break_lines: set[tuple[Stage, tuple[Any, ...]]] = set()
        self._by_stage: dict[str, dict[str, int]] = {}

    def count(self, stage: Stage, kind: Kind, num: int) -> None:
        """So many more of a kind."""
        if num:
            counts = self._by_stage.setdefault(stage, {})
            counts[kind] = counts.get(kind, 0) + num

    def add(self, event: Event) -> None:
        """One more event. Graphs and breaks are counted apart: not every graph has a record, breaks go by the line."""
        if event.kind not in ("graph", "graph_break"):
            self.count(event.stage, event.kind, event.count)
        key = (event.stage, event.kind, event.file, event.line, event.function, event.cause)
        known = self._events.get(key)
        if known is not None:
            seconds = None if event.seconds is known.seconds is None else (event.seconds or 0) + (known.seconds or 0)
            event = replace(known, count=known.count + event.count, seconds=seconds)
        self._events[key] = event

    def add_break(self, event: Event, line: tuple[Any, ...]) -> None:
        """A graph break at a line of code, which counts once, wherever it is called from."""
        if (event.stage, line) not in self._break_lines:
            self._break_lines.add((event.stage, line))
            self.count(event.stage, "graph_break", 1)
        self.add(event)

    def compiles(self) -> Compiles:
        """Counts and events so far."""
        return Compiles(
            graphs=self._number("graph"),
            recompiles=self._number("recompile"),
            graph_breaks=self._number("graph_break"),
            eager_frames=self._number("skipped_frame"),
            limit_hits=self._number("limit_hit"),
            cudagraph_skips=self._number("cudagraph_skip"),
            by_stage={stage: dict(counts) for stage, counts in self._by_stage.items()},
            events=tuple(self._events.values()),
        )

    def _number(self, kind: Kind) -> int | None:
        """How often in training; ``None`` where that is not known."""
        return None if kind in self._uncounted else self._by_stage.get("train", {}).get(kind, 0)
