"""How a search has ended, in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from compile_profiler.outlook import Prospect
from compile_profiler.records import Reason
from compile_profiler.trial import Trial, outcome_of, times
from compile_profiler.verdict import Limits


def kept(trial: Trial, others: Sequence[Trial], *, is_sure: bool, limits: Limits) -> tuple[Reason, str]:
    """Reason and message where a candidate has won.

    Args:
        trial: which.
        others: candidates that were tried, too.
        is_sure: the last comparison was decided by evidence, not by an estimate.
        limits: of the callback.
    """
    figures = f"{times(trial.log_ratio)} eager in a pass and {times(trial.log_step_ratio)} in a whole step"
    num = 1 + sum(one.status == "dropped" for one in others)
    tried = "the only one tried" if num == 1 else f"the best of {num} tried"
    by = "" if is_sure else ", by estimate"
    gains = outcome_of(
        trial.log_ratios, min_speedup=limits.min_speedup, confidence=limits.confidence, max_num=limits.max_pairs
    )
    # The winner was compared with the one before it; the verdict's word is on eager.
    reason: Reason = "gain" if gains == "gain" or (is_sure and num == 1) else "inconclusive"
    return reason, f"{trial.name} is {figures} ({tried}{by}); kept."


def gave_up(
    dropped: Sequence[Trial], prospects: Sequence[tuple[Trial, Prospect]], *, left_s: float, budget_s: float
) -> tuple[Reason, str]:
    """Reason and message where training stays in eager.

    Args:
        dropped: candidates that were tried.
        prospects: those that were not, and what trying them would have promised.
        left_s: seconds left of the run.
        budget_s: seconds that the search may cost.
    """
    measured = [trial for trial in dropped if trial.failed is None]
    if measured:
        figures = ", ".join(f"{trial.name} {trial.why}" for trial in measured)
        return "no_gain", f"No configuration gains here: {figures}; training goes on in eager."
    failed = [trial for trial in dropped if trial.failed is not None]
    if failed:
        assert failed[0].failed is not None
        what = "; ".join(f"{trial.name}: {trial.why}" for trial in failed)
        return failed[0].failed, f"No configuration can be used ({what}); training goes on in eager."
    if not prospects:
        return "unsupported", "There is no configuration to try in this run; training goes on in eager."
    trial, prospect = max(prospects, key=lambda one: one[1].worth_s)
    message = f"The run is too short to find out: about {left_s:.0f} s are left, and {trial.name} "
    message += f"would take about {prospect.compile_s:.0f} s to compile"
    if prospect.worth_s <= 0:
        message += f" and hardly save more than {prospect.saving_s:.0f} s"
    else:
        message += f", more than a search may risk here ({budget_s:.0f} s)"
    return "no_gain", f"{message}; training goes on in eager."
