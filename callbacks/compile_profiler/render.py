"""A report for people: the table at the end of fit, the Markdown of TensorBoard's Text tab."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import IO

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from compile_profiler.candidates_table import candidates_table, told_of
from compile_profiler.records import Compiles, Drift, Environment, Event, Ranks, Remedy, Report, Skew, Speedup, Time
from compile_profiler.wording import (
    UNKNOWN,
    count,
    escape,
    interval,
    joined,
    known,
    markdown,
    one_line,
    place,
    ratio,
    seconds,
    size,
    small,
    told,
)

Row = tuple[str, str, str]  # what, value, what the value rests on

PLAIN_WIDTH = 100  # columns where the output is no terminal: fits a log viewer, and most rows stay on one line
MAX_VALUE = 28  # columns of a value in the table; a longer one would squeeze the other columns out
MAX_EVENTS_IN_TABLE = 3  # the table is read at a glance
MAX_EVENTS_IN_MARKDOWN = 50  # the page is scrolled; the JSON file has them all
EVENT_HEADER = ("kind", "where", "function", "owner", "cause", "count", "seconds", "first seen", "detail")
_WORST_FIRST = (
    "limit_hit",
    "skipped_frame",
    "graph_break",
    "cudagraph_skip",
    "recompile",
    "backend_fallback",
    "graph",
)
STYLES = {"compiled": "green", "eager": "yellow", "undecided": "cyan"}


def table(report: Report) -> Table:
    """The end-of-fit table: about a dozen rows of what was found, its value, what the value rests on.

    >>> table(Report()).row_count
    13
    """
    grid = Table(title="CompileProfiler", box=SIMPLE, show_header=False)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(no_wrap=True, max_width=MAX_VALUE)
    grid.add_column(overflow="fold")
    for index, row in enumerate([*figures(report), *_event_rows(report.compiles.events)]):
        # Text, not str: a name such as "[red]" is shown, not obeyed as rich markup.
        what, value, basis = (Text(one_line(cell)) for cell in row)
        if index == 0:
            value.stylize(STYLES[report.verdict.decision])
        grid.add_row(what, value, basis)
    return grid


def print_table(report: Report, file: IO[str] | None = None) -> None:
    """Print ``table(report)`` to ``file`` or standard output: in colour on a terminal, as plain text elsewhere.

    The candidates of a search follow in a table of their own.
    """
    print_grid(table(report), file)
    if report.search is not None and report.search.candidates:
        print_grid(candidates_table(report.search), file)


def print_grid(grid: Table, file: IO[str] | None = None) -> None:
    """Print any table of ours like ``print_table``."""
    console = Console(file=file)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    with console.capture() as captured:
        console.print(grid)
    # Not console.file, which looks through the stand-in for standard output that a progress bar of rich has put there.
    out = sys.stdout if file is None else file
    # A log file in an older encoding has no en dash, and rich would raise there.
    out.write(captured.get().encode(console.encoding, "replace").decode(console.encoding))
    out.flush()


def verdict_markdown(report: Report) -> str:
    """The decision and the figures it rests on, as a Markdown card.

    >>> print(verdict_markdown(Report()).splitlines()[0])
    ### undecided: pending
    """
    (_, verdict, message), *rows = figures(report)
    return f"### {escape(verdict)}\n\n{escape(message)}\n\n" + markdown(("figure", "value", "rests on"), rows)


def events_markdown(report: Report) -> str:
    """What the compiler did, place by place, as a Markdown table; what can be acted on comes before plain graphs.

    >>> print(events_markdown(Report()))
    The compiler has not done anything yet.
    """
    events = report.compiles.events
    if not events:
        return "The compiler has not done anything yet."
    rows = event_cells(events)[:MAX_EVENTS_IN_MARKDOWN]
    left_out = len(events) - len(rows)
    note = f"\n\n{count(left_out, 'more place')} in `compile_profile.json`." if left_out else ""
    return markdown(EVENT_HEADER, rows) + note


def event_cells(events: Iterable[Event]) -> list[list[str]]:
    """A row under ``EVENT_HEADER`` for each event; what can be acted on comes before plain graphs.

    >>> event_cells([Event(step=3, epoch=0, stage="train", kind="graph", seconds=17.0)])[0][5:8]
    ['1', '17.0 s', 'train, step 3']
    """
    rows = [
        (
            event.kind,
            _place_of(event),
            event.function,
            event.owner,
            event.cause,
            f"{event.count:,}",
            known(event.seconds, seconds),
            f"{event.stage}, step {event.step:,}",
            joined(event.detail, event.hint, by="; "),
        )
        for event in _by_use(events)
    ]
    return [[cell or UNKNOWN for cell in row] for row in rows]


def figures(report: Report) -> list[Row]:
    """Every figure of the faces, once; the verdict comes first.

    >>> figures(Report())[0]
    ('verdict', 'undecided: pending', 'No decision yet.')
    """
    verdict, time, memory = report.verdict, report.time, report.memory
    eager_time, eager_peak = known(time.eager_s, seconds), known(memory.eager_peak_bytes, size)
    at = "" if verdict.decision == "undecided" else f"step {verdict.step:,}: "
    config = (f"{key}={value}" for key, value in verdict.config.items() if key != "backend" and value is not None)
    return [
        ("verdict", f"{verdict.decision}: {verdict.reason}", at + verdict.message),
        ("configuration", known(verdict.config.get("backend"), str), joined(*config)),
        *([] if report.search is None else [("search", *told_of(report.search))]),
        ("speedup of a pass", known(report.speedup.median, ratio), _speedup_basis(report.speedup)),
        ("speedup of a step", known(report.end_to_end.speedup, ratio), _end_to_end_basis(report)),
        ("time of a pass", known(time.compiled_s, seconds), f"compiled; eager {eager_time}"),
        ("compiling", known(time.compile_s, seconds), "extra time of steps in which something compiled"),
        ("measuring", known(time.probe_s, seconds), told("{:.1f} % of training time", time.overhead_pct)),
        ("net saved", known(time.saved_s, seconds), _paid_back(time)),
        ("graphs", known(report.compiles.graphs, "{:,}".format), _compiles_basis(report.compiles)),
        *map(_healing_row, report.compiles.remedies),
        ("loss drift", known(report.drift.loss_rel, small), _drift_basis(report.drift)),
        ("gradient drift", known(report.drift.grad_rel, small), _gradient_basis(report.drift)),
        ("peak memory", known(memory.compiled_peak_bytes, size), f"compiled; eager {eager_peak}"),
        ("measured on", known(report.environment.device, str), _environment_basis(report.environment)),
        *([] if report.ranks is None else [_ranks_row(report.ranks)]),
    ]


def _ranks_row(ranks: Ranks) -> Row:
    """Who is slow, and how slow beside the others.

    >>> _ranks_row(Ranks(num=4, pass_s=Skew(median_s=0.01, slowest_s=0.02, slowest_rank=3)))
    ('ranks', '4', 'slowest pass: rank 3, 20.0 ms (median 10.0 ms)')
    """

    def slowest(what: str, skew: Skew | None) -> str | None:
        if skew is None or skew.slowest_s is None:
            return None
        return f"{what}: rank {skew.slowest_rank}, {seconds(skew.slowest_s)} (median {known(skew.median_s, seconds)})"

    basis = joined(slowest("slowest pass", ranks.pass_s), slowest("longest compile", ranks.compile_s))
    return "ranks", str(ranks.num), basis


def _event_rows(events: tuple[Event, ...]) -> list[Row]:
    rows: list[Row] = [
        (
            event.kind,
            f"{event.count:,} x",
            joined(_place_of(event), event.function, event.cause, event.hint or event.detail),
        )
        for event in _by_use(events)[:MAX_EVENTS_IN_TABLE]
    ]
    left_out = len(events) - len(rows)
    return rows if not left_out else [*rows, ("", "", f"{count(left_out, 'more place')} in compile_profile.json")]


def _by_use(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=lambda event: _WORST_FIRST.index(event.kind))  # stable: then in the order of happening


def _place_of(event: Event) -> str | None:
    return None if event.file is None else place(event.file, event.line)


def _speedup_basis(speedup: Speedup) -> str:
    void = joined(*(f"{number:,} {reason}" for reason, number in speedup.void.items()))
    reasons = f" ({void})" if void else ""
    return joined(
        interval(speedup.low, speedup.high), count(speedup.num_pairs, "pair"), f"{speedup.num_void:,} void{reasons}"
    )


def _end_to_end_basis(report: Report) -> str:
    end_to_end, of_pass = report.end_to_end, report.speedup.median
    waits = None
    if end_to_end.input_bound and of_pass is not None and end_to_end.compute_share is not None:
        waits = f"input-bound: compiling gives {ratio(of_pass)} on {end_to_end.compute_share:.0%} of the step"
    return joined(
        interval(end_to_end.low, end_to_end.high),
        told("by {}", end_to_end.method),
        told("{} a step", end_to_end.step_s, seconds),
        waits or told("{:.0%} of it compute", end_to_end.compute_share),
        "not to be trusted: end_to_end='windows' tells" if end_to_end.trusted is False else None,
    )


def _paid_back(time: Time) -> str:
    """When compiling and measuring are paid back, beside the steps that this run has."""
    beyond = time.last_step is not None and time.break_even_step is not None and time.break_even_step > time.last_step
    return told("compiling is paid back at step {:,}", time.break_even_step) + (
        told(", after this run's last, {:,}", time.last_step) if beyond else ""
    )


def _compiles_basis(found: Compiles) -> str:
    rare = {"eager frame": found.eager_frames, "limit hit": found.limit_hits, "cudagraph skip": found.cudagraph_skips}
    always = (count(found.recompiles, "recompile"), count(found.graph_breaks, "graph break"))
    replayed = told("{:,} of them CUDA graphs", found.cudagraphed)
    return joined(*always, *(count(number, noun) for noun, number in rare.items() if number), replayed)


def _healing_row(remedy: Remedy) -> Row:
    result = {True: "helped", False: "did not help", None: "too early to tell"}[remedy.helped]
    before, since = (
        f"{count(recompiles, 'recompile')} in {count(steps, 'step')}"
        for recompiles, steps in (
            (remedy.recompiles_before, remedy.steps_before),
            (remedy.recompiles_after, remedy.steps_after),
        )
    )
    return "healing", result, f"step {remedy.step:,}: {remedy.change}; {before} before, {since} since"


def _drift_basis(drift: Drift) -> str:
    judged = {True: "within tolerance", False: "beyond tolerance", None: "not judged"}
    return joined(
        judged[drift.within_tolerance] + told(" ({})", drift.tolerance, small),
        "in validation" if drift.stage == "validate" else None,
        told("random numbers {}", drift.rng),
        told("{} by ", drift.worst_effect) + known(drift.effect_rel, small) if drift.worst_effect else None,
        "eager not finite" if drift.eager_finite is False else None,
        "compiled not finite" if drift.compiled_finite is False else None,
        *(f"{name} {small(error)} from float64" for name, error in (drift.reference or {}).items()),
    )


def _gradient_basis(drift: Drift) -> str:
    return joined(
        told("noise floor {}", drift.noise_floor, small),
        told("cosine {:.6f}", drift.grad_cosine),
        told("worst {}", drift.worst_parameter),
    )


def _environment_basis(environment: Environment) -> str:
    return joined(
        told("torch {}", environment.torch),
        told("lightning {}", environment.lightning),
        environment.precision,
        environment.strategy,
        told("world size {}", environment.world_size),
        "tf32" if environment.tf32 else None,
        "deterministic" if environment.deterministic else None,
    )
