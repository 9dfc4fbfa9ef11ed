"""Whether ranks hold together: runs with accidents on random ranks, and what it costs them to meet.

PYTHONPATH=callbacks torchrun --standalone --nproc-per-node 4 -m benchmarks.distributed --rounds 24 --out ranks.json

Each round is a run of its own, under a variant of DDP, with an accident on one rank: all must decide the same at the
same step, and end with the same weights. Figures: microseconds of a meeting, compile seconds of each rank.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks import ranks
from benchmarks.common import machine, quiet
from benchmarks.jobs import JOBS
from compile_profiler import CompileProfiler
from compile_profiler.group import Group
from compile_profiler.meeting import largest

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "find unused": {"find_unused_parameters": True},
}
ACCIDENTS = ("none", "cannot compile", "fails", "out of memory", "slow", "compiles anew")


class Accident:
    """A backend that has an accident when it has been called so many times on one rank."""

    def __init__(self, what: str, unlucky: int, after: int) -> None:
        self._what, self._is_here, self._after = what, ranks.rank() == unlucky, after
        self._num = 0

    def __call__(self, graph: Any, example_inputs: Any) -> Any:
        """The graph as it is, save for the accident."""
        if self._is_here and self._what == "cannot compile":
            raise RuntimeError("planted")

        def run(*inputs: Any) -> Any:
            self._num += 1
            if self._is_here and self._num > self._after:
                if self._what == "slow":
                    time.sleep(0.01)
                if self._what == "fails":
                    raise ValueError("planted")
                if self._what == "out of memory":
                    raise torch.OutOfMemoryError("planted")
                if self._what == "compiles anew" and self._num % 20 == 0:
                    torch._dynamo.reset()
            return graph.forward(*inputs)

        return run


def soak(rounds: int, steps: int, seed: int) -> list[dict[str, Any]]:
    """Rounds with accidents; what all ranks saw in each."""
    coin = random.Random(seed)  # falls alike on every rank
    found = []
    for number in range(rounds):
        name, what = coin.choice(list(VARIANTS)), ACCIDENTS[number % len(ACCIDENTS)]
        unlucky, after = coin.randrange(ranks.world_size()), coin.randrange(1, 60)
        # torch itself fails where a static graph meets accumulation, with or without the callback (2.13).
        accumulate = 1 if name == "static graph" else coin.choice([1, 2])
        torch._dynamo.reset()
        profiler = CompileProfiler(
            backend=Accident(what, unlucky, after), pair_every_n_steps=coin.choice([1, 3, 5]), verbose=False
        )
        began_s = time.monotonic()
        strategy = ranks.ddp(**VARIANTS[name])()
        module = ranks.fit(JOBS["mlp"](False), strategy, [profiler], steps=steps, accumulate_grad_batches=accumulate)
        seconds = time.monotonic() - began_s
        verdict = profiler.report.verdict
        outcomes = ranks.of_all((verdict.decision, verdict.reason, verdict.step, ranks.digest(module)))
        found.append(
            {
                "variant": name,
                "accident": what,
                "rank": unlucky,
                "reason": verdict.reason,
                "step": verdict.step,
                "pairs": profiler.report.speedup.num_pairs,
                "agree": len(set(outcomes)) == 1,
                "seconds": seconds,
            }
        )
    return found


def meeting_cost(num: int = 200) -> dict[str, float]:
    """Microseconds of one exchange of a meeting's size, and of a pair's two."""
    group = Group(print)
    numbers = {str(n): float(n) for n in range(13 + 3 * ranks.world_size())}
    times_s = []
    for _ in range(num):
        began_s = time.perf_counter()
        group.run(largest(numbers))
        times_s.append(time.perf_counter() - began_s)
    group.close()
    low, middle, high = statistics.quantiles(times_s[num // 10 :], n=4)
    return {"low_us": 1e6 * low, "median_us": 1e6 * middle, "high_us": 1e6 * high}


def compile_skew() -> dict[str, Any]:
    """Compile seconds of the ranks with inductor, from a cache that is empty at first."""
    profiler = CompileProfiler(max_pairs=0, verbose=False)
    ranks.fit(JOBS["gpt"](False), ranks.ddp()(), [profiler], steps=8)
    found = profiler.report.ranks
    own_s = 0.0 if found is None or found.compile_s is None else found.compile_s.median_s
    return {"of_all": None if found is None else found.to_dict()["compile_s"], "median_s": own_s}


def table_of(found: list[dict[str, Any]]) -> Table:
    """One row for each kind of accident."""
    table = Table(title=f"Accidents on one of {ranks.world_size()} ranks")
    for column in ("accident", "rounds", "all ranks agree", "reasons", "longest round"):
        table.add_column(column)
    for what in ACCIDENTS:
        rounds = [one for one in found if one["accident"] == what]
        if rounds:
            reasons = Counter(one["reason"] for one in rounds)
            table.add_row(
                what,
                str(len(rounds)),
                str(sum(one["agree"] for one in rounds)),
                ", ".join(f"{reason} {num}" for reason, num in reasons.items()),
                f"{max(one['seconds'] for one in rounds):.1f} s",
            )
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Run it on every rank; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24, help="runs, each with an accident or none")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of a run")
    parser.add_argument("--seed", type=int, default=0, help="of the coin that picks variants, ranks and steps")
    parser.add_argument("--out", type=Path, help="JSON file of all raw figures")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with quiet():
        found = soak(args.rounds, args.steps, args.seed)
        results = {"rounds": found, "meeting": meeting_cost(), "compile_s": compile_skew()}
    if ranks.rank() == 0:
        console = Console(width=150)
        console.print(table_of(found))
        console.print(f"one exchange: {results['meeting']['median_us']:.0f} us")
        console.print(f"compiling with inductor: {results['compile_s']['of_all']}")
        console.print(", ".join(f"{key} {value}" for key, value in machine().items()))
        if args.out is not None:
            whole = {"machine": machine(), "world_size": ranks.world_size(), **results}
            args.out.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    if not all(one["agree"] for one in found):
        raise SystemExit("ranks disagree")


if __name__ == "__main__":
    main()
