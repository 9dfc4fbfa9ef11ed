"""What a search begins with: the first steps in eager, what there is to try, what earlier runs have found."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from compile_profiler.arguments import Settings
from compile_profiler.candidates import TARGETS, Candidate, Choice, candidates_for
from compile_profiler.clock import Clock, PassTimer
from compile_profiler.job import Job, job_of
from compile_profiler.parts import submodules
from compile_profiler.recall import Entry, Tried, VerdictCache, default_folder
from compile_profiler.records import Environment
from compile_profiler.results import SearchReport
from compile_profiler.search import Search, Settle
from compile_profiler.shapes import shapes_of

LOOK_STEPS = 16
"""Training steps in eager before the search begins: what a step takes, whether batches vary in shape."""
TIMED_STEPS = range(2, 6)
"""Of these the steps, counted from 0, whose pass is timed; what a whole step takes is timed on the later ones."""
EAGER: Mapping[str, Any] = {"target": None}
"""What stands for eager where candidates are remembered."""


class Lookout:
    """Watches the first steps of a fit, then sets up its search; at the end it remembers what has won.

    Attributes:
        passes: times the passes of some of these steps.
        knows_eager_wins: an earlier run of the same job has found that nothing gains.

    Args:
        settings: the callback's arguments.
        module: the LightningModule.
        clock: of the module's device.
        moves_optimizers: the step runs backward and steps optimizers itself.
        environment: versions, device and settings.
        known: the candidate that an earlier part of this training has ended with.
    """

    def __init__(
        self,
        settings: Settings,
        module: nn.Module,
        *,
        clock: Clock,
        moves_optimizers: bool,
        environment: Environment,
        known: Candidate | None = None,
    ) -> None:
        self._settings = settings
        self._module = module
        self._device_type = clock.device.type
        self.passes = PassTimer(clock, TIMED_STEPS)
        self._moves_optimizers = moves_optimizers
        self._environment = environment
        self._known = known
        self._shapes: set[str | None] = set()
        self._num_seen = 0
        self._offered: dict[str, Candidate] = {}
        self._job: Job | None = None
        self._cache = VerdictCache(default_folder() if settings.remember else None)
        self.knows_eager_wins = False

    def see(self, call: Any) -> bool:
        """A training step was called with this; whether enough have been seen."""
        if call is not None:
            self._shapes.add(shapes_of(call))
        self._num_seen += 1
        return self._num_seen >= LOOK_STEPS

    def search(self, call: Any, *, seconds_left: float | None) -> Search:
        """The search, with what earlier runs of the same job know.

        Args:
            call: what the last step was called with.
            seconds_left: of the run, ``None`` where nobody knows.
        """
        choice = self._choice(seconds_left)
        self._offered = {one.name: one for one in choice.candidates}
        entry = self._remembered(call, choice.candidates)
        known, remembered_s = self._known, {}
        if entry is not None:
            remembered_s = {_named(one.candidate): one.compile_s for one in entry.tried if one.compile_s is not None}
            self.knows_eager_wins = known is None and entry.winner == EAGER
            if known is None and not self.knows_eager_wins:
                known = Candidate.from_dict(entry.winner)
        return Search(
            choice.candidates,
            pruned=choice.pruned,
            limits=self._settings.limits,
            num_leaves=sum(not any(True for _ in one.children()) for one in self._module.modules()),
            known=known,
            known_speedup=None if entry is None or known is None else entry.result.speedup,
            remembered_s=remembered_s,
        )

    def _choice(self, seconds_left: float | None) -> Choice:
        """What the user has named, or what makes sense here."""
        settings = self._settings
        if settings.candidates:
            return Choice(settings.candidates)
        named = settings.target != "step"
        targets: Sequence[str] = TARGETS
        if named:
            targets = (settings.target if isinstance(settings.target, str) else "forward",)
        choice = candidates_for(
            self._device_type,
            has_blocks=self._has_blocks(),
            shapes_vary=len(self._shapes) > 1,
            seconds_left=seconds_left,
            targets=targets,
            no_graphs="the step moves optimizers itself" if self._moves_optimizers else None,
        )
        kept = [one for one in choice.candidates if settings.options["backend"] == "inductor" or one.mode is None]
        if named:
            kept = [replace(one, target=settings.target) for one in kept]
        if settings.options["dynamic"] is not None:
            kept = list(dict.fromkeys(replace(one, dynamic=settings.options["dynamic"]) for one in kept))
        return Choice(tuple(kept), choice.pruned)

    def _has_blocks(self) -> bool:
        try:
            return bool(submodules(self._module, "blocks"))
        except ValueError:
            return False

    def _remembered(self, call: Any, candidates: Sequence[Candidate]) -> Entry | None:
        if self._cache.folder is None:
            return None
        job = job_of(self._module, call, environment=self._environment, configuration=self._settings.decisive())
        if isinstance(job, str):
            return None
        self._job = job
        return self._cache.get([job.key, job.key_any_size], [EAGER, *(one.to_dict() for one in candidates)])

    def remember(self, settled: Settle, found: SearchReport) -> None:
        """Keep for the next run of this job what has won, unless that was never measured."""
        measured = [row for row in found.candidates if row.num_pairs and row.name in self._offered]
        if self._job is None or not measured:
            return
        tried = tuple(
            Tried(
                candidate=self._offered[row.name].to_dict(),
                compile_s=row.compile_s,
                speedup=row.end_to_end,
                low=row.end_to_end_low,
                high=row.end_to_end_high,
            )
            for row in measured
        )
        winner = dict(EAGER) if settled.candidate is None else settled.candidate.to_dict()
        for key in (self._job.key, self._job.key_any_size):
            self._cache.put(
                Entry(
                    key=key,
                    job=self._job.name,
                    device=self._environment.device,
                    torch=self._environment.torch,
                    winner=winner,
                    tried=tried,
                    when_s=time.time(),
                )
            )


def _named(candidate: Mapping[str, Any]) -> str:
    try:
        return Candidate.from_dict(candidate).name
    except (TypeError, ValueError):  # eager
        return ""
