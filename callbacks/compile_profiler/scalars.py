"""The one list of logged tags: the unit of each, its meaning, where it is read off the report, its chart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from compile_profiler.records import Report
from compile_profiler.results import EAGER, SearchReport

VERDICT_TAG = "compile/verdict"  # text: why the run is compiled or eager
EVENTS_TAG = "compile/events"  # text: what the compiler did, place by place
SEARCH_TAG = "compile/search"  # text: the candidates of a search


@dataclass(frozen=True, slots=True)  # positional, unlike the records: the rows below are read as a table
class Scalar:
    """One logged figure.

    Attributes:
        tag: name under which every logger gets it.
        unit: unit of the logged number, ``ratio`` for a pure number.
        meaning: what the number says, in one line.
        read: the number on a report, in ``unit``; ``None`` while it is not known.
    """

    tag: str
    unit: str
    meaning: str
    read: Callable[[Report], float | None]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _place(search: SearchReport | None) -> int | None:
    """Of the candidate that training runs on, in the report's list, from 1 on; eager is 0."""
    if search is None or search.active == EAGER:
        return None if search is None else 0
    return next((place for place, one in enumerate(search.candidates, start=1) if one.name == search.active), None)


def _mib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / 2**20


_MIB = "MiB = bytes / 2^20"

