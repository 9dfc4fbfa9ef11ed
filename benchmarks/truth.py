"""Is the reported speedup true? Beside it stands the one of whole training runs, eager and compiled in turns.

PYTHONPATH=callbacks python -m benchmarks.truth --jobs mlp,filter --out truth.json

The callback is asked three times: for its estimate, for its windows, for its estimate again.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.table import Table

from benchmarks.common import (
    REPLAYS,
    BlockTimer,
    arguments,
    fit,
    interleaved,
    middle,
    run_all,
    show,
    step_seconds,
    steps_within,
)
from benchmarks.jobs import Job
from compile_profiler import CompileProfiler, Report

OVERHEAD_BUDGET = 0.5
"""Share of the time after its decision that a reporting run may measure: the default 2 % adds one pair in seconds."""


def truth(job: Job, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Eager and compiled Trainer runs that take turns; neither is measured by the callback.

    Twice, with the roles of the two threads exchanged: the main thread's steps came out up to 15 % longer.
    """
    fits: dict[str, Callable[[BlockTimer], None]] = {
        "compiled": lambda timer: fit(
            job, steps=steps, callbacks=[CompileProfiler(max_pairs=0, log=False, verbose=False, **options), timer]
        ),
        "eager": lambda timer: fit(job, steps=steps, callbacks=[timer]),
    }
    turns = [interleaved(fits)]
    if options["mode"] not in REPLAYS:
        turns.append(interleaved(dict(reversed(fits.items()))))
    each = [statistics.median(blocks["eager"]) / statistics.median(blocks["compiled"]) for blocks in turns]
    ratios = [e / c for blocks in turns for e, c in zip(blocks["eager"], blocks["compiled"], strict=True)]
    low, _, high = middle(ratios)
    return {
        "eager_steps_s": [seconds for blocks in turns for seconds in blocks["eager"]],
        "compiled_steps_s": [seconds for blocks in turns for seconds in blocks["compiled"]],
        "speedup": statistics.geometric_mean(each),
        "by_role": each,
        "low": low,
        "high": high,
    }


def reported(job: Job, steps: int, method: Any, options: dict[str, Any]) -> dict[str, Any]:
    """What the callback says about a run of its own, with pairs and windows enough to see a bias of a per cent."""
    profiler = CompileProfiler(
        fallback=False, end_to_end=method, overhead_budget=OVERHEAD_BUDGET, log=False, verbose=False, **options
    )
    fit(job, steps=steps, callbacks=[profiler])
    return profiler.report.to_dict()


def measure(args: argparse.Namespace, job: Job) -> dict[str, Any]:
    """The truth about a job, and three reports: the estimate twice, so that its pairs can be compared, and windows."""
    options = {"backend": args.backend, "mode": args.mode}
    steps = steps_within(step_seconds(job), steps=args.steps, run_s=args.run_s)
    return {
        "steps": steps,
        "truth": truth(job, steps, options),
        "reports": {
            "estimate": reported(job, steps, "estimate", options),
            "windows": reported(job, steps, "windows", options),
            "estimate again": reported(job, steps, "estimate", options),
        },
    }


def whole_step(result: dict[str, Any], method: str) -> str:
    """The speedup of the whole step by one method, and how far it is from the truth."""
    found = Report.from_dict(result["reports"][method]).end_to_end
    if found.speedup is None or found.method != method:
        return show(None)
    error_pct = 100 * (found.speedup / result["truth"]["speedup"] - 1)
    interval = "" if found.low is None else f" [{found.low:.2f}, {found.high:.2f}]"
    doubt = " (not trusted)" if found.trusted is False else ""
    return f"{found.speedup:.3f}{interval} {error_pct:+.1f} %{doubt}"


def table(results: dict[str, dict[str, Any]]) -> Table:
    """One row per job."""
    head = ("job", "eager ms", "compiled ms", "true speedup", "estimate", "windows", "pairs", "pairs again", "compute")
    found = Table(*head, title="Speedup of the whole step: true, and as reported, with its error")
    for name, result in results.items():
        true = result["truth"]
        first, again = (Report.from_dict(result["reports"][key]) for key in ("estimate", "estimate again"))
        share = first.end_to_end.compute_share
        found.add_row(
            name,
            show(1e3 * statistics.median(true["eager_steps_s"])),
            show(1e3 * statistics.median(true["compiled_steps_s"])),
            f"{true['speedup']:.3f} ({', '.join(f'{one:.3f}' for one in true['by_role'])})",
            whole_step(result, "estimate"),
            whole_step(result, "windows"),
            show(first.speedup.median, "{:.3f}"),
            show(again.speedup.median, "{:.3f}"),
            show(share, "{:.0%}") + (" input-bound" if first.end_to_end.input_bound else ""),
        )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the jobs named on the command line."""
    args = arguments(__doc__, argv, steps=200, run_s=6.0)
    run_all(args, partial(measure, args), table)


if __name__ == "__main__":
    main()
