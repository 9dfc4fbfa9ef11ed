"""How good the search of ``mode="auto"`` is, on simulated runs whose truth is known.

PYTHONPATH=callbacks python -m benchmarks.search_simulated --runs 200 --out search.json

A simulated job has true ratios of passes and of whole steps for every candidate, noise with spikes, seconds of
compiling. The search is the real one; it sees what a run would show it. Nothing is compiled, so this takes seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from compile_profiler.candidates import Candidate, checked_candidates
from compile_profiler.outlook import Now
from compile_profiler.records import Sample
from compile_profiler.results import EAGER
from compile_profiler.search import SEARCH_BUDGET, Measure, Search, Settle, Try, Windows
from compile_profiler.verdict import Limits

STEPS_BETWEEN_PAIRS = 5
BLOCK_S, BLOCK_PASSES, MAX_BLOCK_S = 0.02, 4, 0.5  # as of the probe on a GPU
WINDOW_STEPS, SETTLE_STEPS = 20, 2
SPIKE_SHARE = 0.03
EARLY_STEPS = 5  # before the search begins
COMPILE_SD = 0.15  # of the log of compile seconds, from run to run


@dataclass(frozen=True, kw_only=True)
class Truth:
    """One candidate: eager pass over its pass, eager step over its step, seconds of compiling, launching's share."""

    pairs: float
    steps: float
    compile_s: float
    host_share: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as it is; seconds are those of eager, ``sd`` is of one pair's log-ratio, ``window_sd`` of one couple's."""

    step_s: float
    pass_s: float
    arms: Mapping[str, Truth]
    host_share: float = 0.5
    num_leaves: int = 10
    sd: float = 0.05
    window_sd: float = 0.03

    def step_of(self, name: str) -> float:
        """Seconds of a step on this arm."""
        return self.step_s if name == EAGER else self.step_s / self.arms[name].steps

    def alone_s(self, name: str, num_steps: int) -> float:
        """Seconds of a run on this arm from the first step on."""
        return num_steps * self.step_of(name) + (0.0 if name == EAGER else self.arms[name].compile_s)


Ratios = tuple[float, float]


def _arms(*, forward: Ratios, step: Ratios, graphs: Ratios, compile_s: float, host: float) -> dict[str, Truth]:
    """Three candidates, each with its ratio of passes and of whole steps; ``host``: launching's share of a pass."""
    return {
        "step/default": Truth(pairs=step[0], steps=step[1], compile_s=compile_s, host_share=host),
        "step/reduce-overhead": Truth(pairs=graphs[0], steps=graphs[1], compile_s=1.2 * compile_s, host_share=0.2),
        "forward/default": Truth(pairs=forward[0], steps=forward[1], compile_s=compile_s, host_share=host),
    }


def _job(step_s: float, pass_s: float, *, host: float, leaves: int, sd: float, arms: dict[str, Truth]) -> Job:
    return Job(step_s=step_s, pass_s=pass_s, host_share=host, num_leaves=leaves, sd=sd, arms=arms)


# Steps and ratios as measured on one H200 (torch 2.11); where pairs were not measured, they are those of the steps.
# Compiling took 17 to 60 s for the larger ones, with an empty cache; of the others that is a guess, and so are shares
# of launching, from what sets the pace there.
JOBS: dict[str, Job] = {
    "mlp": _job(
        *(0.0026, 0.00065),
        host=0.95,
        leaves=4,
        sd=0.1,
        arms=_arms(forward=(0.75, 0.9), step=(0.74, 0.89), graphs=(1.02, 1.0), compile_s=8.0, host=0.95),
    ),
    "pointwise": _job(
        *(0.0128, 0.0075),
        host=0.3,
        leaves=13,
        sd=0.015,
        arms=_arms(forward=(2.5, 1.39), step=(3.54, 1.68), graphs=(4.2, 1.91), compile_s=10.0, host=0.9),
    ),
    "gpt": _job(
        *(0.0262, 0.0227),
        host=0.8,
        leaves=150,
        sd=0.06,
        arms=_arms(forward=(1.02, 0.98), step=(1.32, 1.27), graphs=(1.4, 1.33), compile_s=35.0, host=0.8),
    ),
    "resnet": _job(
        *(0.034, 0.0284),
        host=0.95,
        leaves=126,
        sd=0.1,
        arms=_arms(forward=(0.88, 0.87), step=(0.97, 0.96), graphs=(2.49, 1.87), compile_s=40.0, host=0.95),
    ),
    "lstm": _job(
        *(0.0101, 0.008),
        host=0.6,
        leaves=3,
        sd=0.05,
        arms=_arms(forward=(1.01, 1.01), step=(0.89, 0.89), graphs=(1.01, 1.01), compile_s=10.0, host=0.8),
    ),
    "linear": _job(
        *(0.277, 0.2),
        host=0.02,
        leaves=4,
        sd=0.01,
        arms=_arms(forward=(1.015, 1.015), step=(1.025, 1.022), graphs=(1.03, 1.026), compile_s=8.0, host=0.02),
    ),
    "branches": _job(
        *(0.00545, 0.004),
        host=0.95,
        leaves=16,
        sd=0.1,
        arms=_arms(forward=(1.05, 1.05), step=(1.03, 1.03), graphs=(1.03, 1.03), compile_s=10.0, host=0.95),
    ),
}


