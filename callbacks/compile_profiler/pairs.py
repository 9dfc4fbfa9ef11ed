"""The pair on a batch, or a void one that says why there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from compile_profiler import host
from compile_profiler.arms import Arm
from compile_profiler.guard import Guard
from compile_profiler.meeting import Exchange, largest
from compile_profiler.notices import first_line
from compile_profiler.probe import Draft, Probe
from compile_profiler.records import Drift, Memory, Sample
from compile_profiler.sandbox import StateTooLargeError
from compile_profiler.step_door import NoLossError
from compile_profiler.windows import StepTime

MAX_ERRORS = 3
"""Pairs that may fail before measuring is given up: a third failure is no accident."""

_VOID = (None, "compiled", "no_loss", "error", "out_of_memory", "state_too_large")
"""Why the times of a pair are not to be used; of several reasons, on several ranks, the last in this row counts."""
_GIVEN_UP = {
    "state_too_large": "no pairs can be measured: more mutable objects hang on the module than can be copied",
    "out_of_memory": "a pair ran out of memory",
    "error": f"{MAX_ERRORS} pairs have failed",
}


class Pairs:
    """Takes pairs for as long as they can be had; an error in one never reaches the run.

    Args:
        probe: measures one pair.
        eager: the arm that serves as the measure.
        compiled: the arm that is measured.
        compiled_something: whether anything was compiled since the pair began.
        compares: whether to keep what the arms computed differently.
        together: context of the passes that all ranks make together; it yields the error of this one, or ``None``.
        validation: the compiled arm of the validation step, where that is compiled.
        tell: told when a pair fails, and when no more can be had.

    Attributes:
        stopped: no more pairs can be had.
        error: what made the last failed pair fail, without its traceback.
    """

    def __init__(
        self,
        probe: Probe,
        *,
        eager: Arm,
        compiled: Guard,
        compiled_something: Callable[[], bool],
        compares: bool,
        together: Callable[[], AbstractContextManager[Callable[[], Exception | None]]] = lambda: nullcontext(_none),
        validation: Guard | None = None,
        tell: Callable[[str], None] = host.warn,
    ) -> None:
        self._probe = probe
        self._eager = eager
        self._compiled = compiled
        self._compiled_something = compiled_something
        self._compares = compares
        self._together = together
        self._validation = validation
        self.tell = tell
        self._num_errors = 0
        self._pass_s: list[float] = []
        self.stopped = False
        self.error: Exception | None = None

    @property
    def memory(self) -> Memory | None:
        """Peak bytes of both arms, once they have been measured."""
        return self._probe.memory

    @property
    def pass_s(self) -> float | None:
        """Seconds of this rank's last compiled pass that waited for no other rank."""
        return self._pass_s[-1] if self._pass_s else None

    def take(
        self, call: tuple[tuple[Any, ...], dict[str, Any]], *, step: int, ordinary: StepTime | None = None
    ) -> Exchange[Sample]:
        """The pair on a batch.

        Each rank compares its arms for itself. If all could, they time them together, and the slowest counts.

        Args:
            call: what ``training_step`` was called with.
            step: x-axis number of the batch.
            ordinary: the time of one step in the window that ended at this pair.
        """
        with self._drafted(call) as (draft, void):
            number = None if draft is None else draft.num_passes
            # Patiently: one of them may have compiled a variant that draws eager's random numbers.
            heard = yield from largest(
                {"void": _VOID.index(void), "num_passes": number, "measures_peaks": self.memory is None}, patient=True
            )
            drift = draft.drift if draft is not None and self._compares else None
            if heard["void"] or draft is None:
                return self._void(step, _VOID[int(heard["void"] or 0)], drift)
            self._pass_s.append(draft.drafts_s[1])
            number = int(heard["num_passes"] or 1)
            own, void = self._timed(draft, number, measures_peaks=bool(heard["measures_peaks"]))
            found = {} if drift is None else _words(drift)
            own |= {"step_s": None, "own_s": 0.0, "coldness": None}
            if ordinary is not None:
                own |= {"step_s": ordinary.step_s, "own_s": ordinary.own_s, "coldness": self._compiled.coldness}
            heard = yield from largest({"void": _VOID.index(void), **own, **found})
        if drift is not None:
            drift = _common(drift, heard)
        void = _VOID[int(heard["void"] or 0)]
        if void not in (None, "compiled"):
            return self._void(step, void, drift)
        return Sample(
            step=step,
            **{name: heard[name] for name in own},  # type: ignore[arg-type]
            num_passes=number,
            shape=draft.shape,
            void=void,
            drift=drift,
        )

    def compare_validation(self, call: tuple[tuple[Any, ...], dict[str, Any]], *, step: int) -> Sample | None:
        """What the arms compute differently on a batch of validation; ``None`` where that is not compiled."""
        if self._validation is None or not self._compares:
            return None
        args, kwargs = call
        try:
            return self._probe.validation(self._eager, self._validation, *args, step=step, **kwargs)
        except Exception as error:
            return self._void(step, self._name(error), None)

    @contextmanager
    def _drafted(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Iterator[tuple[Draft | None, str | None]]:
        """The pair compared, or why not; inside the context it can be timed."""
        args, kwargs = call
        pair = self._probe.pair(self._eager, self._compiled, *args, **kwargs)
        try:
            draft = pair.__enter__()
        except Exception as error:
            failure = error
        else:
            try:
                yield draft, None
            finally:
                pair.__exit__(None, None, None)
            return
        yield None, self._name(failure)

    def _timed(
        self, draft: Draft, num_passes: int, *, measures_peaks: bool
    ) -> tuple[dict[str, float | None], str | None]:
        """Seconds of both arms here, with why they are not to be used."""
        own: dict[str, float | None] = {"eager_s": 0.0, "compiled_s": 0.0, "eager_host_s": 0.0, "compiled_host_s": 0.0}
        failure: Exception | None = None
        with self._together() as failure_within:
            try:
                for name, time in self._probe.times(draft, num_passes).items():
                    own |= {f"{name}_s": time.pass_s, f"{name}_host_s": time.host_s}
                void = "compiled" if self._compiled_something() else None
                if measures_peaks:
                    self._probe.peaks(draft)
            except Exception as error:
                failure = error
            failure = failure or failure_within()
        return own, void if failure is None else self._name(failure)

    def _void(self, step: int, void: str | None, drift: Drift | None) -> Sample:
        """A pair without times; some reasons mean that no pair can be had in this run, on any rank."""
        self._num_errors += int(void == "error")
        if void in _GIVEN_UP and (void != "error" or self._num_errors == MAX_ERRORS):
            self.stopped = True
            self.tell(f"{_GIVEN_UP[void]}; training goes on unmeasured.")
        return Sample(step=step, eager_s=0.0, compiled_s=0.0, void=void, drift=drift)

    def _name(self, error: Exception) -> str:
        """What to call a pair that failed here."""
        self.error = error.with_traceback(None)  # whose frames hold the pair's tensors
        if isinstance(error, NoLossError):
            return "no_loss"
        if isinstance(error, StateTooLargeError):
            return "state_too_large"
        if isinstance(error, torch.OutOfMemoryError):
            return "out_of_memory"
        if self._num_errors == 0:
            self.tell(f"a pair failed and is not used, the run is not affected: {first_line(error)}")
        return "error"


def _none() -> None:
    """No error: passes that nobody else takes part in raise theirs."""


def _words(drift: Drift) -> dict[str, float | None]:
    """What of a drift the ranks exchange: of each number the worst is the largest."""
    within, eager, compiled = drift.within_tolerance, drift.eager_finite, drift.compiled_finite
    return {
        "loss_rel": drift.loss_rel,
        "grad_rel": drift.grad_rel,
        "noise_floor": drift.noise_floor,
        "away_from_parallel": None if drift.grad_cosine is None else -drift.grad_cosine,
        "effect_rel": drift.effect_rel,
        "beyond": None if within is None else not within,
        "compiled_alone_not_finite": None if compiled is None else bool(eager) and not compiled,
        "not_finite": None if eager is None else not eager,
    }


def _common(drift: Drift, heard: dict[str, float | None]) -> Drift:
    """The worst drift of all ranks, with this rank's own where there is no worse or better.

    A rank on which eager gives NaN as well is no witness; one on which only compiled does is enough.
    """
    alone, cosine, beyond = heard["compiled_alone_not_finite"], heard["away_from_parallel"], heard["beyond"]
    finite = drift.eager_finite if heard["not_finite"] is None else not heard["not_finite"]
    return replace(
        drift,
        loss_rel=heard["loss_rel"],
        grad_rel=heard["grad_rel"],
        noise_floor=heard["noise_floor"],
        effect_rel=heard["effect_rel"],
        worst_effect=drift.worst_effect if heard["effect_rel"] == drift.effect_rel else None,
        grad_cosine=None if cosine is None else -cosine,
        worst_parameter=drift.worst_parameter if heard["grad_rel"] == drift.grad_rel else None,
        within_tolerance=None if beyond is None else not beyond,
        eager_finite=True if alone else finite,
        compiled_finite=False if alone else drift.compiled_finite and finite,
    )
