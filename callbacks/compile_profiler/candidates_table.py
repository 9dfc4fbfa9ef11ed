"""The candidates of a search for human eyes: a table for the screen, Markdown, the cells of a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from compile_profiler.results import CandidateResult, SearchReport
from compile_profiler.wording import (
    UNKNOWN,
    count,
    escape,
    interval,
    joined,
    known,
    markdown,
    one_line,
    ratio,
    seconds,
    size,
    small,
    told,
)

CANDIDATE_HEADER = (
    "place",
    "candidate",
    "status",
    "speedup of a pass",
    "speedup of a step",
    "compiling",
    "peak memory",
    "drift",
    "why",
)
MAX_IN_TABLE = 12  # rows: the table is read at a glance
MAX_IN_MARKDOWN = 40  # the page is scrolled; the JSON file has them all
_MAX_WHY = 120  # characters on the screen, where the column is narrow: the message of an error can be long
_MAX_NAME = 26  # columns
_STACKED = (
    "candidate\nstatus\n",
    "a pass\ninterval\npairs",
    "a step\ninterval\nmethod",
    "compiling\npeak memory\ndrift",
)
_FIRST = ("chosen", "tried", "dropped")


def told_of(found: SearchReport) -> tuple[str, str]:
    """A search as a figure of the report: how many were tried, what training runs on, what looking has cost.

    >>> told_of(SearchReport(candidates=(CandidateResult(name="step/default", target="step"),), budget_s=30.0))
    ('0 of 1 tried', 'not settled, training on eager, took 0.00 s, budget 30.0 s')
    """
    tried = sum(map(was_tried, found.candidates))
    since = told(" since step {:,}", found.switches[-1].step if found.switches else None)
    whose = told(" of an assumed run of {}" if found.run_is_assumed else " of a run of {}", found.run_s, seconds)
    basis = joined(
        None if found.settled else "not settled",
        f"training on {found.active}{since}",
        f"took {seconds(found.spent_s)}",
        told("budget {}", found.budget_s, seconds) + whose,
    )
    return f"{tried} of {len(found.candidates)} tried", basis


def was_tried(one: CandidateResult) -> bool:
    """Whether the search has begun with it, in however short a time it was over.

    >>> was_tried(CandidateResult(name="step/default", target="step", step=40))
    True
    """
    return one.step is not None


def candidates_table(found: SearchReport) -> Table:
    """The table of the screen: those that were tried, then the others, one row for each reason.

    >>> first = CandidateResult(name="step/default", target="step", step=40, status="chosen", speedup=1.5)
    >>> others = [CandidateResult(name=name, target="step", status="skipped", why="no GPU") for name in "ab"]
    >>> candidates_table(SearchReport(candidates=(first, *others))).row_count
    2
    """
    grid = Table(title="Candidates", box=SIMPLE, leading=1)
    for n, column in enumerate(_STACKED):
        grid.add_column(column, overflow="fold", no_wrap=n > 0, max_width=None if n else _MAX_NAME)
    grid.add_column("why\n\n", overflow="fold")
    rows = _tried_first(found)
    for name, one in rows[:MAX_IN_TABLE]:
        head = Text(f"{one_line(name)}\n{one.status}")
        if one.status == "chosen":
            head.stylize("green")
        stacks = (_of_a_pass(one), _of_a_step(one), (*_costs(one), _drift(one)))
        cells = ("\n".join(map(one_line, stack)) if was_tried(one) else UNKNOWN for stack in stacks)
        grid.add_row(head, *map(Text, cells), Text(one_line(_why(one), max_text=_MAX_WHY)))
    if len(rows) > MAX_IN_TABLE:
        grid.add_row(Text(_left_out(len(rows) - MAX_IN_TABLE)))
    return grid


def candidates_markdown(found: SearchReport) -> str:
    """The same as Markdown, each with its place in the report.

    >>> found = SearchReport(candidates=(CandidateResult(name="step/default", target="step"),))
    >>> candidates_markdown(found).splitlines()[-1].split(" | ")[:3]
    ['| 1', 'step/default', 'untried']
    """
    places = {id(one): place for place, one in enumerate(found.candidates, start=1)}
    rows = _tried_first(found)
    cells = [_cells(name, places[id(one)], one) for name, one in rows[:MAX_IN_MARKDOWN]]
    left_out = len(rows) - len(cells)
    note = f"\n\n{_left_out(left_out)}" if left_out else ""
    return f"{escape(': '.join(told_of(found)))}\n\n{markdown(CANDIDATE_HEADER, cells)}{note}"


def candidate_cells(found: SearchReport) -> list[list[str]]:
    """A row under ``CANDIDATE_HEADER`` for each candidate, in the order of the report.

    >>> candidate_cells(SearchReport(candidates=(CandidateResult(name="step/default", target="step"),)))[0][:3]
    ['1', 'step/default', 'untried']
    """
    return [_cells(one.name, place, one) for place, one in enumerate(found.candidates, start=1)]


def history(found: SearchReport) -> str:
    """What training has run on, in a sentence.

    >>> from compile_profiler.results import Switch
    >>> history(SearchReport(switches=(Switch(step=12, name="eager"), Switch(step=49, name="step/default"))))
    'eager from step 12, step/default from step 49'
    """
    return ", ".join(f"{switch.name} from step {switch.step:,}" for switch in found.switches)


def _tried_first(found: SearchReport) -> list[tuple[str, CandidateResult]]:
    """Those that were tried, the chosen one first, by name; then, for each reason, those that were not."""
    tried = sorted(filter(was_tried, found.candidates), key=lambda one: (*_FIRST, one.status).index(one.status))
    return [*((one.name, one) for one in tried), *_by_reason(one for one in found.candidates if not was_tried(one))]


def _by_reason(untried: Iterable[CandidateResult]) -> Iterator[tuple[str, CandidateResult]]:
    alike: dict[tuple[str, str], list[CandidateResult]] = {}
    for one in untried:
        alike.setdefault((one.status, one.why), []).append(one)
    for first, *others in alike.values():
        yield first.name + (f" and {len(others):,} more" if others else ""), first


def _left_out(number: int) -> str:
    return f"{count(number, 'more row')} in compile_profile.json"


def _cells(name: str, place: int, one: CandidateResult) -> list[str]:
    flat = (joined(*(part for part in parts if part != UNKNOWN)) for parts in (_of_a_pass(one), _of_a_step(one)))
    cells = (str(place), name, one.status, *flat, *_costs(one), _drift(one), _why(one))
    return [cell or UNKNOWN for cell in cells]


def _of_a_pass(one: CandidateResult) -> tuple[str, ...]:
    pairs = joined(count(one.num_pairs, "pair"), f"{one.num_void:,} void" if one.num_void else None)
    between = interval(one.speedup_low, one.speedup_high)
    return known(one.speedup, ratio), between or UNKNOWN, pairs if one.num_pairs + one.num_void else UNKNOWN


def _of_a_step(one: CandidateResult) -> tuple[str, ...]:
    between = interval(one.end_to_end_low, one.end_to_end_high)
    return known(one.end_to_end, ratio), between or UNKNOWN, known(one.end_to_end_method, "by {}".format)


def _costs(one: CandidateResult) -> tuple[str, ...]:
    return known(one.compile_s, seconds), known(one.peak_bytes, size)


def _drift(one: CandidateResult) -> str:
    """The larger of the distances of loss and gradients."""
    return known(max((rel for rel in (one.loss_rel, one.grad_rel) if rel is not None), default=None), small)


def _why(one: CandidateResult) -> str:
    return one.why or {"untried": "not looked at yet", "tried": "being measured"}.get(one.status, "")
