"""Does ``mode="auto"`` end a run as soon as the best configuration would, chosen by hand?

PYTHONPATH=callbacks python -m benchmarks.auto --jobs resnet,gpt --steps 1000,5000 --out auto.jsonl

Whole fits, each in a process of its own with empty compile caches: eager, the default callback, the search (first with
nothing known, then knowing what that run has found), each single configuration compiled by hand. Their order is
shuffled. Each run is a line of the file as soon as it has ended; what is in the file already is not run again, so one
that was cut short goes on where it was, on the same machine. ``--table FILE`` prints what is there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch

from benchmarks.auto_table import AUTO_RUNS, CALLBACK, show_tables
from benchmarks.common import fit, machine, now_s, on_gpu, quiet
from benchmarks.jobs import JOBS
from compile_profiler import CompileProfiler
from compile_profiler.candidates import candidates_for, checked_candidates
from compile_profiler.parts import submodules
from compile_profiler.recall import FOLDER_VARIABLE
from compile_profiler.results import EAGER

RANKED = ("resnet", "gpt", "mlp", "pointwise", "filter", "cnn", "lstm", "branches", "linear", "input_bound")
"""The most telling ones come first: time may end before the jobs do."""
CPU_ALONE = frozenset({"filter", "cnn", "input_bound"})
"""Jobs that are left out on a GPU unless they are named."""
AUTO = "auto"
ROOT = Path(__file__).resolve().parents[1]

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run, in values that JSON can carry.

    Attributes:
        job: name of the job, in its size for a GPU if ``big``.
        run: ``eager``, ``callback``, ``auto/cold``, ``auto/warm`` or the name of a configuration.
        steps: training steps.
        marks: numbers of steps, up to ``steps``, at which the clock is read.
        backend: of ``torch.compile``.
    """

    job: str
    run: str
    steps: int
    marks: tuple[int, ...]
    big: bool
    backend: str

    @property
    def key(self) -> tuple[str, str, int]:
        """What is the same in each repeat of it."""
        return self.job, self.run, self.steps


Launch = Callable[[Plan, Mapping[str, str]], Row]
"""Carries a plan out with these environment variables; returns what was found, or ``{"error": ...}``."""


class RunClock(L.Callback):
    """Seconds from the start of a fit to given numbers of steps, and to its end; has to be the last callback.

    Attributes:
        marks_s: by the number of steps; that of the last is the end of training, other callbacks' part in it included.
    """

    def __init__(self, marks: Collection[int]) -> None:
        self.marks_s: dict[int, float] = {}
        self._marks = frozenset(marks)
        self._num_steps = 0
        self._began_s = 0.0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start before anything is compiled."""
        self._began_s = now_s()

    def on_train_batch_end(self, *_: Any) -> None:
        """Read the clock where a shorter run would have ended."""
        self._num_steps += 1
        if self._num_steps in self._marks:
            self.marks_s[self._num_steps] = now_s() - self._began_s

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop."""
        self.marks_s[self._num_steps] = now_s() - self._began_s


def carry_out(plan: Plan) -> Row:
    """A whole fit, in this process: seconds at each mark, the report where there is one."""
    if not on_gpu():
        torch.set_num_threads(1)  # with more, tiny operations stall for milliseconds on a busy machine
    clock, profiler, by_hand = RunClock(plan.marks), None, None
    target = "step"
    if plan.run in AUTO_RUNS:
        profiler = CompileProfiler(mode="auto", backend=plan.backend, verbose=False)
    elif plan.run == CALLBACK:
        profiler = CompileProfiler(backend=plan.backend, verbose=False)
    elif plan.run != EAGER:
        (candidate,) = checked_candidates([plan.run])
        assert isinstance(candidate.target, str)
        target, by_hand = candidate.target, {"mode": candidate.mode, "backend": plan.backend}
    with quiet():
        callbacks = [clock] if profiler is None else [profiler, clock]
        fit(JOBS[plan.job](plan.big), steps=plan.steps, callbacks=callbacks, by_hand=by_hand, target=target)
    report = None if profiler is None else profiler.report.to_dict()
    return {"marks_s": {str(steps): seconds for steps, seconds in clock.marks_s.items()}, "report": report}


