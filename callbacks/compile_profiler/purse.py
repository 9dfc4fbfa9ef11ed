"""What a search has cost and may still cost."""

from __future__ import annotations

from compile_profiler.outlook import Now

SECURED_SHARE = 0.5
"""Of what an incumbent is estimated to save, what is spent on: estimates were up to 40 % too high in what they save."""


class Purse:
    """Seconds by which a search may make the run end later than eager.

    Args:
        share: of the run in eager.

    >>> purse = Purse(0.1)
    >>> purse.begin(Now(step=5, seconds_left=100.0))
    >>> purse.spent_s += 4.0
    >>> purse.left_s, purse.is_empty
    (6.0, False)
    >>> purse.earn(log_step_ratio=0.0, left_s=100.0)
    >>> purse.left_s
    6.0
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._secured_s = 0.0
        self.spent_s = 0.0
        self.run_s: float | None = None
        self.run_is_assumed: bool | None = None

    def begin(self, now: Now) -> None:
        """The search begins: what it may cost follows from the length of the run in eager."""
        self.run_s, self.run_is_assumed = now.elapsed_s + now.left_s, now.seconds_left is None

    @property
    def budget_s(self) -> float | None:
        """Seconds that the search may cost; ``None`` before it has begun."""
        return None if self.run_s is None else self._share * self.run_s

    def earn(self, *, log_step_ratio: float, left_s: float) -> None:
        """What training runs on will have saved at the end of the run, if it stays.

        Args:
            log_step_ratio: eager's step over its step, as a log-ratio.
            left_s: seconds left at its pace.
        """
        self._secured_s = SECURED_SHARE * max(0.0, log_step_ratio) * left_s  # log(x) <= x - 1: rather too little

    @property
    def left_s(self) -> float:
        """Seconds that may still be spent."""
        return (self.budget_s or 0.0) + self._secured_s - self.spent_s

    @property
    def is_empty(self) -> bool:
        """Whether more was spent than may be."""
        return self.left_s < 0
