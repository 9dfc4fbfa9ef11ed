"""The ranks of one fit, one or many: when they meet, and how they reach each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from compile_profiler import compiler, host
from compile_profiler.arguments import Settings
from compile_profiler.first_steps import FirstSteps
from compile_profiler.group import Group
from compile_profiler.meeting import Does, Exchange, Meeting, alone, first_voice, largest
from compile_profiler.rig import Rig
from compile_profiler.seat import Seat
from compile_profiler.windows import StepTimes

T = TypeVar("T")


class Company:
    """All that a fit has to do with other ranks; alone, it asks itself, and nothing is sent.

    What waits for others raises ``group.LostError`` when they do not come.

    Args:
        settings: the callback's arguments.
        trainer: the Trainer.
        tell: prints a line.
    """

    def __init__(self, settings: Settings, trainer: host.Trainer, tell: Callable[[str], None]) -> None:
        self._settings = settings
        self._tell = tell
        self._leads_here = trainer.local_rank == 0
        self.rank, self._world_size = trainer.global_rank, trainer.world_size
        self._meeting = Meeting(
            rank=self.rank, world_size=self._world_size, pair_every_n_steps=settings.pair_every_n_steps
        )
        self._group: Group | None = None
        self._first_steps: FirstSteps | None = None

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody else."""
        return self._meeting.is_alone

    def gather(self) -> None:
        """Open the way to the others; collective."""
        if not self.is_alone:
            self._group = Group(self._tell)

    def run(self, exchange: Exchange[T]) -> T:
        """Talk to the others; collective."""
        return alone(exchange) if self._group is None else self._group.run(exchange)

    def first_voice(self, text: str | None) -> str | None:
        """What the lowest rank that has something to say says; collective."""
        return self.run(first_voice(text, rank=self.rank, world_size=self._world_size))

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank; collective."""
        return bool(self.run(largest({"flag": flag}))["flag"])

    def count(self, *, boundary: bool) -> None:
        """Count a batch of training; ``boundary``: it ended with an optimizer step."""
        self._meeting.count(boundary=boundary)

    def is_due(self, seat: Seat, times: StepTimes, *, boundary: bool) -> bool:
        """Whether all meet after the batch just counted."""
        meeting = self._meeting
        return meeting.is_due(
            boundary=boundary,
            urgent=meeting.is_alone and seat.has_something_to_say(meeting.num_since_pair),
            in_window=not (meeting.is_alone or times.between),
            window_ended=times.couple is not None,
        )

    def meet(self, seat: Seat, does: Does) -> None:
        """Hold a meeting; collective."""
        self.run(self._meeting.hold(seat, does))

    def before_step(
        self, rig: Rig, *, failed: Callable[[BaseException], bool], on_failure: Callable[[Exception], None]
    ) -> bool | None:
        """Before each of the first two training steps of several ranks.

        Args:
            rig: what is on the module.
            failed: whether an error is one of compiling.
            on_failure: called with such an error.

        Returns:
            ``None`` before the first; afterwards whether the step itself talks to other ranks.
        """
        if self._first_steps is None:
            leads = self._leads_here or not compiler.shares_cache(self._settings.options["backend"])
            self._first_steps = FirstSteps(rig, leads=leads, failed=failed, on_failure=on_failure, tell=self._tell)
            return None
        rig.door.before_step = None
        return self.run(self._first_steps.end())

    def part(self) -> None:
        """Close the ways, so that nobody waits for this rank; may be called twice."""
        group, self._group = self._group, None
        if group is not None:
            group.close()
