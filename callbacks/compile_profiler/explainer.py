"""Tell the user of one fit, as it goes, what is compiled, what is not, and what to do about it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from compile_profiler import host, targets
from compile_profiler.arguments import Settings
from compile_profiler.arms import CompiledArm, EagerArm
from compile_profiler.clock import profiler_is_on
from compile_profiler.export import Export
from compile_profiler.healing import Healer
from compile_profiler.notices import healed, long_compile, near_limit
from compile_profiler.observe import Observer, Subject
from compile_profiler.records import Compiles, Event, Remedy, Stage
from compile_profiler.rig import Rig
from compile_profiler.shapes import shapes_of


class Explainer:
    """What the compiler does in one fit: as events, as warnings and lines on the console, and with remedies.

    Args:
        settings: the callback's arguments.
        trainer: the Trainer.
        module: its LightningModule.
        export: where lines for the console go.
        on_remedy: called when the compiled target has been changed: what was measured before is of another one.
    """

    def __init__(
        self,
        settings: Settings,
        trainer: host.Trainer,
        module: host.LightningModule,
        export: Export,
        on_remedy: Callable[[Remedy], None],
    ) -> None:
        self._settings = settings
        self._trainer = trainer
        self._module = module
        self._export = export
        self._on_remedy = on_remedy
        self._target: str | Sequence[str] = settings.target
        self._healer: Healer | None = None
        self._arm: CompiledArm | None = None
        self._guard_s: float | None = None
        inductor = settings.options["backend"] == "inductor"
        self.observer = Observer(inductor=inductor, cuda_graphs=settings.replays_cuda_graphs)
        self.other_targets: list[str] | None = None  # looked for where nothing was compiled
        self.never_ran = False

    def start(self, arm: CompiledArm, target: str | Sequence[str]) -> None:
        """Follow what is compiled from here on: of the step methods that run compiled, ``target``."""
        if self._settings.heal:
            self._healer = Healer(arm, self._settings.options["dynamic"])
        self.follow(arm, target, self.new_subject(target))
        self.observer.start()
        self.observer.skip()
        if self._settings.searches:
            return
        names = ", ".join(arm.compiled_names or self._settings.hooks)
        self._export.tell(f"compiling {names or 'forward'} in the first steps; this can take a minute.")

    def new_subject(self, target: str | Sequence[str]) -> Subject:
        """A target of which nothing has been compiled yet."""
        return self.observer.new_subject(targets.own_functions(self._module, target, self._settings.hooks))

    def follow(self, arm: CompiledArm, target: str | Sequence[str], subject: Subject) -> None:
        """What is compiled from here on is this arm's."""
        if arm is not self._arm:
            self._guard_s = None
        self._target, self._arm, self.observer.subject = target, arm, subject

    def is_idle(self) -> bool:
        """Whether ``look`` would find nothing after a training step: no compiling, no remedy to account for."""
        return self._healer is None and not self.observer.compiling()

    def look(self, stage: Stage, batch: Any, *, step: int) -> bool:
        """Take what was compiled as events of ``stage``, say what cannot wait; whether there was anything.

        Args:
            stage: of the step that has ended.
            batch: what it was called with.
            step: its x-axis number.
        """
        if not self.observer.compiling():
            if stage == "train":
                self._heal(())
            return False
        shapes = functools.partial(shapes_of, batch)
        self.observer.poll(stage, step=step, epoch=self._trainer.current_epoch, shapes=shapes)
        news = self.observer.news
        remedied = stage == "train" and self._heal(news.events, near_limit=bool(news.near_limit))
        in_vain = " heal=True cannot mend this." if self._healer is not None else ""
        for finding in () if remedied else news.near_limit:
            host.warn(near_limit(*finding) + in_vain)
        line = long_compile(news.events, news.compile_s)
        if line is not None:
            self._export.tell(line)
        return True

    def _heal(self, events: Sequence[Event], *, near_limit: bool = False) -> bool:
        """Account for a training step, change the target if that can end its recompiles; whether it was changed."""
        remedy = None if self._healer is None else self._healer.step(events, near_limit=near_limit)
        if remedy is None:
            return False
        self._export.tell(healed(remedy))
        if remedy.helped is None:
            self._guard_s = None
            self.observer.forget_warnings()
            self._on_remedy(remedy)
        return remedy.helped is None

    def release(self) -> None:
        """The run is eager from here on: let go of the compiled code."""
        self._arm = None

    def compiles(self) -> Compiles:
        """Counts, events and remedies so far."""
        remedies = () if self._healer is None else tuple(self._healer.remedies)
        return replace(self.observer.compiles(), remedies=remedies, guard_s=self._guard_s)

    def time_guards(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Once: how long a training step of these arguments takes to find its graph."""
        if self._guard_s is None and self._arm is not None:
            with contextlib.suppress(Exception), host.step_context(self._trainer):
                self._guard_s = self._arm.lookup_s("training_step", *args, **kwargs)

    def find_other_targets(self, rig: Rig) -> None:
        """Once, where nothing was compiled: see in one eager pass, which leaves no trace, what the step calls."""
        call = rig.door.last_call
        if self.other_targets is not None or call is None or profiler_is_on():
            return
        self.other_targets = []
        args, kwargs = call
        with contextlib.suppress(Exception):  # a step that cannot be run twice: no advice then
            names = targets.called(
                self._module, functools.partial(rig.probe.rehearse, EagerArm(self._module), *args, **kwargs)
            )
            self.never_ran = targets.never_ran(self._module, self._target, names)
            self.other_targets = targets.other_targets(self._module, self._target, names)
