"""Does drift alarm where nothing is wrong, and does it find what is?

PYTHONPATH=callbacks python -m benchmarks.drift --jobs mlp,cnn --steps 2000 --out drift.json

Three parts, of which ``--parts`` names some. ``clean``: a correct backend, a pair every few steps, to the end of the
run: every distance beyond tolerance is a false alarm. ``floor``: the same, shorter, without a tolerance: how far
compiled is from eager, in multiples of what moving each weight by one roundoff does to eager (``NOISE_FACTOR`` is what
this may reach). ``faults``: one parameter's gradient is scaled, or set to NaN, from some step on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from benchmarks.common import fit, machine, on_gpu, quiet, show
from benchmarks.jobs import JOBS, Job
from compile_profiler import CompileProfiler, rig
from compile_profiler.drift import NOISE_FACTOR

FAULT_FROM = 20
"""Steps that a faulty run goes well."""
PAIR_EVERY = 5
PARTS = ("clean", "floor", "faults")
FAULTS: dict[str, float] = {"x 1.001": 1.001, "x 1.01": 1.01, "x 1.1": 1.1, "NaN": float("nan")}


class Encoder(nn.Module):
    """Two transformer layers with dropout, averaged over the sequence."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.3, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, length, width) to (rows, 10)."""
        logits: Tensor = self.head(self.layers(x).mean(1))
        return logits


class Spectral(nn.Module):
    """Complex weights between a Fourier transform and its inverse."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(width // 2 + 1, dtype=torch.complex64) / 4)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) to (rows, 10)."""
        logits: Tensor = self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=x.shape[-1]).tanh())
        return logits


def layers() -> nn.Module:
    """Three linear layers with LayerNorm between them."""
    return nn.Sequential(
        nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)
    )


def convolutions() -> nn.Module:
    """Two convolutions, each with BatchNorm."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10)),
    )


def rows(*shape: int) -> tuple[Tensor, Tensor]:
    """Sixteen random inputs of this shape in ten classes."""
    return torch.randn(16, *shape), torch.randint(10, (16,))


def _job(net: Callable[[], nn.Module], *shape: int, precision: str = "32-true") -> Job:
    return Job(net=net, batch=partial(rows, *shape), loss=F.cross_entropy, precision=precision)


CLEAN_JOBS: dict[str, Callable[[bool], Job]] = {
    "mlp": lambda big: _job(layers, 32),
    "cnn": lambda big: _job(convolutions, 3, 10, 10),
    "transformer": lambda big: _job(Encoder, 8, 32),
    "bf16": lambda big: _job(layers, 32, precision="bf16-mixed"),
    "fp16": lambda big: _job(layers, 32, precision="16-mixed"),
    "complex": lambda big: _job(Spectral, 32),
}
LARGE_JOBS = {name: JOBS[name] for name in ("resnet", "gpt")}
"""ResNet-50 and a GPT of GPT-2's size in bf16 on a GPU; small ones on a CPU."""


