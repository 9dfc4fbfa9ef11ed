"""Change the compiled target where it is recompiled again and again, and count whether that helped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from compile_profiler.arms import CompiledArm
from compile_profiler.compiler import has_setting
from compile_profiler.records import Event, Remedy

HEAL_AFTER = 5
"""Recompiles of one line for one cause: six graphs, two short of torch's limit. Healthy ones have settled by then."""
TELLING_STEPS = 16
"""Steps after which a remedy is judged."""

_INTEGER = re.compile(r"^(?!len\(|___stack)\S.*? (?:==|!=|<=|>=|<|>) -?\d+$")
_SYMBOLIC = "allow_unspec_int_on_nn_module"


class Change(NamedTuple):
    """What is changed: in words, as arguments of ``torch.compile``, as settings of torch's tracer."""

    text: str
    options: Mapping[str, Any]
    tracer: Mapping[str, Any]


def change_for(event: Event, dynamic: bool | None) -> Change | None:
    """What can be changed about a recompile without touching data or user code, ``None`` if nothing can.

    Args:
        event: the recompile.
        dynamic: that argument of ``torch.compile`` as it is.

    >>> at = {"step": 5, "epoch": 0, "stage": "train", "kind": "recompile"}
    >>> change_for(Event(**at, cause="shape", detail="size mismatch at index 1"), None).text
    'dynamic=True'
    >>> counter = Event(**at, cause="python_scalar", detail="self.n == 5", hint="self.n changes and is a constant.")
    >>> change_for(counter, None).text
    'self.n as a symbolic integer'
    >>> change_for(Event(**at, cause="object_identity", detail="___check_obj_id(self.act, 7)"), None) is None
    True
    """
    if event.cause == "shape" and dynamic is not True:
        return Change("dynamic=True", {"dynamic": True}, {})
    if event.cause == "python_scalar" and _INTEGER.match(event.detail) and has_setting(_SYMBOLIC):
        name, changes, _ = event.hint.partition(" changes")
        text = f"{name if changes else 'an integer'} as a symbolic integer"
        # dynamic=False would keep it a constant all the same.
        return Change(text, {"dynamic": None} if dynamic is False else {}, {_SYMBOLIC: True})
    return None


class Healer:
    """Watches one compiled arm, and changes it at most once for each kind of change.

    Args:
        arm: the compiled arm of this fit.
        dynamic: that argument of ``torch.compile`` as the arm has it.
    """

    def __init__(self, arm: CompiledArm, dynamic: bool | None) -> None:
        self._arm = arm
        self._dynamic = dynamic
        self._num_by_place: Counter[tuple[Any, ...]] = Counter()
        self._tried: set[str] = set()
        self._num_steps = 0
        self._num_recompiles = 0
        self.remedies: list[Remedy] = []

    def step(self, events: Iterable[Event], *, near_limit: bool = False) -> Remedy | None:
        """Account for a training step in which this was compiled.

        Args:
            events: what the compiler did in it.
            near_limit: whether torch is about to give a function up.

        Returns:
            A remedy that was just applied, or that has just been judged (``helped`` is known then).
        """
        recompiles = [event for event in events if event.kind == "recompile"]
        self._num_steps += 1
        self._num_recompiles += len(recompiles)
        self._num_by_place.update((event.file, event.line, event.cause) for event in recompiles)
        for event in recompiles:
            if near_limit or self._num_by_place[event.file, event.line, event.cause] >= HEAL_AFTER:
                change = change_for(event, self._dynamic)
                if change is not None and change.text not in self._tried:
                    return self._apply(change, event)
        return self._account(len(recompiles))

    def _apply(self, change: Change, event: Event) -> Remedy:
        self._tried.add(change.text)
        self._arm.change(options=change.options, tracer=change.tracer)
        self._dynamic = change.options.get("dynamic", self._dynamic)
        remedy = Remedy(
            step=event.step,
            change=change.text,
            cause=event.cause,
            detail=event.detail,
            function=event.function,
            file=event.file,
            line=event.line,
            steps_before=self._num_steps,
            recompiles_before=self._num_recompiles,
        )
        self.remedies.append(remedy)
        self._num_steps = self._num_recompiles = 0
        self._num_by_place.clear()
        return remedy

    def _account(self, num_recompiles: int) -> Remedy | None:
        """The newest remedy, if this step has shown whether it helped."""
        if not self.remedies:
            return None
        remedy = self.remedies[-1]
        after, recompiles = remedy.steps_after + 1, remedy.recompiles_after + num_recompiles
        helped = remedy.helped
        if recompiles >= HEAL_AFTER and after <= 2 * TELLING_STEPS:
            helped = False
        elif helped is None and after >= TELLING_STEPS:
            helped = recompiles / after <= remedy.recompiles_before / remedy.steps_before / 2
        self.remedies[-1] = replace(remedy, steps_after=after, recompiles_after=recompiles, helped=helped)
        return self.remedies[-1] if helped != remedy.helped else None
