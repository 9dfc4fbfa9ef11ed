"""One run as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from compile_profiler.candidates_table import CANDIDATE_HEADER, candidate_cells, history
from compile_profiler.pictures import MISSING, bars, picture, timeline
from compile_profiler.records import Report
from compile_profiler.render import EVENT_HEADER, event_cells, figures
from compile_profiler.results import SearchReport
from compile_profiler.runs_on_disk import Curve
from compile_profiler.scalars import CHARTS
from compile_profiler.wording import one_line


def page(report: Report, curves: Mapping[str, Curve], *, name: str) -> str:
    """HTML that needs nothing beside itself: no script, no font, no request; every text in it is escaped.

    Args:
        report: the run.
        curves: its curves by tag; a chart of which none is known is left out.
        name: what the page calls the run.

    Raises:
        ImportError: jinja2 or, if there is something to draw, matplotlib is not installed.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ModuleNotFoundError as error:
        raise ImportError(MISSING) from error
    template = files("compile_profiler").joinpath("page.html.jinja").read_text(encoding="utf-8")
    decided_at = None if report.verdict.decision == "undecided" else report.verdict.step
    known = [chart for chart in CHARTS if any(curves.get(tag) for tag in chart.tags)]
    (_, verdict, message), *rows = [tuple(map(one_line, row)) for row in figures(report)]
    search = report.search
    return (
        Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        .from_string(template)
        .render(
            name=one_line(name),
            decision=report.verdict.decision,
            verdict=verdict,
            message=message,
            rows=rows,
            candidate_header=CANDIDATE_HEADER,
            candidates=[] if search is None else [list(map(one_line, row)) for row in candidate_cells(search)],
            history="" if search is None else one_line(history(search)),
            search_pictures=[] if search is None else _of_a_search(search, _last_step(report, curves)),
            pictures=[(chart.title, picture(chart, curves, decided_at=decided_at)) for chart in known],
            event_header=EVENT_HEADER,
            events=[list(map(one_line, row)) for row in event_cells(report.compiles.events)],
        )
    )


def _of_a_search(found: SearchReport, last_step: int) -> list[tuple[str, str]]:
    drawn = {
        "speedup of a step, by candidate": bars(found.candidates),
        "what training ran on": timeline(found, last_step=last_step),
    }
    return [(title, address) for title, address in drawn.items() if address is not None]


def _last_step(report: Report, curves: Mapping[str, Curve]) -> int:
    """The last step that anything is known of; ``time.last_step`` may be far beyond where the run was ended."""
    return max(report.verdict.step, *(step for curve in curves.values() for step, _ in curve), 0)
