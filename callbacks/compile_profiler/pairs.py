"""The pair on a batch, or a void one that says why there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from compile_profiler import host
from compile_profiler.arms import Arm
from compile_profiler.guard import Guard
from compile_profiler.notices import first_line
from compile_profiler.probe import Probe
from compile_profiler.records import Memory, Sample
from compile_profiler.sandbox import StateTooLargeError
from compile_profiler.step_door import NoLossError
from compile_profiler.windows import StepTime

MAX_ERRORS = 3
"""Pairs that may fail before measuring is given up: a third failure is no accident."""


class Pairs:
    """Takes pairs for as long as they can be had; an error in one never reaches the run.

    Args:
        probe: measures one pair.
        eager: the arm that serves as the measure.
        compiled: the arm that is measured.
        compiled_something: whether anything was compiled since the pair began.
        compares: whether to keep what the arms computed differently.
        validation: the compiled arm of the validation step, where that is compiled.
    """

    def __init__(
        self,
        probe: Probe,
        *,
        eager: Arm,
        compiled: Guard,
        compiled_something: Callable[[], bool],
        compares: bool,
        validation: Guard | None = None,
    ) -> None:
        self._probe = probe
        self._eager = eager
        self._compiled = compiled
        self._compiled_something = compiled_something
        self._compares = compares
        self._validation = validation
        self._num_errors = 0
        self.stopped = False

    @property
    def memory(self) -> Memory | None:
        """Peak bytes of both arms, once they have been measured."""
        return self._probe.memory

    def take(
        self, call: tuple[tuple[Any, ...], dict[str, Any]], *, step: int, ordinary: StepTime | None = None
    ) -> Sample:
        """The pair on a batch.

        Args:
            call: what ``training_step`` was called with.
            step: x-axis number of the batch.
            ordinary: the time of one step in the window that ended at this pair.
        """
        args, kwargs = call
        try:
            sample = self._probe.measure(
                self._eager,
                self._compiled,
                *args,
                step=step,
                compiled_something=self._compiled_something,
                **kwargs,
            )
        except Exception as error:
            return Sample(step=step, eager_s=0.0, compiled_s=0.0, void=self._reason(error))
        if ordinary is not None:
            sample = replace(sample, step_s=ordinary.step_s, own_s=ordinary.own_s, coldness=self._compiled.coldness)
        return sample if self._compares else replace(sample, drift=None)

    def compare_validation(self, call: tuple[tuple[Any, ...], dict[str, Any]], *, step: int) -> Sample | None:
        """What the arms compute differently on a batch of validation; ``None`` where that is not compiled."""
        if self._validation is None or not self._compares:
            return None
        args, kwargs = call
        try:
            return self._probe.validation(self._eager, self._validation, *args, step=step, **kwargs)
        except Exception as error:
            return Sample(step=step, eager_s=0.0, compiled_s=0.0, void=self._reason(error))

    def _reason(self, error: Exception) -> str:
        """What to call a pair that failed; some failures mean that no pair can be had in this run."""
        if isinstance(error, NoLossError):
            return "no_loss"
        if isinstance(error, StateTooLargeError):
            self._stop(f"no pairs can be measured: {error}")
            return "state_too_large"
        if isinstance(error, torch.OutOfMemoryError):
            self._stop("a pair ran out of memory; training goes on unmeasured.")
            return "out_of_memory"
        self._num_errors += 1
        if self._num_errors == 1:
            host.warn(f"a pair failed and is not used, the run is not affected: {first_line(error)}")
        if self._num_errors == MAX_ERRORS:
            self._stop(f"{MAX_ERRORS} pairs have failed; training goes on unmeasured.")
        return "error"

    def _stop(self, message: str) -> None:
        host.warn(message)
        self.stopped = True
