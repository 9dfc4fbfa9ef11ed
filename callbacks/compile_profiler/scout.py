"""Whom to try next, if anybody is worth it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from compile_profiler.candidates import Candidate
from compile_profiler.duel import MAX_PAIRS
from compile_profiler.outlook import (
    Now,
    Prospect,
    expected_compile_s,
    hoped_log_ratio,
    obstacle,
    pair_s,
    saving_s,
)
from compile_profiler.purse import Purse
from compile_profiler.records import Sample
from compile_profiler.trial import Trial

PAIRS_TO_DECIDE = 10
"""Pairs of one challenger, as reckoned with beforehand."""
SURPRISE = 0.02
"""Log-ratio by which any candidate might be faster after all: where this share of the run is more than finding out
costs, everything is tried."""
UNLEARNED = 1.5
"""The first guess of compile seconds may be too low by this factor; the budget is to hold all the same."""


class Scout:
    """What trying each candidate promises, from all that was seen.

    Args:
        trials: all candidates, in order of preference among equals.
        purse: what the search may cost.
        num_leaves: modules without submodules, for a first guess of compile seconds.
        remembered_s: compile seconds by name of candidate, from earlier runs of the same job.
    """

    def __init__(
        self,
        trials: Mapping[Candidate, Trial],
        purse: Purse,
        *,
        num_leaves: int,
        remembered_s: Mapping[str, float],
    ) -> None:
        self._trials = trials
        self._purse = purse
        self._num_leaves = num_leaves
        self._remembered_s = remembered_s
        self._pairs_s: list[float] = []
        self._eagers_s: list[float] = []  # of a pass
        self._host_shares: list[float] = []  # of it

    def see(self, sample: Sample, seconds: float) -> None:
        """A usable pair has taken so many seconds in all."""
        self._pairs_s.append(seconds)
        self._eagers_s.append(sample.eager_s)
        if sample.eager_host_s is not None:
            self._host_shares.append(sample.eager_host_s / sample.eager_s)

    def choose(self, incumbent: Trial | None, now: Now) -> Trial | None:
        """The candidate that promises most; ``None``: nobody is worth trying. The others know why."""
        untried = [trial for trial in self._trials.values() if trial.status == "untried"]
        for trial in untried:
            trial.why = self._objection(trial, incumbent, now)
        worthy = [trial for trial in untried if not trial.why]
        return max(worthy, key=lambda trial: self.prospect(trial, incumbent, now).worth_s, default=None)

    def _objection(self, trial: Trial, incumbent: Trial | None, now: Now) -> str:
        """Why the candidate is not to be tried now, in a phrase; empty: nothing speaks against it."""
        tried = [other.tried() for other in self._trials.values() if other.samples or other.failed]
        way = obstacle(trial.candidate, tried, list(self._trials))
        if way is not None:
            return way
        prospect = self.prospect(trial, incumbent, now)
        if prospect.worth_s <= 0:
            return f"could save {prospect.saving_s:.1f} s and would cost {prospect.cost_s:.1f} s"
        is_guess = not self._seen_s and trial.name not in self._remembered_s
        risk_s = prospect.cost_s + (UNLEARNED - 1) * prospect.compile_s * is_guess
        if risk_s > self._purse.left_s:
            return f"may cost {risk_s:.1f} s, and the search may cost {max(self._purse.left_s, 0.0):.1f} s more"
        return ""

    def prospect(self, trial: Trial, incumbent: Trial | None, now: Now) -> Prospect:
        """What trying the candidate promises, while training runs on ``incumbent``."""
        active = 0.0 if incumbent is None else incumbent.log_ratio or 0.0
        host_share = statistics.median(self._host_shares) if self._host_shares else now.host_share
        compile_s = self.expected_compile_s(trial.candidate)
        cost_s = compile_s + PAIRS_TO_DECIDE * self._pair_s(now)
        tried = [other.tried() for other in self._trials.values() if other.samples]
        hoped = max(hoped_log_ratio(trial.candidate, tried, host_share=host_share), active + SURPRISE)
        pass_share = self._pass_share(active, now)
        saved_s = saving_s(hoped, active, pass_share=pass_share, left_s=max(0.0, now.left_s - cost_s))
        if trial.candidate.dynamic:
            saved_s += now.recompile_s
        return Prospect(saved_s - cost_s, saved_s, compile_s, cost_s)

    def pays(self, trial: Trial, step_speedup: float, now: Now) -> bool:
        """Whether a candidate whose steps are known to be so much faster saves more than compiling it costs."""
        cost_s = self.expected_compile_s(trial.candidate) + PAIRS_TO_DECIDE * self._pair_s(now)
        return saving_s(math.log(step_speedup), 0.0, pass_share=1.0, left_s=now.left_s - cost_s) > cost_s

    def is_small(self, trial: Trial, incumbent: Trial | None, now: Now) -> bool:
        """Whether what the pairs have shown so far saves or costs less than the pairs that would settle it."""
        active = 0.0 if incumbent is None or incumbent is trial else incumbent.log_ratio or 0.0
        gap = abs((trial.log_ratio or 0.0) - active)
        at_stake_s = saving_s(gap, 0.0, pass_share=self._pass_share(active, now), left_s=now.left_s)
        return at_stake_s < (MAX_PAIRS - len(trial.log_ratios)) * self._pair_s(now)

    def _pair_s(self, now: Now) -> float:
        if self._pairs_s:
            return statistics.median(self._pairs_s)
        return 0.0 if now.pass_s is None else pair_s(now.pass_s)

    def _pass_share(self, active: float, now: Now) -> float:
        """Share of a step that the pass of what training runs on takes; 1 where nobody has timed it."""
        eager_s = statistics.median(self._eagers_s) if self._eagers_s else now.pass_s
        return 1.0 if eager_s is None or not now.step_s else min(1.0, eager_s * math.exp(-active) / now.step_s)

    @property
    def _seen_s(self) -> dict[Candidate, float]:
        return {one.candidate: one.compile_s for one in self._trials.values() if one.compile_s and not one.failed}

    def expected_compile_s(self, candidate: Candidate) -> float:
        """Seconds that compiling the candidate is likely to take."""
        seen_s, known_s = self._seen_s, self._remembered_s
        return expected_compile_s(candidate, num_leaves=self._num_leaves, seen_s=seen_s, remembered_s=known_s)
