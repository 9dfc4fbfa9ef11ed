"""What the user is told at once about compiling, each in one line."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from compile_profiler.advice import without_command
from compile_profiler.records import Event, Reason, Remedy

LONG_COMPILE_S = 5.0
"""A step that compiles for longer than this looks like one that hangs: it is told."""
_FAILURES: dict[Reason, str] = {
    "compile_error": "Compiling failed",
    "runtime_error": "The compiled step failed",
    "out_of_memory": "The compiled step ran out of memory",
}


def failure(reason: Reason, error: Exception, what_to_do: str | None, *, rank: int | None = None) -> str:
    """What went wrong with the compiled step, and on which rank of several.

    >>> failure("runtime_error", ValueError("too wide"), "Do this.")
    'The compiled step failed: ValueError: too wide Do this.'
    """
    where = "" if rank is None else f" on rank {rank}"
    return f"{_FAILURES[reason]}{where}: {first_line(error)} {what_to_do or ''}".rstrip()


def first_line(error: Exception) -> str:
    """The error on one line, with as much of its text as fits; torch's own put the cause on the second line."""
    text = " ".join(without_command(str(error)).split())
    return f"{type(error).__name__}: {textwrap.shorten(text, 200) if text else 'without a message'}"


def near_limit(event: Event, num_graphs: int, limit: int) -> str:
    """The warning that torch is about to give up a function.

    Args:
        event: its last recompile.
        num_graphs: graphs that it has now.
        limit: graphs that torch makes of one function.

    >>> counts = Event(step=5, epoch=0, stage="train", kind="recompile", function="training_step", file="/my/train.py",
    ...     line=34, detail="self.n == 5", hint="self.n changes. Keep it as a tensor.")
    >>> near_limit(counts, 6, 8)
    'training_step (train.py:34) has 6 graphs; at 8 torch stops compiling it and it runs in eager. self.n changes. \
Keep it as a tensor.'
    """
    what_to_do = event.hint or f"This changes from call to call: {event.detail}."
    return (
        f"{event.function or 'a function'}{_at(event)} has {num_graphs} graphs; at {limit} torch stops compiling it "
        f"and it runs in eager. {what_to_do}"
    )


def long_compile(events: Sequence[Event], seconds: float) -> str | None:
    """The line about a step that has compiled for so many ``seconds``, ``None`` where that was no wait.

    Args:
        events: what the compiler did in this step.
        seconds: wall seconds of compiling, that of the backward pass included.

    >>> first = Event(step=0, epoch=0, stage="train", kind="graph", function="training_step", seconds=20.0)
    >>> long_compile([first], 23.14)
    'compiling training_step took 23.1 s at step 0: its first graph.'
    >>> long_compile([first], 2.0) is None
    True
    """
    if seconds <= LONG_COMPILE_S:
        return None
    timed = [event for event in events if event.kind in ("graph", "recompile", "skipped_frame")]
    longest = max(timed, key=lambda event: event.seconds or 0.0, default=None)
    if longest is None:  # torch keeps no records, or this is the backward pass of an earlier graph
        return f"compiling took {seconds:.1f} s."
    reason = {
        "graph": "its first graph",
        "recompile": f"again, because this no longer held: {longest.detail}",
    }.get(longest.kind, f"in vain, it runs in eager{_at(longest)}")
    others = f" ({len(timed)} functions or parts in all)" if len(timed) > 1 else ""
    return (
        f"compiling {longest.function or 'a function'} took {seconds:.1f} s at step {longest.step}: {reason}{others}."
    )


def healed(remedy: Remedy) -> str:
    """The line about a remedy: that it was applied, or whether it has helped.

    >>> remedy = Remedy(step=5, change="dynamic=True", function="training_step", steps_before=6, recompiles_before=5)
    >>> healed(remedy)
    'healing at step 5: training_step is compiled anew with dynamic=True, after 5 recompiles in 6 steps.'
    >>> from dataclasses import replace
    >>> healed(replace(remedy, steps_after=16, recompiles_after=1, helped=True))
    'healing with dynamic=True has helped: 1 recompile in 16 steps, after 5 in 6 before.'
    """
    if remedy.helped is None:
        anew = f"{remedy.function or 'the target'}{_at(remedy)} is compiled anew with {remedy.change}"
        return (
            f"healing at step {remedy.step}: {anew}, after {remedy.recompiles_before} recompiles in "
            f"{remedy.steps_before} steps."
        )
    recompiles = f"{remedy.recompiles_after} recompile" + "s" * (remedy.recompiles_after != 1)
    return (
        f"healing with {remedy.change} has {'helped' if remedy.helped else 'not helped'}: {recompiles} in "
        f"{remedy.steps_after} steps, after {remedy.recompiles_before} in {remedy.steps_before} before."
    )


def not_finite(step: int, *, weights_finite: bool) -> str:
    """The line about a loss or gradients that are NaN or infinite in both arms.

    >>> not_finite(7, weights_finite=True)
    'the loss or its gradients are NaN or infinite at step 7, in eager as well: this is not a matter of \
compiling. Trainer(detect_anomaly=True) tells where it comes from.'
    """
    seen = f"the loss or its gradients are NaN or infinite at step {step}, in eager as well"
    if weights_finite:
        return f"{seen}: this is not a matter of compiling. Trainer(detect_anomaly=True) tells where it comes from."
    return (
        f"{seen}, and so are weights by now: what began it cannot be told any more. If the same run is finite without "
        "this callback, compile with pair_every_n_steps=1 to see the first such step."
    )


def _at(event: Event | Remedy) -> str:
    return f" ({Path(event.file).name}:{event.line})" if event.file else ""
