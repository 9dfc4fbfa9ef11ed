"""The door to what ``torch.compile`` tells of itself: listeners, records, counters, logs, settings.

Everything here reads private parts of torch (names checked on 2.11 and 2.13). A part that another version lacks is
``None`` in ``Sources`` and costs its own figures alone.
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch._dynamo
from torch._dynamo import callback as dynamo_callback
from torch._dynamo import utils as dynamo_utils

from compile_profiler.records import Kind


def recompile_limit() -> int | None:
    """Graphs that torch makes of one function before it leaves it in eager; ``None`` where that is not known."""
    config = torch._dynamo.config
    # The second is its name in older versions.
    limit = getattr(config, "recompile_limit", None) or getattr(config, "cache_size_limit", None)
    return int(limit) if limit else None


def counts_parameters() -> bool:
    """Whether records say how many parameters a graph reads."""
    config = torch._dynamo.config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # since torch 2.13 the second is always on, and reading it warns
        return all(getattr(config, name, False) for name in ("log_compilation_metrics", "inline_inbuilt_nn_modules"))


@contextmanager
def tracing_with(settings: Mapping[str, Any]) -> Iterator[None]:
    """Settings of torch's tracer for a moment; ``torch._dynamo.config.patch`` does the same in ten times the time."""
    config = torch._dynamo.config
    before = {name: getattr(config, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def has_setting(name: str) -> bool:
    """Whether torch's tracer has a setting of this name."""
    return hasattr(torch._dynamo.config, name)


def lookup_s(code: CodeType, local_values: Mapping[str, Any], repeats: int = 20) -> float | None:
    """Seconds that torch takes to find which graph of a function applies to a call: to check the graphs' guards.

    torch's own record of it (``guard_latency_us``) is of the first check, with cold caches, and tens of times longer.

    Args:
        code: of the compiled function.
        local_values: its arguments by name.
        repeats: how often to look; the median counts.

    Returns:
        ``None`` where none applies, or this torch does not let its graphs be looked at.
    """
    entries_of = getattr(torch._C._dynamo.eval_frame, "_debug_get_cache_entry_list", None)
    looks_s = []
    with suppress(Exception):
        guards = [entry.guard_manager for entry in entries_of(code)] if entries_of is not None else []
        for _ in range(repeats):
            began_s = time.perf_counter()
            found = any(guard.check(local_values) for guard in guards)
            looks_s.append(time.perf_counter() - began_s)
            if not found:
                return None
    return statistics.median(looks_s) if len(looks_s) == repeats else None


@dataclass(frozen=True)
class Sources:
    """What torch tells while it compiles; a source that this version lacks is ``None``.

    Attributes:
        listeners: wakes whoever registers at the start and the end of each compile, that of backward included.
        records: the last compilations of this process, forward and backward, and attempts that failed.
        break_reasons: why graphs were broken, since the last ``torch._dynamo.reset()``.
        counters: what this process has compiled, by group and name.
    """

    listeners: Any | None
    records: Callable[[], Sequence[Any]] | None
    break_reasons: Callable[[], Sequence[Any]] | None
    counters: Callable[[], Mapping[str, Mapping[str, int]]] | None

    @classmethod
    def of_torch(cls) -> Sources:
        """What the installed torch has."""

        def attribute(name: str) -> Callable[[], Any] | None:
            # Read anew each time: torch puts another list there.
            return partial(getattr, dynamo_utils, name) if hasattr(dynamo_utils, name) else None

        records = getattr(dynamo_utils, "get_compilation_metrics", None)
        if records is not None:  # what it copies on each call, where that can be looked at itself
            records = attribute("_compilation_metrics") or records
        return cls(
            listeners=getattr(dynamo_callback, "callback_handler", None),
            records=records,
            break_reasons=attribute("graph_break_reasons"),
            counters=attribute("counters"),
        )

    @property
    def sees_compiling(self) -> bool:
        """Whether a step in which something is compiled can be told from one in which nothing is."""
        return any(source is not None for source in (self.listeners, self.records, self.counters))

    @property
    def tells_cuda_graphs(self) -> bool:
        """Whether listeners are told which CUDA graph is being recorded (since torch 2.8)."""
        return self.listeners is not None and hasattr(
            getattr(dynamo_callback, "CallbackTrigger", None), "CUDAGRAPH_RECORDING"
        )

    @property
    def uncounted(self) -> frozenset[Kind]:
        """What cannot be counted for want of a source."""
        missing: set[Kind] = set()
        if self.records is None:
            missing |= {"recompile", "skipped_frame", "limit_hit"}
        if self.break_reasons is None:
            missing |= {"graph_break"}
        if self.counters is None:
            missing |= {"cudagraph_skip"}
        if self.records is None and self.counters is None:
            missing |= {"graph"}
        return frozenset(missing)

    def all_records(self) -> Sequence[Any]:
        """The last compilations; none where torch keeps no records."""
        return self.records() if self.records is not None else ()

    def all_break_reasons(self) -> Sequence[Any]:
        """Why graphs were broken; none where torch keeps no list."""
        return self.break_reasons() if self.break_reasons is not None else ()

    def counter(self, group: str, name: str) -> int:
        """A counter of this process; 0 where torch has none."""
        return int(self.counters().get(group, {}).get(name, 0)) if self.counters is not None else 0


class Heard(NamedTuple):
    """What inductor said of a graph: the text, the user's stack at the operator in question, whether it is complex."""

    text: str
    trace: str = ""
    is_complex: bool = False


class BackendLog(logging.Filter):
    """Listens to what inductor logs of graphs that it does not compile as asked; shows and hides nothing.

    As a filter, because the loggers are silent unless ``TORCH_LOGS`` asks for them: they are opened, and what would
    not have been shown is not shown. Nothing passes here but while something is compiled.
    """

    _LEVELS = (
        ("torch._inductor.cudagraph_utils.__cudagraphs", logging.WARNING),  # skipped CUDA graphs
        ("torch._inductor.cudagraph_utils.__perf_hints", logging.WARNING),  # the same in torch 2.7
        ("torch._inductor.graph.__perf_hints", logging.INFO),  # operators left to ATen
        ("torch._inductor.utils", logging.WARNING),  # a GPU too small for max-autotune
    )

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Heard] = []
        self._shown_from: dict[str, int] = {}
        self._undo = ExitStack()
        self._is_open = False

    def open(self) -> None:
        """Listen from here on; may be called again."""
        if self._is_open:
            return
        self._is_open = True
        for name, level in self._LEVELS:
            logger = logging.getLogger(name)
            before, self._shown_from[name] = logger.level, logger.getEffectiveLevel()
            if self._shown_from[name] > level:
                logger.setLevel(level)
                self._undo.callback(logger.setLevel, before)
            logger.addFilter(self)
            self._undo.callback(logger.removeFilter, self)

    def close(self) -> None:
        """Leave the loggers as they were; may be called twice."""
        self._undo.close()
        self._is_open = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Take the message down; whether it would have been shown anyway."""
        with suppress(Exception):  # nothing that is wrong here may stop a compile
            self.heard.append(Heard(record.getMessage(), *_operator_at_hand()))
        return record.levelno >= self._shown_from.get(record.name, 0)


def _operator_at_hand() -> tuple[str, bool]:
    """The user's stack at the operator that inductor is working on, and whether its result is complex."""
    virtualized = sys.modules.get("torch._inductor.virtualized")
    node = getattr(getattr(getattr(virtualized, "V", None), "graph", None), "current_node", None)
    meta = getattr(node, "meta", {})
    value = meta.get("val")
    return meta.get("stack_trace") or "", isinstance(value, torch.Tensor) and value.is_complex()


def shares_cache(backend: Any) -> bool:
    """Whether what one process compiles is read from disk by another on its machine."""
    if backend != "inductor":
        return False
    from torch._inductor import config  # imported late: loads the compiler

    return bool(getattr(config, "fx_graph_cache", False)) and not getattr(config, "force_disable_caches", False)
