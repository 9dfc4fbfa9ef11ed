"""Does memory grow without bound? A thousand steps of changing shapes, and twenty fits in one process.

PYTHONPATH=callbacks python -m benchmarks.memory --out memory.json

Each run has a process of its own; beside the callback stand the same job in eager and compiled by hand.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.common import machine, on_gpu, quiet, show
from compile_profiler import CompileProfiler

KINDS = ("eager", "by hand", "callback")
QUESTIONS = {"steps": "a step of changing shape", "fits": "a fit"}
WARM_SHARE = 0.25
"""The first part of a run: libraries start, caches fill."""
FIT_STEPS = 20


class Sequences(Dataset[Tensor]):
    """Batches of changing length, no two neighbours alike."""

    def __init__(self, num: int, *, varying: bool) -> None:
        self._lengths = [8 + 37 * number % 56 if varying else 16 for number in range(num)]

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(4, self._lengths[number], 16, generator=generator)


class Small(L.LightningModule):
    """Attention and a feed-forward part, as small as they come.

    Args:
        by_hand: keyword arguments of ``torch.compile`` for the loss, ``None`` to leave it as it is.
    """

    def __init__(self, by_hand: dict[str, Any] | None) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self._loss = self.loss if by_hand is None else torch.compile(self.loss, **by_hand)

    def loss(self, x: Tensor) -> Tensor:
        """How far the output is from the input, a scalar."""
        mixed, _ = self.attention(x, x, x, need_weights=False)
        return nn.functional.mse_loss(self.net(mixed), x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The loss of one batch, logged."""
        loss = self._loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Resident(L.Callback):
    """Resident bytes of this process after each step."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """Read them."""
        self.sizes.append(resident_bytes())


def resident_bytes() -> int:
    """Resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)


def slope(values: Sequence[float]) -> float:
    """By how much a value rises from one to the next: the median over all pairs of them, which no jump moves.

    >>> slope([1.0, 3.0, 5.0, 7.0]), slope([4.0, 4.0, 100.0, 4.0, 4.0])
    (2.0, 0.0)
    """
    step = max(1, len(values) // 200)  # enough of them: there are n * n / 2 pairs
    points = list(enumerate(values))[::step]
    return statistics.median([(late - early) / (j - i) for (i, early), (j, late) in combinations(points, 2)])


def train(kind: str, *, steps: int, varying: bool, options: dict[str, Any], callbacks: Iterable[L.Callback]) -> None:
    """One fit of a fresh module."""
    L.seed_everything(0, verbose=False)
    found = list(callbacks)
    if kind == "callback":
        found.append(CompileProfiler(fallback=False, log=False, verbose=False, **options))
    trainer = L.Trainer(
        max_steps=steps,
        accelerator="gpu" if on_gpu() else "cpu",
        devices=1,
        callbacks=found,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(Small(options if kind == "by hand" else None), DataLoader(Sequences(steps, varying=varying), None))


def sizes(question: str, kind: str, *, number: int, options: dict[str, Any], steps: int = FIT_STEPS) -> Iterator[int]:
    """Resident bytes after each step of one fit, or after each of many fits of so many ``steps``."""
    if question == "steps":
        resident = Resident()
        train(kind, steps=number, varying=True, options=options, callbacks=[resident])
        yield from resident.sizes
        return
    for _ in range(number):
        train(kind, steps=steps, varying=False, options=options, callbacks=[])
        if kind == "by hand":  # else the next fit would take what this one has compiled
            torch._dynamo.reset()
        gc.collect()
        yield resident_bytes()


def measured(question: str, kind: str, *, number: int, options: dict[str, Any]) -> dict[str, Any]:
    """The same in a process of its own, with the slope of its later part."""
    command = [sys.executable, "-m", "benchmarks.memory", "--only", question, kind, str(number), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the run {question} {kind} failed: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    later = found[int(WARM_SHARE * len(found)) :]
    return {"sizes_bytes": found, "slope_kib": slope(later) / 1024, "last_mib": later[-1] / 2**20}


def table(results: dict[str, dict[str, Any]]) -> Table:
    """One row per question and kind."""
    found = Table("by", "kind", "KiB each", "MiB at the end", title="Growth of resident memory")
    for question, kinds in results.items():
        for kind, result in kinds.items():
            found.add_row(QUESTIONS[question], kind, show(result["slope_kib"]), show(result["last_mib"], "{:.0f}"))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Ask both questions of all three kinds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="steps of changing shape")
    parser.add_argument("--fits", type=int, default=20, help="fits in one process")
    parser.add_argument("--out", type=Path, help="JSON file of all raw figures, rewritten after each run")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--only", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.only is not None:
        question, kind, number, options = args.only
        torch.set_num_threads(1)
        with quiet():
            warnings.simplefilter("ignore")  # of recompiling, which this is about
            print(json.dumps(list(sizes(question, kind, number=int(number), options=json.loads(options)))))
        return
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "131072")  # a fixed one: glibc's grows with what is freed
    console, results = Console(width=120), {}
    for question, number in (("steps", args.steps), ("fits", args.fits)):
        for kind in KINDS:
            found = measured(question, kind, number=number, options={"backend": args.backend})
            results.setdefault(question, {})[kind] = found
            console.print(f"{question}, {kind}: {found['slope_kib']:.1f} KiB each")
            if args.out is not None:
                text = json.dumps({"machine": machine(), "results": results}, indent=1)
                args.out.write_text(f"{text}\n", encoding="utf-8")
    console.print(table(results))
    console.print(", ".join(f"{key} {value}" for key, value in machine().items()))


if __name__ == "__main__":
    main()
