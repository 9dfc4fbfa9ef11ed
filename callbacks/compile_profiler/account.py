"""What each step adds to what is known: what was compiled in it, whether it is an ordinary one, its time."""

from __future__ import annotations

from typing import Any

from compile_profiler.explainer import Explainer
from compile_profiler.ledger import Ledger
from compile_profiler.records import Stage
from compile_profiler.windows import StepTimes


class Account:
    """Follows the steps of one fit.

    Attributes:
        news: there is something to judge.
        compiled_again: something was compiled after the first compiles were over.
        compile_s: wall seconds that this process has spent on compiling.
        is_warm: enough steps in a row were clean.

    Args:
        explainer: what the compiler does.
        ledger: where steps are added up.
        times: where their times are taken.
        warmup_steps: clean steps in a row after which what follows is ordinary.
    """

    def __init__(self, explainer: Explainer, ledger: Ledger, times: StepTimes, *, warmup_steps: int) -> None:
        self._explainer = explainer
        self._ledger = ledger
        self._times = times
        self._warmup_steps = warmup_steps
        self._num_clean = 0
        self._has_been_warm = False  # the first compiles of this fit are over
        self.news = True
        self.compiled_again = False
        self.compile_s = 0.0
        self.is_warm = warmup_steps == 0

    def look(self, stage: Stage, batch: Any, *, step: int) -> bool:
        """Take what was compiled as events of ``stage``; whether there was anything.

        Args:
            stage: of the step that has ended.
            batch: what it was called with.
            step: its x-axis number.
        """
        found = self._explainer.look(stage, batch, step=step)
        if found:
            self.compile_s += self._explainer.observer.news.compile_s
        return found

    def step(self, step: int, seconds: float, *, batch: Any, boundary: bool, compiled: bool, own_s: float) -> None:
        """A training step has ended.

        Args:
            step: its x-axis number.
            seconds: that it took.
            batch: what it was called with.
            boundary: it ended with an optimizer step.
            compiled: it ran on the compiled arm.
            own_s: what the callback took beside it.
        """
        compiling = not self._explainer.is_idle() and self.look("train", batch, step=step)
        self._ledger.add_step(step, seconds, compiled=compiled, compiling=compiling)
        if compiling:
            self.news, self._num_clean = True, 0
            self.compiled_again |= self._has_been_warm
        else:
            self._num_clean += 1
        self.is_warm = self._num_clean >= self._warmup_steps
        self._has_been_warm |= self.is_warm
        self._times.step(step, boundary=boundary, compiling=compiling, warm=self.is_warm, own_s=own_s)

    def disturb(self) -> None:
        """Something other than a step comes."""
        self._times.pause()
        self._num_clean = min(self._num_clean, self._warmup_steps - 1)
        self.is_warm = False