# One pass is one forward and backward; one step is all of a training step, data loading and optimizer included.
SCALARS = (
    Scalar("compile/speedup", "ratio", "eager over compiled time of a pass, median pair", lambda r: r.speedup.median),
    Scalar("compile/speedup_low", "ratio", "lower end of the interval of that median", lambda r: r.speedup.low),
    Scalar("compile/speedup_high", "ratio", "upper end of the interval of that median", lambda r: r.speedup.high),
    Scalar("compile/end_to_end_speedup", "ratio", "the same for a whole step", lambda r: r.end_to_end.speedup),
    Scalar("compile/step_ms/eager", "ms", "time of an eager pass, median", lambda r: _ms(r.time.eager_s)),
    Scalar("compile/step_ms/compiled", "ms", "time of a compiled pass, median", lambda r: _ms(r.time.compiled_s)),
    Scalar("compile/step_ms/total", "ms", "time of a whole step", lambda r: _ms(r.end_to_end.step_s)),
    Scalar("compile/graphs", "count", "graphs compiled for training, recompiled included", lambda r: r.compiles.graphs),
    Scalar("compile/recompiles", "count", "graphs compiled again for training", lambda r: r.compiles.recompiles),
    Scalar("compile/graph_breaks", "count", "cuts in the graphs of training", lambda r: r.compiles.graph_breaks),
    Scalar("compile/compile_s", "s", "extra time of steps in which something compiled", lambda r: r.time.compile_s),
    Scalar("compile/drift/loss_rel", "ratio", "distance of the two losses over eager's", lambda r: r.drift.loss_rel),
    Scalar("compile/drift/grad_rel", "ratio", "distance of the two gradients over eager's", lambda r: r.drift.grad_rel),
    Scalar("compile/drift/grad_cosine", "ratio", "cosine of the two gradients", lambda r: r.drift.grad_cosine),
    Scalar("compile/drift/noise_floor", "ratio", "`grad_rel` of eager against eager", lambda r: r.drift.noise_floor),
    Scalar("compile/drift/tolerance", "ratio", "limit on both distances", lambda r: r.drift.tolerance),
    Scalar("compile/saved_s", "s", "time saved, net of compiling and measuring", lambda r: r.time.saved_s),
    Scalar("compile/overhead_pct", "%", "share of training time spent on measuring", lambda r: r.time.overhead_pct),
    Scalar("compile/peak_mb/eager", _MIB, "peak memory of an eager pass", lambda r: _mib(r.memory.eager_peak_bytes)),
    Scalar("compile/peak_mb/compiled", _MIB, "the same, compiled pass", lambda r: _mib(r.memory.compiled_peak_bytes)),
    Scalar("compile/active", "flag", "1 compiled or undecided, 0 eager", lambda r: r.verdict.decision != "eager"),
    Scalar("compile/candidate", "place", "0 eager, else which candidate of a search", lambda r: _place(r.search)),
)


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves that are read together.

    Attributes:
        title: what the chart shows, with the unit where there is one.
        tags: its curves.
        band: whether the second and third curve are the lower and upper end of the first one's band.
        even: the value at which nothing is gained or lost, where there is one.
    """

    title: str
    tags: tuple[str, ...]
    band: bool = False
    even: float | None = None


CHARTS = (
    Chart("speedup of a pass", ("compile/speedup", "compile/speedup_low", "compile/speedup_high"), band=True, even=1.0),
    Chart("time of a pass, ms", ("compile/step_ms/eager", "compile/step_ms/compiled")),
    Chart("net time saved, s", ("compile/saved_s",), even=0.0),
    Chart("recompiles and graph breaks", ("compile/recompiles", "compile/graph_breaks")),
    Chart(
        "drift, its noise floor, its limit",
        ("compile/drift/grad_rel", "compile/drift/loss_rel", "compile/drift/noise_floor", "compile/drift/tolerance"),
    ),
)
SEARCH_CHART = Chart("candidate that training runs on, 0 eager", ("compile/candidate",))


def layout(*, searches: bool = False) -> dict[str, dict[str, list[Any]]]:
    """``CHARTS``, of a search one more, as ``SummaryWriter.add_custom_scalars`` takes them.

    >>> layout()["compile"]["net time saved, s"]
    ['Multiline', ['compile/saved_s']]
    """
    charts = [*CHARTS, *([SEARCH_CHART] if searches else [])]
    return {"compile": {chart.title: ["Margin" if chart.band else "Multiline", list(chart.tags)] for chart in charts}}


def scalars(report: Report) -> dict[str, float]:
    """The known figures of ``report`` by tag, ready for ``logger.log_metrics``; an unknown one is left out.

    >>> from compile_profiler.records import Speedup, Time
    >>> scalars(Report(speedup=Speedup(median=1.25), time=Time(eager_s=0.5)))["compile/step_ms/eager"]
    500.0
    >>> "compile/step_ms/compiled" in scalars(Report())
    False
    """
    read = ((scalar.tag, scalar.read(report)) for scalar in SCALARS)
    return {tag: float(value) for tag, value in read if value is not None}


def whole_bands(figures: dict[str, float]) -> dict[str, float]:
    """``figures`` without curves of a band of which only a part is known.

    A speedup has no interval below six pairs. TensorBoard draws nothing of a band whose curves begin at different
    steps, so the curve in its middle waits for the others.

    >>> whole_bands({"compile/speedup": 2.0, "compile/graphs": 1.0})
    {'compile/graphs': 1.0}
    """
    bands = [set(chart.tags) for chart in CHARTS if chart.band]
    partial = {tag for band in bands if not band <= figures.keys() for tag in band}
    return {tag: value for tag, value in figures.items() if tag not in partial}


def described(config: Mapping[str, Any]) -> dict[str, str]:
    """A configuration as hyperparameters, named like the tags; what is left to torch has a name too.

    >>> described({"backend": "inductor", "mode": None})
    {'compile/backend': 'inductor', 'compile/mode': 'default'}
    """
    left_to_torch = {"mode": "default", "dynamic": "auto", "options": "none"}
    return {
        f"compile/{name}": left_to_torch.get(name, "none") if value is None else str(value)
        for name, value in config.items()
    }


def markdown_table() -> str:
    """The table of tags in ``docs/scalars.md``.

    >>> print(markdown_table().splitlines()[2])
    | `compile/speedup` | ratio | eager over compiled time of a pass, median pair |
    """
    rows = [f"| `{scalar.tag}` | {scalar.unit} | {scalar.meaning} |" for scalar in SCALARS]
    return "\n".join(["| tag | unit | meaning |", "|---|---|---|", *rows])
