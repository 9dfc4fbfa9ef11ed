"""A report for people: the table at the end of fit, the Markdown of TensorBoard's Text tab."""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import IO, TypeVar

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from compile_profiler.records import Compiles, Drift, Environment, Event, Ranks, Remedy, Report, Skew, Speedup, Time

T = TypeVar("T")
Row = tuple[str, str, str]  # what, value, what the value rests on

UNKNOWN = "\N{EN DASH}"
PLAIN_WIDTH = 100  # columns where the output is no terminal: fits a log viewer, and most rows stay on one line
MAX_TEXT = 240  # characters of one cell: guards and configurations can be pages long
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
    """Print ``table(report)`` to ``file`` or standard output: in colour on a terminal, as plain text elsewhere."""
    print_grid(table(report), file)


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
    return f"### {escape(verdict)}\n\n{escape(message)}\n\n" + _markdown(("figure", "value", "rests on"), rows)


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
    return _markdown(EVENT_HEADER, rows) + note


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
            _joined(event.detail, event.hint, by="; "),
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
        ("configuration", known(verdict.config.get("backend"), str), _joined(*config)),
        ("speedup of a pass", known(report.speedup.median, ratio), _speedup_basis(report.speedup)),
        ("speedup of a step", known(report.end_to_end.speedup, ratio), _end_to_end_basis(report)),
        ("time of a pass", known(time.compiled_s, seconds), f"compiled; eager {eager_time}"),
        ("compiling", known(time.compile_s, seconds), "extra time of steps in which something compiled"),
        ("measuring", known(time.probe_s, seconds), _told("{:.1f} % of training time", time.overhead_pct)),
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

    def told(what: str, skew: Skew | None) -> str | None:
        if skew is None or skew.slowest_s is None:
            return None
        return f"{what}: rank {skew.slowest_rank}, {seconds(skew.slowest_s)} (median {known(skew.median_s, seconds)})"

    basis = _joined(told("slowest pass", ranks.pass_s), told("longest compile", ranks.compile_s))
    return "ranks", str(ranks.num), basis


