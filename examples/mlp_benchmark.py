"""The benchmark that everybody writes first, done by the callback.

By hand: build an MLP, compile it, warm up, synchronise, time a few hundred steps of each, compare, check `allclose`.
Here all of that is five lines, on the batches of a real training run:

    profiler = CompileProfiler()
    trainer = L.Trainer(max_steps=200, callbacks=[profiler])
    trainer.fit(Denoiser(), photographs())
    print(profiler.report.speedup)  # the comparison, with its interval
    print(profiler.report.drift)  # what `allclose` was to tell

Look at the interval beside the speedup: two matrix products take nearly all of the time, and on a CPU the compiler
hands them to the same library as eager does.

    python -m examples.mlp_benchmark
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import TensorBoardLogger
from sklearn.datasets import load_sample_image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from compile_profiler import CompileProfiler


class Denoiser(L.LightningModule):
    """An MLP 1024-4096-1024 that cleans noisy photographs, patches of 32x32 at a time."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))

    def training_step(self, batch, batch_idx):
        noisy, clean = batch
        loss = F.mse_loss(self.net(noisy), clean)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-4)


def photographs(batch_size=256, stride=8):
    """Shuffled batches of noisy and clean grey patches (batch, 1024) of scikit-learn's two sample photographs."""
    grey = [torch.tensor(load_sample_image(name) / 255.0).float().mean(dim=2) for name in ("china.jpg", "flower.jpg")]
    patches = [image.unfold(0, 32, stride).unfold(1, 32, stride).reshape(-1, 1024) for image in grey]
    clean = torch.cat(patches) - 0.5
    # The noise is drawn here, once, not in the step: both ways of running a step then see the same numbers.
    noisy = clean + 0.1 * torch.randn(clean.shape)
    # drop_last: a shorter last batch would be one more shape to compile for.
    return DataLoader(TensorDataset(noisy, clean), batch_size, shuffle=True, drop_last=True)


def main(max_steps=200, callbacks=None, root_dir="runs"):
    """Train, and return the trainer. Without `callbacks` the job is profiled; `[]` trains it plainly."""
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        max_steps=max_steps,
        accelerator="auto",
        devices=1,
        callbacks=[CompileProfiler()] if callbacks is None else callbacks,
        logger=TensorBoardLogger(root_dir, name="mlp_benchmark"),
        log_every_n_steps=5,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Denoiser(), photographs())
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--root-dir", default="runs", help="where TensorBoard looks")
    parser.add_argument("--plain", action="store_true", help="train without the profiler")
    args = parser.parse_args()
    main(args.max_steps, [] if args.plain else None, args.root_dir)
