"""One thing that torch noted, a compilation record or a graph-break reason, as events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from compile_profiler.causes import UNTRACEABLE, Explanation, detail_of, explain_break, explain_recompile, library_in
from compile_profiler.places import Place, innermost, places_in, resolved, to_blame, written_name
from compile_profiler.records import Event, Kind

MAX_DETAIL = 300
_IN_A_LIBRARY = (
    "This happens in a library that is called here. Move the call out of the step, or mark the function that makes it "
    "with torch.compiler.disable."
)


class Seen(NamedTuple):
    """A compilation record or a graph-break reason of torch, with the user's frame that had led to it."""

    what: Any
    caller: Place | None


def of_record(record: Any, stack: Sequence[Place], here: dict[str, Any]) -> Iterator[Event]:
    """A compilation record as events: a graph, a recompile, a function left in eager, a limit hit.

    Args:
        record: a compilation record of torch.
        stack: where its function is, below who called it.
        here: stage, step, epoch of the events.
    """
    if not is_of_frame(record):
        return
    guard, failure = getattr(record, "recompile_reason", None) or "", getattr(record, "fail_reason", None) or ""
    fail_type = getattr(record, "fail_type", None)
    seconds = getattr(record, "entire_frame_compile_time_s", None)
    at_guard = [*stack, *(places_in(guard) or resolved(guard, stack[-1:]))]
    if guard:
        yield event("recompile", guard, explain_recompile(guard), at_guard, here, seconds)
    elif has_graph(record):
        yield event("graph", "", None, stack, here, seconds)
    if fail_type is None or fail_type == "SkipFrame":  # compiled, or nothing in it to compile
        return
    if "recompile limit" in failure or "RecompileLimit" in fail_type:
        cause, hint = explain_recompile(guard)
        explained = Explanation(cause, f"From now on this function runs in eager. {hint}".strip())
        yield event("limit_hit", guard or failure, explained, at_guard, here, None)
        return
    file = getattr(record, "fail_user_frame_filename", None)
    if file:
        line = getattr(record, "fail_user_frame_lineno", None) or 0
        stack = [*stack, Place(file, line, stack[-1].function if stack else "")]
    yield event("skipped_frame", failure, explain_break(failure), stack, here, None if guard else seconds)


def of_break(seen: Seen, here: dict[str, Any]) -> tuple[Event, tuple[Any, ...]]:
    """A graph-break reason as an event, with the line that ends the graph, in whoever's code."""
    reason = str(seen.what.reason)
    stack = [Place(frame.filename, frame.lineno or 0, written_name(frame.name)) for frame in seen.what.user_stack]
    found = event("graph_break", reason, explain_break(reason), below(seen.caller, stack), here, None)
    return found, stack[-1][:2] if stack else (reason,)


def event(
    kind: Kind,
    text: str,
    explained: Explanation | None,
    stack: Sequence[Place],
    here: dict[str, Any],
    seconds: float | None,
    count: int = 1,
) -> Event:
    """An event whose place is the user's innermost frame of ``stack``, and whose detail is the gist of ``text``."""
    place, owner = innermost(stack), to_blame(stack, library_in(text))
    hint = explained.hint if explained else ""
    if owner == "third_party" and (kind == "recompile" or hint == UNTRACEABLE):
        hint = _IN_A_LIBRARY  # its code is not the user's to change
    return Event(
        **here,
        kind=kind,
        function=place.function if place else None,
        file=place.file if place else None,
        line=place.line if place else None,
        owner=owner,
        cause=explained.cause if explained else None,
        detail=detail_of(text)[:MAX_DETAIL],
        hint=hint,
        seconds=seconds,
        count=count,
    )


def function_of(record: Any) -> Place | None:
    """The function that a record is about; a limit hit has only its number."""
    file = getattr(record, "co_filename", None)
    if not file:
        return None
    line, function = getattr(record, "co_firstlineno", None), getattr(record, "co_name", None)
    return Place(file, line or 0, written_name(function or ""))


def function_number(record: Any) -> str:
    """The function's part of a compile id such as ``3/1``."""
    return str(getattr(record, "compile_id", None)).rpartition("/")[0]


def is_of_frame(record: Any) -> bool:
    """Not the backward half of a graph, nor what a backend does at run time: those have records of their own."""
    return getattr(record, "is_forward", None) is not False and not getattr(record, "is_runtime", False)


def has_graph(record: Any) -> bool:
    """Whether a function was compiled, and there was something in it to compile."""
    compiled = is_of_frame(record) and getattr(record, "fail_type", None) is None
    return compiled and bool(getattr(record, "graph_op_count", None))


def below(caller: Place | None, stack: Sequence[Place]) -> list[Place]:
    """A stack with the user's frame that led to it, for torch sees only what was called from there."""
    return [*stack] if caller is None else [caller, *stack]
