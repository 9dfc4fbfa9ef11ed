"""Whether a challenger is faster than what it would replace."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from compile_profiler.candidates import Candidate
from compile_profiler.records import Sample
from compile_profiler.results import EAGER
from compile_profiler.trial import Trial, outcome_of, times
from compile_profiler.verdict import Limits

MAX_PAIRS = 16
"""Pairs of one challenger: ten unanimous ones decide the first comparison, and windows tell more than many pairs."""
MIN_PAIRS = 4
"""Usable pairs, and so comparisons of results, before a challenger trains anything."""
MAX_COUPLES = 12
MAX_VOID = 12
"""Void pairs in a row, or void couples: this one cannot be measured."""
CLEAR_GAIN = 1.15
"""Estimates of a whole step from pairs were up to 13 % too high: a gain above this needs no windows."""
NEAR = 1.05
"""A pass that is slower by less may still be part of a faster step."""


@dataclass(frozen=True, slots=True)
class Try:
    """Compile this candidate, beside what training runs on, and take pairs with it (void while it compiles)."""

    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Measure:
    """Take another pair of eager with this candidate."""

    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Windows:
    """Train in alternating windows on ``incumbent`` (``None``: eager) and ``challenger``."""

    incumbent: Candidate | None
    challenger: Candidate


@dataclass(frozen=True, slots=True)
class Won:
    """The challenger is the better one: by evidence, or only by estimate."""

    is_sure: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """The challenger is not, and why; ``to_rival``: it was the rival that has shown it, not eager."""

    why: str
    to_rival: bool = False


class Duel:
    """A challenger against the incumbent: in pairs, then, where these do not settle it, in windows of real steps.

    Args:
        challenger: who is measured.
        rival: whom it has to beat; ``None``: eager, which it has to beat in any case.
        limits: of the callback.
        confidences: of three comparisons: pairs with eager, pairs with the rival's pairs, windows.
    """

    def __init__(
        self, challenger: Trial, rival: Trial | None, *, limits: Limits, confidences: tuple[float, float, float]
    ) -> None:
        self.challenger = challenger
        self._rival = rival
        self._limits = limits
        self._with_eager, self._with_rival, self._in_steps = confidences
        self._in_windows = False
        self._num_void_couples = 0

    def saw_couple(self, sample: Sample) -> None:
        """Two windows have ended: ``eager_s`` is a step of the rival, ``compiled_s`` one of the challenger."""
        if sample.void is None:
            self.challenger.couples.append(sample.log_ratio)
        else:
            self._num_void_couples += 1

    def next(self, *, hurry: bool) -> Try | Measure | Windows | Won | Lost:
        """What the challenger needs next, or how its case has ended.

        Args:
            hurry: no more pairs than necessary.
        """
        one = self.challenger
        if one.compile_s is None and not one.samples:
            return Try(one.candidate)
        if one.num_void_in_a_row >= MAX_VOID:
            return Lost(f"{MAX_VOID} pairs in a row were void ({one.samples[-1].void})")
        found = None if self._in_windows else self._by_pairs(hurry=hurry)
        self._in_windows = found is None
        return self._by_windows() if found is None else found

    def _by_pairs(self, *, hurry: bool) -> Measure | Won | Lost | None:
        """``None``: pairs do not settle it."""
        one, rival, num = self.challenger, self._rival, len(self.challenger.log_ratios)
        max_num, margin = min(MAX_PAIRS, self._limits.max_pairs), self._limits.min_speedup
        outcome = outcome_of(one.log_ratios, min_speedup=margin, confidence=self._with_eager, max_num=max_num)
        if outcome == "no_gain":
            return Lost(f"{times(one.log_ratio)} eager in a pass, below the {margin:.2f}x asked for")
        won, is_open = outcome == "gain", outcome == "pending"
        if rival is not None:
            ahead = one.differences(rival)
            faster = outcome_of(ahead, min_speedup=1.0, confidence=self._with_rival, max_num=max_num)
            slower = outcome_of(ahead, min_speedup=1 / NEAR, confidence=self._with_rival, max_num=max_num)
            if slower == "no_gain":
                return Lost(f"{times(statistics.median(ahead))} {rival.name} in a pass", to_rival=True)
            won, is_open = faster == "gain", faster == "pending" and len(ahead) == num
        if num < min(MIN_PAIRS, max_num) or (is_open and not hurry):
            return Measure(one.candidate)
        if not won and rival is not None and statistics.median(ahead) < -math.log(NEAR):
            return Lost(
                f"{times(statistics.median(ahead))} {rival.name} in a pass, in {len(ahead)} pairs", to_rival=True
            )
        gain = one.estimated_gain()
        if won and gain is not None and gain[0] >= math.log(CLEAR_GAIN):
            return Won(is_sure=True)
        if not won and rival is None and (one.log_ratio or 0.0) < -math.log(NEAR):
            return Lost(f"{times(one.log_ratio)} eager in a pass, no gain in {num} pairs")
        return None

    def _by_windows(self) -> Windows | Won | Lost:
        one, rival = self.challenger, self._rival
        margin = self._limits.min_speedup if rival is None else 1.0
        outcome = outcome_of(one.couples, min_speedup=margin, confidence=self._in_steps, max_num=MAX_COUPLES)
        if outcome == "pending" and self._num_void_couples < MAX_VOID:
            return Windows(None if rival is None else rival.candidate, one.candidate)
        log_ratio = statistics.median(one.couples) if one.couples else 0.0
        if outcome == "gain" or (outcome != "no_gain" and log_ratio > math.log(margin) / 2):
            return Won(is_sure=outcome == "gain")
        return Lost(f"{times(log_ratio)} {EAGER if rival is None else rival.name} in real steps", rival is not None)