def _planted(sd: float, **arms: Ratios) -> Job:
    """A job of 30 ms a step, each candidate of which takes 20 s to compile."""
    named = {name.replace("__", "/").replace("_", "-"): ratios for name, ratios in arms.items()}
    return Job(
        step_s=0.03,
        pass_s=0.025,
        host_share=0.9,
        num_leaves=100,
        sd=sd,
        window_sd=sd / 2,
        arms={name: Truth(pairs=p, steps=s, compile_s=20.0, host_share=0.9) for name, (p, s) in named.items()},
    )


# What a search could get wrong. Names as of candidates, with __ for / and _ for -; ratios of passes and of whole steps.
HARD: dict[str, Job] = {
    "gains, 5 % apart": _planted(
        0.06, step__default=(1.32, 1.27), step__reduce_overhead=(1.4, 1.33), forward__default=(1.02, 0.98)
    ),
    "passes and steps in another order": _planted(
        0.06, step__default=(1.5, 1.1), step__reduce_overhead=(1.45, 1.18), forward__default=(1.2, 1.08)
    ),
    "noisy, 4 % apart": _planted(
        0.1, step__default=(1.2, 1.15), step__reduce_overhead=(1.26, 1.2), forward__default=(1.1, 1.05)
    ),
    "noisy, nothing gains": _planted(
        0.1, step__default=(0.97, 0.96), step__reduce_overhead=(0.96, 0.96), forward__default=(0.9, 0.92)
    ),
    "noisy, one gains 4 %": _planted(
        0.1, step__default=(1.05, 1.04), step__reduce_overhead=(0.96, 0.96), forward__default=(0.9, 0.92)
    ),
    "quiet, all but one lose": _planted(
        0.02, step__default=(0.8, 0.9), step__reduce_overhead=(0.9, 0.95), forward__default=(1.06, 1.05)
    ),
    "six, 5 % apart": _planted(
        0.06,
        step__default=(1.1, 1.05),
        step__reduce_overhead=(1.2, 1.15),
        forward__default=(1.05, 1.02),
        forward__reduce_overhead=(1.15, 1.1),
        blocks__default=(1.25, 1.2),
        blocks__reduce_overhead=(1.3, 1.25),
    ),
}
HARD_STEPS = 300_000  # two hours and a half: all candidates are worth their price
WRONG = 1.03
"""An arm this much slower than the best one is a wrong choice."""


def wrong_choices(job: Job, *, num_runs: int, num_steps: int = HARD_STEPS) -> float:
    """Share of runs that end on a wrong choice.

    >>> wrong_choices(HARD["gains, 5 % apart"], num_runs=3)
    0.0
    """
    best_s = min(job.step_of(name) for name in (EAGER, *job.arms))
    runs = (simulate(job, num_steps=num_steps, seed=seed) for seed in range(num_runs))
    return sum(job.step_of(run.active) > WRONG * best_s for run in runs) / num_runs


@dataclass(frozen=True, kw_only=True)
class Run:
    """A simulated run: seconds in all, what the search took of them, what it ended with, what it tried."""

    total_s: float
    spent_s: float
    active: str
    tried: tuple[str, ...]
    compile_s: float
    settled: bool
    search: Search

    @property
    def expected_s(self) -> float:
        """Seconds that compiling was expected to take."""
        return sum(one.expected_compile_s or 0.0 for one in self.search.report().candidates)


