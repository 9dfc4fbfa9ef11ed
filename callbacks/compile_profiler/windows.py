"""Real training steps, timed in windows."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

from compile_profiler.clock import Clock
from compile_profiler.records import Sample

WINDOW_STEPS = 20
SETTLE_STEPS = 2
"""Steps after a switch of arms or a pair that are not timed: caches, allocator and launch queue are not theirs yet."""
MAX_STRETCH = 3
"""Of a window that is interrupted again and again: so many times its length in steps, then it ends as it is."""
MAX_IDLE_SHARE = 0.1
"""A device that lags may have been done within what came after the last step, nobody knows when: a part of a window of
which more than this share has passed since is not used."""


class StepTime(NamedTuple):
    """Seconds of one step of a window, and those of them that the callback took between two steps."""

    step_s: float
    own_s: float


class Window:
    """Seconds of ordinary training steps between looks at the clock, the device waited for at each.

    A window may have parts: validation, a checkpoint or a new epoch ends one, and the next begins behind it. An epoch
    may so be shorter than a window.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._num_to_settle = 0
        self._clear()

    def _clear(self) -> None:
        self._start_s: float | None = None
        self._ended_s = 0.0
        self._num_in_part = 0
        self._own_in_part_s = 0.0
        self._past_s = 0.0
        self._past_own_s = 0.0
        self._num_past = 0

    @property
    def num_steps(self) -> int:
        """Whole steps that have been timed."""
        return self._num_past + self._num_in_part

    def step(self, own_s: float = 0.0) -> None:
        """An ordinary step has ended; the callback took ``own_s`` of it."""
        if self._start_s is not None:
            self._num_in_part += 1
            self._own_in_part_s += own_s
            self._ended_s = self._clock.read_s()
        elif self._num_to_settle > 1:
            self._num_to_settle -= 1
        else:
            self._clock.synchronize()
            self._start_s = self._clock.now()

    def pause(self, *, settle_steps: int = 1) -> None:
        """Something other than an ordinary step comes; what has been timed counts, up to the last step's end."""
        self._num_to_settle = settle_steps
        if self._start_s is not None and self._num_in_part:
            asked_s = self._clock.now()
            self._clock.synchronize()
            idle_s = asked_s - self._ended_s
            seconds = self._clock.now() - self._start_s - idle_s
            if not (self._clock.lags and idle_s > MAX_IDLE_SHARE * seconds):
                self._past_s += seconds
                self._past_own_s += self._own_in_part_s
                self._num_past += self._num_in_part
        self._start_s, self._num_in_part, self._own_in_part_s = None, 0, 0.0

    def drop(self, *, settle_steps: int = 1) -> None:
        """Forget what was timed; ``settle_steps`` more steps, the last one's end is where a new window begins."""
        self._clear()
        self._num_to_settle = settle_steps

    def close(self, *, settle_steps: int = 1) -> StepTime | None:
        """The time of one step, or ``None`` if no whole step lies in the window; a new one begins."""
        self.pause()
        found = None
        if self._num_past:
            found = StepTime(step_s=self._past_s / self._num_past, own_s=self._past_own_s / self._num_past)
        self.drop(settle_steps=settle_steps)
        return found


