"""The arithmetic of evidence: what a finished sequence of pairs says about two arms.

Everything here is a pure function of numbers. The decision rests on signs alone, so it needs no variance, no
normal distribution and no protection from outliers; the interval is for people to read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy import special

from compile_profiler.records import Sample, Speedup

Outcome = Literal["gain", "no_gain", "inconclusive", "pending"]
Floats = npt.NDArray[np.float64]

MIN_INTERVAL_VALUES = 6  # below, no interval of the median reaches 0.95 (5 values: 0.9375), so none is shown
CLIP_SDS = 2.0  # farther out a value is a spike, which must neither make nor hide a correlation of neighbours
CLEAR_SDS = 3.0  # noise does not carry values over a margin that they clear by this much on average
# Ten pairs say little about their correlation, so the estimate starts from 30 that had shown 0.22, as simulation chose:
# a lower start lets more correlated runs through, a higher one delays the decision on independent pairs.
PRIOR_LAG1, PRIOR_VALUES = 0.22, 30
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
    median = (ordered[(num - 1) // 2] + ordered[num // 2]) / 2
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


def independence(excess: Sequence[float] | Floats) -> float:
    """Share of the evidence in the signs of ``excess`` that is left where neighbours resemble each other, in [0, 1].

    ``(1 - s) / (1 + s)``, where ``s`` is the lag-1 correlation of the signs: one independent sign is worth so many of
    these. It follows from the correlation ``r`` of the values as ``2 / pi * asin(r)``, which is steadier to
    estimate: values are clipped at two robust standard deviations, the small-sample bias of about ``-2 / n`` is
    taken out, and the estimate is drawn towards 0.22 with the weight of 30 values. Values that clear zero by three
    robust standard deviations keep all their evidence: their signs do not depend on the noise.

    >>> independence([1.0] * 8)
    1.0
    >>> independence([1.0, -1.0] * 10)  # neighbours that oppose each other are no bonus
    1.0
    >>> wave = [1.0, 1.0, -1.0, -1.0]
    >>> round(independence(wave * 4), 2), round(independence([*wave[:2] * 4, *wave[2:] * 4]), 2)
    (0.76, 0.53)
    """
    num, median = len(excess), float(np.median(excess))
    centred = np.asarray(excess, dtype=float) - median
    sd = 1.4826 * float(np.median(np.abs(centred)))  # robust; 1.4826 takes the median deviation to a normal's sd
    if abs(median) > CLEAR_SDS * sd:
        return 1.0
    clipped = np.clip(centred, -CLIP_SDS * sd, CLIP_SDS * sd) if sd else np.sign(centred)
    power = float(clipped @ clipped) or 1.0
    raw = float(clipped[1:] @ clipped[:-1]) / power
    lag1 = (num * raw + 2 + PRIOR_VALUES * PRIOR_LAG1) / (num + PRIOR_VALUES)
    of_signs = 2 / math.pi * math.asin(min(max(lag1, 0.0), 1.0))
    return (1 - of_signs) / (1 + of_signs)


def first_outcome(
    log_ratios: Sequence[float], *, min_speedup: float, confidence: float, max_pairs: int
) -> tuple[Outcome, int]:
    """What the first deciding prefix of ``log_ratios`` decided, and how many pairs that took.

    Two one-sided sign e-processes on ``log_ratio - log(min_speedup)``, each stopped at 2/alpha. Pairs that come
    after the decision do not change it; see `lost` for those. A pair exactly at the margin speaks for neither side
    and is skipped: the remaining signs keep their guarantee, while half a win each would only dilute it. It does use
    up budget, so that a clock too coarse to tell the arms apart ends in ``inconclusive``.

    That pairs are independent is the one assumption. The log of the evidence is multiplied by `independence`, which
    holds the error within 40 pairs below 5 % up to a lag-1 correlation of 0.3 (3.8 %; left alone 8.4 %), not much
    beyond. Replacing pairs by medians of three when the correlation exceeds 0.2 does not hold it (5.7 %): ten pairs
    cannot tell on which side of 0.2 they are.

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
    have not decided; ``pending`` before. Eight unanimous pairs decide at 0.95 where they clear the margin
    by more than their noise; near it, one or two more.

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


