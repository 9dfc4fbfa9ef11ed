"""Whatever function of the package fails, the run goes on as without it: a sample of what ``tests/faults.py`` tries."""

import pytest

from compile_profiler.guard import Guard
from faults import DOORS, RUNS, boundary_of, complaints, crossings, recorded, run, short_blocks

ONE_IN = {"measured": 30, "windows": 80, "failing": 50, "manual": 80, "manual, failing": 80}
ONE_IN_A_SEARCH = 120


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.filterwarnings("ignore")
def test_an_error_of_our_own_loses_no_run_and_leaves_nothing(kind):
    """Weights, optimizer, random numbers, logs, attributes and listeners are those of a run without the callback."""
    with short_blocks():
        plain, counts = run(RUNS[kind], None), crossings(kind)
        sample = list(counts)[:: ONE_IN.get(kind, ONE_IN_A_SEARCH)]
        found = {boundary_of(code): complaints(kind, code, 1, plain) for code in sample}

    assert {boundary: wrong for boundary, wrong in found.items() if wrong} == {}
    assert len(counts) > 200
    assert len({boundary.module for boundary in found}) > 2


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_is_spoiled_is_seen(monkeypatch):
    """The same check, of a guard that gives nothing back."""
    monkeypatch.setattr(Guard, "_rewind", lambda self, failure: None)
    with short_blocks():
        plain, counts = run(RUNS["failing"], None), recorded("failing")
        (code,) = (code for code in counts if boundary_of(code).name == "advice")
        found = complaints("failing", code, 1, plain)

    assert "left weights/net.1.running_mean" in found


def test_every_door_exists():
    """A door that was renamed would excuse nothing; one that is gone has no excuse."""
    with short_blocks():
        names = {boundary_of(code).name for kind in ("measured", "manual") for code in recorded(kind)}

    assert set(DOORS) - names <= {"CompileProfiler._give_up", "CompileProfiler.report", "CompileProfiler.__init__"}
