"""Several runs side by side, for human eyes."""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from compile_profiler.candidates_table import told_of
from compile_profiler.records import Drift, EndToEnd, Memory, Report, Speedup
from compile_profiler.render import STYLES, event_cells
from compile_profiler.results import SearchReport
from compile_profiler.wording import UNKNOWN, interval, known, one_line, ratio, seconds, size, small

_SURROUNDINGS = ("device", "torch", "lightning", "precision", "strategy", "world_size")
_CONFIG = ("target", "backend", "mode", "dynamic", "fullgraph", "options")


def comparison(names: Sequence[str], reports: Sequence[Report]) -> Table:
    """One column for each report, one row for each figure; what no report has, a setting or a search, is left out.

    >>> comparison(["a", "b"], [Report(), Report()]).row_count
    20
    """
    grid = Table(title="CompileProfiler", box=SIMPLE)
    grid.add_column(style="bold", no_wrap=True)
    for name in names:
        grid.add_column(Text(one_line(name)), overflow="fold")
    columns = [_figures(report) for report in reports]
    for what in columns[0]:
        cells = [Text(one_line(column[what])) for column in columns]
        if what == "decision":
            for cell in cells:
                cell.stylize(STYLES[cell.plain])
        grid.add_row(what, *cells)
    for setting in _CONFIG:
        values = [report.verdict.config.get(setting) for report in reports]
        if any(value not in (None, False) for value in values):
            grid.add_row(setting, *(Text(one_line(known(value, str))) for value in values))
    searches = [report.search for report in reports]
    if any(searches):
        grid.add_row("search", *(Text(one_line(known(search, _winner))) for search in searches))
    return grid


def caveats(reports: Sequence[Report]) -> list[str]:
    """What a reader has to know before comparing columns.

    >>> from compile_profiler.records import Environment
    >>> here, there = Report(environment=Environment(device="cpu")), Report(environment=Environment(device="H200"))
    >>> caveats([here, there])[0]
    'The runs differ in device: their times cannot be compared, only their ratios.'
    """
    told = {}
    for field in _SURROUNDINGS:
        told[field] = {getattr(report.environment, field) for report in reports}
    differing = [field.replace("_", " ") for field, values in told.items() if len(values - {None}) > 1]
    unknown = [field.replace("_", " ") for field, values in told.items() if None in values]
    found = []
    if differing:
        found.append(f"The runs differ in {', '.join(differing)}: their times cannot be compared, only their ratios.")
    if unknown:
        found.append(f"Not every run tells its {', '.join(unknown)}: compare ratios, not times.")
    return found


def blame(names: Sequence[str], reports: Sequence[Report]) -> Table:
    """What stood in the compiler's way, place by place: a row for each, with the names of the runs that met it.

    >>> blame(["a"], [Report()]).row_count
    0
    """
    met: dict[tuple[str, ...], list[str]] = {}
    for name, report in zip(names, reports, strict=True):
        hindrances = [event for event in report.compiles.events if event.kind != "graph"]
        for event, cells in zip(hindrances, event_cells(hindrances), strict=True):
            kind, where, function, *_, detail = cells
            met.setdefault((kind, f"{where}, {function}", event.hint or detail), []).append(name)
    grid = Table(title="What stood in the compiler's way", box=SIMPLE)
    for what in ("kind", "where", "what to do", "in"):
        grid.add_column(what, overflow="fold")
    for row, meeting in met.items():
        runs = "all" if len(meeting) == len(names) > 1 else ", ".join(meeting)
        grid.add_row(*(Text(one_line(cell)) for cell in (*row, runs)))
    return grid


def short_names(files: Sequence[Path]) -> list[str]:
    """The folders of ``files`` without what all of them have in common.

    >>> short_names([Path("logs/a/version_0/r.json"), Path("logs/b/version_3/r.json")])
    ['a/version_0', 'b/version_3']
    >>> short_names([Path("logs/a/r.json")])
    ['a']
    """
    folders = [file.absolute().parent for file in files]
    common = Path(os.path.commonpath(folders))
    return [str(folder.relative_to(common)) if folder != common else folder.name for folder in folders]


def _figures(report: Report) -> dict[str, str]:
    time, compiles, environment = report.time, report.compiles, report.environment
    return {
        "decision": report.verdict.decision,
        "reason": report.verdict.reason,
        "speedup of a pass": _speedup(report.speedup),
        "pairs": f"{report.speedup.num_pairs:,}",
        "speedup of a step": _speedup_of_step(report.end_to_end),
        "eager pass": known(time.eager_s, seconds),
        "compiled pass": known(time.compiled_s, seconds),
        "whole step": known(report.end_to_end.step_s, seconds),
        "compiling": known(time.compile_s, seconds),
        "net saved": known(time.saved_s, seconds),
        "loss drift": known(report.drift.loss_rel, small),
        "gradient drift": _gradient_drift(report.drift),
        "peak memory": _peak_memory(report.memory),
        "graphs": known(compiles.graphs, "{:,}".format),
        "recompiles": known(compiles.recompiles, "{:,}".format),
        "graph breaks": known(compiles.graph_breaks, "{:,}".format),
        "device": environment.device or UNKNOWN,
        "torch": environment.torch or UNKNOWN,
        "lightning": environment.lightning or UNKNOWN,
        "precision": environment.precision or UNKNOWN,
    }


def _winner(search: SearchReport) -> str:
    num_tried, _ = told_of(search)
    return f"{search.active}{'' if search.settled else ' so far'}, {num_tried}"


def _speedup(speedup: Speedup) -> str:
    return _with_interval(known(speedup.median, ratio), interval(speedup.low, speedup.high))


def _speedup_of_step(end_to_end: EndToEnd) -> str:
    shown = _with_interval(known(end_to_end.speedup, ratio), interval(end_to_end.low, end_to_end.high))
    return f"{shown}, not to be trusted" if end_to_end.trusted is False else shown


def _with_interval(shown: str, between: str | None) -> str:
    return shown if between is None else f"{shown} ({between})"


def _peak_memory(memory: Memory) -> str:
    compiled, eager = (known(size_b, size) for size_b in (memory.compiled_peak_bytes, memory.eager_peak_bytes))
    return compiled if eager == compiled else f"{compiled}, eager {eager}"


def _gradient_drift(drift: Drift) -> str:
    judged = {True: ", within tolerance", False: ", beyond tolerance", None: ""}
    return known(drift.grad_rel, small) + judged[drift.within_tolerance]
