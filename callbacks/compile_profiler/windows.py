"""Real training steps, timed in windows."""

from __future__ import annotations

import random

from compile_profiler.clock import Clock
from compile_profiler.records import Sample

WINDOW_STEPS = 20
MIN_WINDOW_S = 0.1
"""Twenty steps of a millisecond are over before a neighbour's time slice is: short steps have more in a window."""
SETTLE_STEPS = 2
"""Steps after a switch of arms or a pair that are not timed: caches, allocator and launch queue are not theirs yet."""


class Window:
    """Seconds of ordinary training steps between two looks at the clock, the device waited for at both."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start_s: float | None = None
        self._num_to_settle = 0
        self.num_steps = 0

    def step(self) -> None:
        """An ordinary step has ended."""
        if self._num_to_settle > 0:
            self._num_to_settle -= 1
        elif self._start_s is None:
            self.open()
        else:
            self.num_steps += 1

    def open(self) -> None:
        """Begin here."""
        self._clock.synchronize()
        self._start_s, self.num_steps = self._clock.now(), 0

    def drop(self, *, settle_steps: int = 0) -> None:
        """Something else happened: a pair, validation, a checkpoint. A new window opens when things have settled."""
        self._start_s, self.num_steps, self._num_to_settle = None, 0, settle_steps

    @property
    def open_s(self) -> float:
        """Seconds since the window was opened, without waiting for the device."""
        return 0.0 if self._start_s is None else self._clock.now() - self._start_s

    def close(self) -> float | None:
        """Seconds of one step, or ``None`` if no whole step lies in the window."""
        if self._start_s is None or not self.num_steps:
            return None
        self._clock.synchronize()
        return (self._clock.now() - self._start_s) / self.num_steps


class Alternation:
    """Real steps in alternating windows of both arms; two neighbours, in an order tossed by a coin, make one sample.

    Nothing is run twice, so the ratio is that of the training itself, loading and optimizer included; but eager steps
    take part in training. A switch of arms happens between two optimizer steps only.

    Args:
        clock: seconds on the module's device.
        seed: of the coin.
        window_steps: timed steps in a window, at least; it ends with an optimizer step.
        settle_steps: untimed steps after each switch.
        min_window_s: seconds that a window lasts, at least.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        seed: int,
        window_steps: int = WINDOW_STEPS,
        settle_steps: int = SETTLE_STEPS,
        min_window_s: float = MIN_WINDOW_S,
    ) -> None:
        self._coin = random.Random(seed)
        self._window = Window(clock)
        self._window_steps = window_steps
        self._settle_steps = settle_steps
        self._min_window_s = min_window_s
        self._order: list[str] = []
        self._seconds: dict[str, float] = {}
        self._num_to_settle = 0
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

    def drop(self) -> None:
        """Something other than an ordinary step happened: the open window begins again."""
        self._window.drop()
        self._num_to_settle = self._settle_steps

    def step(self, step: int, *, boundary: bool) -> Sample | None:
        """An ordinary step on ``arm`` has ended; ``boundary``: with an optimizer step. A sample when two are done."""
        if not self._order:
            self._num_to_rest -= 1
            if boundary and self._num_to_rest <= 0:
                self._order = ["eager", "compiled"]
                self._coin.shuffle(self._order)
                self._num_to_settle = self._settle_steps
            return None
        if self._num_to_settle > 0:
            self._num_to_settle -= 1
            if self._num_to_settle == 0:
                self._window.open()
            return None
        self._window.step()
        long_enough = self._window.num_steps >= self._window_steps and self._window.open_s >= self._min_window_s
        if not (boundary and long_enough):
            return None
        num_steps, seconds = self._window.num_steps, self._window.close()
        assert seconds is not None
        self._seconds[self._order.pop(0)] = seconds
        self._window.drop()
        self._num_to_settle = self._settle_steps
        if self._order:
            return None
        return Sample(
            step=step,
            eager_s=self._seconds["eager"],
            compiled_s=self._seconds["compiled"],
            num_passes=num_steps,
        )
