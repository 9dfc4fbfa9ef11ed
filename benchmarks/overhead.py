"""What the callback costs: an ordinary step, a whole fit, beside the same job compiled by hand.

PYTHONPATH=callbacks python -m benchmarks.overhead --jobs mlp,cnn --steps 1000 --out overhead.json

Figures: microseconds of a step by hand and under the callback, seconds of whole fits, waits for the device.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning as L
import torch
from rich.table import Table

from benchmarks.common import (
    BLOCK_STEPS,
    REPLAYS,
    BlockTimer,
    arguments,
    fit,
    interleaved,
    on_gpu,
    run_all,
    show,
    step_seconds,
    steps_within,
)
from benchmarks.jobs import Job
from compile_profiler import CompileProfiler

ALTERNATIONS = 3

Fit = Callable[[BlockTimer], None]


def ordinary_step(job: Job, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds that a step under the callback takes longer than one compiled by hand; nothing is measured in it.

    Beside it what a callback that does nothing costs. Once for each thread that a fit can have: they differ.
    """

    def with_callbacks(*callbacks: L.Callback, by_hand: dict[str, Any] | None = None) -> Fit:
        return lambda timer: fit(job, steps=steps, callbacks=[*callbacks, timer], by_hand=by_hand)

    def fits() -> dict[str, Fit]:
        return {
            "callback": with_callbacks(CompileProfiler(max_pairs=0, verbose=False, **options)),
            "by_hand": with_callbacks(by_hand=options),
            "idle": with_callbacks(L.Callback(), by_hand=options),
        }

    names = list(fits())
    turns = []
    for turn in range(1 if options["mode"] in REPLAYS else len(names)):
        made = fits()
        turns.append(interleaved({name: made[name] for name in [*names[turn:], *names[:turn]]}))

    def by_role(name: str) -> list[float]:
        return [statistics.median(blocks[name]) - statistics.median(blocks["by_hand"]) for blocks in turns]

    return {
        "steps_s": {name: [seconds for blocks in turns for seconds in blocks[name]] for name in names},
        "extra_s": statistics.mean(by_role("callback")),
        "extra_by_role_s": by_role("callback"),
        "idle_extra_s": statistics.mean(by_role("idle")),
    }


class SynchronisationCounter(L.Callback):
    """Counts what it is told of, in ordinary steps: after the first block, before training ends."""

    def __init__(self) -> None:
        self.count = 0
        self._num_steps = 0
        self._ended = False

    def on_train_batch_end(self, *_: Any) -> None:
        """A step has ended."""
        self._num_steps += 1

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The last one has."""
        self._ended = True

    def seen(self) -> None:
        """Somebody waited for the device."""
        self.count += self._num_steps >= BLOCK_STEPS and not self._ended

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Explicit waits are seen by wrapping torch's functions, implicit ones (``.item()``) by torch's own check."""
        places: list[tuple[Any, str]] = [
            (torch.cuda, "synchronize"),
            (torch.accelerator, "synchronize"),
            (torch.cuda.Event, "synchronize"),
            (torch.cuda.Stream, "synchronize"),
        ]
        before = [getattr(place, name) for place, name in places]

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                self.seen()
                return call(*args, **kwargs)

            return wrapper

        def on_warning(message: Warning | str, *_: Any, **__: Any) -> None:
            if "synchroniz" in str(message):
                self.seen()

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = on_warning
            torch.cuda.set_sync_debug_mode("warn")
            for (place, name), call in zip(places, before, strict=True):
                setattr(place, name, counted(call))
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")
                for (place, name), call in zip(places, before, strict=True):
                    setattr(place, name, call)


def synchronisations(job: Job, options: dict[str, Any]) -> dict[str, int] | None:
    """How often two blocks of ordinary steps wait for the device; ``None`` without one."""
    if not on_gpu():
        return None
    found = {}
    for name in ("callback", "by_hand"):
        counter = SynchronisationCounter()
        ours = [CompileProfiler(max_pairs=0, verbose=False, **options)] if name == "callback" else []
        with counter.listening():
            fit(
                job,
                steps=3 * BLOCK_STEPS,
                callbacks=[*ours, counter],
                by_hand=options if name == "by_hand" else None,
            )
        found[name] = counter.count
    return found


