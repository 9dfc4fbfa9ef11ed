"""Real training steps, timed in windows."""

from __future__ import annotations

from compile_profiler.clock import Clock


class Window:
    """Seconds of ordinary training steps between two looks at the clock, the device waited for at both."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start_s: float | None = None
        self._num_steps = 0

    def step(self) -> None:
        """An ordinary step has ended."""
        if self._start_s is None:
            self.open()
        else:
            self._num_steps += 1

    def open(self) -> None:
        """Begin here."""
        self._clock.synchronize()
        self._start_s, self._num_steps = self._clock.now(), 0

    def drop(self) -> None:
        """Something else happened: validation, a checkpoint, compiling. The next step opens a new window."""
        self._start_s = None

    def close(self) -> float | None:
        """Seconds of one step, or ``None`` if no whole step lies in the window."""
        if self._start_s is None or not self._num_steps:
            return None
        self._clock.synchronize()
        return (self._clock.now() - self._start_s) / self._num_steps
