"""The rows of ``benchmarks/auto.py`` as tables: how much later a search ends than the best run without one."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import show
from compile_profiler.results import EAGER

CALLBACK = "callback"
COLD, WARM = AUTO_RUNS = ("auto/cold", "auto/warm")
"""A search that knows nothing, and the next one of the same job."""

Row = Mapping[str, Any]


def seconds(rows: Sequence[Row], steps: int) -> dict[str, list[float]]:
    """Seconds of runs of so many steps, by what ran; of those that did not fail.

    >>> seconds([{"run": "eager", "marks_s": {"10": 1.0, "50": 5.0}}, {"run": "callback", "error": "no"}], 10)
    {'eager': [1.0]}
    """
    found: dict[str, list[float]] = {}
    for row in rows:
        if str(steps) in row.get("marks_s", {}):
            found.setdefault(row["run"], []).append(row["marks_s"][str(steps)])
    return found


def noise_pct(same: Sequence[float]) -> float | None:
    """By how many percent a ratio of medians is off, typically, where both are of the same thing.

    The values are split into two halves in every way; of the distances of their medians, the median. ``None`` for
    fewer than two values.

    >>> noise_pct([1.0, 1.1])
    10.0
    >>> noise_pct([1.0]) is None
    True
    """
    half, everything = len(same) // 2, range(len(same))
    apart = []
    for chosen in itertools.combinations(everything, half) if half else ():
        rest = [same[n] for n in everything if n not in chosen]
        ratio = statistics.median(same[n] for n in chosen) / statistics.median(rest)
        apart.append(abs(math.log(ratio)))
    return round(100 * math.expm1(statistics.median(apart)), 3) if apart else None


def figures(rows: Sequence[Row], steps: int) -> dict[str, Any]:
    """What is known of one job's runs of so many steps.

    Args:
        rows: of that job, on one machine.
        steps: how many.

    Returns:
        Medians of the seconds by what ran; the best run without a search, by name; by the kind of search, its seconds
        over that one's, its share of the run in percent, what it ended on.

    >>> rows = [{"run": "eager", "steps": 10, "marks_s": {"10": 4.0}}]
    >>> rows += [{"run": "step/default", "steps": 10, "marks_s": {"10": 2.0}}]
    >>> search = {"active": "step/default", "spent_s": 0.25}
    >>> rows += [{"run": "auto/cold", "steps": 10, "marks_s": {"10": 2.5}, "report": {"search": search}}]
    >>> found = figures(rows, 10)
    >>> found["best"], found["over_best"], found["search_pct"], found["chosen"]
    ('step/default', {'auto/cold': 1.25}, {'auto/cold': 10.0}, {'auto/cold': 'step/default'})
    """
    all_s = seconds(rows, steps)
    typical = {run: statistics.median(values) for run, values in all_s.items()}
    others = [run for run in typical if run not in AUTO_RUNS]
    best = min(others, key=typical.__getitem__, default=None)
    searches = {run: _searches(rows, run, steps) for run in AUTO_RUNS if run in typical}
    return {
        "num": {run: len(values) for run, values in all_s.items()},
        "seconds": typical,
        "best": best,
        "over_best": {run: typical[run] / typical[best] for run in searches} if best is not None else {},
        "noise_pct": noise_pct(all_s.get(EAGER, [])),
        "search_pct": {run: statistics.median(share for share, _ in found) for run, found in searches.items()},
        "chosen": {run: _counted([name for _, name in found]) for run, found in searches.items()},
    }


def _searches(rows: Sequence[Row], run: str, steps: int) -> list[tuple[float, str]]:
    """Of each search its share of the run in percent, and what it ended on."""
    found = []
    for row in rows:
        if row["run"] == run and str(steps) in row.get("marks_s", {}):
            # A callback that found nothing to do in this run has no search.
            search = row["report"]["search"] or {"spent_s": 0.0, "active": EAGER}
            found.append((100 * search["spent_s"] / row["marks_s"][str(steps)], search["active"]))
    return found


def _counted(names: Sequence[str]) -> str:
    counts = Counter(names)
    return names[0] if len(counts) == 1 else ", ".join(f"{name} {num}" for name, num in counts.most_common())


def table(by_job: Mapping[tuple[str, int], Mapping[str, Any]]) -> Table:
    """One row for each job and number of steps, of ``figures``."""
    found = Table(
        *("job", "steps", "runs", "eager s", "callback s", "auto s", "known s", "best s", "which"),
        *("auto / best", "known / best", "eager / eager", "search", "chose", "known: chose"),
        title="Whole runs with the search over the best of the others (known: it knows an earlier run's winner)",
    )
    for (job, steps), known in by_job.items():
        typical, best = known["seconds"], known["best"]
        found.add_row(
            *(job, str(steps), str(min(known["num"].values()))),
            *(show(typical.get(run)) for run in (EAGER, CALLBACK, COLD, WARM)),
            *(show(typical.get(best)), best or show(None)),
            *(show(known["over_best"].get(run), "{:.3f}") for run in AUTO_RUNS),
            show(known["noise_pct"], "± {:.1f} %"),
            show(known["search_pct"].get(COLD), "{:.1f} %"),
            *(known["chosen"].get(run, show(None)) for run in AUTO_RUNS),
        )
    return found


def singles_table(by_job: Mapping[tuple[str, int], Mapping[str, Any]]) -> Table:
    """Seconds of each single configuration."""
    names = dict.fromkeys(run for known in by_job.values() for run in sorted(known["seconds"]))
    columns = [EAGER, *(name for name in names if name not in (EAGER, CALLBACK, *AUTO_RUNS))]
    found = Table("job", "steps", *(f"{name} s" for name in columns), title="Each configuration compiled by hand")
    for (job, steps), known in by_job.items():
        found.add_row(job, str(steps), *(show(known["seconds"].get(name)) for name in columns))
    return found


def show_tables(rows: Sequence[Row]) -> None:
    """Print both for each machine and kind of caches; then what failed."""
    console = Console(width=200)
    by_setting: dict[str, list[Row]] = {}
    for row in rows:
        if not row["fills"]:
            by_setting.setdefault(json.dumps(row["setting"]), []).append(row)
    for setting, of_setting in by_setting.items():
        by_job = {}
        for job in dict.fromkeys(row["job"] for row in of_setting):
            mine = [row for row in of_setting if row["job"] == job]
            for steps in sorted({int(mark) for row in mine for mark in row.get("marks_s", {})}):
                by_job[job, steps] = figures(mine, steps)
        console.print(table(by_job))
        console.print(singles_table(by_job))
        console.print(", ".join(f"{key} {value}" for key, value in json.loads(setting).items()))
    for row in rows:
        if "error" in row:
            console.print(f"{row['job']}, {row['run']}, {row['steps']} steps: {row['error']}", markup=False)
