"""What the benchmarks share: one fit of a job, its clock, the table and the file of results."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.jobs import JOBS, Job

BLOCK_STEPS = 20
"""Steps of one timed block. The first block of a fit is warm-up: it holds compiling and the first steps after it."""
UNTIMED_STEPS = 3
"""Steps at the start of a block that are not timed, while caches and clocks come back from what ran before."""
MIN_BLOCKS = 4


def on_gpu() -> bool:
    """Whether jobs run on a CUDA device; on the CPU otherwise."""
    return torch.cuda.is_available()


def now_s() -> float:
    """Seconds since some fixed moment, once the device has finished what it was given."""
    if on_gpu():
        torch.cuda.synchronize()
    return time.perf_counter()


class BlockTimer(L.Callback):
    """Seconds of real training steps, by blocks; has to be the last callback, so that it sees whole steps.

    Attributes:
        steps_s: for each block, warm-up included, seconds of one step.
        marks_s: seconds from the start of training to the end of each block.
        train_s: seconds from the start of training to its end, what other callbacks do there included.

    Args:
        pause: called after each block, outside of its time.
    """

    def __init__(self, pause: Callable[[], None] | None = None) -> None:
        self.steps_s: list[float] = []
        self.marks_s: list[float] = []
        self.train_s = 0.0
        self._pause = pause
        self._num_steps = 0
        self._began_s = 0.0
        self._block_began_s = 0.0
        self._cores: set[int] = set()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock of the run."""
        self._began_s = now_s()

    def on_train_batch_end(self, *_: Any) -> None:
        """Start or end a block."""
        self._num_steps += 1
        if self._num_steps % BLOCK_STEPS == UNTIMED_STEPS:
            self._block_began_s = now_s()
        elif self._num_steps % BLOCK_STEPS == 0:
            ended_s = now_s()
            self.steps_s.append((ended_s - self._block_began_s) / (BLOCK_STEPS - UNTIMED_STEPS))
            self.marks_s.append(ended_s - self._began_s)
            if len(self.marks_s) == 1:
                self._cores = pinned(0)
            if self._pause is not None:
                self._pause()

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        """Pin the thread that runs backward for a device, too; on a CPU it is that of forward."""
        if self._num_steps == BLOCK_STEPS and on_gpu():
            loss.register_hook(lambda _: pinned(1) and None)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock of the run."""
        self.train_s = now_s() - self._began_s
        self._unpin()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leave the thread as it was."""
        self._unpin()

    def _unpin(self) -> None:
        if self._cores:
            os.sched_setaffinity(0, self._cores)


def pinned(number: int) -> set[int]:
    """Keep this thread on one core, the last but ``2 * number``; returns the cores it had, if the system says them.

    A thread that wakes up on another core finds cold caches, and steps of 3 ms came out 30 % apart by that alone.
    Not before the first steps: processes that the compiler starts inherit it.
    """
    if not hasattr(os, "sched_getaffinity"):
        return set()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[-1 - min(2 * number, len(cores) - 1)]})
    return cores


def fit(
    job: Job,
    *,
    steps: int,
    callbacks: Sequence[L.Callback],
    by_hand: Mapping[str, Any] | None = None,
    target: str = "step",
) -> None:
    """Train a fresh module of the job; with the options of ``torch.compile`` one whose target is compiled by hand."""
    L.seed_everything(0, verbose=False)
    with torch.device("cuda" if on_gpu() else "cpu"):
        module = job.module(by_hand=by_hand, target=target)
    # Lightning makes bfloat16 of float16 on a CPU, unless it is given the plugin.
    fp16_on_cpu = job.precision == "16-mixed" and not on_gpu()
    numbers: dict[str, Any] = {"plugins": [MixedPrecision("16-mixed", "cpu")]} if fp16_on_cpu else {}
    with tempfile.TemporaryDirectory() as root_dir:
        trainer = L.Trainer(
            max_steps=steps,
            accelerator="gpu" if on_gpu() else "cpu",
            devices=1,
            **(numbers or {"precision": job.precision}),
            callbacks=list(callbacks),
            logger=CSVLogger(root_dir),
            default_root_dir=root_dir,
            log_every_n_steps=min(50, steps),  # 50 is the default; Lightning warns if no step is logged
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, job.loader(steps, pinned=on_gpu()))


REPLAYS = frozenset({"reduce-overhead", "max-autotune"})
"""Modes with CUDA graphs, which are replayed in the main thread alone."""


