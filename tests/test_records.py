"""Promises of the nouns: impossible values are refused at birth, a report survives JSON unchanged."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from compile_profiler.records import (
    SCHEMA,
    Compiles,
    Drift,
    EndToEnd,
    Environment,
    Event,
    Memory,
    Report,
    Sample,
    Speedup,
    Time,
    Verdict,
)

FULL = Report(
    verdict=Verdict(
        decision="eager",
        reason="drift",
        message="Gradients differ by 0.5.",
        step=40,
        config={"target": ["encoder", "decoder"], "backend": "inductor", "options": {"max_autotune": True}},
    ),
    speedup=Speedup(median=1.5, low=1.25, high=1.75, num_pairs=9, num_void=2, void={"compiled in it": 2}, num_shapes=1),
    end_to_end=EndToEnd(
        speedup=1.1, low=1.05, high=1.2, method="estimate", step_s=0.02, compute_share=0.4, input_bound=True
    ),
    time=Time(
        eager_s=0.01, compiled_s=0.007, compile_s=17, probe_s=0.5, saved_s=-3.0, break_even_step=900, overhead_pct=1.5
    ),
    compiles=Compiles(
        graphs=3,
        recompiles=2,
        by_stage={"train": {"graph": 3, "recompile": 2}, "sanity": {"graph": 1}},
        events=(
            Event(step=0, epoch=0, stage="train", kind="graph"),
            Event(
                step=7,
                epoch=1,
                stage="validate",
                kind="recompile",
                function="forward",
                file="model.py",
                line=12,
                owner="user",
                cause="shape",
                detail="size 8 became 5",
                hint="pad",
                seconds=1.5,
                count=4,
            ),
        ),
    ),
    drift=Drift(loss_rel=0.0, rng="matched", within_tolerance=False, reference={"eager": 1e-7, "compiled": 2e-7}),
    memory=Memory(eager_peak_bytes=1, compiled_peak_bytes=0),
    environment=Environment(torch="2.13.0", world_size=2, tf32=False),
)


@pytest.mark.parametrize("report", [Report(), FULL], ids=["empty", "full"])
def test_report_survives_json(report: Report) -> None:
    """dict -> JSON -> from_dict gives an equal report, and the JSON needs no NaN."""
    text = json.dumps(report.to_dict(), allow_nan=False)

    assert Report.from_dict(json.loads(text)) == report


def test_unknown_figures_are_null() -> None:
    """An empty report has null where a figure is not known, and zero only where something is counted."""
    empty = Report().to_dict()

    assert set(empty["time"].values()) == {None}
    assert empty["speedup"] == {
        "median": None,
        "low": None,
        "high": None,
        "num_pairs": 0,
        "num_void": 0,
        "void": {},
        "num_shapes": 0,
    }


def test_top_level_keys_are_the_contract() -> None:
    """The JSON begins with the contract's parts, in its order."""
    expected = ["schema", "verdict", "speedup", "end_to_end", "time", "compiles", "drift", "memory"]
    expected += ["environment", "ranks", "search"]

    assert list(Report().to_dict()) == expected


def test_unknown_keys_are_ignored() -> None:
    """A file written by a later version of the same schema can still be read."""
    data = Report().to_dict() | {"later": 1}
    data["time"]["later_s"] = 2.0

    assert Report.from_dict(data) == Report()


def test_missing_parts_take_their_defaults() -> None:
    """A file that leaves out what it does not know is read as not knowing it."""
    assert Report.from_dict({"schema": SCHEMA, "time": {"eager_s": 1}}) == Report(time=Time(eager_s=1))


@pytest.mark.parametrize(
    ("data", "found"),
    [({"schema": 2}, "2"), ({}, "None"), ([1], "'list'"), (None, "'NoneType'")],
    ids=["later", "missing", "a list", "nothing"],
)
def test_other_schemas_are_refused(data: Any, found: str) -> None:
    """Anything but a report of this schema is refused, saying what was found."""
    with pytest.raises(ValueError, match=f"^expected a report with schema {SCHEMA}, got {found}"):
        Report.from_dict(data)


