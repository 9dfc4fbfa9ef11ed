"""A small CNN on scikit-learn's digits: a job that compiling does not speed up on a CPU.

The convolutions are one library call each, with or without a compiler, and there is little around them to fuse.
Look at the verdict: the run has to go back to eager by itself (`compile/active` drops to 0), and the training
curve must not show when that happened.

    python -m examples.digits_cnn
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import TensorBoardLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from compile_profiler import CompileProfiler


class DigitsCNN(L.LightningModule):
    """Two convolutions and a linear layer on images of 1x8x8."""

    def __init__(self, channels=16):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(channels * 4 * 4, 10),
        )

    def training_step(self, batch, batch_idx):
        images, digits = batch
        logits = self.net(images)
        loss = F.cross_entropy(logits, digits)
        self.log("train_loss", loss)
        self.log("train_accuracy", (logits.argmax(dim=1) == digits).float().mean())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def digits(batch_size=64):
    """Shuffled batches of images (batch, 1, 8, 8) in [0, 1] and their digits (batch,)."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    # drop_last: a shorter last batch would be one more shape to compile for.
    return DataLoader(TensorDataset(images, torch.tensor(data.target)), batch_size, shuffle=True, drop_last=True)


def main(max_steps=400, callbacks=None, root_dir="runs"):
    """Train, and return the trainer. Without `callbacks` the job is profiled; `[]` trains it plainly."""
    L.seed_everything(0, verbose=False)
    torch.set_num_threads(1)  # operations this small only wait for a second thread, for long on a busy machine
    trainer = L.Trainer(
        max_steps=max_steps,
        accelerator="cpu",
        callbacks=[CompileProfiler()] if callbacks is None else callbacks,
        logger=TensorBoardLogger(root_dir, name="digits_cnn"),
        log_every_n_steps=5,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(DigitsCNN(), digits())
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-steps", type=int, default=400)
    parser.add_argument("--root-dir", default="runs", help="where TensorBoard looks")
    parser.add_argument("--plain", action="store_true", help="train without the profiler")
    args = parser.parse_args()
    main(args.max_steps, [] if args.plain else None, args.root_dir)