def in_a_process(plan: Plan, environment: Mapping[str, str], *, run_s: float) -> Row:
    """The same in a process of its own, which is killed after ``run_s`` seconds."""
    with tempfile.TemporaryDirectory(prefix="compile-profiler-") as folder:
        found, said = Path(folder) / "found.json", Path(folder) / "said.txt"
        path = os.pathsep.join([str(ROOT / "callbacks"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        with said.open("w", encoding="utf-8") as stream:
            child = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.auto", "--carry-out", json.dumps(asdict(plan)), "--out", str(found)],
                env={**os.environ, **environment, "PYTHONPATH": path},
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that processes of the compiler end with it
            )
            try:
                code: int | None = child.wait(timeout=run_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
        if code is None:
            return {"error": f"took longer than {run_s:g} s"}
        if code or not found.exists():
            lines = said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            return {"error": f"exit code {code}: {lines[-1][:300] if lines else 'nothing said'}", "said": lines[-40:]}
        row: Row = json.loads(found.read_text(encoding="utf-8"))
        return row


def singles(name: str, big: bool) -> list[str]:
    """Names of the configurations that a search has to choose from on this machine, without autotuning."""
    with torch.device("meta"):
        module = JOBS[name](big).module()
    try:
        has_blocks = bool(submodules(module, "blocks"))
    except ValueError:
        has_blocks = False
    return _configurations(has_blocks=has_blocks)


def _configurations(*, has_blocks: bool) -> list[str]:
    device_type = "cuda" if on_gpu() else "cpu"
    choice = candidates_for(device_type, has_blocks=has_blocks, shapes_vary=False, seconds_left=0.0)
    return [candidate.name for candidate in choice.candidates]


def units(
    configurations: Collection[str], *, steps: Sequence[int], name: str, big: bool, backend: str
) -> list[list[Plan]]:
    """The runs of one repeat, in any order; those of one unit follow each other.

    What does not look ahead runs once, to the largest number of steps: its first part is a shorter run. Eager runs
    twice: how far apart these two are is what every ratio can be off by.
    """

    def plan(run: str, num: int, marks: Sequence[int]) -> Plan:
        return Plan(job=name, run=run, steps=num, marks=tuple(marks), big=big, backend=backend)

    found = [[plan(run, num, [num]) for run in AUTO_RUNS] for num in steps if AUTO in configurations]
    found += [[plan(CALLBACK, num, [num])] for num in steps if CALLBACK in configurations]
    unaware = [EAGER, EAGER, *singles(name, big)]
    return found + [[plan(run, max(steps), steps)] for run in unaware if run in configurations]


def measure(args: argparse.Namespace, launch: Launch, tell: Callable[[str], None]) -> Iterator[Row]:
    """Row after row, until all is done or the budget is spent."""
    ends_s = time.monotonic() + args.budget_s
    setting = _setting(args)
    earlier = [row for row in read(args.out) if row["setting"] == setting and not row["fills"]]
    done = Counter((row["job"], row["run"], row["steps"], row["repeat"]) for row in earlier)
    with tempfile.TemporaryDirectory(prefix="compile-profiler-") as shared:
        for repeat, unit in _planned(args, done):
            with tempfile.TemporaryDirectory(prefix="compile-profiler-") as verdicts:
                for plan in unit:
                    if time.monotonic() >= ends_s:
                        tell(f"{args.budget_s:.0f} s are over: no new run is begun.")
                        return
                    began_s = time.monotonic()
                    found = _launched(plan, launch, shared if args.warm_inductor else None, verdicts)
                    row = {
                        **{name: getattr(plan, name) for name in ("job", "run", "steps")},
                        "repeat": repeat,
                        "fills": repeat == 0,
                        "took_s": time.monotonic() - began_s,
                        "setting": setting,
                        **found,
                    }
                    what = found.get("error") or f"{found['marks_s'][str(plan.steps)]:.1f} s"
                    tell(f"{plan.job}, {plan.run}, {plan.steps} steps, repeat {repeat}: {what}")
                    yield row


def _setting(args: argparse.Namespace) -> dict[str, Any]:
    """What runs that are compared have in common."""
    caches = "warm" if args.warm_inductor else "empty"
    return {**machine(), "size": "GPU" if _is_big(args) else "CPU", "backend": args.backend, "caches": caches}


def _is_big(args: argparse.Namespace) -> bool:
    return on_gpu() and not args.quick


def _planned(args: argparse.Namespace, done: Counter[tuple[Any, ...]]) -> Iterator[tuple[int, list[Plan]]]:
    """All that is to be run, in order: repeat and unit. With warm caches a round more, numbered 0, fills them."""
    for name in args.jobs:
        asked = units(args.configurations, steps=args.steps, name=name, big=_is_big(args), backend=args.backend)
        for repeat in range(0 if args.warm_inductor else 1, args.repeats + 1):
            coin = random.Random(f"{args.seed} {name} {repeat}")
            for unit in coin.sample(asked, len(asked)):
                keys = [(*plan.key, repeat) for plan in unit]
                if all(done[key] > 0 for key in keys):
                    done.subtract(keys)
                else:
                    yield repeat, unit


def _launched(plan: Plan, launch: Launch, inductor: str | None, verdicts: str) -> Row:
    with tempfile.TemporaryDirectory(prefix="compile-profiler-") as empty:
        caches = inductor or empty
        variables = {"TORCHINDUCTOR_CACHE_DIR": caches, "TRITON_CACHE_DIR": str(Path(caches) / "triton")}
        return launch(plan, {**variables, FOLDER_VARIABLE: str(Path(verdicts) / "verdicts")})


def read(file: Path | None) -> list[Row]:
    """The rows in a file, without the line that a killed program has left half written."""
    rows = []
    for line in [] if file is None or not file.exists() else file.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    jobs = [name for name in RANKED if not (on_gpu() and name in CPU_ALONE)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(jobs), help="names separated by commas, the first is run first")
    parser.add_argument("--steps", default="1000,5000", help="lengths of the runs")
    parser.add_argument(
        "--configurations", help=f"some of {EAGER}, {CALLBACK}, {AUTO}, step/default, ...; default: all"
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of each; medians are shown")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the runs")
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), help="no new run is begun after so many seconds"
    )
    parser.add_argument("--run-s", type=float, default=900.0, help="a run that takes longer is killed")
    parser.add_argument("--warm-inductor", action="store_true", help="with filled compile caches; one round more")
    parser.add_argument("--quick", action="store_true", help="jobs of CPU size")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--out", type=Path, help="file of all runs, a line of JSON each; gets more lines")
    parser.add_argument("--table", type=Path, metavar="FILE", help="run nothing, show the runs of such a file")
    parser.add_argument("--carry-out", help=argparse.SUPPRESS)  # a plan: this process is one run
    args = parser.parse_args(argv)
    args.jobs = args.jobs.split(",")
    if unknown := [name for name in args.jobs if name not in JOBS]:
        parser.error(f"--jobs must name some of {', '.join(JOBS)}, got {', '.join(unknown)}.")
    try:
        args.steps = sorted({int(steps) for steps in args.steps.split(",")})
    except ValueError:
        parser.error(f"--steps must be whole numbers separated by commas, got {args.steps}.")
    if args.steps[0] < 1 or args.repeats < 1:
        parser.error(f"--steps and --repeats must be at least 1, got {args.steps[0]} and {args.repeats}.")
    known = [EAGER, CALLBACK, AUTO, *_configurations(has_blocks=True)]
    args.configurations = known if args.configurations is None else args.configurations.split(",")
    if unknown := [name for name in args.configurations if name not in known]:
        parser.error(f"--configurations must name some of {', '.join(known)}, got {', '.join(unknown)}.")
    return args


def main(argv: Sequence[str] | None = None, launch: Launch | None = None) -> None:
    """Measure what the command line names, each run with ``launch``, or show a file.

    Raises:
        SystemExit: a run in eager, of the callback or of the search has failed; the others have been made and shown.
    """
    args = _arguments(argv)
    if args.carry_out is not None:
        args.out.write_text(json.dumps(carry_out(Plan(**json.loads(args.carry_out)))), encoding="utf-8")
        return
    if args.table is not None:
        show_tables(read(args.table))
        return
    if not on_gpu():
        torch.set_num_threads(1)  # as in the runs, which say so
    rows = read(args.out)
    way = launch or (lambda plan, environment: in_a_process(plan, environment, run_s=args.run_s))
    for row in measure(args, way, lambda line: print(line, flush=True)):
        rows.append(row)
        if args.out is not None:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    show_tables(rows)
    # That a configuration cannot be compiled by hand is something found out.
    if failed := {row["run"] for row in rows if "error" in row} & {EAGER, CALLBACK, *AUTO_RUNS}:
        raise SystemExit(f"failed: {', '.join(sorted(failed))}")


if __name__ == "__main__":
    main()
