"""What follows from all that one fit has seen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from compile_profiler import machine
from compile_profiler.advice import advice, reads_overwritten
from compile_profiler.explainer import Explainer
from compile_profiler.ledger import Ledger
from compile_profiler.meeting import Finding
from compile_profiler.notices import failure
from compile_profiler.records import Reason, Sample, Verdict
from compile_profiler.verdict import Limits, judge

MAX_SHAPES_TO_REOPEN = 3
_MAX_BACKOFF = 10
MAX_MESSAGE = 800


class Judgement:
    """The verdict of one fit, and the question that it answers.

    Args:
        limits: what the user asked for.
        config: what is compiled how.
        ledger: what has been seen.
        explainer: what the compiler has done.
    """

    def __init__(self, limits: Limits, config: dict[str, Any], ledger: Ledger, explainer: Explainer) -> None:
        self._limits = limits
        self._config = config
        self._ledger = ledger
        self._explainer = explainer
        self.verdict = Verdict(config=config)

    def steps_per_pair(self, pair_every_n_steps: int, overhead_budget: float) -> float:
        """Optimizer steps between two pairs: fixed while undecided, afterwards what the budget allows."""
        # A model that compiles in every pair would otherwise be measured in vain for ever.
        interval = pair_every_n_steps << min(self._ledger.num_void_in_a_row, _MAX_BACKOFF)
        if self.verdict.decision == "undecided":
            return interval
        return max(interval, self._ledger.steps_per_pair(overhead_budget))

    def reopen(self, why: str, step: int) -> bool:
        """Another regime than the one that was decided on: ask again, from here on; the run stays compiled."""
        if self.verdict.reason not in ("gain", "inconclusive"):
            return False
        self._ledger.ask()
        self.verdict = Verdict(message=f"Asked again: {why}.", step=step, config=self._config)
        return True

    def another_regime(self, sample: Sample) -> str | None:
        """Why the question is to be asked again, if this pair shows another regime or the answer has rested enough."""
        shapes = {earlier.shape for earlier in self._ledger.samples}
        # A run of ever new lengths was decided on many of them; its next new one is nothing new.
        if sample.void is None and shapes and sample.shape not in shapes and len(shapes) <= MAX_SHAPES_TO_REOPEN:
            return "batches of another shape came"
        rested = len(self._ledger.asked_samples) >= 2 * self._limits.max_pairs
        return "the answer was not clear" if self.verdict.reason == "inconclusive" and rested else None

    def judge(self, step: int, common: Finding, *, by_windows: bool) -> Verdict:
        """The verdict on everything seen since the question was opened.

        Args:
            step: x-axis number to put on it.
            common: what all ranks have found.
            by_windows: whether speed is judged on windows of real steps.
        """
        compiles = self._explainer.compiles()
        if common.without_graph:
            compiles = replace(compiles, graphs=0)
        if common.limit_hits:
            compiles = replace(compiles, limit_hits=common.limit_hits)
        return judge(
            self._ledger.asked_samples,
            compiles,
            limits=self._limits,
            step=step,
            config=self._config,
            num_compiled_steps=self._ledger.num_compiled_steps,
            num_steps_seen=self._ledger.num_steps,
            num_recent_compiling=max(self._ledger.num_recent_compiling, common.num_recent_compiling),
            evidence=self._ledger.asked_windows if by_windows else None,
            left_out=self._explainer.observer.left_out,
            never_ran=self._explainer.never_ran,
            other_targets=self._explainer.other_targets or (),
            recent_compile_s=self._ledger.recent_compile_s,
            validations=self._ledger.validations,
        )

    def on_failure(self, error: Exception, step: int, rank: int | None) -> Verdict:
        """The verdict on a compiled step that failed, on this rank of several or alone."""
        reason: Reason = "compile_error" if self._explainer.observer.failed(error) else "runtime_error"
        if isinstance(error, torch.OutOfMemoryError):
            reason = "out_of_memory"
        message = failure(reason, error, advice(error, machine.system()), rank=rank)
        return Verdict(decision="eager", reason=reason, message=message, step=step, config=self._config)


def after_trouble(error: Exception) -> Verdict:
    """The verdict on an error outside of the user's step: mostly one of our own.

    >>> after_trouble(KeyError("x")).message
    "The profiler itself failed and has taken itself off: KeyError: 'x'"
    """
    if reads_overwritten(error):  # what the module holds cannot be kept for a retry
        message = failure("runtime_error", error, advice(error, machine.system()))
        return Verdict(decision="eager", reason="runtime_error", message=message)
    message = f"The profiler itself failed and has taken itself off: {type(error).__name__}: {error}"
    return Verdict(decision="eager", reason="disabled", message=message)


def is_failure(verdict: Verdict) -> bool:
    """Whether an error of the compiled step has decided."""
    return verdict.reason in ("compile_error", "runtime_error", "out_of_memory")


def packed(verdict: Verdict) -> str:
    """A verdict as a text for other ranks, which have the same configuration.

    >>> unpacked(packed(Verdict(step=7)), {}).step
    7
    """
    plain = {**verdict.to_dict(), "config": {}, "message": verdict.message[:MAX_MESSAGE]}
    return json.dumps(plain, ensure_ascii=False)


def unpacked(text: str, config: Mapping[str, Any]) -> Verdict:
    """The verdict in such a text."""
    return replace(Verdict.from_dict(json.loads(text)), config=dict(config))
