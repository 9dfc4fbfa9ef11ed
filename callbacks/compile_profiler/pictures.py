"""Curves and bars as pictures inside a page."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from compile_profiler.results import CandidateResult, SearchReport
from compile_profiler.runs_on_disk import Curve
from compile_profiler.scalars import Chart
from compile_profiler.wording import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MISSING = "the page needs jinja2 and matplotlib: pip install 'lightning-compile-profiler[html]'"
_MAX_NAME = 44  # characters beside a bar
_CHOSEN, _OTHER = "#2e8540", "#7a9cb8"


class _Drawing:
    """Axes while they are drawn on, then the address of an inline SVG picture in ``address``."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.address = ""


@contextmanager
def _drawing(height: float = 2.6) -> Iterator[_Drawing]:
    """Axes to draw on. A browser runs no script in such a picture and follows no link.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError(MISSING) from error
    # The same figures give the same picture: no date in it, no random identifiers, nothing of the user's own settings.
    settings = rc_context({"svg.hashsalt": "compile_profiler", "svg.fonttype": "path", "font.size": 9.0})
    with settings, io.BytesIO() as drawn, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a name in a script that the font lacks gets boxes
        figure = Figure(figsize=(6.0, height), layout="constrained")
        drawing = _Drawing(figure.subplots())
        yield drawing
        figure.savefig(drawn, format="svg", metadata={"Date": None})
        drawing.address = f"data:image/svg+xml;base64,{base64.b64encode(drawn.getvalue()).decode('ascii')}"


def picture(chart: Chart, curves: Mapping[str, Curve], *, decided_at: int | None = None) -> str:
    """``chart`` as the address of an inline picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
    with _drawing() as drawing:
        axes = drawing.axes
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
    return drawing.address


def bars(candidates: Sequence[CandidateResult]) -> str | None:
    """The step speedup of each candidate with its interval; ``None`` if none was measured.

    Raises:
        ImportError: matplotlib is not installed.
    """
    known = [(one, one.end_to_end) for one in candidates if one.end_to_end is not None]
    if not known:
        return None
    with _drawing(0.9 + 0.3 * len(known)) as drawing:
        axes = drawing.axes
        for place, (one, speedup) in enumerate(known):
            axes.barh(place, speedup, color=_CHOSEN if one.status == "chosen" else _OTHER, height=0.6)
            if one.end_to_end_low is not None and one.end_to_end_high is not None:
                axes.plot([one.end_to_end_low, one.end_to_end_high], [place, place], color="0.2", marker="|")
        axes.axvline(1.0, color="0.5", linewidth=0.8)
        _name_rows(axes, [one.name for one, _ in known])
        axes.set_xlabel("eager step over its step")
    return drawing.address


def timeline(found: SearchReport, *, last_step: int) -> str | None:
    """What training has run on, from step to step; ``None`` if the search has not begun.

    Args:
        found: the search.
        last_step: the last that is known of.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if not found.switches:
        return None
    names = list(dict.fromkeys(switch.name for switch in found.switches))
    steps = [switch.step for switch in found.switches]
    ends = [*steps[1:], max(last_step, steps[-1] + 1)]
    with _drawing(0.9 + 0.3 * len(names)) as drawing:
        axes = drawing.axes
        for switch, end in zip(found.switches, ends, strict=True):
            color = _CHOSEN if switch.name == found.active else _OTHER
            axes.barh(names.index(switch.name), end - switch.step, left=switch.step, color=color, height=0.6)
        _name_rows(axes, names)
        axes.set_xlabel("step")
    return drawing.address


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    # parse_math: a dollar sign in a name is a dollar sign.
    labels = [one_line(name, max_text=_MAX_NAME) for name in names]
    axes.set_yticks(range(len(names)), labels, parse_math=False)
    axes.invert_yaxis()  # the first one on top
    axes.grid(axis="x", alpha=0.3)


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