def end_to_end(*, step_s: float, eager_s: float, compiled_s: float, own_s: float = 0.0) -> float:
    """Speedup of the whole step while the compiled arm is active, if the rest of the step takes as long under both.

    ``(step_s - own_s + eager_s - compiled_s) / step_s``, where ``step_s`` is the compiled step, loading and optimizer
    included, and ``own_s`` what the callback adds to it. Real steps overlap with their neighbours, a synchronised pass
    does not: where ``step_s`` comes out shorter than its own pass, nothing is left for the rest of the step, and the
    speedup is that of the pass.

    >>> end_to_end(step_s=10.0, eager_s=8.0, compiled_s=4.0)
    1.4
    """
    rest_s = max(step_s - compiled_s, 0.0)
    return (max(rest_s - own_s, 0.0) + eager_s) / (rest_s + compiled_s)


def end_to_end_bracket(sample: Sample) -> tuple[float, float] | None:
    """Lowest and highest speedup of the whole step that a pair and the time of a compiled step allow.

    Two things are not known, and each is taken both ways:

    - Where the device lags behind Python, the rest of the step hides behind the longer pass, so that the whole step
      gains less than the passes differ: if launching sets the pace, only what launching differs. On a device that keeps
      step with Python the two are one.
    - What Python does takes longer in a real step than in a block of passes, whose caches are warm. Of compiled it is
      known how much (``coldness``; 1.0 to 2.7 in the jobs of docs/benchmarks.md); eager may take as many seconds more,
      as where it repeats the same few operations, or as many times longer. Work of a device does not.

    ``None`` without the time of a whole step.

    >>> pair = Sample(step=1, eager_s=6.0, compiled_s=2.0, eager_host_s=4.0, compiled_host_s=2.0, step_s=8.0)
    >>> end_to_end_bracket(pair)
    (1.25, 1.5)
    >>> import dataclasses
    >>> pair = Sample(step=1, eager_s=4.0, compiled_s=2.0, eager_host_s=4.0, compiled_host_s=2.0, step_s=8.0)
    >>> end_to_end_bracket(dataclasses.replace(pair, coldness=1.5))
    (1.25, 1.375)
    """
    if sample.step_s is None:
        return None
    of_step = partial(end_to_end, step_s=sample.step_s, own_s=sample.own_s)
    eager_s, compiled_s = sample.eager_s, sample.compiled_s
    if sample.eager_host_s is None or sample.compiled_host_s is None:
        return (of_step(eager_s=eager_s, compiled_s=compiled_s),) * 2
    found = []
    for eager_host_s, compiled_host_s in when_cold(
        sample.coldness, sample.compiled_host_s, sample.eager_host_s, sample.compiled_host_s
    ):
        found.append(of_step(eager_s=eager_host_s, compiled_s=compiled_host_s))
        found.append(of_step(eager_s=max(eager_s, eager_host_s), compiled_s=max(compiled_s, compiled_host_s)))
    return min(found), max(found)


def when_cold(coldness: float | None, known_s: float, *warm_s: float) -> list[tuple[float, ...]]:
    """What Python's seconds in blocks of passes become in a real step: as many more of each, or as many times longer.

    Args:
        coldness: how much longer than ``known_s`` it was in real steps; below 1 Python waited in the block, for a
            device that was behind.
        known_s: seconds of the pass that has been seen in real steps.
        *warm_s: seconds of passes, that one among them.

    >>> when_cold(1.5, 2.0, 4.0, 2.0)
    [(5.0, 3.0), (6.0, 3.0)]
    """
    cold = max(coldness or 1.0, 1.0)
    extra_s = (cold - 1) * known_s
    return [tuple(seconds + extra_s for seconds in warm_s), tuple(cold * seconds for seconds in warm_s)]


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
