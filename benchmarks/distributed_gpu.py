"""One run on the GPUs of one host with NCCL, or on any number of CPU processes with gloo, or on one device alone.

PYTHONPATH=callbacks torchrun --standalone --nproc-per-node 2 -m benchmarks.distributed_gpu --out gpus.json

Without torchrun it is one process. For each strategy and mode: whether weights are the same bit for bit with and
without pairs and on all ranks; the reported speedup beside that of whole runs, eager and compiled in turn; what an
accident on the last rank ends in; the time of a pair's collectives.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from rich.console import Console
from rich.table import Table

from benchmarks import ranks
from benchmarks.common import BLOCK_STEPS, BlockTimer, machine, middle, quiet, show
from benchmarks.distributed import Accident, meeting_cost
from benchmarks.jobs import JOBS, Job
from compile_profiler import CompileProfiler

STRATEGIES: dict[str, tuple[Callable[[], Strategy], dict[str, Any]]] = {
    "ddp": (ranks.ddp(), {}),
    "ddp, bucket views": (ranks.ddp(gradient_as_bucket_view=True), {}),
    "ddp, static graph": (ranks.ddp(static_graph=True), {}),
    "ddp, accumulating": (ranks.ddp(), {"accumulate_grad_batches": 2}),
    "fsdp2": (ranks.fsdp2, {}),
}
ACCIDENTS = {"slow": 0, "cannot compile": 0, "fails": 12, "out of memory": 12}
ALTERNATIONS = 2


def combinations(names: Sequence[str], strategies: Sequence[str], modes: Sequence[str | None]) -> Iterator[Any]:
    """What is measured: FSDP2 with blocks of the transformer in the default mode, DDP with every job and mode."""
    for name in names:
        for strategy in strategies:
            for mode in modes:
                if strategy != "fsdp2" or (name == "gpt" and mode is None):
                    yield name, strategy, mode


def weights(job: Job, strategy: str, compiled: dict[str, Any], steps: int) -> dict[str, Any]:
    """Whether pairs leave the weights alone; under FSDP2, whose eager windows train too, whether ranks are equal."""
    made, options = STRATEGIES[strategy]
    digests = []
    reports = []
    for max_pairs in (0, 40):
        torch._dynamo.reset()
        profiler = CompileProfiler(**compiled, max_pairs=max_pairs, pair_every_n_steps=2, fallback=False, verbose=False)
        digests.append(ranks.digest(ranks.fit(job, made(), [profiler], steps=steps, **options)))
        reports.append(profiler.report)
    everybodys = ranks.of_all(digests)
    return {
        "num_pairs": reports[1].speedup.num_pairs,
        "void": reports[1].speedup.void,
        "same_with_pairs": None if strategy == "fsdp2" else digests[0] == digests[1],
        "same_on_all_ranks": all(one == everybodys[0] for one in everybodys),
        "reasons": [report.verdict.reason for report in reports],
    }


def speedup(job: Job, strategy: str, compiled: dict[str, Any], steps: int) -> dict[str, Any]:
    """The speedup that is reported, and that of whole runs in turn."""
    made, options = STRATEGIES[strategy]
    torch._dynamo.reset()
    profiler = CompileProfiler(**compiled, fallback=False, verbose=False)
    ranks.fit(job, made(), [profiler], steps=steps, **options)
    steps_s: dict[str, list[float]] = {"eager": [], "compiled": []}
    for _ in range(ALTERNATIONS):
        for arm in steps_s:
            timer = BlockTimer()
            plain = [] if arm == "eager" else [CompileProfiler(**compiled, max_pairs=0, verbose=False)]
            ranks.fit(job, made(), [*plain, timer], steps=steps, **options)
            steps_s[arm] += timer.steps_s[1:]
    report = profiler.report
    return {
        "reported_pass": report.speedup.median,
        "reported_step": report.end_to_end.speedup,
        "method": report.end_to_end.method,
        "of_whole_runs": statistics.median(steps_s["eager"]) / statistics.median(steps_s["compiled"]),
        "eager_steps_s": middle(steps_s["eager"]),
        "compiled_steps_s": middle(steps_s["compiled"]),
        "ranks": None if report.ranks is None else report.ranks.to_dict(),
    }


def accident(what: str, steps: int) -> dict[str, Any]:
    """What an accident on the last rank ends in, on all ranks."""
    torch._dynamo.reset()
    last = ranks.world_size() - 1
    profiler = CompileProfiler(backend=Accident(what, last, ACCIDENTS[what]), pair_every_n_steps=3, verbose=False)
    began_s = time.monotonic()
    module = ranks.fit(JOBS["mlp"](False), ranks.ddp()(), [profiler], steps=steps)
    verdict = profiler.report.verdict
    outcomes = ranks.of_all((verdict.decision, verdict.reason, verdict.step, ranks.digest(module)))
    return {
        "reason": verdict.reason,
        "step": verdict.step,
        "agree": len(set(outcomes)) == 1,
        "seconds": time.monotonic() - began_s,
    }


def table_of(results: dict[str, dict[str, Any]]) -> Table:
    """One row for each job, strategy and mode."""
    table = Table(title=f"{ranks.world_size()} processes, {ranks.backend()}")
    columns = ("job, strategy, mode", "pairs", "same with pairs", "same on all ranks")
    for column in (*columns, "reported pass", "reported step", "whole runs", "method"):
        table.add_column(column)
    for name, found in results.items():
        if "error" in found:
            table.add_row(name, found["error"])
            continue
        kept, fast = found["weights"], found["speedup"]
        table.add_row(
            name,
            str(kept["num_pairs"]),
            show(kept["same_with_pairs"], "{}"),
            str(kept["same_on_all_ranks"]),
            show(fast["reported_pass"]),
            show(fast["reported_step"]),
            show(fast["of_whole_runs"]),
            str(fast["method"]),
        )
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Run it on every rank; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default="gpt,resnet", help="names separated by commas")
    parser.add_argument("--strategies", default=";".join(STRATEGIES), help="names separated by semicolons")
    parser.add_argument("--modes", default="default,reduce-overhead", help="of torch.compile, separated by commas")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps of a run that is timed")
    parser.add_argument("--quick", action="store_true", help="jobs of CPU size")
    parser.add_argument("--out", type=Path, help="JSON file of all raw figures, rewritten after each row")
    args = parser.parse_args(argv)
    args.steps = max(args.steps, 2 * BLOCK_STEPS)
    torch.set_num_threads(1)
    console = Console(width=170, quiet=ranks.rank() != 0)
    results: dict[str, dict[str, Any]] = {}
    others: dict[str, Any] = {}

    def keep() -> None:
        if args.out is not None and ranks.rank() == 0:
            whole = {"machine": machine(), "world_size": ranks.world_size(), "runs": results, **others}
            args.out.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")

    modes = [None if mode == "default" else mode for mode in args.modes.split(",")]
    with quiet():
        others["accidents"] = {what: accident(what, 60) for what in ACCIDENTS}
        console.print(others["accidents"])
        if ranks.world_size() > 1:
            others["exchange"] = meeting_cost()
            console.print(others["exchange"])
        keep()
        for name, strategy, mode in combinations(args.jobs.split(","), args.strategies.split(";"), modes):
            job = JOBS[name](ranks.uses_gpu() and not args.quick)
            target = "blocks" if strategy == "fsdp2" else "step"
            compiled = {"target": target, "backend": args.backend, "mode": mode}
            row = f"{name}, {strategy}, {mode or 'default'}"
            began_s = time.perf_counter()
            try:
                results[row] = {
                    "weights": weights(job, strategy, compiled, 60 if strategy == "fsdp2" else 30),
                    "speedup": speedup(job, strategy, compiled, args.steps),
                }
            except Exception as error:  # time on a large machine is dear: the other rows go on
                results[row] = {"error": f"{type(error).__name__}: {error}"[:300]}
            console.print(f"{row}: {time.perf_counter() - began_s:.0f} s")
            keep()
        console.print(table_of(results))
        console.print(", ".join(f"{key} {value}" for key, value in machine().items()))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
