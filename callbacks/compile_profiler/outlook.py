"""What trying a candidate could still save, what it is likely to cost: guesses, good enough to choose whom to try next.

A guess never decides what training runs on; it decides whether finding out is worth its price. The gain of a pass is
guessed as a log-ratio that adds up: what compiling gains, what replaying its launches as CUDA graphs gains on top, what
autotuning does. Figures measured on a sibling replace the guess of what they share.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from compile_profiler.candidates import WITHOUT_AUTOTUNE, Candidate
from compile_profiler.plain import Record
from compile_profiler.records import Reason

# Shares of a pass that a candidate is hoped to save. Measured in the jobs of docs/benchmarks.md on a GPU: compiling
# -5 to 70 %, CUDA graphs on top 0 to 50 % where launching sets the pace, autotuning a few per cent.
COMPILING_SAVES = 0.3
GRAPHS_SAVE = 0.4
AUTOTUNING_SAVES = 0.1
WHOLE_STEP_SAVES = 0.1  # more than `forward` or `blocks` alone: the loss, and what lies between
OTHER_TARGET_SAVES = 0.02  # `forward` or `blocks` where the whole step compiles well
HOST_SHARE = 0.7  # of a pass, where nobody has timed it: CUDA graphs are hoped to gain something, not everything
DEVICE_BOUND = 0.5  # a host that is done in half of a pass does not set its pace

# Seconds of compiling before any has been seen: 7 to 10 s for a handful of leaf modules (2 CPU cores), 17 to 60 s for
# ResNet-50 and GPT-2 small with their 130 to 160 (one H200).
FIRST_COMPILE_S, LEAF_COMPILE_S = 5.0, 0.15
TARGET_COSTS = {"blocks": 0.3}  # one compile serves all blocks
MODE_COSTS = {"reduce-overhead": 1.2, "max-autotune-no-cudagraphs": 4.0, "max-autotune": 4.5}

MIN_BLOCK_S, BLOCK_PASSES, MAX_BLOCK_S = 0.02, 4, 0.5  # a block of a pair, about as the probe makes it

ASSUMED_LEFT_S = 3600.0
"""Nobody knows how long the run is: it is taken to go on for another hour, at any time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Now(Record):
    """What the run knows of itself at this moment.

    Attributes:
        step: x-axis number.
        elapsed_s: seconds since training began.
        seconds_left: of training, at the pace of today; ``None``: nobody knows.
        step_s: of an ordinary training step on what it runs on now; ``None`` before one was timed.
        pass_s: of one eager forward and backward pass, if it was timed before any pair.
        host_s: of ``pass_s``, the seconds until Python had launched it.
        recompile_s: seconds that compiling again, for other shapes, has cost training so far.
    """

    step: int
    elapsed_s: float = 0.0
    seconds_left: float | None = None
    step_s: float | None = None
    pass_s: float | None = None
    host_s: float | None = None
    recompile_s: float = 0.0

    @property
    def left_s(self) -> float:
        """Seconds left, known or assumed."""
        return ASSUMED_LEFT_S if self.seconds_left is None else max(self.seconds_left, 0.0)

    @property
    def host_share(self) -> float | None:
        """Of an eager pass, the share after which Python has launched it."""
        return None if self.host_s is None or not self.pass_s else self.host_s / self.pass_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried(Record):
    """What is known of a candidate that was tried.

    Attributes:
        candidate: which.
        log_ratio: of its pairs, the median; ``None`` without any.
        host_share: of its pass, the share after which Python has launched it.
        failed: why it could not be measured to an end.
    """

    candidate: Candidate
    log_ratio: float | None = None
    host_share: float | None = None
    failed: Reason | None = None


def graphs_gain(host_share: float | None) -> float:
    """Log-ratio by which replaying launches is hoped to speed up a pass that Python launches in this share of it.

    >>> graphs_gain(0.4), round(graphs_gain(1.0), 2), graphs_gain(None) < graphs_gain(0.8)
    (0.0, 0.51, True)
    """
    share = HOST_SHARE if host_share is None else min(host_share, 1.0)
    pace = max(0.0, (share - DEVICE_BOUND) / (1 - DEVICE_BOUND))
    return -math.log1p(-GRAPHS_SAVE * pace)


def obstacle(candidate: Candidate, tried: Sequence[Tried], offered: Sequence[Candidate]) -> str | None:
    """Why a candidate is not to be tried now, whatever it could save, in a phrase; ``None``: nothing is in its way.

    Variants wait for what they vary: autotuning and dynamic shapes for the same without. A failure is taken to repeat
    itself in all that adds to what has failed; a candidate with CUDA graphs may fail because of them.

    >>> failed = Tried(candidate=Candidate(), failed="compile_error")
    >>> obstacle(Candidate(mode="reduce-overhead"), [failed], [])
    'step/default has failed (compile_error)'
    >>> obstacle(Candidate(target="forward"), [failed], []) is None
    True
    >>> obstacle(Candidate(mode="max-autotune"), [], [Candidate(mode="reduce-overhead")])
    'waits for step/reduce-overhead'
    """
    for one in tried:
        of_graphs = one.candidate.replays_graphs and not candidate.replays_graphs
        of_shapes = candidate.dynamic and one.failed in ("recompile_storm", "recompile_limit")
        if one.failed and one.candidate.target == candidate.target and not of_graphs and not of_shapes:
            return f"{one.candidate.name} has failed ({one.failed})"
    plainer = []
    if candidate.autotunes:
        plainer.append(replace(candidate, mode=WITHOUT_AUTOTUNE[str(candidate.mode)]))
    if candidate.dynamic:
        plainer.append(replace(candidate, dynamic=None))
    known = {one.candidate for one in tried}
    first = next((one for one in plainer if one in offered and one not in known), None)
    return None if first is None else f"waits for {first.name}"