EVENT = {"step": 1, "epoch": 0, "stage": "train", "kind": "graph"}


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"verdict": []}, "report.verdict must be an object, got []."),
        ({"verdict": {"message": 3}}, "report.verdict.message must be str, got 3."),
        (
            {"verdict": {"decision": "maybe"}},
            "report.verdict.decision must be one of 'compiled', 'eager', 'undecided', ",
        ),
        ({"speedup": {"num_pairs": None}}, "report.speedup.num_pairs must be int, got None."),
        ({"speedup": {"num_pairs": 2.5}}, "report.speedup.num_pairs must be int, got 2.5."),
        ({"speedup": {"num_pairs": True}}, "report.speedup.num_pairs must be int, got True."),
        ({"speedup": {"void": {"late": "2"}}}, "report.speedup.void.late must be int, got '2'."),
        ({"speedup": {"void": [2]}}, "report.speedup.void must be dict, got [2]."),
        ({"time": {"eager_s": "fast"}}, "report.time.eager_s must be float, got 'fast'."),
        ({"time": {"eager_s": False}}, "report.time.eager_s must be float, got False."),
        ({"drift": {"within_tolerance": 1}}, "report.drift.within_tolerance must be bool, got 1."),
        ({"drift": {"rng": "maybe"}}, "report.drift.rng must be one of 'none', 'matched', 'unmatched', got 'maybe'."),
        ({"compiles": {"events": {}}}, "report.compiles.events must be tuple, got {}."),
        ({"compiles": {"events": [EVENT, EVENT | {"line": "x"}]}}, "report.compiles.events[1].line must be int, "),
        ({"compiles": {"events": [{"step": 1, "epoch": 0}]}}, "report.compiles.events[0] lacks stage, kind."),
        ({"verdict": {"decision": "eager"}}, "'undecided' goes only with 'pending', got 'eager' with 'pending'."),
        ({"time": {"eager_s": math.nan}}, "Time.eager_s must be a finite number or None, got nan."),
    ],
)
def test_a_wrong_field_is_named(part: dict[str, Any], message: str) -> None:
    """A field of the wrong type is refused with its path, what was expected, what came."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 -- the whole message is compared below
        Report.from_dict({"schema": SCHEMA, **part})

    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_figure_is_nan_or_infinite(value: float) -> None:
    """A figure that is not a finite number is refused, also one inside a mapping of figures."""
    with pytest.raises(ValueError, match=r"Speedup\.median must be a finite number or None"):
        Speedup(median=value)
    with pytest.raises(ValueError, match=r"Drift\.reference must be a finite number or None"):
        Drift(reference={"eager": 1e-7, "compiled": value})


def test_undecided_goes_only_with_pending() -> None:
    """A verdict is either pending or has both a decision and its reason."""
    assert Verdict().reason == "pending"
    assert Verdict(decision="eager", reason="no_gain").decision == "eager"
    for fields in ({"decision": "compiled"}, {"reason": "gain"}, {"decision": "undecided", "reason": "gain"}):
        with pytest.raises(ValueError, match="'undecided' goes only with 'pending'"):
            Verdict(**fields)


@pytest.mark.parametrize(("eager_s", "compiled_s"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)])
def test_a_pair_without_time_must_be_void(eager_s: float, compiled_s: float) -> None:
    """A pair that counts has two positive times; a void one may have none."""
    with pytest.raises(ValueError, match="seconds of a pair must be positive"):
        Sample(step=0, eager_s=eager_s, compiled_s=compiled_s)

    assert Sample(step=0, eager_s=eager_s, compiled_s=compiled_s, void="compiled in it").void


def test_log_ratio_is_positive_where_compiling_is_faster() -> None:
    """The sample of a pair is the logarithm of eager over compiled time."""
    assert Sample(step=0, eager_s=2.0, compiled_s=1.0).log_ratio == pytest.approx(math.log(2))
    assert Sample(step=0, eager_s=1.0, compiled_s=2.0).log_ratio == pytest.approx(-math.log(2))