def _event_rows(events: tuple[Event, ...]) -> list[Row]:
    rows: list[Row] = [
        (
            event.kind,
            f"{event.count:,} x",
            _joined(_place_of(event), event.function, event.cause, event.hint or event.detail),
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
    void = _joined(*(f"{number:,} {reason}" for reason, number in speedup.void.items()))
    reasons = f" ({void})" if void else ""
    return _joined(
        interval(speedup.low, speedup.high), count(speedup.num_pairs, "pair"), f"{speedup.num_void:,} void{reasons}"
    )


def _end_to_end_basis(report: Report) -> str:
    end_to_end, of_pass = report.end_to_end, report.speedup.median
    waits = None
    if end_to_end.input_bound and of_pass is not None and end_to_end.compute_share is not None:
        waits = f"input-bound: compiling gives {ratio(of_pass)} on {end_to_end.compute_share:.0%} of the step"
    return _joined(
        interval(end_to_end.low, end_to_end.high),
        _told("by {}", end_to_end.method),
        _told("{} a step", end_to_end.step_s, seconds),
        waits or _told("{:.0%} of it compute", end_to_end.compute_share),
        "not to be trusted: end_to_end='windows' tells" if end_to_end.trusted is False else None,
    )


def _paid_back(time: Time) -> str:
    """When compiling and measuring are paid back, beside the steps that this run has."""
    beyond = time.last_step is not None and time.break_even_step is not None and time.break_even_step > time.last_step
    return _told("compiling is paid back at step {:,}", time.break_even_step) + (
        _told(", after this run's last, {:,}", time.last_step) if beyond else ""
    )


def _compiles_basis(found: Compiles) -> str:
    rare = {"eager frame": found.eager_frames, "limit hit": found.limit_hits, "cudagraph skip": found.cudagraph_skips}
    always = (count(found.recompiles, "recompile"), count(found.graph_breaks, "graph break"))
    replayed = _told("{:,} of them CUDA graphs", found.cudagraphed)
    return _joined(*always, *(count(number, noun) for noun, number in rare.items() if number), replayed)


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
    return _joined(
        judged[drift.within_tolerance] + _told(" ({})", drift.tolerance, small),
        "in validation" if drift.stage == "validate" else None,
        _told("random numbers {}", drift.rng),
        _told("{} by ", drift.worst_effect) + known(drift.effect_rel, small) if drift.worst_effect else None,
        "eager not finite" if drift.eager_finite is False else None,
        "compiled not finite" if drift.compiled_finite is False else None,
        *(f"{name} {small(error)} from float64" for name, error in (drift.reference or {}).items()),
    )


def _gradient_basis(drift: Drift) -> str:
    return _joined(
        _told("noise floor {}", drift.noise_floor, small),
        _told("cosine {:.6f}", drift.grad_cosine),
        _told("worst {}", drift.worst_parameter),
    )


def _environment_basis(environment: Environment) -> str:
    return _joined(
        _told("torch {}", environment.torch),
        _told("lightning {}", environment.lightning),
        environment.precision,
        environment.strategy,
        _told("world size {}", environment.world_size),
        "tf32" if environment.tf32 else None,
        "deterministic" if environment.deterministic else None,
    )


def interval(low: float | None, high: float | None) -> str | None:
    """Both ends of an interval, ``None`` where it is not known.

    >>> interval(1.25, 1.4)
    '1.25x to 1.40x'
    """
    return None if low is None or high is None else f"{ratio(low)} to {ratio(high)}"


def _joined(*parts: str | None, by: str = ", ") -> str:
    return by.join(part for part in parts if part)


def _told(template: str, value: T | None, form: Callable[[T], object] = lambda value: value) -> str:
    """``template`` about a known figure, nothing about an unknown one."""
    return "" if value is None else template.format(form(value))


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *([escape(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def one_line(text: str) -> str:
    """``text`` without line breaks and control characters, cut at ``MAX_TEXT`` characters.

    >>> one_line("a" + chr(10) + "  b" + chr(27) + "[0m")
    'a b [0m'
    """
    # Neither are lone surrogates, found in the names of files that are not UTF-8, printable.
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 3] + "..."


def escape(text: str) -> str:
    r"""``one_line(text)`` as Markdown that shows it literally, in a table cell too.

    >>> print(escape("<lambda> a|b __init__"))
    &lt;lambda&gt; a\|b \_\_init\_\_
    """
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", html.escape(one_line(text), quote=False))


def known(value: T | None, form: Callable[[T], str]) -> str:
    """``form(value)``, or a dash for what is not known: never a zero.

    >>> known(0.5, ratio), known(None, ratio) == UNKNOWN
    ('0.50x', True)
    """
    return UNKNOWN if value is None else form(value)


def place(file: str, line: int | None) -> str:
    """``file:line`` with the last two parts of the path, enough to find it in one's own project.

    >>> place("/home/user/project/models/gpt.py", 41)
    'models/gpt.py:41'
    """
    return "/".join(re.split(r"[\\/]", file)[-2:]) + _told(":{}", line)


def seconds(value: float) -> str:
    """A duration with its unit.

    >>> seconds(0.0225), seconds(-17), seconds(5400), seconds(0)
    ('22.5 ms', '-17.0 s', '1.50 h', '0.00 s')
    """
    units = ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
    scale, unit = next((pair for pair in units if abs(value) >= pair[0]), (1.0, "s"))
    return f"{_three_digits(value / scale)} {unit}"


def size(num_bytes: int) -> str:
    """An amount of memory with its unit.

    >>> size(3 * 2**29), size(2**19)
    ('1.50 GiB', '0.50 MiB')
    """
    scale, unit = (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")
    return f"{_three_digits(num_bytes / scale)} {unit}"


def ratio(value: float) -> str:
    """A speedup.

    >>> ratio(1.3249)
    '1.32x'
    """
    return f"{value:.2f}x"


def small(value: float) -> str:
    """A number of which the order of magnitude matters.

    >>> small(1.23e-7), small(0.0)
    ('1.2e-07', '0')
    """
    return f"{value:.1e}" if value else "0"


def count(number: int | None, noun: str) -> str:
    """A number of things, a dash for one that is not known.

    >>> count(1, "pair"), count(2000, "pair"), count(None, "pair") == f"{UNKNOWN} pairs"
    ('1 pair', '2,000 pairs', True)
    """
    return f"{known(number, '{:,}'.format)} {noun}{'' if number == 1 else 's'}"


def _three_digits(value: float) -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"