class Relay:
    """Runners of which one runs at a time and hands on to the next."""

    def __init__(self, names: Iterable[str]) -> None:
        self._waiting = deque(names)
        self._changed = threading.Condition()

    def wait(self, name: str) -> None:
        """Return when it is this runner's turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting[0] == name)

    def hand_on(self, name: str) -> None:
        """Let each of the others have a turn."""
        with self._changed:
            self._waiting.rotate(-1)
            self._changed.notify_all()
        self.wait(name)

    def leave(self, name: str) -> None:
        """Go home at the end of the own turn."""
        with self._changed:
            self._waiting.remove(name)
            self._changed.notify_all()


def interleaved(fits: Mapping[str, Callable[[BlockTimer], object]]) -> dict[str, list[float]]:
    """Seconds of one step, by blocks, of whole fits that take turns: a block of steps each, then the next one's.

    Two runs after each other meet two different machines; two neighbouring blocks meet nearly the same. Every fit has
    a thread of its own, and all but one of them are waiting at any time. Each goes through its own set-up and
    compiling once, in its first turn, which is warm-up and left out. The first fit has the main thread (compiled code
    with CUDA graphs works in no other).

    Args:
        fits: by name, a fit that adds the given timer as its last callback. None of them may read a clock across
            steps itself, as a measuring ``CompileProfiler`` does: it would count the others' turns.

    Raises:
        BaseException: the first error of a fit, after the others have ended.
    """
    relay = Relay(fits)
    timers = {name: BlockTimer(pause=partial(relay.hand_on, name)) for name in fits}
    errors: list[BaseException] = []

    def run(name: str) -> None:
        relay.wait(name)
        try:
            fits[name](timers[name])
        except BaseException as error:
            errors.append(error)
        finally:
            relay.leave(name)

    first, *others = fits
    threads = [threading.Thread(target=run, args=(name,)) for name in others]
    for thread in threads:
        thread.start()
    run(first)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return {name: timer.steps_s[1:] for name, timer in timers.items()}


def steps_within(step_s: float, *, steps: int, run_s: float) -> int:
    """Steps of a run: as many as asked for, fewer if they take too long, in whole blocks, a few at least.

    Args:
        step_s: seconds of one step.
        steps: how many are asked for.
        run_s: how long the run should take at most.

    >>> steps_within(0.001, steps=200, run_s=8.0), steps_within(0.07, steps=200, run_s=8.0)
    (200, 100)
    """
    return BLOCK_STEPS * max(MIN_BLOCKS, min(steps, int(run_s / step_s)) // BLOCK_STEPS)


def step_seconds(job: Job) -> float:
    """Seconds of one eager step of the job, roughly; also makes libraries start up before anything is timed."""
    timer = BlockTimer()
    fit(job, steps=2 * BLOCK_STEPS, callbacks=[timer])
    return timer.steps_s[-1]


def middle(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile.

    >>> middle([1.0, 2.0, 3.0, 4.0, 9.0])
    (2.0, 3.0, 4.0)
    """
    if len(values) == 1:
        return (values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def show(value: float | None, pattern: str = "{:.2f}") -> str:
    """A number as tables show it; says so where it is not known.

    >>> show(1.234), show(None)
    ('1.23', 'not available')
    """
    return "not available" if value is None else pattern.format(value)


def machine() -> dict[str, Any]:
    """On what the figures were measured."""
    return {
        "device": torch.cuda.get_device_name() if on_gpu() else f"CPU ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "lightning": L.__version__,
        "python": platform.python_version(),
    }


def arguments(description: str | None, argv: Sequence[str] | None, *, steps: int, run_s: float) -> argparse.Namespace:
    """The command line that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(JOBS), help="names separated by commas; all of them by default")
    parser.add_argument("--steps", type=int, default=steps, help="steps of one run")
    parser.add_argument(
        "--run-s", type=float, default=run_s, help="seconds that one run should take at most, without compiling"
    )
    parser.add_argument("--out", type=Path, help="JSON file of all raw figures, rewritten after each job")
    parser.add_argument("--quick", action="store_true", help="jobs of CPU size and a quarter of the steps")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--mode", help="of torch.compile")
    args = parser.parse_args(argv)
    args.jobs = args.jobs.split(",")
    if unknown := [name for name in args.jobs if name not in JOBS]:
        parser.error(f"--jobs must name some of {', '.join(JOBS)}, got {', '.join(unknown)}.")
    if args.quick:
        args.steps //= 4
    return args


@contextmanager
def quiet() -> Iterator[None]:
    """Without what Lightning says at every fit."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            # A loader in the main process is what these jobs are meant to have; the other is Lightning about itself.
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            warnings.filterwarnings("ignore", message=".*treespec, LeafSpec", category=FutureWarning)
            yield
    finally:
        logger.setLevel(level)


def run_all(args: argparse.Namespace, measure: Callable[[Job], dict[str, Any]], table: Callable[..., Table]) -> None:
    """Measure every job, print the table, keep the raw figures.

    Args:
        args: what ``arguments`` has returned.
        measure: everything about one job.
        table: makes the table of the results by name.

    Raises:
        SystemExit: a job failed; the others have been measured and shown.
    """
    if not on_gpu():
        torch.set_num_threads(1)  # with more, tiny operations stall for milliseconds on a busy machine
    console = Console(width=150)
    results: dict[str, dict[str, Any]] = {}
    failed = []
    for name in args.jobs:
        job = JOBS[name](on_gpu() and not args.quick)
        began_s = time.perf_counter()
        torch._dynamo.reset()  # all jobs share one step's code: torch would take their shapes for one that varies
        try:
            with quiet():
                results[name] = measure(job)
        except Exception:  # time on a large machine is dear: the other jobs go on
            console.print_exception(max_frames=8)
            failed.append(name)
            continue
        results[name]["took_s"] = time.perf_counter() - began_s
        console.print(f"{name}: {results[name]['took_s']:.0f} s")
        if args.out is not None:  # after each job, so that an interrupted run has lost nothing
            args.out.write_text(json.dumps({"machine": machine(), "jobs": results}, indent=1) + "\n", encoding="utf-8")
    console.print(table(results))
    console.print(", ".join(f"{key} {value}" for key, value in machine().items()))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