def whole_fit(job: Job, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Whole fits by hand and with the measuring callback, one after the other, both from a warm cache of kernels.

    The callback's warm-up is as long as a block, so that no block holds both compiling and measuring.
    """
    runs: dict[str, list[dict[str, Any]]] = {"by_hand": [], "callback": []}
    for turn in range(ALTERNATIONS):
        for name in runs if turn % 2 == 0 else reversed(runs):
            timer = BlockTimer()
            profiler = CompileProfiler(fallback=False, warmup_steps=BLOCK_STEPS, verbose=False, **options)
            if name == "by_hand":
                fit(job, steps=steps, callbacks=[timer], by_hand=options)
            else:
                fit(job, steps=steps, callbacks=[profiler, timer])
            report = profiler.report.to_dict()
            runs[name].append({"train_s": timer.train_s, "marks_s": timer.marks_s, "report": report})
    return runs | compared(runs)


def after(run: dict[str, Any], num_blocks: int) -> float:
    """Seconds of a run from the end of its first so many blocks."""
    return float(run["train_s"] - run["marks_s"][num_blocks - 1])


def compared(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Overhead of measuring as seen from outside and as reported, in percent, medians over the runs."""
    by_hand_s = statistics.median(after(run, 1) for run in runs["by_hand"])
    outside, inside, decided = [], [], []
    for run in runs["callback"]:
        extra_s = after(run, 1) - by_hand_s
        outside.append(100 * extra_s / (run["train_s"] - extra_s))
        inside.append(run["report"]["time"]["overhead_pct"])
        num_blocks = 1 + run["report"]["verdict"]["step"] // BLOCK_STEPS
        if run["report"]["verdict"]["decision"] != "undecided" and num_blocks < len(run["marks_s"]):
            ordinary_s = statistics.median(after(other, num_blocks) for other in runs["by_hand"])
            decided.append(100 * (after(run, num_blocks) / ordinary_s - 1))
    return {
        "outside_pct": statistics.median(outside),
        "reported_pct": statistics.median(inside) if None not in inside else None,
        "after_decision_pct": statistics.median(decided) if decided else None,
    }


def measure(args: argparse.Namespace, job: Job) -> dict[str, Any]:
    """All that one job can tell about the cost."""
    options = {"backend": args.backend, "mode": args.mode}
    steps = steps_within(step_seconds(job), steps=args.steps, run_s=args.run_s)
    return {
        "steps": steps,
        "ordinary_step": ordinary_step(job, steps, options),
        "synchronisations": synchronisations(job, options),
        "whole_fit": whole_fit(job, steps, options),
    }


def table(results: dict[str, dict[str, Any]]) -> Table:
    """One row per job."""
    found = Table(
        *("job", "step by hand ms", "extra us (by role)", "an idle callback us", "device waits, by hand"),
        *("fit by hand s", "fit s", "measuring %", "reported %", "after decision %"),
        title="What the callback costs over a job compiled by hand",
    )
    for name, result in results.items():
        step, whole, waits = result["ordinary_step"], result["whole_fit"], result["synchronisations"]
        found.add_row(
            name,
            show(1e3 * statistics.median(step["steps_s"]["by_hand"])),
            f"{1e6 * step['extra_s']:.0f} ({', '.join(f'{1e6 * one:.0f}' for one in step['extra_by_role_s'])})",
            f"{1e6 * step['idle_extra_s']:.0f}",
            "no device" if waits is None else f"{waits['callback']}, {waits['by_hand']}",
            *(show(statistics.median(run["train_s"] for run in whole[key])) for key in ("by_hand", "callback")),
            *(show(whole[key]) for key in ("outside_pct", "reported_pct", "after_decision_pct")),
        )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the jobs named on the command line."""
    args = arguments(__doc__, argv, steps=1000, run_s=15.0)
    run_all(args, partial(measure, args), table)


if __name__ == "__main__":
    main()
