"""What it costs not to know beforehand: fit with the default callback beside the better of eager and compiled.

PYTHONPATH=callbacks python -m benchmarks.regret --jobs mlp,filter --steps 2000 --out regret.json

With the seconds of compiling and without them, and once the verdict stands.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.table import Table

from benchmarks.common import BlockTimer, arguments, fit, run_all, show, step_seconds, steps_within
from benchmarks.jobs import Job
from compile_profiler import CompileProfiler

ALTERNATIONS = 2
ARMS = ("compiled", "callback", "eager")
"""The compiled run goes first: it meets an empty cache of kernels, if it is empty."""


def one_run(job: Job, arm: str, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """A whole fit, from the start of training to its end."""
    timer = BlockTimer()
    never: dict[str, Any] = {"max_pairs": 0} if arm == "compiled" else {}
    profiler = CompileProfiler(verbose=False, **never, **options)
    fit(job, steps=steps, callbacks=[timer] if arm == "eager" else [profiler, timer])
    report = None if arm == "eager" else profiler.report.to_dict()
    compile_s = report["time"]["compile_s"] if report is not None else 0.0
    settled = timer.steps_s[len(timer.steps_s) // 2 :]
    return {
        "train_s": timer.train_s,
        "without_compiling_s": timer.train_s - compile_s,
        "settled_step_s": statistics.median(settled),
        "report": report,
    }


def measure(args: argparse.Namespace, job: Job) -> dict[str, Any]:
    """Whole fits of each arm in turn."""
    options = {"backend": args.backend, "mode": args.mode}
    steps = steps_within(step_seconds(job), steps=args.steps, run_s=args.run_s)
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for turn in range(ALTERNATIONS):
        for arm in ARMS if turn % 2 == 0 else reversed(ARMS):
            runs[arm].append(one_run(job, arm, steps, options))
    figures = ("train_s", "without_compiling_s", "settled_step_s")
    return {"steps": steps, "runs": runs, "regret_pct": {figure: regret_pct(runs, figure) for figure in figures}}


def regret_pct(runs: dict[str, list[dict[str, Any]]], figure: str) -> float:
    """How much more of it the callback has taken than the better of the two arms, in percent.

    >>> runs = {"eager": [{"s": 4.0}], "compiled": [{"s": 3.0}, {"s": 2.0}], "callback": [{"s": 3.0}]}
    >>> round(regret_pct(runs, "s"))
    20
    """
    typical = {arm: statistics.median(run[figure] for run in runs[arm]) for arm in runs}
    return float(100 * (typical["callback"] / min(typical["eager"], typical["compiled"]) - 1))


def table(results: dict[str, dict[str, Any]]) -> Table:
    """One row per job."""
    found = Table(
        *("job", "steps", "eager s", "compiled s", "callback s", "first compile s", "measuring s", "verdict"),
        *("regret", "without compiling", "after settling", "break-even step"),
        title="Regret: the default callback over the better of eager and compiled",
    )
    for name, result in results.items():
        runs, regret = result["runs"], result["regret_pct"]
        report = runs["callback"][-1]["report"]
        seconds = {arm: statistics.median(run["train_s"] for run in runs[arm]) for arm in ARMS}
        found.add_row(
            name,
            str(result["steps"]),
            *(show(seconds[arm]) for arm in ("eager", "compiled", "callback")),
            show(runs["compiled"][0]["report"]["time"]["compile_s"], "{:.1f}"),
            show(report["time"]["probe_s"]),
            f"{report['verdict']['decision']}: {report['verdict']['reason']}",
            *(f"{regret[figure]:+.1f} %" for figure in ("train_s", "without_compiling_s", "settled_step_s")),
            show(report["time"]["break_even_step"], "{}"),
        )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the jobs named on the command line."""
    args = arguments(__doc__, argv, steps=2000, run_s=20.0)
    run_all(args, partial(measure, args), table)


if __name__ == "__main__":
    main()
