"""What `make demo` runs: one job that compiling does not help, one that it does, both verdicts side by side."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

from rich.console import Console
from rich.table import Table

from compile_profiler import CompileProfiler
from compile_profiler.records import Report
from examples import digits_cnn, recurrent_filter


def figure(value: float | None, unit: str = "", scale: float = 1.0) -> str:
    """A number as the table shows it; a dash where it is not known.

    >>> figure(0.00125, " ms", 1e3), figure(None, " ms", 1e3)
    ('1.25 ms', '-')
    """
    return "-" if value is None else f"{scale * value:.2f}{unit}"


def side_by_side(reports: dict[str, Report]) -> Table:
    """One column per report, one row per question a reader has."""
    table = Table("", *reports, title="Does compiling pay?")
    rows = {
        "decision": lambda r: r.verdict.decision,
        "reason": lambda r: r.verdict.reason,
        "speedup": lambda r: figure(r.speedup.median, "x"),
        "interval": lambda r: f"{figure(r.speedup.low, 'x')} to {figure(r.speedup.high, 'x')}",
        "eager": lambda r: figure(r.time.eager_s, " ms", 1e3),
        "compiled": lambda r: figure(r.time.compiled_s, " ms", 1e3),
        "compiling took": lambda r: figure(r.time.compile_s, " s"),
        "pairs": lambda r: str(r.speedup.num_pairs),
    }
    for name, cell in rows.items():
        table.add_row(name, *(cell(report) for report in reports.values()))
    return table


def main(root_dir="runs"):
    """Train both jobs, print the table, return the reports by name."""
    # The verdicts are to be read here, not what Lightning says about itself at every fit.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec", category=FutureWarning)
    reports = {}
    for name, job in (("digits CNN", digits_cnn), ("recurrent filter", recurrent_filter)):
        profiler = CompileProfiler()
        job.main(callbacks=[profiler], root_dir=root_dir)
        reports[name] = profiler.report
    console = Console()
    console.print(side_by_side(reports))
    for name, report in reports.items():
        console.print(f"{name}: {report.verdict.message}", soft_wrap=True)
    tensorboard = Path(sys.executable).with_name("tensorboard")  # of the same virtual environment
    console.print(f"\nTo see the curves: {os.path.relpath(tensorboard)} --logdir {root_dir}", soft_wrap=True)
    return reports


if __name__ == "__main__":
    main()
