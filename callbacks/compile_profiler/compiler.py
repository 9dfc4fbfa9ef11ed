"""The door to what ``torch.compile`` tells of itself: listeners, records, counters, logs, settings.

Everything here reads private parts of torch (names checked on 2.11 and 2.13). A part that another version lacks is
``None`` in ``Sources`` and costs its own figures alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch._dynamo import callback as dynamo_callback
from torch._dynamo import utils as dynamo_utils
from torch._inductor.runtime import cache_dir_utils

from compile_profiler.records import Kind

_STANCES = {
    "force_eager": "leaves everything in eager",
    "eager_on_recompile": "compiles nothing new",
    "fail_on_recompile": "forbids to compile anything new",
}


def disabled() -> str | None:
    """Why nothing can be compiled in this process: an environment variable, a setting or a stance; else ``None``."""
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "the environment variable TORCHDYNAMO_DISABLE=1 switches torch.compile off"
    if getattr(torch._dynamo.config, "disable", False):
        if os.environ.get("TORCH_COMPILE_DISABLE") == "1":  # which torch reads when it is imported
            return "the environment variable TORCH_COMPILE_DISABLE=1 switches torch.compile off"
        return "torch._dynamo.config.disable switches torch.compile off"
    stance = getattr(getattr(torch._dynamo.eval_frame, "_stance", None), "stance", None)
    return f"torch.compiler.set_stance('{stance}') {_STANCES[stance]}" if stance in _STANCES else None


def cache_folder() -> Path:
    """Where inductor keeps what it compiled; it need not be there yet."""
    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or cache_dir_utils.default_cache_dir())


def recompile_limit() -> int | None:
    """Graphs that torch makes of one function before it leaves it in eager; ``None`` where that is not known."""
    config = torch._dynamo.config
    # The second is its name in older versions.
    limit = getattr(config, "recompile_limit", None) or getattr(config, "cache_size_limit", None)
    return int(limit) if limit else None


def counts_parameters() -> bool:
    """Whether records say how many parameters a graph reads."""
    config = torch._dynamo.config
    return all(getattr(config, name, False) for name in ("log_compilation_metrics", "inline_inbuilt_nn_modules"))


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
            return (lambda: getattr(dynamo_utils, name)) if hasattr(dynamo_utils, name) else None

        return cls(
            listeners=getattr(dynamo_callback, "callback_handler", None),
            records=getattr(dynamo_utils, "get_compilation_metrics", None),
            break_reasons=attribute("graph_break_reasons"),
            counters=attribute("counters"),
        )

    @property
    def sees_compiling(self) -> bool:
        """Whether a step in which something is compiled can be told from one in which nothing is."""
        return any(source is not None for source in (self.listeners, self.records, self.counters))

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
