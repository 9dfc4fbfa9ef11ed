"""What travels through the package: samples, events, the report tree."""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from compile_profiler.plain import AnyRecord, Record, build
from compile_profiler.results import SearchReport

SCHEMA = 1

Decision = Literal["compiled", "eager", "undecided"]
Reason = Literal[
    "gain",
    "no_gain",
    "inconclusive",
    "nothing_compiled",
    "compile_error",
    "runtime_error",
    "recompile_storm",
    "recompile_limit",
    "drift",
    "non_finite",
    "out_of_memory",
    "unsupported",
    "disabled",
    "pending",
]
Kind = Literal["graph", "recompile", "graph_break", "skipped_frame", "limit_hit", "cudagraph_skip", "backend_fallback"]
Owner = Literal["user", "lightning", "torch", "third_party"]
Cause = Literal[
    "shape",
    "stage",
    "python_scalar",
    "object_identity",
    "unsupported",
    "data_dependent",
    "side_effect",
    "other",
]
Stage = Literal["train", "sanity", "validate", "test", "predict", "probe"]
Rng = Literal["none", "matched", "unmatched"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift(Record):
    """How far the compiled arm is from the eager arm on one batch with the same weights.

    Attributes:
        loss_rel: ``|loss_c - loss_e| / |loss_e|``, a pure number; where the loss is near zero, over what rounding can
            resolve of it.
        grad_rel: ``|g_c - g_e| / |g_e|`` over all gradients seen as one vector, a pure number.
        grad_cosine: cosine of the angle between the two gradient vectors.
        worst_parameter: name of the parameter with the largest relative gradient distance.
        effect_rel: largest relative distance of a buffer that the step writes, a value that it logs, or, in
            validation, an output.
        worst_effect: name of that one.
        noise_floor: ``grad_rel`` of eager against eager, the part that compiling cannot be blamed for.
        rng: ``none``: the step draws no random numbers; ``matched``: both arms drew the same ones;
            ``unmatched``: they could not, so the distance says nothing about compiling.
        tolerance: limit on the relative distances.
        within_tolerance: ``None`` where the distance cannot be judged.
        eager_finite: loss and gradients of the eager arm are free of NaN and infinity.
        compiled_finite: the same for the compiled arm.
        reference: errors of both arms against a float64 run, or ``None``.
        stage: whose step it was, ``train`` or ``validate``.
    """

    loss_rel: float | None = None
    grad_rel: float | None = None
    grad_cosine: float | None = None
    worst_parameter: str | None = None
    effect_rel: float | None = None
    worst_effect: str | None = None
    noise_floor: float | None = None
    rng: Rng | None = None
    tolerance: float | None = None
    within_tolerance: bool | None = None
    eager_finite: bool | None = None
    compiled_finite: bool | None = None
    reference: dict[str, float] | None = None
    stage: Stage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Record):
    """One pair: one batch, run both ways, forward and backward.

    Attributes:
        step: x-axis number of the batch.
        eager_s: seconds of one eager pass, the mean over a block of passes on a device that lags, else the median.
        compiled_s: seconds of one compiled pass, likewise.
        eager_host_s: of ``eager_s``, the seconds until Python had launched the pass; less where the device lags behind.
        compiled_host_s: likewise of ``compiled_s``.
        num_passes: passes in each timed block.
        shape: the batch's shape class; pairs are compared within one class.
        step_s: seconds of one whole training step in the window that ended at this pair, if one did.
        own_s: of ``step_s``, the seconds that the callback took between two steps; an eager run without it has none.
        coldness: how much longer Python is in the compiled call of a real step than in that of a pair, whose passes
            follow each other with warm caches.
        void: why the times are not to be used, or ``None``.
        drift: what the two arms computed differently, if it was looked at.
    """

    step: int
    eager_s: float
    compiled_s: float
    eager_host_s: float | None = None
    compiled_host_s: float | None = None
    num_passes: int = 1
    shape: str = ""
    step_s: float | None = None
    own_s: float = 0.0
    coldness: float | None = None
    void: str | None = None
    drift: Drift | None = None

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if self.void is None and not (self.eager_s > 0 and self.compiled_s > 0):
            raise ValueError(
                f"seconds of a pair must be positive, got eager_s={self.eager_s}, compiled_s={self.compiled_s}."
            )

    @property
    def log_ratio(self) -> float:
        """``log(t_eager / t_compiled)``: positive where compiling is faster."""
        return math.log(self.eager_s / self.compiled_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(Record):
    """What a fit has seen so far, as a later one goes on from it.

    Attributes:
        samples: the pairs since the question was opened, in order.
        window_samples: windows of real steps, in order.
        num_steps: training steps of either arm.
        num_compiled_steps: those of the compiled arm.
        first_compiled_step: x-axis number of the first of them.
        compile_s: seconds spent on compiling.
        probe_s: seconds spent on pairs.
    """

    samples: tuple[Sample, ...] = ()
    window_samples: tuple[Sample, ...] = ()
    num_steps: int = 0
    num_compiled_steps: int = 0
    first_compiled_step: int = 0
    compile_s: float = 0.0
    probe_s: float = 0.0

    def shortened(self, *, num_first: int, num_last: int) -> Evidence:
        """Without the middle of long lists: the first samples have decided, the last ones keep watch.

        >>> pairs = tuple(Sample(step=n, eager_s=1.0, compiled_s=1.0) for n in range(9))
        >>> [sample.step for sample in Evidence(samples=pairs).shortened(num_first=2, num_last=3).samples]
        [0, 1, 6, 7, 8]
        """

        def ends(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
            used = (n for n, sample in enumerate(samples, start=1) if sample.void is None)
            decided_at = next(itertools.islice(used, max(num_first - 1, 0), None), len(samples))
            return (*samples[:decided_at], *samples[max(decided_at, len(samples) - num_last) :])

        return dataclasses.replace(self, samples=ends(self.samples), window_samples=ends(self.window_samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class Event(Record):
    """One thing the compiler did, merged over its repetitions at the same place for the same cause.

    ``step``, ``epoch`` and ``shapes`` (of the batch, as in ``Sample.shape``) are those of the first.
    """

    step: int
    epoch: int
    stage: Stage
    kind: Kind
    function: str | None = None
    file: str | None = None
    line: int | None = None
    owner: Owner | None = None
    cause: Cause | None = None
    detail: str = ""
    hint: str = ""
    seconds: float | None = None
    count: int = 1
    shapes: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy(Record):
    """One change that was made to the compiled target of this fit, because it was recompiled again and again.

    Attributes:
        step: x-axis number at which it was made.
        function: function, file and line that were recompiled, and why: ``cause`` and ``detail``.
        change: what was changed, in words.
        steps_before: training steps since the start of the fit, or since the remedy before; ``recompiles_before``
            those in them.
        steps_after: training steps since; ``recompiles_after`` those in them.
        helped: fewer recompiles a step than before; ``None`` while there are too few steps to tell.
    """

    step: int
    change: str
    cause: Cause | None = None
    detail: str = ""
    function: str | None = None
    file: str | None = None
    line: int | None = None
    steps_before: int = 0
    recompiles_before: int = 0
    steps_after: int = 0
    recompiles_after: int = 0
    helped: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(Record):
    """What was decided, why, at which step, about which configuration."""

    decision: Decision = "undecided"
    reason: Reason = "pending"
    message: str = "No decision yet."
    step: int = 0
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if (self.decision == "undecided") != (self.reason == "pending"):
            raise ValueError(f"'undecided' goes only with 'pending', got {self.decision!r} with {self.reason!r}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup(Record):
    """``t_eager / t_compiled`` of forward and backward on the same batch: median of the pairs and its interval.

    ``void`` counts the pairs that were not used, by reason.
    """

    median: float | None = None
    low: float | None = None
    high: float | None = None
    num_pairs: int = 0
    num_void: int = 0
    void: dict[str, int] = field(default_factory=dict)
    num_shapes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndToEnd(Record):
    """The whole training step, data loading and optimizer included.

    ``trusted`` is ``False`` for an estimate that depends on how the step overlaps with the device's work.
    """

    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    method: str | None = None
    step_s: float | None = None
    compute_share: float | None = None
    input_bound: bool | None = None
    trusted: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Time(Record):
    """Where the seconds went: medians of both arms, compiling, measuring, the net saving so far.

    ``last_step`` is where this run is expected to end; a ``break_even_step`` behind it is not reached.
    """

    eager_s: float | None = None
    compiled_s: float | None = None
    compile_s: float | None = None
    probe_s: float | None = None
    saved_s: float | None = None
    break_even_step: int | None = None
    last_step: int | None = None
    overhead_pct: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiles(Record):
    """What the compiler did in stage ``train``; ``by_stage`` has every stage, ``events`` every place.

    A number is ``None`` where this version of torch does not tell it.

    Attributes:
        cudagraphed: graphs of which forward or backward became a CUDA graph; ``None`` where none was asked for.
        guard_s: seconds that a call of the compiled step spends on finding out which of its graphs applies; ``None``
            for other targets than the step, of which this cannot be asked.
        remedies: what ``heal=True`` has changed.
    """

    graphs: int | None = 0
    recompiles: int | None = 0
    graph_breaks: int | None = 0
    eager_frames: int | None = 0
    limit_hits: int | None = 0
    cudagraph_skips: int | None = 0
    cudagraphed: int | None = None
    guard_s: float | None = None
    by_stage: dict[str, dict[str, int]] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    remedies: tuple[Remedy, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(Record):
    """Peak bytes of tensors allocated during one forward and backward pass of each arm."""

    eager_peak_bytes: int | None = None
    compiled_peak_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment(Record):
    """On what the numbers were measured."""

    torch: str | None = None
    lightning: str | None = None
    device: str | None = None
    precision: str | None = None
    strategy: str | None = None
    world_size: int | None = None
    tf32: bool | None = None
    deterministic: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Skew(Record):
    """Seconds that each rank has of its own: their median, the largest and whose it is."""

    median_s: float | None = None
    slowest_s: float | None = None
    slowest_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks(Record):
    """How far apart the ranks are.

    Attributes:
        num: how many there are.
        compile_s: spent on compiling.
        step_s: of an ordinary training step, in which each waits for the slowest.
        pass_s: of a compiled forward and backward pass that waits for nobody.
    """

    num: int = 1
    compile_s: Skew | None = None
    step_s: Skew | None = None
    pass_s: Skew | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Record):
    """Everything known about one fit. JSON keys are the field names; an unknown figure is ``null``.

    ``ranks`` is that of several processes, ``search`` that of ``mode="auto"``.
    """

    schema: int = SCHEMA
    verdict: Verdict = field(default_factory=Verdict)
    speedup: Speedup = field(default_factory=Speedup)
    end_to_end: EndToEnd = field(default_factory=EndToEnd)
    time: Time = field(default_factory=Time)
    compiles: Compiles = field(default_factory=Compiles)
    drift: Drift = field(default_factory=Drift)
    memory: Memory = field(default_factory=Memory)
    environment: Environment = field(default_factory=Environment)
    ranks: Ranks | None = None
    search: SearchReport | None = None

    @classmethod
    def from_dict(cls: type[AnyRecord], data: Mapping[str, Any]) -> AnyRecord:
        """The report that ``to_dict`` was called on.

        Raises:
            ValueError: ``data`` is not a report of this schema, or has a field of the wrong type.

        >>> Report.from_dict(Report().to_dict()) == Report()
        True
        """
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(f"expected a report with schema {SCHEMA}, got {found!r}.")
        return typing.cast("AnyRecord", build(cls, data, "report"))