class Alternation:
    """Real steps in alternating windows of both arms; two neighbours, in an order tossed by a coin, make one sample.

    Nothing is run twice, so the ratio is that of the training itself, loading and optimizer included; but eager steps
    take part in training. A switch of arms happens between two optimizer steps only. What the callback itself does
    between two steps is no part of an eager step: without the callback there is none.

    Args:
        clock: seconds on the module's device.
        seed: of the coin.
        window_steps: timed steps in a window, at least; it ends with an optimizer step. Where epochs or validation
            leave too few of them in ``MAX_STRETCH`` as many steps, it ends with those it has.
        settle_steps: untimed steps after each switch.
        of_all: several processes take these windows, so that arms change after a fixed number of steps, timed or not.
        eager_is_free: the eager arm stands for a run without the callback; ``False``: for another compiled one.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        seed: int,
        window_steps: int = WINDOW_STEPS,
        settle_steps: int = SETTLE_STEPS,
        of_all: bool = False,
        eager_is_free: bool = True,
    ) -> None:
        self._coin = random.Random(seed)
        self._window = Window(clock)
        self._window_steps = window_steps
        self._settle_steps = settle_steps
        self._of_all = of_all
        self._eager_is_free = eager_is_free
        self._order: list[str] = []
        self._num_in_window = 0
        self._seconds: dict[str, float | None] = {}
        self._num_to_rest = 0.0

    @property
    def arm(self) -> str:
        """Name of the arm that the next step is to run on."""
        return self._order[0] if self._order else "compiled"

    @property
    def between(self) -> bool:
        """Whether no window is open, so that a pair disturbs none."""
        return not self._order

    def rest(self, num_steps: float) -> None:
        """Stay on the compiled arm for so many steps before the next two windows."""
        self._num_to_rest = num_steps

    def pause(self) -> None:
        """Something other than an ordinary step comes: the open window goes on behind it."""
        self._window.pause(settle_steps=self._settle_steps)

    def step(self, step: int, *, boundary: bool, own_s: float = 0.0) -> Sample | None:
        """An ordinary step on ``arm`` has ended; ``boundary``: with an optimizer step. A sample when two are done."""
        if not self._order:
            self._num_to_rest -= 1
            if boundary and self._num_to_rest <= 0:
                self._order = ["eager", "compiled"]
                self._coin.shuffle(self._order)
                self._window.drop(settle_steps=self._settle_steps)
            return None
        self._window.step(own_s)
        self._num_in_window += 1
        num_steps = self._num_in_window - self._settle_steps if self._of_all else self._window.num_steps
        is_stretched = self._num_in_window >= MAX_STRETCH * self._window_steps
        if not boundary or not (num_steps >= self._window_steps or is_stretched):
            return None
        found = self._window.close(settle_steps=self._settle_steps)
        if found is None and not self._of_all and not is_stretched:  # its last part could not be told
            return None
        self._num_in_window = 0
        arm = self._order.pop(0)
        is_free = arm == "eager" and self._eager_is_free
        self._seconds[arm] = None if found is None else found.step_s - (found.own_s if is_free else 0.0)
        if self._order:
            return None
        eager_s, compiled_s = self._seconds["eager"], self._seconds["compiled"]
        return Sample(
            step=step,
            eager_s=eager_s or 0.0,
            compiled_s=compiled_s or 0.0,
            num_passes=num_steps,
            void=None if eager_s and compiled_s else "paused",
        )


class StepTimes:
    """Real steps of one fit: in windows from pair to pair, or, where asked for, in alternating ones.

    Args:
        clock: seconds on the module's device.
        measures: whether pairs are taken; without them nobody asks for the time of a step.
        alternates: whether eager windows alternate with compiled ones.
        seed: of the coin that orders them.
        of_all: several processes take these windows; what happens on one of them must not move the others'.
    """

    def __init__(self, clock: Clock, *, measures: bool, alternates: bool, seed: int, of_all: bool) -> None:
        self._clock = clock
        self._measures = measures
        self._seed = seed
        self._of_all = of_all
        self._between_pairs = Window(clock)
        self._alternation: Alternation | None = None
        self.alternates = False  # eager windows with compiled ones
        self._was_disturbed = False
        self.couple: Sample | None = None  # two windows that have just ended, void if something else came between
        self.may_alternate = False  # for several processes: all are warm
        if alternates:
            self.alternate()

    def alternate(self, *, eager_is_free: bool = True) -> None:
        """From here on, alternate.

        Args:
            eager_is_free: as of ``Alternation``.
        """
        if self._alternation is None:
            self._alternation = Alternation(
                self._clock, seed=self._seed, of_all=self._of_all, eager_is_free=eager_is_free
            )
            self.alternates = True

    def stop_alternating(self) -> None:
        """From here on, time what lies between two pairs; an open window is dropped."""
        self._alternation = self.couple = None
        self.alternates = False
        self.after_pair()

    @property
    def arm(self) -> str:
        """Name of the arm that the next step is to run on."""
        return "compiled" if self._alternation is None else self._alternation.arm

    @property
    def between(self) -> bool:
        """Whether no alternating window is open, so that a pair disturbs none."""
        return self._alternation is None or self._alternation.between

    def step(self, step: int, *, boundary: bool, compiling: bool, warm: bool, own_s: float) -> None:
        """An ordinary step has ended, or one in which something was compiled.

        Args:
            step: its x-axis number.
            boundary: it ended with an optimizer step.
            compiling: something was compiled, which is no ordinary step.
            warm: the steps before it were ordinary too.
            own_s: what the callback took of it.
        """
        if compiling:
            self.pause()
            self._was_disturbed = True
        if self._alternation is None:
            if self._measures and not compiling:
                self._between_pairs.step(own_s)
        elif self.may_alternate if self._of_all else warm and not compiling:
            if self._alternation.between:
                self._was_disturbed = False
            couple = self._alternation.step(step, boundary=boundary, own_s=own_s)
            if couple is not None and self._of_all and self._was_disturbed:
                couple = replace(couple, void="compiled")
            self.couple = couple

    def pause(self) -> None:
        """Something other than an ordinary step comes."""
        self._between_pairs.pause(settle_steps=SETTLE_STEPS)
        if self._alternation is not None:
            self._alternation.pause()

    def before_pair(self) -> StepTime | None:
        """The time of one step since the last pair, ``None`` if no whole step was timed."""
        return self._between_pairs.close(settle_steps=SETTLE_STEPS)

    def after_pair(self) -> None:
        """Begin again."""
        self._between_pairs.drop(settle_steps=SETTLE_STEPS)

    def rest(self, num_steps: float) -> None:
        """Stay on the compiled arm for so many steps before the next two alternating windows."""
        if self._alternation is not None:
            self._alternation.rest(num_steps)
