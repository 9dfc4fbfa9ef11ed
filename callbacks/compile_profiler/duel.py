"""Whether a challenger is faster than what it would replace."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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
"""Void pairs in a row: this one cannot be measured."""
MAX_VOID_COUPLES = 3
"""Steps of this run cannot be timed, with epochs of two batches for example: pairs have to do."""
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
    """Take another pair of eager with this candidate, the challenger or an incumbent that has too few of them."""

    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Windows:
    """Train in alternating windows on ``incumbent`` (``None``: eager) and ``challenger``."""

    incumbent: Candidate | None
    challenger: Candidate


@dataclass(frozen=True, slots=True)
class Won:
    """The challenger is the better one: with the user's confidence in this last comparison, or only by estimate."""

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
        rival: whom it has to beat; ``None``: eager.
        limits: of the callback.
        confidence: gives the confidence of one more comparison.
        on_trust: its whole step has won in an earlier run, so that pairs need only show that it still gains.
    """

    def __init__(
        self, challenger: Trial, rival: Trial | None, *, limits: Limits, confidence: Callable[[], float], on_trust: bool
    ) -> None:
        self.challenger = challenger
        self._rival = rival
        self._limits = limits
        self._confidence = confidence
        self._on_trust = on_trust
        self._in_pairs = confidence()
        self._in_steps: float | None = None  # of windows, once they are asked for
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
        if not one.is_begun:
            return Try(one.candidate)
        if one.num_void_in_a_row >= MAX_VOID:
            return Lost(f"{MAX_VOID} pairs in a row were void ({one.samples[-1].void})")
        found = self._by_pairs(hurry=hurry) if self._in_steps is None else None
        if found is not None:
            return found
        self._in_steps = self._in_steps or self._confidence()
        return self._by_windows(self._in_steps)

    def _by_pairs(self, *, hurry: bool) -> Measure | Won | Lost | None:
        """``None``: pairs do not settle it."""
        one, rival, num = self.challenger, self._rival, len(self.challenger.log_ratios)
        max_num = min(MAX_PAIRS, self._limits.max_pairs)
        if rival is None:
            ahead, than, margin = one.log_ratios, EAGER, self._limits.min_speedup
            to_lose = margin
        else:
            ahead, than, margin, to_lose = one.differences(rival), rival.name, 1.0, 1 / NEAR
        outcome_at = partial(outcome_of, ahead, confidence=self._in_pairs, max_num=max_num)
        if outcome_at(min_speedup=to_lose) == "no_gain":
            return Lost(f"{times(statistics.median(ahead))} {than} in a pass", rival is not None)
        outcome = outcome_at(min_speedup=margin)
        if num < min(MIN_PAIRS, max_num):
            return Measure(one.candidate)
        if outcome == "pending" and not hurry:
            if rival is not None and len(ahead) < num and len(rival.log_ratios) < max_num:
                return Measure(rival.candidate)
            if num < max_num:
                return Measure(one.candidate)
        gain = one.estimated_gain()
        is_clear = gain is not None and gain[0] >= math.log(CLEAR_GAIN)
        if outcome == "gain" and (is_clear or self._on_trust):
            return Won(is_sure=True)
        if outcome != "gain" and rival is None and (one.log_ratio or 0.0) < -math.log(NEAR):
            return Lost(f"{times(one.log_ratio)} {than} in a pass, by {num} pairs")
        return None

    def _by_windows(self, confidence: float) -> Windows | Won | Lost:
        one, rival = self.challenger, self._rival
        margin = self._limits.min_speedup if rival is None else 1.0
        outcome_at = partial(outcome_of, one.couples, min_speedup=margin, max_num=MAX_COUPLES)
        outcome = outcome_at(confidence=confidence)
        if outcome == "pending" and self._num_void_couples < MAX_VOID_COUPLES:
            return Windows(None if rival is None else rival.candidate, one.candidate)
        log_ratio, where = self._in_the_middle()
        if outcome != "no_gain" and log_ratio > 0:
            return Won(is_sure=outcome_at(confidence=self._limits.confidence) == "gain")
        return Lost(f"{times(log_ratio)} {EAGER if rival is None else rival.name} in {where}", rival is not None)

    def _in_the_middle(self) -> tuple[float, str]:
        """How far ahead the challenger is, and in what: real steps, or passes where no step could be timed."""
        one, rival = self.challenger, self._rival
        if one.couples:
            return statistics.median(one.couples), "real steps"
        ahead = one.log_ratios if rival is None else one.differences(rival)
        return statistics.median(ahead) if ahead else 0.0, "a pass"
