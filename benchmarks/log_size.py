"""How much longer a TensorBoard event file gets by the callback, on steps so cheap that pairs are as frequent as ever.

    PYTHONPATH=callbacks python -m benchmarks.log_size --steps 20000

Figures: bytes of the event file of a run with and without the callback, and how the difference grows.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader, Dataset

from compile_profiler import CompileProfiler


class Rows(Dataset[torch.Tensor]):
    """So many times the same batch of 8x4."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.batch = torch.ones(8, 4)

    def __len__(self) -> int:
        """How many batches."""
        return self.num

    def __getitem__(self, index: int) -> torch.Tensor:
        """The batch."""
        return self.batch


class Tiny(L.LightningModule):
    """One linear layer, one logged value."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """A mean of squares."""
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def event_bytes(steps: int, callbacks: list[Any], *, log_every_n_steps: int = 50) -> int:
    """Bytes of the event files of one run."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_steps=steps,
            accelerator="cpu",
            callbacks=callbacks,
            logger=TensorBoardLogger(folder),
            log_every_n_steps=log_every_n_steps,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Tiny(), DataLoader(Rows(steps), batch_size=None))
        return sum(file.stat().st_size for file in Path(folder).rglob("*tfevents*"))


def main(steps: int, log_every_n_steps: int) -> dict[str, float]:
    """Both runs, with a backend that costs nothing and stays; bytes of each, pairs."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    plain = event_bytes(steps, [], log_every_n_steps=log_every_n_steps)
    profiler = CompileProfiler(backend="eager", fallback=False, verbose=False)
    profiled = event_bytes(steps, [profiler], log_every_n_steps=log_every_n_steps)
    speedup = profiler.report.speedup
    pairs = speedup.num_pairs + speedup.num_void
    return {
        "plain_bytes": plain,
        "profiled_bytes": profiled,
        "bytes_per_1000_steps": 1000 * (profiled - plain) / steps,
        "num_pairs": pairs,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--log-every-n-steps", type=int, default=50)
    asked = parser.parse_args()
    for name, value in main(asked.steps, asked.log_every_n_steps).items():
        print(f"{name}: {value:,.0f}")
