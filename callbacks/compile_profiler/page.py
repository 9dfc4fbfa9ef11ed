"""One run as one self-contained HTML page."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from importlib.resources import files
from typing import TYPE_CHECKING

from compile_profiler.records import Report
from compile_profiler.render import EVENT_HEADER, event_cells, figures, one_line
from compile_profiler.runs_on_disk import Curve
from compile_profiler.scalars import CHARTS, Chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MISSING = "the page needs jinja2 and matplotlib: pip install 'lightning-compile-profiler[html]'"


def page(report: Report, curves: Mapping[str, Curve], *, name: str) -> str:
    """HTML that needs nothing beside itself: no script, no font, no request; every text in it is escaped.

    Args:
        report: the run.
        curves: its curves by tag; a chart of which none is known is left out.
        name: what the page calls the run.

    Raises:
        ImportError: jinja2 or, if there are curves, matplotlib is not installed.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ModuleNotFoundError as error:
        raise ImportError(_MISSING) from error
    template = files("compile_profiler").joinpath("page.html.jinja").read_text(encoding="utf-8")
    decided_at = None if report.verdict.decision == "undecided" else report.verdict.step
    known = [chart for chart in CHARTS if any(curves.get(tag) for tag in chart.tags)]
    (_, verdict, message), *rows = [tuple(map(one_line, row)) for row in figures(report)]
    return (
        Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        .from_string(template)
        .render(
            name=one_line(name),
            decision=report.verdict.decision,
            verdict=verdict,
            message=message,
            rows=rows,
            pictures=[(chart.title, picture(chart, curves, decided_at=decided_at)) for chart in known],
            event_header=EVENT_HEADER,
            events=[list(map(one_line, row)) for row in event_cells(report.compiles.events)],
        )
    )


def picture(chart: Chart, curves: Mapping[str, Curve], *, decided_at: int | None = None) -> str:
    """``chart`` as the address of an inline SVG picture, in which a browser runs no script and follows no link.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError(_MISSING) from error
    # The same curves give the same picture: no date in it, no random identifiers, nothing of the user's own settings.
    settings = rc_context({"svg.hashsalt": "compile_profiler", "svg.fonttype": "path", "font.size": 9.0})
    with settings, io.BytesIO() as drawn:
        figure = Figure(figsize=(6.0, 2.6), layout="constrained")
        axes = figure.subplots()
        if chart.band:
            _draw_band(axes, chart, curves)
        else:
            for tag in chart.tags:
                axes.plot(*_points(curves, tag), marker=".", markersize=3, linewidth=1.2, label=_label(tag))
        if chart.even is not None:
            axes.axhline(chart.even, color="0.5", linewidth=0.8)
        if decided_at is not None:
            axes.axvline(decided_at, color="0.5", linestyle=":", linewidth=1, label="decided")
        if all(value.is_integer() for tag in chart.tags for _, value in curves.get(tag, ())):
            axes.set_ylim(top=max(1.0, axes.get_ylim()[1]))
            axes.locator_params(axis="y", integer=True)  # there is no half recompile
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, frameon=False)
        figure.savefig(drawn, format="svg", metadata={"Date": None})
        return f"data:image/svg+xml;base64,{base64.b64encode(drawn.getvalue()).decode('ascii')}"


def _draw_band(axes: Axes, chart: Chart, curves: Mapping[str, Curve]) -> None:
    middle, *ends = chart.tags
    low, high = (dict(curves.get(tag, ())) for tag in ends)
    steps = sorted(low.keys() & high.keys())
    axes.plot(*_points(curves, middle), marker=".", markersize=3, linewidth=1.2, label=_label(middle))
    axes.fill_between(
        steps, [low[step] for step in steps], [high[step] for step in steps], alpha=0.25, label="interval"
    )


def _points(curves: Mapping[str, Curve], tag: str) -> tuple[list[int], list[float]]:
    curve = curves.get(tag, ())
    return [step for step, _ in curve], [value for _, value in curve]


def _label(tag: str) -> str:
    return tag.removeprefix("compile/")