def hoped_log_ratio(candidate: Candidate, tried: Sequence[Tried], *, host_share: float | None) -> float:
    """Eager pass over the candidate's pass, as a log-ratio that may well be reached.

    Args:
        candidate: whose.
        tried: what is known of others.
        host_share: of an eager pass, the share after which Python has launched it.

    >>> round(hoped_log_ratio(Candidate(), [], host_share=1.0), 2)
    0.36
    >>> default = Tried(candidate=Candidate(), log_ratio=0.2, host_share=0.4)
    >>> hoped_log_ratio(Candidate(mode="reduce-overhead"), [default], host_share=1.0)  # now the device sets the pace
    0.2
    """
    measured = [one for one in tried if one.log_ratio is not None]
    siblings = [one for one in measured if one.candidate.target == candidate.target]

    def distance(one: Tried) -> tuple[int, float]:
        theirs = one.candidate
        flags = (
            theirs.replays_graphs != candidate.replays_graphs,
            theirs.autotunes != candidate.autotunes,
            theirs.dynamic != candidate.dynamic,
        )
        return sum(flags), -(one.log_ratio or 0.0)

    nearest = min(siblings or measured, key=distance, default=None)
    if nearest is None:
        return -math.log1p(-COMPILING_SAVES) + _features(candidate, host_share)
    if not nearest.candidate.replays_graphs and nearest.host_share is not None:
        host_share = nearest.host_share
    hoped = (nearest.log_ratio or 0.0) + _features(candidate, host_share) - _features(nearest.candidate, host_share)
    if siblings:
        return hoped
    return hoped - math.log1p(-(WHOLE_STEP_SAVES if candidate.target == "step" else OTHER_TARGET_SAVES))


def _features(candidate: Candidate, host_share: float | None) -> float:
    graphs = graphs_gain(host_share) if candidate.replays_graphs else 0.0
    return graphs - (math.log1p(-AUTOTUNING_SAVES) if candidate.autotunes else 0.0)


def saving_s(hoped: float, active: float, *, pass_share: float, left_s: float) -> float:
    """Seconds saved until the end of the run, if a pass had the log-ratio ``hoped`` instead of the ``active`` one.

    Args:
        hoped: log-ratio of an eager pass over the candidate's.
        active: the same of what training runs on.
        pass_share: share of a step that its pass takes, as it runs now.
        left_s: seconds left, as it runs now.

    >>> round(saving_s(math.log(2.0), 0.0, pass_share=0.8, left_s=100.0), 9)
    40.0
    """
    return max(0.0, -math.expm1(active - hoped)) * pass_share * left_s


def expected_compile_s(
    candidate: Candidate,
    *,
    num_leaves: int,
    seen_s: Mapping[Candidate, float],
    remembered_s: Mapping[str, float],
) -> float:
    """Seconds that compiling the candidate is likely to take.

    Args:
        candidate: which.
        num_leaves: modules of the target that have no submodules.
        seen_s: seconds that others have taken in this run: they scale the guess.
        remembered_s: seconds by name of candidate, from earlier runs of the same job.

    >>> expected_compile_s(Candidate(), num_leaves=100, seen_s={}, remembered_s={})
    20.0
    >>> slow = {Candidate(): 40.0}
    >>> expected_compile_s(Candidate(mode="reduce-overhead"), num_leaves=100, seen_s=slow, remembered_s={})
    48.0
    """
    if candidate.name in remembered_s:
        return remembered_s[candidate.name]

    def prior_s(one: Candidate) -> float:
        costs = TARGET_COSTS.get(str(one.target), 1.0) * MODE_COSTS.get(one.mode or "default", 1.0)
        return costs * (FIRST_COMPILE_S + LEAF_COMPILE_S * num_leaves)

    scales = [seconds / prior_s(one) for one, seconds in seen_s.items()]
    return (statistics.median(scales) if scales else 1.0) * prior_s(candidate)


def pair_s(pass_s: float) -> float:
    """Seconds that a pair is likely to take, of passes like this one: each arm runs once, then a block.

    >>> round(pair_s(0.001), 3), round(pair_s(0.02), 3), round(pair_s(0.3), 3)
    (0.042, 0.2, 1.6)
    """
    return 2 * (pass_s + max(MIN_BLOCK_S, min(BLOCK_PASSES * pass_s, MAX_BLOCK_S)))


class Prospect(NamedTuple):
    """What trying a candidate promises: ``worth_s`` is ``saving_s`` less ``cost_s``, which includes ``compile_s``."""

    worth_s: float
    saving_s: float
    compile_s: float
    cost_s: float
