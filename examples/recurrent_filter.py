"""A hand-written recurrent filter on program text: a job that compiling speeds up, on a CPU too.

Every byte costs a handful of tiny operations on a 64x16 tensor, so eager time is spent on launching them, not on
arithmetic. The compiler fuses the 24 unrolled steps into a few loops. Look at `compile/step_ms/eager` against
`compile/step_ms/compiled`, and at how many steps the seconds of compiling take to be earned back.

    python -m examples.recurrent_filter
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader

from compile_profiler import CompileProfiler


class RecurrentFilter(L.LightningModule):
    """A bank of gated leaky integrators that reads 24 bytes and predicts the next one."""

    def __init__(self, channels=16):
        super().__init__()
        self.channels = channels
        self.signal = nn.Embedding(256, channels)
        self.feedback = nn.Parameter(torch.zeros(channels))
        # From forgetting at once to remembering for the whole window.
        self.memory = nn.Parameter(torch.linspace(-2, 3, channels))
        self.predict = nn.Linear(channels, 256)

    def forward(self, text):
        state = torch.zeros(len(text), self.channels, device=self.device)
        for signal in self.signal(text).unbind(dim=1):
            keep = torch.sigmoid(self.memory + self.feedback * state)
            state = keep * state + (1 - keep) * torch.tanh(signal)
        return self.predict(state)

    def training_step(self, batch, batch_idx):
        text, following = batch[:, :-1], batch[:, -1]
        loss = F.cross_entropy(self(text), following)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def source_code(batch_size=64, num_steps=24, num_bytes=1_000_000):
    """Shuffled batches (batch, num_steps + 1) of bytes from the source files of Python's standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:num_bytes]
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, num_steps + 1, num_steps)
    # drop_last: a shorter last batch would be one more shape to compile for.
    return DataLoader(windows, batch_size, shuffle=True, drop_last=True)


def main(max_steps=600, callbacks=None, root_dir="runs"):
    """Train, and return the trainer. Without `callbacks` the job is profiled; `[]` trains it plainly."""
    L.seed_everything(0, verbose=False)
    torch.set_num_threads(1)  # operations this small only wait for a second thread, for long on a busy machine
    trainer = L.Trainer(
        max_steps=max_steps,
        accelerator="cpu",
        callbacks=[CompileProfiler()] if callbacks is None else callbacks,
        logger=TensorBoardLogger(root_dir, name="recurrent_filter"),
        log_every_n_steps=5,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(RecurrentFilter(), source_code())
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-steps", type=int, default=600)
    parser.add_argument("--root-dir", default="runs", help="where TensorBoard looks")
    parser.add_argument("--mode", help="of the profiler: auto searches for the fastest way, where the run is long")
    parser.add_argument("--plain", action="store_true", help="train without the profiler")
    args = parser.parse_args()
    main(args.max_steps, [] if args.plain else [CompileProfiler(mode=args.mode)], args.root_dir)
