"""What one fit has seen, added up into a report."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from compile_profiler.records import (
    Compiles,
    Drift,
    EndToEnd,
    Environment,
    Evidence,
    Memory,
    Ranks,
    Report,
    Sample,
    Time,
    Verdict,
)
from compile_profiler.stats import Interval, break_even_step, end_to_end_bracket, median_interval, saved_s, speedup
from compile_profiler.verdict import RECENT_STEPS, SKIPPED, UNSCHEDULED

ORDINARY_STEPS = 50
"""Steps whose median is the ordinary step that a compiling step is compared with."""
INPUT_BOUND_SHARE = 0.5
TRUSTED_BRACKET = 1.05
"""An estimate whose two ends are further apart than this is not to be trusted: windows of real steps tell."""
TRUSTED_INTERVAL = 1.10
"""Nor one whose interval is wider: the middle of such an interval is easily 5 % off."""


class Ledger:
    """Samples, seconds and counts of one fit; ``own_s`` is what the callback itself has taken, pairs included.

    Args:
        confidence: of every interval.
        whole_step: whether to report the speedup of the whole step.
        read_s: the clock that the length of the fit is read from.
    """

    def __init__(
        self, *, confidence: float, whole_step: bool = True, read_s: Callable[[], float] = time.perf_counter
    ) -> None:
        self._confidence = confidence
        self._whole_step = whole_step
        self._read_s = read_s
        self._began_s = read_s()
        self._compiling_steps_s: list[float] = []
        self._recent_steps_s: deque[float] = deque(maxlen=ORDINARY_STEPS)
        self._recent_compiling_s: deque[float | None] = deque(maxlen=RECENT_STEPS)  # None: nothing was compiled
        self._first_compiled_step = 0
        self._earlier_compile_s = 0.0
        self._asked_at = 0, 0  # pairs and couples of windows seen when the question was opened
        self.samples: list[Sample] = []
        self.window_samples: list[Sample] = []
        self.void_couples: list[Sample] = []
        self.validations: list[Sample] = []
        self._pairs_s: list[float] = []
        self.num_steps = 0
        self.num_compiled_steps = 0
        self.probe_s = 0.0
        self.own_s = 0.0
        self.memory = Memory()
        self.last_step: int | None = None

    def add_step(self, step: int, seconds: float, *, compiled: bool, compiling: bool) -> None:
        """A training step of one of the arms took so many wall seconds, or compiled something meanwhile."""
        if compiled and not self.num_compiled_steps:
            self._first_compiled_step = step
        self.num_compiled_steps += int(compiled)
        self._recent_compiling_s.append(seconds if compiling else None)
        (self._compiling_steps_s if compiling else self._recent_steps_s).append(seconds)

    def add_pair(self, sample: Sample, seconds: float) -> None:
        """A pair was tried; it took so many wall seconds in all."""
        self.samples.append(sample)
        self._pairs_s.append(seconds)
        self.probe_s += seconds

    def add_trial(self, seconds: float, *, compile_s: float) -> None:
        """A pair with another arm than the one that this is about took so many wall seconds, some for compiling."""
        self._pairs_s.append(seconds - compile_s)
        self.probe_s += seconds - compile_s
        self._earlier_compile_s += compile_s

    def show(self, samples: Sequence[Sample], memory: Memory) -> None:
        """Let this be all that has been seen of the compiled arm: it is another one now."""
        self.samples[:], self.memory = samples, memory
        self.window_samples.clear()
        self.void_couples.clear()
        self.validations.clear()
        self._asked_at = 0, 0

    def add_validation(self, sample: Sample, seconds: float) -> None:
        """A batch of validation was compared; it took so many wall seconds."""
        self.validations.append(sample)
        self.probe_s += seconds

    @property
    def num_recent_compiling(self) -> int:
        """Of the last ``RECENT_STEPS`` steps, those in which something was compiled."""
        return sum(seconds is not None for seconds in self._recent_compiling_s)

    def forget_recent_compiling(self) -> None:
        """Steps run on another arm from here on."""
        self._recent_compiling_s.clear()

    @property
    def recent_compile_s(self) -> float:
        """Wall seconds that these took more than an ordinary step each."""
        return self._more_than_ordinary_s(seconds for seconds in self._recent_compiling_s if seconds is not None)

    def _more_than_ordinary_s(self, steps_s: Iterable[float]) -> float:
        ordinary_s = self.ordinary_s
        return sum(max(0.0, seconds - ordinary_s) for seconds in steps_s)

    @property
    def num_void_in_a_row(self) -> int:
        """Pairs that were due since the last usable one."""
        since = itertools.takewhile(lambda sample: sample.void is not None, reversed(self.samples))
        return sum(sample.void not in UNSCHEDULED for sample in since)

    def steps_per_pair(self, overhead_budget: float) -> float:
        """Steps between two pairs at which measuring takes this share of training time."""
        if not self.samples or not self._recent_steps_s:
            return 0.0
        # The typical one: a second arm compiled in one of them, for drift, was weighed by itself.
        pair_s = statistics.median(self._pairs_s) if self._pairs_s else self.probe_s / len(self.samples)
        return pair_s / (overhead_budget * statistics.median(self._recent_steps_s))

    @property
    def ordinary_s(self) -> float:
        """Wall seconds of an ordinary step, the median of the last ones; 0 without any."""
        return statistics.median(self._recent_steps_s) if self._recent_steps_s else 0.0

    def steps_per_couple(self, overhead_budget: float) -> float:
        """Steps between two couples of windows at which the eager one costs this share of training time."""
        if not self.window_samples:
            return 0.0
        last = self.window_samples[-1]
        return last.num_passes * max(0.0, last.eager_s - last.compiled_s) / (overhead_budget * last.compiled_s)

    @property
    def ordinary_step_s(self) -> float | None:
        """Seconds of a recent step in which nothing was compiled."""
        return statistics.median(self._recent_steps_s) if self._recent_steps_s else None

    def compile_s(self) -> float:
        """Wall seconds of the steps in which something compiled, less an ordinary step each."""
        return self._earlier_compile_s + self._more_than_ordinary_s(self._compiling_steps_s)

    def ask(self) -> None:
        """Open the question again: only what comes from here on is evidence."""
        self._asked_at = len(self.samples), len(self.window_samples)

    @property
    def asked_samples(self) -> list[Sample]:
        """Pairs since the question was opened."""
        return self.samples[self._asked_at[0] :]

    @property
    def asked_windows(self) -> list[Sample]:
        """Couples of windows since the question was opened."""
        return self.window_samples[self._asked_at[1] :]

    def evidence(self) -> Evidence:
        """What a later fit can go on from."""
        return Evidence(
            samples=tuple(self.asked_samples),
            window_samples=tuple(self.asked_windows),
            num_steps=self.num_steps,
            num_compiled_steps=self.num_compiled_steps,
            first_compiled_step=self._first_compiled_step,
            compile_s=self.compile_s(),
            probe_s=self.probe_s,
        )

    def go_on_from(self, earlier: Evidence) -> None:
        """Begin where an earlier fit of the same training has stopped."""
        self.samples[:] = earlier.samples
        self.window_samples[:] = earlier.window_samples
        self.num_steps, self.num_compiled_steps = earlier.num_steps, earlier.num_compiled_steps
        self._first_compiled_step, self._earlier_compile_s = earlier.first_compiled_step, earlier.compile_s
        self.probe_s = earlier.probe_s

    def report(
        self, verdict: Verdict, compiles: Compiles, environment: Environment, ranks: Ranks | None = None
    ) -> Report:
        """Everything known now; a figure that is not known is ``None``."""
        used = [sample for sample in self.samples if sample.void is None]
        eager_s = statistics.median([sample.eager_s for sample in used]) if used else None
        compiled_s = statistics.median([sample.compiled_s for sample in used]) if used else None
        whole = self._end_to_end(used, compiled_s)
        return Report(
            verdict=verdict,
            speedup=speedup(self.samples, self._confidence),
            end_to_end=whole if self._whole_step else EndToEnd(),
            time=self._time(eager_s, compiled_s, whole, ended=verdict.decision == "eager"),
            compiles=compiles,
            drift=self._drift(),
            memory=self.memory,
            environment=environment,
            ranks=ranks,
        )

    def _drift(self) -> Drift:
        """The last one of a training batch, or of a batch of validation where that alone is beyond tolerance.

        Where a gradient scaler has skipped a step, both arms have usually overflowed: that is no news.
        """

        def is_news(sample: Sample) -> bool:
            drift = sample.drift
            if drift is None or sample.void != SKIPPED:
                return drift is not None
            return drift.within_tolerance is False or bool(drift.eager_finite and not drift.compiled_finite)

        training, validation = (
            next((s.drift for s in reversed(samples) if is_news(s)), None) or Drift()
            for samples in (self.samples, self.validations)
        )
        worse = validation.within_tolerance is False or (validation.eager_finite and not validation.compiled_finite)
        return validation if worse and training.within_tolerance is not False else training

    def _end_to_end(self, used: Sequence[Sample], compiled_s: float | None) -> EndToEnd:
        """The whole step: by windows of real steps where there are any, else estimated from pairs."""
        if self.window_samples:
            method, trusted = "windows", True
            steps_s = [sample.compiled_s for sample in self.window_samples]
            interval = median_interval([s.eager_s / s.compiled_s for s in self.window_samples], self._confidence)
        else:
            method = "estimate"
            steps_s = [sample.step_s for sample in used if sample.step_s is not None]
            brackets = [bracket for bracket in map(end_to_end_bracket, used) if bracket is not None]
            lower = median_interval([low for low, _ in brackets], self._confidence)
            upper = median_interval([high for _, high in brackets], self._confidence)
            if lower.median is None or upper.median is None:
                return EndToEnd()
            trusted = upper.median / lower.median <= TRUSTED_BRACKET
            if lower.low is not None and upper.high is not None:
                trusted &= upper.high / lower.low <= TRUSTED_INTERVAL
            interval = Interval(median=math.sqrt(lower.median * upper.median), low=lower.low, high=upper.high)
        step_s = statistics.median(steps_s)
        # Real steps overlap with their neighbours, a synchronised pass does not: the share can come out above 1.
        share = None if compiled_s is None else min(1.0, compiled_s / step_s)
        return EndToEnd(
            speedup=interval.median,
            low=interval.low,
            high=interval.high,
            method=method,
            step_s=step_s,
            compute_share=share,
            input_bound=None if share is None else share < INPUT_BOUND_SHARE,
            trusted=trusted,
        )

    def _time(self, eager_s: float | None, compiled_s: float | None, whole: EndToEnd, *, ended: bool) -> Time:
        """Seconds spent and saved; a run that has ended in eager breaks even at no later step."""
        elapsed_s = self._read_s() - self._began_s
        compile_s = self.compile_s()
        known = Time(
            compile_s=compile_s,
            probe_s=self.probe_s,
            last_step=self.last_step,
            eager_s=eager_s,
            compiled_s=compiled_s,
            overhead_pct=100 * self.own_s / (elapsed_s - self.own_s) if elapsed_s > self.own_s else None,
        )
        if eager_s is None or compiled_s is None:
            return known
        saved_per_step_s = eager_s - compiled_s
        if whole.speedup is not None and whole.step_s is not None:  # what a real step saves is what counts
            saved_per_step_s = whole.step_s * (whole.speedup - 1)
        per_step = {"saved_per_step_s": saved_per_step_s, "compile_s": compile_s, "probe_s": self.probe_s}
        return replace(
            known,
            saved_s=saved_s(num_compiled_steps=self.num_compiled_steps, **per_step),
            break_even_step=(
                None if ended else break_even_step(first_compiled_step=self._first_compiled_step, **per_step)
            ),
        )