@dataclass
class _World:
    """A run that goes on, and what it costs."""

    job: Job
    num_steps: int
    random: random.Random
    warmth: float = 1.0  # share of compile seconds that are left where kernels are in torch's own cache
    total_s: float = 0.0
    done: int = 0
    compile_s: dict[str, float] = field(default_factory=dict)

    def train(self, name: str, steps: int) -> None:
        steps = min(steps, self.num_steps - self.done)
        self.done += steps
        self.total_s += steps * self.job.step_of(name)

    def noise(self, sd: float) -> float:
        spike = self.random.uniform(5, 20) * self.random.choice((-1, 1)) if self.random.random() < SPIKE_SHARE else 0.0
        return sd * (self.random.gauss(0.0, 1.0) + spike)

    def compile(self, name: str) -> float:
        seconds = self.job.arms[name].compile_s * self.warmth * math.exp(COMPILE_SD * self.random.gauss(0.0, 1.0))
        self.compile_s[name] = self.compile_s.get(name, 0.0) + seconds
        self.total_s += seconds
        return seconds

    def now(self, active: str, *, knows_end: bool) -> Now:
        step_s = self.job.step_of(active)
        return Now(
            step=self.done,
            elapsed_s=self.total_s,
            seconds_left=(self.num_steps - self.done) * step_s if knows_end else None,
            step_s=step_s,
            pass_s=self.job.pass_s,
            host_s=self.job.pass_s * self.job.host_share,
        )

    def pair(self, name: str, active: str) -> tuple[Sample, float]:
        job, arm = self.job, self.job.arms[name]
        self.train(active, STEPS_BETWEEN_PAIRS)
        common = math.exp(0.05 * self.random.gauss(0.0, 1.0))  # how fast the machine is at the moment
        compiled_s = common * job.pass_s / arm.pairs * math.exp(self.noise(job.sd))
        passes_s = job.pass_s, job.pass_s / arm.pairs
        block = max(BLOCK_PASSES, math.ceil(BLOCK_S / min(passes_s)))
        block = max(1, min(block, int(MAX_BLOCK_S / max(passes_s))))
        seconds = (1 + block) * sum(passes_s)
        self.total_s += seconds
        return Sample(
            step=self.done,
            eager_s=common * job.pass_s,
            compiled_s=compiled_s,
            eager_host_s=common * job.pass_s * job.host_share,
            compiled_host_s=compiled_s * arm.host_share,
            step_s=common * job.step_of(active) * math.exp(0.02 * self.random.gauss(0.0, 1.0)),
        ), seconds

    def couple(self, incumbent: str, challenger: str) -> Sample:
        steps_s = [self.job.step_of(name) for name in (incumbent, challenger)]
        for name in (incumbent, challenger):
            self.train(name, WINDOW_STEPS + SETTLE_STEPS)
        compiled_s = steps_s[1] * math.exp(self.noise(self.job.window_sd))
        return Sample(step=self.done, eager_s=steps_s[0], compiled_s=compiled_s, num_passes=WINDOW_STEPS)


def simulate(
    job: Job,
    *,
    num_steps: int,
    seed: int,
    search_budget: float = SEARCH_BUDGET,
    known: str | None = None,
    warmth: float = 1.0,
    knows_end: bool = True,
) -> Run:
    """One run of the job with the search on.

    Args:
        job: what is trained.
        num_steps: of the run.
        seed: of the noise.
        search_budget: share of the run that the search may cost.
        known: winner of an earlier run of the job; its compile seconds are known then, too.
        warmth: share of compile seconds that are left.
        knows_end: whether the run knows how long it is.

    >>> simulate(JOBS["resnet"], num_steps=20_000, seed=0).active
    'step/reduce-overhead'
    """
    world = _World(job, num_steps, random.Random(seed), warmth)
    names = {candidate: candidate.name for candidate in checked_candidates(list(job.arms))}
    search = Search(
        list(names),
        limits=Limits(),
        num_leaves=job.num_leaves,
        search_budget=search_budget,
        known=next((candidate for candidate, name in names.items() if name == known), None),
        known_speedup=job.arms[known].steps if known in job.arms else None,
        remembered_s={known: job.arms[known].compile_s * warmth} if known in job.arms else {},
    )

    def active() -> str:
        return _name(search.incumbent)

    world.train(EAGER, EARLY_STEPS)
    action = None
    while world.done < num_steps:
        action = search.next(world.now(active(), knows_end=knows_end))
        if isinstance(action, Settle):
            world.train(active(), num_steps)
        elif isinstance(action, Windows):
            search.saw_couple(world.couple(_name(action.incumbent), action.challenger.name))
        else:
            name = action.candidate.name
            if isinstance(action, Try):
                search.compiled(action.candidate, world.compile(name))
            assert isinstance(action, (Try, Measure))
            search.saw_pair(*world.pair(name, active()))
    return Run(
        total_s=world.total_s,
        spent_s=search.spent_s,
        active=active(),
        tried=tuple(world.compile_s),
        compile_s=sum(world.compile_s.values()),
        settled=isinstance(action, Settle),
        search=search,
    )


