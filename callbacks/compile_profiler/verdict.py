"""From what was seen to one verdict."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from compile_profiler.records import Compiles, Decision, Drift, Event, Reason, Sample, Speedup, Verdict
from compile_profiler.stats import NET_LOSSES, first_outcome, lost, speedup

DriftPolicy = Literal["fallback", "warn", "off"]

RECENT_STEPS = 64
STORM_STEPS = 16
"""More of the last ``RECENT_STEPS`` steps that compile are a storm. Healthy runs settle after a few graphs: one for a
ragged last batch, two or three for a varying length, a few for ``batch_idx % k``; torch's limit is 8 for one frame."""
LOSING_STEPS = 8
"""So many are one if they take more time than compiling saves: past the beginning healthy runs compile nothing."""
GUARD_SHARE = 0.2
"""A share of the compiled pass from which on the check of its guards is named as what eats the gain."""

SKIPPED = "skipped"
"""Void reason of a pair on a batch whose optimizer step a gradient scaler has skipped."""
ALARM = "alarm"
"""Void reason of a pair that was not due: the loss of its step was not finite."""
UNSCHEDULED = frozenset({SKIPPED, ALARM})
DRIFT_RUN = 3  # judged samples outside tolerance in a row: one alone can be an unlucky batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a verdict is weighed against.

    Attributes:
        min_speedup: below it the run goes back to eager; 1.02, because less is not worth a compiler in the loop.
        confidence: at least this share of decisions for speed is right; 0.95, which eight unanimous pairs reach.
        max_pairs: evidence budget of one decision; 40 find a gain of 1.1 in the noise of a shared machine (a standard
            deviation of 0.1 in a log-ratio) and cost eighty blocks of passes. 0: compile, observe, never measure.
        drift: ``fallback``: results that keep differing end in eager; ``warn``, ``off``: they do not.
        fallback: ``False``: the reason is reported, the run stays compiled.
    """

    min_speedup: float = 1.02
    confidence: float = 0.95
    max_pairs: int = 40
    drift: DriftPolicy = "fallback"
    fallback: bool = True

    def __post_init__(self) -> None:
        if not (self.min_speedup > 0 and math.isfinite(self.min_speedup)):
            raise ValueError(
                f"min_speedup must be a positive number, got {self.min_speedup}. "
                "It is the ratio of eager to compiled time that is worth keeping; 1.02 asks for 2 %."
            )
        if not 0 < self.confidence < 1:
            raise ValueError(f"confidence must lie between 0 and 1, got {self.confidence}. 0.95 is usual.")
        if self.max_pairs < 0:
            raise ValueError(f"max_pairs must be at least 0, got {self.max_pairs}. 0 observes without measuring.")
        if self.drift not in get_args(DriftPolicy):
            raise ValueError(f"drift must be one of {', '.join(get_args(DriftPolicy))}, got {self.drift!r}.")


def judge(
    samples: Sequence[Sample],
    compiles: Compiles,
    *,
    limits: Limits,
    step: int,
    config: Mapping[str, Any],
    num_compiled_steps: int,
    num_steps_seen: int,
    num_recent_compiling: int = 0,
    recent_compile_s: float = 0.0,
    evidence: Sequence[Sample] | None = None,
    left_out: Event | None = None,
    never_ran: bool = False,
    other_targets: Sequence[str] = (),
    validations: Sequence[Sample] = (),
) -> Verdict:
    """The verdict on everything seen since the question was opened; call it again after each pair.

    Weighed in this order: results that are not finite, drift, nothing compiled, recompiling without end, speed. Void
    samples never enter the speed, but what they computed counts. Pairs of different shapes are pooled: each compares
    one batch with itself, so its sign is fair whatever the shape.

    The first pairs that decide are the decision; later ones can only show that what was kept has been lost (`lost`).
    To ask afresh, after a new shape or a recompile, hand in the samples since then.

    Args:
        samples: all pairs since the question was opened, in order, the void ones included.
        compiles: what the compiler did; its totals count the stage ``train``.
        limits: what the user asked for.
        step: x-axis number to put on the verdict.
        config: the configuration of the compiled arm, to put on the verdict.
        num_compiled_steps: training steps that ran under the compiled arm.
        num_steps_seen: training steps of either arm.
        num_recent_compiling: of the last ``RECENT_STEPS`` steps, those in which something was compiled.
        recent_compile_s: wall seconds that these took more than other steps.
        evidence: what the speed is judged on where it is not the pairs: windows of real steps.
        left_out: where the target's own function was left in eager, if only helpers that it calls were compiled.
        never_ran: whether the step is known not to call the target.
        other_targets: what to try where nothing was compiled, as the user writes it.
        validations: what was compared on batches of validation.

    >>> faster = [Sample(step=n, eager_s=0.013, compiled_s=0.010) for n in range(8)]
    >>> verdict = judge(
    ...     faster, Compiles(graphs=1), limits=Limits(), step=50, config={}, num_compiled_steps=50, num_steps_seen=50
    ... )
    >>> verdict.decision, verdict.reason, verdict.message
    ('compiled', 'gain', 'Compiled is 1.30x faster (1.30x to 1.30x, 8 pairs); kept.')
    """
    decision, reason, message = (
        _not_finite([*samples, *validations], limits)
        or _drifts(samples, validations, limits)
        or _nothing_compiled(
            compiles, num_compiled_steps, limits, left_out=left_out, never_ran=never_ran, other_targets=other_targets
        )
        or _recompile_limit(compiles, limits)
        or _recompile_storm(compiles, num_recent_compiling, recent_compile_s, limits)
        or _recompiling_loses(compiles, num_recent_compiling, recent_compile_s, samples, limits, num_steps_seen)
        or _speed(samples if evidence is None else evidence, limits, num_steps_seen, guard_s=compiles.guard_s)
    )
    return Verdict(decision=decision, reason=reason, message=message, step=step, config=dict(config))


def persistent_drift(samples: Sequence[Sample]) -> tuple[Drift, int] | None:
    """The drift that completed the first three judged samples in a row outside tolerance, and the first one's step.

    Samples whose drift could not be judged neither count nor interrupt the row.

    >>> far = [Sample(step=n, eager_s=1.0, compiled_s=1.0, drift=Drift(within_tolerance=False)) for n in (5, 10, 15)]
    >>> persistent_drift(far[:2]) is None, persistent_drift(far)[1]
    (True, 5)
    """
    row: list[int] = []
    for sample in samples:
        drift = sample.drift
        if drift is not None and drift.within_tolerance is not None:
            row = [] if drift.within_tolerance else [*row, sample.step]
            if len(row) == DRIFT_RUN:
                return drift, row[0]
    return None


_Finding = tuple[Decision, Reason, str]


def _against(reason: Reason, finding: str, limits: Limits) -> _Finding:
    """A finding that ends in eager, unless the user wants findings without consequences."""
    if limits.fallback:
        return "eager", reason, f"{finding}; training goes on in eager."
    return "compiled", reason, f"{finding}; kept all the same (fallback=False)."


def _not_finite(samples: Sequence[Sample], limits: Limits) -> _Finding | None:
    for sample in samples:
        if sample.drift is not None and sample.drift.eager_finite and sample.drift.compiled_finite is False:
            finding = f"Compiled gave NaN or infinity at step {sample.step} where eager gave finite numbers"
            return _against("non_finite", finding, limits)
    return None


def _drifts(samples: Sequence[Sample], validations: Sequence[Sample], limits: Limits) -> _Finding | None:
    # Steps that a gradient scaler has skipped are rare, and ordinary pairs between them say nothing about them.
    ordinary = [sample for sample in samples if sample.void != SKIPPED]
    skipped = [sample for sample in samples if sample.void == SKIPPED]
    found = next(filter(None, map(persistent_drift, (ordinary, skipped, validations))), None)
    if found is None or limits.drift != "fallback":
        return None
    drift, since = found
    named = {"loss": drift.loss_rel, "gradients": drift.grad_rel}
    by = " and ".join(f"{what} by {distance:.1e}" for what, distance in named.items() if distance is not None)
    details = [f"tolerance {drift.tolerance:.1e}"] if drift.tolerance is not None else []
    details += [f"most in {drift.worst_parameter}"] if drift.worst_parameter is not None else []
    if drift.worst_effect is not None and (drift.effect_rel is None or drift.effect_rel > (drift.tolerance or 0.0)):
        details += [drift.worst_effect + (f" by {drift.effect_rel:.1e}" if drift.effect_rel is not None else "")]
    where = "batches of validation" if drift.stage == "validate" else "pairs"
    return _against(
        "drift",
        f"Compiled differs from eager in {by or 'its results'}"
        + (f" ({', '.join(details)})" if details else "")
        + f", in {DRIFT_RUN} {where} in a row from step {since} on",
        limits,
    )


def _nothing_compiled(
    compiles: Compiles,
    num_compiled_steps: int,
    limits: Limits,
    *,
    left_out: Event | None,
    never_ran: bool,
    other_targets: Sequence[str],
) -> _Finding | None:
    if not num_compiled_steps or (compiles.graphs != 0 and left_out is None):
        return None
    skipped = [event for event in compiles.events if event.kind == "skipped_frame" and event.stage == "train"]
    cause = left_out or next(iter(skipped), None)
    if compiles.graphs:
        finding = "The target was left in eager and only helpers that it calls were compiled"
    else:
        finding = f"The compiler made no graph in {num_compiled_steps} step" + "s" * (num_compiled_steps != 1)
    if never_ran:
        finding += ", because the step does not call the target"
    elif cause is not None and cause.file:
        finding += f", because of {Path(cause.file).name}:{cause.line}"
    if other_targets:
        finding += f", try {' or '.join(other_targets)}"
    return _against("nothing_compiled", finding, limits)


def _recompile_limit(compiles: Compiles, limits: Limits) -> _Finding | None:
    if not compiles.limit_hits:
        return None
    train = [event for event in compiles.events if event.stage == "train"]
    hit = next((event for event in train if event.kind == "limit_hit"), None)
    finding = "The recompile limit was reached"
    if hit is not None:
        finding += (f" in {hit.function}" if hit.function else "") + f" at step {hit.step}"
    finding += ", so that code is no longer compiled"
    finding += _in_vain(compiles)
    # What has changed and what to write instead: said at the hit, else at the last recompile before it.
    why = [event for event in train if event.kind == "recompile" and hit is not None and _at_one_place(event, hit)]
    told = [hit.hint.partition("runs in eager. ")[2]] if hit is not None else []
    told += [text for event in reversed(why) for text in (event.hint, event.detail)]
    explained = next((text for text in told if text), None)
    if explained:
        finding += f" ({_in_one_sentence(explained)})"
    return _against("recompile_limit", finding, limits)


def _at_one_place(event: Event, other: Event) -> bool:
    places = [(one.file, one.line, one.function, one.cause) for one in (event, other)]
    return places[0] == places[1]


def _in_one_sentence(text: str) -> str:
    """Several sentences joined by semicolons.

    >>> _in_one_sentence("self.n changes. Keep it as a tensor.")
    'self.n changes; keep it as a tensor'
    """
    return re.sub(r"\. ([A-Z])(?=[a-z]* )", lambda match: f"; {match[1].lower()}", text).removesuffix(".")


def _recompile_storm(
    compiles: Compiles, num_recent_compiling: int, recent_compile_s: float, limits: Limits
) -> _Finding | None:
    if num_recent_compiling <= STORM_STEPS:
        return None
    return _against("recompile_storm", _lately(compiles, num_recent_compiling, recent_compile_s), limits)


def _recompiling_loses(
    compiles: Compiles,
    num_recent_compiling: int,
    recent_compile_s: float,
    samples: Sequence[Sample],
    limits: Limits,
    num_steps_seen: int,
) -> _Finding | None:
    """No storm, but more is lost than compiled steps save; what a run compiles at first has left the window."""
    used = [sample for sample in samples if sample.void is None]
    if num_recent_compiling < LOSING_STEPS or num_steps_seen < 2 * RECENT_STEPS or not used:
        return None
    saved_s = RECENT_STEPS * statistics.median(sample.eager_s - sample.compiled_s for sample in used)
    if recent_compile_s <= saved_s:
        return None
    finding = f"{_lately(compiles, num_recent_compiling, recent_compile_s)}, more than compiling saves in them"
    return _against("recompile_storm", finding, limits)


def _lately(compiles: Compiles, num_recent_compiling: int, recent_compile_s: float) -> str:
    compiled = [event for event in compiles.events if event.kind in ("recompile", "graph") and event.stage == "train"]
    worst = max(compiled, key=lambda event: event.count, default=None)
    where = f", most often in {worst.function}" if worst is not None and worst.function else ""
    lost = f", which took {recent_compile_s:.2g} s"
    return f"Something was compiled in {num_recent_compiling} of the last {RECENT_STEPS} steps{where}{lost}" + (
        _in_vain(compiles)
    )


def _in_vain(compiles: Compiles) -> str:
    tried = [remedy.change for remedy in compiles.remedies]
    return f", although it was healed with {' and '.join(tried)}" if tried else ""


def _speed(samples: Sequence[Sample], limits: Limits, num_steps_seen: int, *, guard_s: float | None) -> _Finding:
    if not limits.max_pairs:
        return "compiled", "disabled", "Compiled and observed, not measured (max_pairs=0)."
    used = [sample for sample in samples if sample.void is None]
    log_ratios = [sample.log_ratio for sample in used]
    outcome, num_pairs = first_outcome(
        log_ratios, min_speedup=limits.min_speedup, confidence=limits.confidence, max_pairs=limits.max_pairs
    )
    seen = speedup(used[:num_pairs], limits.confidence)
    if outcome == "pending":
        so_far = f": {_figures(seen)} so far" if num_pairs else ""
        return "undecided", "pending", f"No decision yet after {num_steps_seen} steps{so_far}."
    if outcome == "no_gain":
        below = f"below the {limits.min_speedup:.2f}x asked for"
        below += _guards(guard_s, used[:num_pairs])
        return _against("no_gain", f"Compiling gains nothing here: {_figures(seen)}, {below}", limits)
    too_close = f"too close to the {limits.min_speedup:.2f}x asked for"
    unclear = f"No clear answer: {_figures(seen)}, {too_close}{_guards(guard_s, used[:num_pairs])}"
    if outcome == "inconclusive" and (seen.median or 0) < 1:
        return _against("inconclusive", unclear, limits)
    # Kept on a gain of 2 %, given up only when slower than eager: between the two nothing is to be won by switching.
    if lost(log_ratios[num_pairs:], min(0.0, math.log(limits.min_speedup))):
        now = _figures(speedup(used[-NET_LOSSES:], limits.confidence))
        return _against("no_gain", f"Compiled has stopped gaining since it was kept: {now}", limits)
    if outcome == "inconclusive":
        return "compiled", "inconclusive", f"{unclear}; kept, being no slower than eager."
    return "compiled", "gain", f"Compiled is {seen.median:.2f}x faster{_spread(seen)}; kept."


def _guards(guard_s: float | None, used: Sequence[Sample]) -> str:
    """What checking guards takes of a compiled pass, where that is much of it.

    >>> _guards(0.004, [Sample(step=0, eager_s=0.01, compiled_s=0.01)])
    ' (40 % of a compiled pass go into checking which graph applies)'
    """
    share = None if guard_s is None else guard_s / statistics.median(sample.compiled_s for sample in used)
    if share is None or share < GUARD_SHARE:
        return ""
    return f" ({100 * min(share, 1):.0f} % of a compiled pass go into checking which graph applies)"


def _figures(seen: Speedup) -> str:
    return f"{seen.median:.2f}x{_spread(seen)}"


def _spread(seen: Speedup) -> str:
    pairs = f"{seen.num_pairs} pair" + "s" * (seen.num_pairs != 1)
    return f" ({pairs})" if seen.low is None else f" ({seen.low:.2f}x to {seen.high:.2f}x, {pairs})"
