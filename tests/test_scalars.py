"""Promises of the tag table: the contract's list, in its units, the known figures only."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile_profiler.records import Compiles, Drift, EndToEnd, Memory, Report, Speedup, Time, Verdict
from compile_profiler.results import CandidateResult, SearchReport
from compile_profiler.scalars import EVENTS_TAG, SCALARS, SEARCH_TAG, VERDICT_TAG, markdown_table, scalars

PAGE = Path(__file__).parents[1] / "docs" / "scalars.md"

# Every figure is another number, so that a tag which reads its neighbour's field is found out.
FULL = Report(
    verdict=Verdict(decision="compiled", reason="gain"),
    speedup=Speedup(median=1.5, low=1.25, high=1.75),
    end_to_end=EndToEnd(speedup=1.125, step_s=0.5),
    time=Time(eager_s=0.25, compiled_s=0.125, compile_s=17.0, saved_s=-4.0, overhead_pct=1.375),
    compiles=Compiles(graphs=5, recompiles=3, graph_breaks=2),
    drift=Drift(loss_rel=1e-7, grad_rel=2e-7, grad_cosine=0.75, noise_floor=3e-8, tolerance=4e-5),
    memory=Memory(eager_peak_bytes=3 * 2**20, compiled_peak_bytes=2**19),
    search=SearchReport(active="b", candidates=tuple(CandidateResult(name=name, target="step") for name in "ab")),
)

# The contract, written out: tag, and the number that FULL must give.
EXPECTED = {
    "compile/speedup": 1.5,
    "compile/speedup_low": 1.25,
    "compile/speedup_high": 1.75,
    "compile/end_to_end_speedup": 1.125,
    "compile/step_ms/eager": 250.0,
    "compile/step_ms/compiled": 125.0,
    "compile/step_ms/total": 500.0,
    "compile/graphs": 5.0,
    "compile/recompiles": 3.0,
    "compile/graph_breaks": 2.0,
    "compile/compile_s": 17.0,
    "compile/drift/loss_rel": 1e-7,
    "compile/drift/grad_rel": 2e-7,
    "compile/drift/grad_cosine": 0.75,
    "compile/drift/noise_floor": 3e-8,
    "compile/drift/tolerance": 4e-5,
    "compile/saved_s": -4.0,
    "compile/overhead_pct": 1.375,
    "compile/peak_mb/eager": 3.0,
    "compile/peak_mb/compiled": 0.5,
    "compile/active": 1.0,
    "compile/candidate": 2.0,
}


def test_tags_are_the_contract() -> None:
    """The tags are the contract's, each once, in its order."""
    assert [scalar.tag for scalar in SCALARS] == list(EXPECTED)
    assert (VERDICT_TAG, EVENTS_TAG, SEARCH_TAG) == ("compile/verdict", "compile/events", "compile/search")


def test_every_tag_reads_its_own_field_in_its_own_unit() -> None:
    """A full report gives every tag, converted to the unit of the table."""
    assert scalars(FULL) == EXPECTED


def test_values_are_floats() -> None:
    """Loggers get plain floats, never a bool or an int."""
    assert {type(value) for value in scalars(FULL).values()} == {float}


def test_unknown_figures_are_left_out() -> None:
    """An empty report logs its counts and the active arm, and no zero in place of an unknown figure."""
    expected = {"compile/graphs": 0.0, "compile/recompiles": 0.0, "compile/graph_breaks": 0.0, "compile/active": 1.0}

    assert scalars(Report()) == expected


def test_a_known_zero_is_logged() -> None:
    """Zero is a figure like any other when it was measured."""
    assert scalars(Report(drift=Drift(loss_rel=0.0)))["compile/drift/loss_rel"] == 0.0


@pytest.mark.parametrize(
    ("verdict", "active"),
    [
        (Verdict(), 1.0),
        (Verdict(decision="compiled", reason="inconclusive"), 1.0),
        (Verdict(decision="eager", reason="no_gain"), 0.0),
    ],
)
def test_active_says_which_arm_trains(verdict: Verdict, active: float) -> None:
    """The run counts as compiled until it is decided that it goes back to eager."""
    assert scalars(Report(verdict=verdict))["compile/active"] == active


@pytest.mark.parametrize(("active", "place"), [("eager", 0.0), ("a", 1.0), ("b", 2.0), ("of another version", None)])
def test_the_candidate_is_its_place_in_the_report(active: str, place: float | None) -> None:
    """Eager is 0, the first candidate 1; a name that is not in the list has no place."""
    search = SearchReport(active=active, candidates=FULL.search.candidates if FULL.search else ())

    assert scalars(Report(search=search)).get("compile/candidate") == place


def test_page_shows_the_table_of_the_code() -> None:
    """The table in docs/scalars.md is the one the code makes."""
    assert f"\n\n{markdown_table()}\n\n" in PAGE.read_text(encoding="utf-8")  # no row more, none less


def test_units_and_meanings_fit_a_table_cell() -> None:
    """No unit or meaning is empty or holds a pipe, which would break the page's table."""
    texts = [text for scalar in SCALARS for text in (scalar.unit, scalar.meaning)]

    assert all(text and "|" not in text and "\n" not in text for text in texts)
