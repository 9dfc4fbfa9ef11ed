"""The digits job described by a file: module, data, trainer and the arguments of `CompileProfiler` in YAML.

Look at `callbacks` in examples/config.yaml: the profiler is one entry among the trainer's own, and each of its
arguments can be set there or on the command line. Trying another mode needs no line of code.

    python -m examples.cli fit --config examples/config.yaml
    python -m examples.cli fit --config examples/config.yaml --trainer.callbacks.init_args.target forward
"""

from __future__ import annotations

import lightning as L
from lightning.pytorch.cli import LightningCLI

from examples.digits_cnn import DigitsCNN, digits


class Digits(L.LightningDataModule):
    """scikit-learn's digits."""

    def __init__(self, batch_size: int = 64):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return digits(self.batch_size)


def main(args=None):
    """Do what the command line says, and return the trainer."""
    return LightningCLI(DigitsCNN, Digits, args=args).trainer


if __name__ == "__main__":
    main()