def _name(candidate: Candidate | None) -> str:
    return EAGER if candidate is None else candidate.name


def summary(job: Job, *, num_steps: int, num_runs: int, **options: Any) -> dict[str, Any]:
    """What ``num_runs`` runs have in common: totals over eager and over the best single arm, as quantiles."""
    runs = [simulate(job, num_steps=num_steps, seed=seed, **options) for seed in range(num_runs)]
    warmth = float(options.get("warmth") or 1.0)
    warm = replace(job, arms={name: replace(arm, compile_s=warmth * arm.compile_s) for name, arm in job.arms.items()})
    alone = {name: warm.alone_s(name, num_steps) for name in (EAGER, *job.arms)}
    best = min(alone, key=lambda name: alone[name])
    totals = np.array([run.total_s for run in runs])
    actives = [run.active for run in runs]
    return {
        "steps": num_steps,
        "alone_s": alone,
        "best": best,
        "over_best": _quantiles(totals / alone[best]),
        "over_eager": _quantiles(totals / alone[EAGER]),
        "search_share": _quantiles(np.array([run.spent_s for run in runs]) / alone[EAGER]),
        "active": {name: actives.count(name) / num_runs for name in sorted(set(actives))},
        "tried": sum(len(run.tried) for run in runs) / num_runs,
    }


def _quantiles(values: np.ndarray) -> list[float]:
    return [float(value) for value in np.quantile(values, (0.05, 0.5, 0.95))]


def table(results: Sequence[Mapping[str, Any]]) -> Table:
    """One row for each job and length."""
    found = Table(
        *("job", "steps", "eager s", "best s", "which", "with the search s", "over best", "95 %"),
        *("over eager", "95 %", "tried", "ends with"),
        title="Simulated runs, over the best single configuration in hindsight and over eager",
    )
    for row in results:
        alone, best, active = row["alone_s"], row["best"], row["active"]
        most = max(active, key=lambda one: active[one])
        found.add_row(
            *(row["job"], f"{row['steps']:,}", f"{alone[EAGER]:.0f}", f"{alone[best]:.0f}", best),
            f"{alone[EAGER] * row['over_eager'][1]:.0f}",
            *(f"{row[figure][n]:.3f}" for figure in ("over_best", "over_eager") for n in (1, 2)),
            *(f"{row['tried']:.1f}", f"{most} ({100 * active[most]:.0f} %)"),
        )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate the jobs named on the command line, or count wrong choices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wrong", action="store_true", help="count wrong choices in the hard jobs instead")
    parser.add_argument("--jobs", default=",".join(JOBS), help="names, with commas between them")
    parser.add_argument("--steps", default="1000,5000,20000", help="lengths of the runs")
    parser.add_argument("--runs", type=int, default=200, help="simulated runs of each")
    parser.add_argument("--budget", type=float, default=SEARCH_BUDGET, help="share of a run that the search may cost")
    parser.add_argument("--warmth", type=float, default=1.0, help="share of compile seconds left by a warm cache")
    parser.add_argument("--known", action="store_true", help="the winner is known from an earlier run")
    parser.add_argument("--out", type=Path, help="where to write all figures, as JSON")
    args = parser.parse_args(argv)
    results: list[dict[str, Any]] = []
    if args.wrong:
        for name, job in HARD.items():
            results.append({"job": name, "wrong": wrong_choices(job, num_runs=args.runs)})
            print(f"{name}: {100 * results[-1]['wrong']:.1f} % of {args.runs}", flush=True)
    else:
        for name in args.jobs.split(","):
            job = JOBS[name]
            known = min((EAGER, *job.arms), key=job.step_of) if args.known else None
            options = {"search_budget": args.budget, "warmth": args.warmth, "known": known}
            for steps in map(int, args.steps.split(",")):
                results.append({"job": name, **summary(job, num_steps=steps, num_runs=args.runs, **options)})
        Console(width=170).print(table(results))
        over_best = [row["over_best"][1] for row in results]
        mean = math.exp(sum(map(math.log, over_best)) / len(over_best))
        most = max(row["over_eager"][2] for row in results)
        print(f"Over best: mean {mean:.3f}, worst {max(over_best):.3f}. Over eager: worst {most:.3f} (95 % of runs).")
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
