"""What has been seen of one candidate in a search."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from compile_profiler.candidates import Candidate
from compile_profiler.outlook import Tried
from compile_profiler.records import Reason, Sample
from compile_profiler.results import CandidateResult, Status
from compile_profiler.stats import Interval, Outcome, first_outcome, log_e_value, median_interval, speedup, when_cold


class Pass(NamedTuple):
    """Seconds of one forward and backward pass, and those of them until Python had launched it."""

    total_s: float
    host_s: float | None = None


def step_gain(running: Pass, before: Pass, after: Pass, *, step_s: float, coldness: float = 1.0) -> tuple[float, float]:
    """Log-ratio of a whole step with the pass ``before`` over one with ``after``: the lower and the upper estimate.

    What a step does besides its pass is taken to last as long under each. Whether the device sets the pace of a step
    or Python does, and what Python takes in a real step, is not known: see `stats.end_to_end_bracket`.

    Args:
        running: the pass of what training ran on when the step was timed.
        before: the pass of what is compared with.
        after: the pass of the candidate.
        step_s: seconds of that step.
        coldness: how much longer launching takes in a real step than in a block of passes.

    >>> [round(math.exp(gain), 2) for gain in step_gain(Pass(6.0, 4.0), Pass(6.0, 4.0), Pass(2.0, 2.0), step_s=10.0)]
    [1.25, 1.67]
    """

    def gain(running_s: float, before_s: float, after_s: float) -> float:
        rest_s = max(step_s - running_s, 0.0)
        return math.log((rest_s + before_s) / (rest_s + after_s))

    passes_s = [one.total_s for one in (running, before, after)]
    hosts_s = [one.host_s for one in (running, before, after) if one.host_s is not None]
    if len(hosts_s) < len(passes_s):
        return (gain(*passes_s),) * 2
    gains = []
    for cold_s in when_cold(coldness, hosts_s[0], *hosts_s):
        gains.append(gain(*cold_s))
        gains.append(gain(*map(max, passes_s, cold_s)))
    return min(gains), max(gains)


@lru_cache(maxsize=1024)
def _evidence(wins: int, trials: int) -> float:
    return float(log_e_value(wins, trials))


def _may_decide(log_ratios: Sequence[float], margin: float, bar: float) -> bool:
    """Whether the signs of some beginning of ``log_ratios`` could decide, if all of them were independent."""
    wins = losses = 0
    for log_ratio in log_ratios:
        wins, losses = wins + (log_ratio > margin), losses + (log_ratio < margin)
        if _evidence(max(wins, losses), wins + losses) >= bar:
            return True
    return False


def outcome_of(log_ratios: Sequence[float], *, min_speedup: float, confidence: float, max_num: int) -> Outcome:
    """`stats.first_outcome`, in microseconds where the signs alone say that nothing is decided.

    >>> outcome_of([0.3] * 7, min_speedup=1.02, confidence=0.95, max_num=12)
    'pending'
    >>> outcome_of([0.3] * 8, min_speedup=1.02, confidence=0.95, max_num=12)
    'gain'
    """
    if not _may_decide(log_ratios[:max_num], math.log(min_speedup), math.log(2 / (1 - confidence))):
        return "inconclusive" if len(log_ratios) >= max_num else "pending"
    return first_outcome(log_ratios, min_speedup=min_speedup, confidence=confidence, max_pairs=max_num)[0]


def times(log_ratio: float | None) -> str:
    """A log-ratio as people read it.

    >>> times(0.0), times(None)
    ('1.00x', 'unmeasured')
    """
    return "unmeasured" if log_ratio is None else f"{math.exp(log_ratio):.2f}x"


class Trial:
    """One candidate from the moment it is tried; before, its place in the list.

    Args:
        candidate: which.
        status: of it in the search.
        why: the reason of that, in a phrase.
    """

    def __init__(self, candidate: Candidate, *, status: Status = "untried", why: str = "") -> None:
        self.candidate = candidate
        self.status = status
        self.why = why
        self.failed: Reason | None = None
        self.lost_to: Trial | None = None
        self.step: int | None = None
        self.compile_s: float | None = None
        self.expected_compile_s: float | None = None
        self.peak_bytes: int | None = None
        self.is_begun = False  # something was heard of it since it was chosen
        self.samples: list[Sample] = []
        self.log_ratios: list[float] = []  # of the usable pairs
        self.num_void_in_a_row = 0
        self.couples: list[float] = []  # log-ratios of real steps: the incumbent's over this one's
        self.gains: list[tuple[float, float]] = []  # estimates of the same, from pairs
        self.base = 0.0  # log-ratio of whole steps: eager's over the incumbent's, when it was tried

    @property
    def name(self) -> str:
        """The candidate's."""
        return self.candidate.name

    @property
    def log_ratio(self) -> float | None:
        """Of an eager pass over its pass: the median of the pairs."""
        return statistics.median(self.log_ratios) if self.log_ratios else None

    @property
    def host_share(self) -> float | None:
        """Of its pass, the share after which Python has launched it."""
        shares = [
            one.compiled_host_s / one.compiled_s
            for one in self.samples
            if one.void is None and one.compiled_host_s is not None
        ]
        return statistics.median(shares) if shares else None

    def tried(self) -> Tried:
        """What others can learn from it."""
        return Tried(candidate=self.candidate, log_ratio=self.log_ratio, host_share=self.host_share, failed=self.failed)

    def add_pair(self, sample: Sample, running: Trial | None) -> None:
        """A pair of eager with this one, taken while training ran on ``running`` (``None``: on eager)."""
        self.is_begun = True
        self.samples.append(sample)
        if sample.void is not None:
            self.num_void_in_a_row += 1
            return
        self.num_void_in_a_row = 0
        if sample.step_s is not None:
            eager = Pass(sample.eager_s, sample.eager_host_s)
            mine = Pass(sample.compiled_s, sample.compiled_host_s)
            under = eager if running is None else mine if running is self else running.pass_beside(eager)
            # What it is compared with: what training runs on, or eager, where that is this one already.
            before = eager if running is self else under
            cold = max(sample.coldness or 1.0, 1.0)
            step_s = max(sample.step_s - sample.own_s, 0.0)
            self.gains.append(step_gain(under, before, mine, step_s=step_s, coldness=cold))
        self.log_ratios.append(sample.log_ratio)

    def pass_beside(self, eager: Pass) -> Pass:
        """Its pass on a batch whose eager pass took so long."""
        total_s = eager.total_s * math.exp(-(self.log_ratio or 0.0))
        share = self.host_share
        return Pass(total_s, None if share is None else share * total_s)

    def differences(self, other: Trial) -> list[float]:
        """How much faster its passes are than the other's, as log-ratios: pairs of one shape, each in their order."""
        theirs: dict[str, deque[float]] = defaultdict(deque)
        for sample in other.samples:
            if sample.void is None:
                theirs[sample.shape].append(sample.log_ratio)
        mine = (one for one in self.samples if one.void is None)
        return [one.log_ratio - theirs[one.shape].popleft() for one in mine if theirs[one.shape]]

    def estimated_gain(self) -> tuple[float, float] | None:
        """Log-ratio of the incumbent's step over its step, estimated from pairs: lower and upper; ``None``: unknown."""
        if not self.gains:
            return None
        lower, upper = zip(*self.gains, strict=True)
        return statistics.median(lower), statistics.median(upper)

    @property
    def log_step_ratio(self) -> float | None:
        """Of eager's step over its step: the median, by windows or else estimated; ``None``: not known."""
        if self.couples:
            return self.base + statistics.median(self.couples)
        gain = self.estimated_gain()
        return None if gain is None else self.base + sum(gain) / 2

    def whole_step(self, confidence: float) -> tuple[Interval, str] | None:
        """Log-ratio of eager's step over its step with its interval, and the method; ``None``: not known."""
        if self.couples:
            seen, method = median_interval(self.couples, confidence), "windows"
        else:
            method = "estimate"
            lower = median_interval([low for low, _ in self.gains], confidence)
            upper = median_interval([high for _, high in self.gains], confidence)
            if lower.median is None or upper.median is None:
                return None
            seen = Interval(median=(lower.median + upper.median) / 2, low=lower.low, high=upper.high, num=lower.num)
        shifted = (None if log is None else log + self.base for log in (seen.median, seen.low, seen.high))
        median, low, high = shifted
        return Interval(median=median, low=low, high=high, num=seen.num), method

    def result(self, confidence: float) -> CandidateResult:
        """The row of the report."""
        pairs = speedup(self.samples, confidence)
        whole = self.whole_step(confidence)
        seen, method = (Interval(), None) if whole is None else whole
        ratios = [None if log is None else math.exp(log) for log in (seen.median, seen.low, seen.high)]
        compared = [one.drift for one in self.samples if one.drift is not None]
        target = self.candidate.target
        return CandidateResult(
            name=self.name,
            target=target if isinstance(target, str) else "+".join(target),
            mode=self.candidate.mode,
            dynamic=self.candidate.dynamic,
            status=self.status,
            why=self.why,
            step=self.step,
            compile_s=self.compile_s,
            expected_compile_s=self.expected_compile_s,
            speedup=pairs.median,
            speedup_low=pairs.low,
            speedup_high=pairs.high,
            num_pairs=pairs.num_pairs,
            num_void=pairs.num_void,
            end_to_end=ratios[0],
            end_to_end_low=ratios[1],
            end_to_end_high=ratios[2],
            end_to_end_method=method,
            peak_bytes=self.peak_bytes,
            loss_rel=compared[-1].loss_rel if compared else None,
            grad_rel=compared[-1].grad_rel if compared else None,
        )