class Collects(L.Callback):
    """The drift of every pair, read off the report once something was measured.

    Attributes:
        found: the report's drift after each pair, as plain values.
        step: x-axis number of the batch at hand.
    """

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        self.step = 0
        self._num_pairs = 0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Take the step's number."""
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Take what the last pair has found."""
        profiler = next(callback for callback in trainer.callbacks if isinstance(callback, CompileProfiler))
        report = profiler.report
        num_pairs = report.speedup.num_pairs + report.speedup.num_void
        if num_pairs > self._num_pairs:
            self._num_pairs = num_pairs
            self.found.append({"step": self.step, **report.drift.to_dict()})


def faulty(names: dict[tuple[int, ...], str], name: str, factor: float, step: Callable[[], int]) -> Callable[..., Any]:
    """A backend that scales the gradient of the parameter ``name`` from ``FAULT_FROM`` on; parameters go by shape."""

    def bw_compiler(graph: Any, example_inputs: Any) -> Any:
        def run(*inputs: Any) -> list[Any]:
            outputs = list(graph.forward(*inputs))
            if step() < FAULT_FROM:
                return outputs
            return [
                out * factor if isinstance(out, Tensor) and names.get(tuple(out.shape)) == name else out
                for out in outputs
            ]

        return make_boxed_func(torch._dynamo.disable(run))

    def fw_compiler(graph: Any, example_inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    backend: Callable[..., Any] = aot_autograd(fw_compiler=fw_compiler, bw_compiler=bw_compiler)
    return backend


def run(job: Job, *, steps: int, collects: Collects, **options: Any) -> Any:
    """A fit with a pair every few steps from beginning to end; its report."""
    every_pair: dict[str, Any] = {"pair_every_n_steps": PAIR_EVERY, "max_pairs": 10**6, "overhead_budget": 1.0}
    unhurried: dict[str, Any] = {"min_speedup": 1e-9, "confidence": 1 - 1e-12, "end_to_end": "off"}
    profiler = CompileProfiler(log=False, verbose=False, **{**every_pair, **unhurried, **options})
    fit(job, steps=steps, callbacks=[profiler, collects])
    return profiler.report


def clean(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    """Distances of a correct backend, and those that would have been an alarm."""
    collects = Collects()
    every = max(PAIR_EVERY, args.steps // 100)
    report = run(job, steps=args.steps, collects=collects, pair_every_n_steps=every, **compiler(args))
    judged = [drift for drift in collects.found if drift["within_tolerance"] is not None]
    return {
        "steps": args.steps,
        "pairs": len(collects.found),
        "judged": len(judged),
        "beyond": sum(not drift["within_tolerance"] for drift in judged),
        "alarm": report.verdict.reason in ("drift", "non_finite"),
        "largest": max((drift["grad_rel"] or 0.0 for drift in judged), default=None),
        "limit": max((drift["tolerance"] for drift in judged), default=None),
        "rng": report.drift.rng,
        "report": report.to_dict(),
    }


def floor(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    """Distances in multiples of what one roundoff in each weight does to eager."""
    collects = Collects()
    with _no_tolerance():
        run(job, steps=max(60, args.steps // 10), collects=collects, drift="warn", **compiler(args))
    # Without a tolerance the limit is NOISE_FACTOR times what the nudge does, and nothing else.
    ratios = [NOISE_FACTOR * d["grad_rel"] / d["tolerance"] for d in collects.found if d["tolerance"] and d["grad_rel"]]
    cuts = statistics.quantiles(ratios, n=20, method="inclusive") if len(ratios) > 1 else []
    return {
        "pairs": len(collects.found),
        "equal": sum(drift["grad_rel"] == 0 for drift in collects.found),
        "median": statistics.median(ratios) if ratios else None,
        "p95": cuts[-1] if cuts else None,
        "largest": max(ratios, default=None),
        "ratios": ratios,
    }


@contextmanager
def _no_tolerance() -> Iterator[None]:
    before = rig.tolerance_for
    rig.tolerance_for = lambda *_, **__: 0.0
    try:
        yield
    finally:
        rig.tolerance_for = before


def faults(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    """For each fault, in how many of the parameters that it was planted in it was found, named, and how soon."""
    shapes: dict[tuple[int, ...], list[str]] = {}
    for name, parameter in job.module().named_parameters():
        shapes.setdefault(tuple(parameter.shape), []).append(name)
    names = {shape: found[0] for shape, found in shapes.items() if len(found) == 1}
    planted = list(names.values())[: args.parameters]
    results: dict[str, Any] = {}
    for fault, factor in FAULTS.items():
        runs = []
        for name in planted:
            collects = Collects()
            backend = faulty(names, name, factor, lambda collects=collects: collects.step)
            torch._dynamo.reset()
            report = run(job, steps=args.fault_steps, collects=collects, backend=backend)
            found = report.verdict.reason in ("drift", "non_finite")
            named = found and report.drift.worst_parameter == name
            early = found and report.verdict.step < FAULT_FROM
            runs.append(
                {"parameter": name, "found": found, "named": named, "early": early, "step": report.verdict.step}
            )
        results[fault] = {
            "planted": len(runs),
            "found": sum(each["found"] for each in runs),
            "named": sum(each["named"] for each in runs),
            "early": sum(each["early"] for each in runs),
            "steps_to_verdict": [each["step"] - FAULT_FROM for each in runs if each["found"]],
            "runs": runs,
        }
    return results


def compiler(args: argparse.Namespace) -> dict[str, Any]:
    """The options that go to ``torch.compile``; with eager's random numbers where that can be asked for at once.

    Runs of seconds are too short for a second arm.
    """
    matched = args.backend == "inductor" and args.mode is None
    return {"backend": args.backend, "mode": args.mode, "options": {"fallback_random": True} if matched else None}


def table(results: dict[str, dict[str, Any]]) -> list[Table]:
    """One table for each part."""
    first = Table("job", "steps", "pairs", "judged", "beyond", "alarm", "largest", "limit", "rng", title="Clean runs")
    second = Table("job", "pairs", "equal", "median", "95 %", "largest", title="In multiples of one roundoff's doing")
    third = Table("job", *FAULTS, title="Planted faults: found of planted, named, steps to the verdict")
    for name, result in results.items():
        if (of := result.get("clean")) is not None:
            counts = (str(of[key]) for key in ("steps", "pairs", "judged", "beyond", "alarm"))
            first.add_row(name, *counts, show(of["largest"], "{:.1e}"), show(of["limit"], "{:.1e}"), str(of["rng"]))
        if (of := result.get("floor")) is not None:
            figures = (show(of[key]) for key in ("median", "p95", "largest"))
            second.add_row(name, str(of["pairs"]), str(of["equal"]), *figures)
        if (of := result.get("faults")) is not None:
            third.add_row(name, *(_cell(of[fault]) for fault in FAULTS))
    return [each for each in (first, second, third) if each.row_count]


def _cell(found: dict[str, Any]) -> str:
    steps = found["steps_to_verdict"]
    after = f", {statistics.median(steps):.0f}" if steps else ""
    return f"{found['found']}/{found['planted']}, {found['named']}{after}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the parts named on the command line on the jobs named there."""
    jobs = {**CLEAN_JOBS, **LARGE_JOBS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(CLEAN_JOBS), help=f"some of {', '.join(jobs)}")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--steps", type=int, default=2000, help="steps of a clean run")
    parser.add_argument("--fault-steps", type=int, default=60, help="steps of a faulty run")
    parser.add_argument("--parameters", type=int, default=2, help="parameters of a job that faults are planted in")
    parser.add_argument("--backend", default="inductor", help="of torch.compile, in clean runs")
    parser.add_argument("--mode", help="of torch.compile, in clean runs")
    parser.add_argument("--tf32", action="store_true", help="let float32 products use TensorFloat-32")
    parser.add_argument("--out", type=Path, help="JSON file of all raw figures, rewritten after each job")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.jobs.split(",") if name not in jobs]:
        parser.error(f"--jobs must name some of {', '.join(jobs)}, got {', '.join(unknown)}.")
    if unknown := [name for name in args.parts.split(",") if name not in PARTS]:
        parser.error(f"--parts must name some of {', '.join(PARTS)}, got {', '.join(unknown)}.")
    if args.tf32:
        torch.set_float32_matmul_precision("high")
    if not on_gpu():
        torch.set_num_threads(1)
    console, results = Console(width=150), {}
    measures = {"clean": clean, "floor": floor, "faults": faults}
    for name in args.jobs.split(","):
        began_s = time.perf_counter()
        job = jobs[name](on_gpu())
        results[name] = {}
        for part in args.parts.split(","):
            torch._dynamo.reset()
            with quiet():
                results[name][part] = measures[part](job, args)
        console.print(f"{name}: {time.perf_counter() - began_s:.0f} s")
        if args.out is not None:
            settings = {"backend": args.backend, "mode": args.mode, "tf32": args.tf32}
            found = {"machine": machine(), "settings": settings, "jobs": results}
            args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for each in table(results):
        console.print(each)
    console.print(", ".join(f"{key} {value}" for key, value in machine().items()))


if __name__ == "__main__":
    main()
