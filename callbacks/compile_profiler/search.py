"""Find the configuration that ends the run soonest: whom to compile, measure and keep, one decision at a time.

Training always runs on the *incumbent*, the best arm known; at first that is eager. One *challenger* at a time is
compiled and measured beside it, in pairs that train nothing, so one that fails costs no training step. It becomes the
incumbent or is dropped, and the loser's compiled code can go: two compiled arms are alive at most.

* **Whom** (`scout`). The candidate with the largest difference between what it is hoped to save until the end of the
  run and what finding out is likely to cost, if that is positive and there is room for it in the budget. So a short run
  compiles nothing, a job that Python holds up goes to CUDA graphs without trying the default mode first, one that the
  device holds up never tries them, and autotuning is left to runs of hours.
* **Pairs** (`duel`) compare it with eager (margin ``min_speedup``), or, pair by pair, with a compiled incumbent that
  has beaten eager before. What loses is dropped; against a compiled incumbent only by more than 5 %, because a pass
  does not show what else a step hides. What wins, and whose whole step is estimated to gain more than 15 %, is the
  incumbent at once.
* **Windows** of real steps, incumbent and challenger in turn, decide all else: what pairs have left open, and gains
  that the rest of a step may swallow. Twelve couples at most; if these do not decide, their median does. That the
  winner meets each challenger at once, not all finalists at the end, keeps losers out of memory and lets training run
  on the better one from then on.
* **Errors.** All comparisons are sign e-processes. The k-th one may err with ``(1 - confidence) / (k (k + 1))``, which
  adds up to ``1 - confidence`` however many follow.
* **Budget** (`purse`). ``search_budget`` of the run in eager is by how much the run may end later than eager because of
  the search. Compiling and pairs count in full, windows with what the challenger's steps took longer. Half of what an
  incumbent is estimated to save until the end may be spent as well: a gain found early pays for looking further.

Everything follows from the calls and their arguments, with no clock and no chance: ranks that make the same calls
come to the same actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from compile_profiler.candidates import Candidate, Pruned
from compile_profiler.duel import Duel, Lost, Measure, Try, Windows, Won
from compile_profiler.ending import gave_up, kept
from compile_profiler.outlook import Now
from compile_profiler.purse import Purse
from compile_profiler.records import Reason, Sample
from compile_profiler.results import EAGER, SearchReport, Switch
from compile_profiler.scout import Scout
from compile_profiler.trial import Trial
from compile_profiler.verdict import Limits, persistent_drift

SEARCH_BUDGET = 0.1
"""Share of the run in eager that the search may cost."""


@dataclass(frozen=True, slots=True)
class Settle:
    """The search has ended: stay with ``candidate`` (``None``: eager). Reason and message are those of a verdict."""

    candidate: Candidate | None
    reason: Reason
    message: str


Action = Try | Measure | Windows | Settle


class Search:
    """The state of one search; see the module for how it goes.

    Call ``next`` after each thing reported, or at any time: without news it gives the same action again. ``incumbent``
    says what training is to run on except in windows, ``alive`` what must be kept compiled.

    Args:
        candidates: to choose from, in order of preference among equals.
        pruned: those that are no option here, for the report.
        limits: of the callback; ``max_pairs`` is one more bound on the pairs of a challenger.
        search_budget: share of the run that the search may cost.
        num_leaves: modules without submodules, for a first guess of compile seconds.
        known: the winner of an earlier run of the same job: tried first and trained on from its first usable pair on;
            kept, with no other tried, if it still gains.
        known_speedup: of its whole step in that run: where it saves less than compiling costs, nothing is tried.
        remembered_s: compile seconds by name of candidate, from earlier runs of the same job.

    >>> search = Search([Candidate(), Candidate(mode="reduce-overhead")], limits=Limits(), num_leaves=100)
    >>> search.next(Now(step=5, step_s=0.03, seconds_left=40.0)).message
    'The run is too short to find out: about 40 s are left, and step/default would take about 20 s to compile \
and hardly save more than 6 s; training goes on in eager.'
    >>> search = Search([Candidate(), Candidate(mode="reduce-overhead")], limits=Limits(), num_leaves=100)
    >>> search.next(Now(step=5, step_s=0.03, seconds_left=4000.0, pass_s=0.02, host_s=0.01))
    Try(candidate=Candidate(target='step', mode=None, dynamic=None))
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        *,
        limits: Limits,
        num_leaves: int,
        pruned: Sequence[Pruned] = (),
        search_budget: float = SEARCH_BUDGET,
        known: Candidate | None = None,
        known_speedup: float | None = None,
        remembered_s: Mapping[str, float] | None = None,
    ) -> None:
        self._pruned = tuple(pruned)
        self._limits = limits
        self._trials = {candidate: Trial(candidate) for candidate in candidates}
        self._known = None if known is None else self._trials.get(known)
        self._known_speedup = known_speedup
        self._purse = Purse(search_budget)
        self._scout = Scout(self._trials, self._purse, num_leaves=num_leaves, remembered_s=remembered_s or {})
        self._duel: Duel | None = None
        self._asked: Trial | None = None  # whose pair is asked for
        self._incumbent: Trial | None = None
        self._is_sure = False  # the incumbent has won by evidence, not only by estimate
        self._num_comparisons = 0
        self._switches: list[Switch] = []
        self._settled: Settle | None = None
        self._now = Now(step=0)

    # -- what the caller reads ---------------------------------------------------------------------------------------

    @property
    def incumbent(self) -> Candidate | None:
        """What training is to run on, except in windows; ``None``: eager."""
        return None if self._incumbent is None else self._incumbent.candidate

    @property
    def challenger(self) -> Candidate | None:
        """What is being compiled or measured at present."""
        return None if self._duel is None else self._duel.challenger.candidate

    @property
    def alive(self) -> tuple[Candidate, ...]:
        """Candidates whose compiled code is still needed; that of others is to be released."""
        return tuple(one for one in self._trials if one in (self.incumbent, self.challenger))

    @property
    def spent_s(self) -> float:
        """Seconds that the search has cost so far."""
        return self._purse.spent_s

    def report(self) -> SearchReport:
        """Everything known now, candidate by candidate."""
        pruned = [Trial(candidate, status="skipped", why=why) for candidate, why in self._pruned]
        return SearchReport(
            active=EAGER if self._incumbent is None else self._incumbent.name,
            settled=self._settled is not None,
            spent_s=self._purse.spent_s,
            budget_s=self._purse.budget_s,
            run_s=self._purse.run_s,
            run_is_assumed=self._purse.run_is_assumed,
            candidates=tuple(one.result(self._limits.confidence) for one in [*self._trials.values(), *pruned]),
            switches=tuple(self._switches),
        )

    # -- what the caller reports -------------------------------------------------------------------------------------

    def compiled(self, candidate: Candidate, seconds: float) -> None:
        """Compiling the candidate has taken so many more seconds; call it whenever something of it was compiled."""
        trial = self._trials[candidate]
        trial.is_begun = True
        trial.compile_s = (trial.compile_s or 0.0) + seconds
        self._purse.spent_s += seconds

    def saw_pair(self, sample: Sample, seconds: float) -> None:
        """The pair that was asked for, void or not.

        Args:
            sample: ``step_s`` is that of training, whatever it ran on.
            seconds: what the pair took in all, without those reported by ``compiled``.
        """
        assert self._duel is not None
        assert self._asked is not None
        trial, drift = self._asked, sample.drift
        self._purse.spent_s += seconds
        # The incumbent's own step is known from when it was the challenger, compared with what was beaten then.
        trial.add_pair(sample if trial is self._duel.challenger else replace(sample, step_s=None), self._incumbent)
        if drift is not None and drift.eager_finite and drift.compiled_finite is False:
            self.failed(trial.candidate, "non_finite", "gave NaN or infinity where eager gave finite numbers")
        elif drift is not None and self._limits.drift == "fallback" and persistent_drift(trial.samples):
            self.failed(trial.candidate, "drift", "differed from eager in three pairs in a row")
        elif sample.void is None:
            self._scout.see(sample, seconds)
            if trial is self._known:
                self._run_on(trial)

    def saw_couple(self, sample: Sample) -> None:
        """Two windows of real steps: ``eager_s`` is a step of the incumbent, ``compiled_s`` one of the challenger."""
        assert self._duel is not None
        self._duel.saw_couple(sample)
        if sample.void is None:
            self._purse.spent_s += sample.num_passes * max(0.0, sample.compiled_s - sample.eager_s)

    def saw_memory(self, candidate: Candidate, peak_bytes: int) -> None:
        """Bytes of tensors that one pass of the candidate allocates at most."""
        self._trials[candidate].peak_bytes = peak_bytes

    def failed(self, candidate: Candidate, reason: Reason, message: str = "") -> None:
        """The candidate cannot be used: an error, no memory, drift, nothing compiled, compiling without end.

        If it was the incumbent, training is back on eager, those that only it has beaten are candidates again, and
        the search goes on.

        Args:
            candidate: which.
            reason: one word of the verdict's.
            message: what has happened, in a phrase.
        """
        trial = self._trials[candidate]
        was_incumbent, trial.failed = trial is self._incumbent, reason
        self._drop(trial, f"{reason}: {message}" if message else reason)
        self._settled = None
        for other in self._trials.values():
            if other.status == "skipped" or (other.lost_to is trial and other.status == "dropped"):
                other.status, other.why, other.lost_to = "untried", "", None
        if was_incumbent and self._duel is not None:  # its rival is gone: from now on against eager
            self._begin(self._duel.challenger)

    # -- what is next ------------------------------------------------------------------------------------------------

    def next(self, now: Now) -> Action:
        """What to do now."""
        self._now = now
        if self._purse.run_s is None:
            self._purse.begin(now)
            self._switches.append(Switch(step=now.step, name=EAGER))
        self._purse.earn(log_step_ratio=self._log_step_ratio, left_s=now.left_s)
        while self._settled is None:
            if self._duel is None:
                chosen = self._choose()
                if chosen is None:
                    self._settled = self._conclusion()
                    break
                self._begin(chosen)
            assert self._duel is not None
            hurry = self._purse.is_empty or self._scout.is_small(self._duel.challenger, self._incumbent, now)
            found = self._duel.next(hurry=hurry)
            if isinstance(found, Won):
                self._adopt(self._duel.challenger, is_sure=found.is_sure)
            elif isinstance(found, Lost):
                self._drop(self._duel.challenger, found.why, lost_to=self._incumbent if found.to_rival else None)
            else:
                if not isinstance(found, Windows):
                    self._asked = self._trials[found.candidate]
                return found
        return self._settled

    def _choose(self) -> Trial | None:
        if self._known is not None and self._known.status == "untried" and not self._known.samples:
            if self._known_speedup is None or self._scout.pays(self._known, self._known_speedup, self._now):
                return self._known
            for trial in self._trials.values():
                trial.why = f"{self._known.name} has won in an earlier run, too little for the time that is left"
            return None
        if self._known is not None and self._known.status == "chosen":
            for trial in self._trials.values():
                trial.why = trial.why or f"{self._known.name} has won in an earlier run of this job"
            return None
        return self._scout.choose(self._incumbent, self._now)

    def _begin(self, trial: Trial) -> None:
        trial.status, trial.why, trial.step, trial.is_begun = "tried", "", self._now.step, False
        trial.expected_compile_s = self._scout.expected_compile_s(trial.candidate)
        trial.couples, trial.gains, trial.base = [], [], self._log_step_ratio
        on_trust = trial is self._known and self._incumbent is None
        confidence = self._next_confidence
        self._duel = Duel(trial, self._incumbent, limits=self._limits, confidence=confidence, on_trust=on_trust)

    def _next_confidence(self) -> float:
        """Of one more comparison: what all of them may err adds up to what the user allows."""
        self._num_comparisons += 1
        return 1 - (1 - self._limits.confidence) / (self._num_comparisons * (self._num_comparisons + 1))

    def _adopt(self, trial: Trial, *, is_sure: bool) -> None:
        beaten = self._incumbent
        if beaten is not None and beaten is not trial:
            beaten.status, beaten.why, beaten.lost_to = "dropped", f"slower than {trial.name}", trial
        trial.status, trial.why = "chosen", "the best so far" if is_sure else "the best so far, by estimate"
        self._duel, self._is_sure = None, is_sure
        self._run_on(trial)

    def _drop(self, trial: Trial, why: str, *, lost_to: Trial | None = None) -> None:
        trial.status, trial.why, trial.lost_to = "dropped", why, lost_to
        if self._duel is not None and self._duel.challenger is trial:
            self._duel = None
        if self._incumbent is trial:
            self._run_on(None)

    def _run_on(self, trial: Trial | None) -> None:
        name = EAGER if trial is None else trial.name
        self._incumbent = trial
        if self._switches[-1].name != name:
            self._switches.append(Switch(step=self._now.step, name=name))

    @property
    def _log_step_ratio(self) -> float:
        """Eager's step over the incumbent's, as a log-ratio; 0 where it is not known."""
        return 0.0 if self._incumbent is None else self._incumbent.log_step_ratio or 0.0

    def _conclusion(self) -> Settle:
        left_out = [trial for trial in self._trials.values() if trial.status == "untried"]
        for trial in left_out:
            trial.status = "skipped"
        dropped = [trial for trial in self._trials.values() if trial.status == "dropped"]
        if self._incumbent is not None:
            reason, message = kept(self._incumbent, dropped, is_sure=self._is_sure, limits=self._limits)
            return Settle(self._incumbent.candidate, reason, message)
        prospects = [(trial, self._scout.prospect(trial, None, self._now)) for trial in left_out]
        budget_s = self._purse.budget_s or 0.0
        return Settle(None, *gave_up(dropped, prospects, left_s=self._now.left_s, budget_s=budget_s))
