"""What a search for the best configuration has found out, candidate by candidate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from compile_profiler.plain import Record

Status = Literal["untried", "tried", "skipped", "dropped", "chosen"]
EAGER = "eager"
"""Name of the arm that is no candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateResult(Record):
    """What is known of one configuration.

    Attributes:
        name: ``target``, ``mode`` and kind of shapes as one text. Of a target of several submodules, the names are
            joined by ``+``.
        target: what is compiled.
        mode: the mode of ``torch.compile``; ``None``: the default one.
        dynamic: how ``torch.compile`` takes shapes.
        status: ``untried``: not looked at yet; ``tried``: being measured; ``skipped``: never tried; ``dropped``: tried,
            and not the best; ``chosen``: the best so far, which training runs on.
        why: the reason of that, in a phrase.
        step: x-axis number at which it was first tried.
        compile_s: wall seconds of compiling it; ``expected_compile_s``: what that was reckoned at beforehand.
        speedup: eager pass over its pass, median of the pairs; ``speedup_low``, ``speedup_high``: its interval.
        num_pairs: pairs that were used; ``num_void``: pairs that were not.
        end_to_end: eager step over its step; ``end_to_end_low``, ``end_to_end_high``: its interval.
        end_to_end_method: ``estimate`` (from pairs) or ``windows`` (of real steps).
        peak_bytes: of tensors allocated during one of its passes.
        loss_rel: relative distance of its loss from eager's in the last pair compared; ``grad_rel``: of its gradients.
    """

    name: str
    target: str
    mode: str | None = None
    dynamic: bool | None = None
    status: Status = "untried"
    why: str = ""
    step: int | None = None
    compile_s: float | None = None
    expected_compile_s: float | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    num_pairs: int = 0
    num_void: int = 0
    end_to_end: float | None = None
    end_to_end_low: float | None = None
    end_to_end_high: float | None = None
    end_to_end_method: str | None = None
    peak_bytes: int | None = None
    loss_rel: float | None = None
    grad_rel: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch(Record):
    """From this step on, training runs on the candidate of this name, or on ``eager``."""

    step: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchReport(Record):
    """The search as a whole.

    Attributes:
        active: name of the candidate that training runs on, or ``eager``.
        settled: whether the search has ended.
        spent_s: seconds that compiling and measuring candidates have taken.
        budget_s: seconds that they may take: a share of the run.
        run_s: expected length of the run in eager, as of the beginning of the search.
        run_is_assumed: nobody knows that length; ``run_s`` is an assumption.
        candidates: all of them, in order of preference, those that are no option here included.
        switches: what training has run on, and since when.
    """

    active: str = EAGER
    settled: bool = False
    spent_s: float = 0.0
    budget_s: float | None = None
    run_s: float | None = None
    run_is_assumed: bool | None = None
    candidates: tuple[CandidateResult, ...] = ()
    switches: tuple[Switch, ...] = ()

    def stages(self) -> tuple[str, ...]:
        """What changes seldom: what training runs on, how far each candidate is.

        >>> SearchReport(candidates=(CandidateResult(name="step/default", target="step"),)).stages()
        ('eager', 'False', 'untried')
        """
        return self.active, str(self.settled), *(one.status for one in self.candidates)
