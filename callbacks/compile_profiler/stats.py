"""The arithmetic of evidence: what a finished sequence of pairs says about two arms.

Everything here is a pure function of numbers. The decision rests on signs alone, so it needs no variance, no
normal distribution and no protection from outliers; the interval is for people to read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy import special

from compile_profiler.records import Sample, Speedup

Outcome = Literal["gain", "no_gain", "inconclusive", "pending"]
Floats = npt.NDArray[np.float64]

MIN_INTERVAL_VALUES = 6  # below, no interval of the median reaches 0.95 (5 values: 0.9375), so none is shown
CLIP_SDS = 2.0  # where a value stops counting as more than an outlier in the correlation of neighbours
NET_LOSSES = 8  # height of the CUSUM in `lost`: false alarms and delays are tabled in its docstring


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A median with the interval that holds the true one at the stated confidence; ``None`` where not known."""

    median: float | None = None
    low: float | None = None
    high: float | None = None
    num: int = 0


def median_interval(values: Sequence[float], confidence: float) -> Interval:
    """Median of ``values`` and its interval from order statistics, whatever their distribution.

    The number of values below the true median is binomial with probability 1/2; the interval runs between the
    outermost pair of order statistics that this leaves no more than ``1 - confidence`` outside of.

    >>> median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 0.95)
    Interval(median=3.5, low=1.0, high=6.0, num=6)
    >>> median_interval([1.0, 2.0, 3.0], 0.95)
    Interval(median=2.0, low=None, high=None, num=3)
    """
    ordered = sorted(values)
    num = len(ordered)
    if not num:
        return Interval()
    median = float(np.median(ordered))
    tails = special.bdtr(np.arange(num // 2), num, 0.5)
    cut = int(np.count_nonzero(tails <= (1 - confidence) / 2))
    if num < MIN_INTERVAL_VALUES or not cut:
        return Interval(median=median, num=num)
    return Interval(median=median, low=ordered[cut - 1], high=ordered[num - cut], num=num)


def speedup(samples: Iterable[Sample], confidence: float) -> Speedup:
    """Median ratio of the usable pairs with its interval, and why the others were not used.

    Each pair compares one batch with itself, so pairs of different shapes may be pooled: the median is then that
    of the shapes as the run meets them.

    >>> pairs = [Sample(step=1, eager_s=2.0, compiled_s=1.0), Sample(step=2, eager_s=0, compiled_s=0, void="compiled")]
    >>> result = speedup(pairs, 0.95)
    >>> round(result.median, 6), result.low, result.num_pairs, result.void
    (2.0, None, 1, {'compiled': 1})
    """
    samples = list(samples)
    used = [sample for sample in samples if sample.void is None]
    void = Counter(sample.void for sample in samples if sample.void is not None)
    # Ratios are averaged as logs, as the evidence has them: the median of an even number is a geometric mean.
    logs = median_interval([sample.log_ratio for sample in used], confidence)
    median, low, high = (None if log is None else math.exp(log) for log in (logs.median, logs.low, logs.high))
    return Speedup(
        median=median,
        low=low,
        high=high,
        num_pairs=len(used),
        num_void=void.total(),
        void=dict(void),
        num_shapes=len({sample.shape for sample in used}),
    )


def log_e_value(wins: npt.ArrayLike, trials: npt.ArrayLike) -> Any:
    """Natural log of `e_value`, element by element; in logs because 2**trials leaves the range of a float.

    Beyond about a thousand trials the incomplete beta function underflows where losses prevail; the log is then
    ``-inf``, too little evidence rather than too much.

    >>> [round(float(log), 3) for log in log_e_value([0, 7, 8], [0, 7, 8])]
    [0.0, 3.462, 4.039]
    """
    won, tried = np.asarray(wins, dtype=float), np.asarray(trials, dtype=float)
    lost = tried - won
    with np.errstate(divide="ignore"):
        upper_half = np.log(special.betainc(lost + 1, won + 1, 0.5))
    return (tried + 1) * math.log(2) + special.betaln(won + 1, lost + 1) + upper_half


def e_value(wins: int, trials: int) -> float:
    """Evidence that a win is more likely than a loss: 1 says nothing, 2/alpha ends a two-sided question.

    The likelihood of the trials, averaged over success probabilities spread evenly on [1/2, 1], over their likelihood
    at 1/2. While a win is no more likely than a loss its expectation stays at most 1 at whatever moment one stops,
    so it exceeds 1/alpha with probability alpha at most, however often one looks.

    >>> e_value(7, 7) < 40 < e_value(8, 8)  # 2/alpha at a confidence of 0.95
    True
    """
    with np.errstate(over="ignore"):
        return float(np.exp(log_e_value(wins, trials)))


def independence(values: Sequence[float] | Floats) -> float:
    """Share of the evidence that is left when neighbouring values resemble each other, in [0, 1].

    ``(1 - r) / (1 + r)`` with the lag-1 correlation ``r``: so many independent values are worth as much as one of
    these. Values are clipped at two robust standard deviations, so that a spike neither makes nor hides a
    correlation; ``r`` is freed of its small-sample bias of ``-(1 + 3 r) / n`` (Kendall, 1954).

    >>> independence([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])  # constant: nothing to correlate
    1.0
    >>> independence([1.0, -1.0] * 10)  # neighbours that oppose each other are not counted as a bonus
    1.0
    >>> independence([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])  # a trend: each value is known from the one before
    0.0
    """
    num = len(values)
    centred = np.asarray(values, dtype=float) - np.median(values)
    scale = CLIP_SDS * 1.4826 * float(np.median(np.abs(centred)))  # 1.4826: from the median deviation to a normal's sd
    clipped = np.clip(centred, -scale, scale) if scale > 0 else np.sign(centred)
    power = float(clipped @ clipped)
    if num <= 3 or power == 0:
        return 1.0
    raw = float(clipped[1:] @ clipped[:-1]) / power
    lag1 = min(max((raw + 1 / num) / (1 - 3 / num), 0.0), 1.0)
    return (1 - lag1) / (1 + lag1)


def first_outcome(
    log_ratios: Sequence[float], *, min_speedup: float, confidence: float, max_pairs: int
) -> tuple[Outcome, int]:
    """What the first deciding prefix of ``log_ratios`` decided, and how many pairs that took.

    Two one-sided sign e-processes on ``log_ratio - log(min_speedup)``, each stopped at 2/alpha. Pairs that come
    after the decision do not change it; see `lost` for those. A pair exactly at the margin speaks for neither side
    and is skipped: the remaining signs keep their guarantee, while half a win each would only dilute it. It does use
    up budget, so that a clock too coarse to tell the arms apart ends in ``inconclusive``.

    Independence of the pairs is the one assumption. The log of the evidence is multiplied by `independence`;
    medians of three instead, when the correlation exceeds 0.2, were tried and let 5.7 % of the runs through at a
    correlation of 0.3, because eight to fifteen pairs cannot place a correlation on either side of a threshold.

    >>> first_outcome([0.3] * 12, min_speedup=1.02, confidence=0.95, max_pairs=40)
    ('gain', 8)
    """
    excess = np.asarray(log_ratios[:max_pairs], dtype=float) - math.log(min_speedup)
    wins, losses = np.cumsum(excess > 0), np.cumsum(excess < 0)
    gain, no_gain = log_e_value(wins, wins + losses), log_e_value(losses, wins + losses)
    strongest = np.maximum(gain, no_gain)
    bar = math.log(2 / (1 - confidence))
    for last in np.flatnonzero(strongest >= bar):
        if strongest[last] * independence(excess[: last + 1]) >= bar:
            return ("gain" if gain[last] > no_gain[last] else "no_gain"), int(last) + 1
    return ("inconclusive" if len(log_ratios) >= max_pairs else "pending"), len(excess)


def decide(log_ratios: Sequence[float], *, min_speedup: float, confidence: float, max_pairs: int) -> Outcome:
    """Whether compiled is faster than ``min_speedup``: a function of the usable pairs so far, valid after each one.

    ``gain`` or ``no_gain`` is wrong in at most ``1 - confidence`` of the runs; ``inconclusive`` when ``max_pairs``
    have not decided; ``pending`` before.

    >>> decide([0.3] * 7, min_speedup=1.02, confidence=0.95, max_pairs=40)
    'pending'
    >>> decide([-0.1] * 8, min_speedup=1.02, confidence=0.95, max_pairs=40)
    'no_gain'
    >>> decide([0.3, -0.3] * 20, min_speedup=1.02, confidence=0.95, max_pairs=40)
    'inconclusive'
    """
    return first_outcome(log_ratios, min_speedup=min_speedup, confidence=confidence, max_pairs=max_pairs)[0]


def lost(log_ratios_since_decision: Sequence[float], margin: float = 0.0) -> bool:
    """Whether a compiled arm that was kept has since become slower than ``margin`` (a log-ratio; 0: than eager).

    A CUSUM of signs: a loss adds one, a win takes one away but never below zero, eight net losses are an alarm.
    Mean pairs to the alarm at margin 0, with a standard deviation of 0.1 in a log-ratio and 3 % of spikes:
    368,000 at a true ratio of 1.10 (a false alarm), 72 at 1.00, 19 at 0.95, 11 at 0.90. Measured sparsely, a
    pair every 200 steps, 100,000 steps hold 500 pairs: one false alarm in 700 such runs at 1.10.

    >>> lost([0.1] * 100 + [-0.1] * 7), lost([0.1] * 100 + [-0.1] * 8)
    (False, True)
    """
    net = 0
    for log_ratio in log_ratios_since_decision:
        net = net + 1 if log_ratio < margin else max(net - 1, 0)
        if net >= NET_LOSSES:
            return True
    return False


def end_to_end(*, step_s: float, eager_s: float, compiled_s: float) -> float:
    """Speedup of the whole step while the compiled arm is active, if the rest of the step takes as long under both.

    ``(step_s + eager_s - compiled_s) / step_s``, where ``step_s`` is the compiled step, loading and optimizer included.
    Real steps overlap with their neighbours, a synchronised pass does not: where ``step_s`` comes out shorter than
    its own pass, nothing is left for the rest of the step, and the speedup is that of the pass.

    >>> end_to_end(step_s=10.0, eager_s=8.0, compiled_s=4.0)
    1.4
    """
    rest_s = max(step_s - compiled_s, 0.0)
    return (rest_s + eager_s) / (rest_s + compiled_s)


def saved_s(*, num_compiled_steps: int, saved_per_step_s: float, compile_s: float, probe_s: float) -> float:
    """Seconds saved so far, net of compiling and measuring; negative until they are paid back.

    >>> saved_s(num_compiled_steps=1000, saved_per_step_s=0.25, compile_s=30.0, probe_s=10.0)
    210.0
    """
    return num_compiled_steps * saved_per_step_s - compile_s - probe_s


def break_even_step(
    *, first_compiled_step: int, saved_per_step_s: float, compile_s: float, probe_s: float
) -> int | None:
    """The step at which compiling and measuring are paid back, ``None`` where a compiled step saves nothing.

    >>> break_even_step(first_compiled_step=5, saved_per_step_s=0.25, compile_s=30.0, probe_s=10.0)
    165
    >>> break_even_step(first_compiled_step=5, saved_per_step_s=-0.1, compile_s=30.0, probe_s=10.0) is None
    True
    """
    if saved_per_step_s <= 0:
        return None
    return first_compiled_step + math.ceil((compile_s + probe_s) / saved_per_step_s)
