"""Modules and batches as users have them, for `compile-profiler bench`."""

import os
import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(pl.LightningModule):
    """With a loader of its own, which needs `setup` and the trainer."""

    def __init__(self, width=4, fault=None):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
        self.fault = fault

    def setup(self, stage):
        self.data = TensorDataset(torch.randn(32, 3), torch.randn(32, 1))

    def train_dataloader(self):
        assert self.trainer.fit_loop
        return DataLoader(self.data, batch_size=8)

    def val_dataloader(self):
        raise AssertionError("a benchmark does not validate")

    def validation_step(self, batch, batch_idx):
        pass

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.fault == "raise":
            raise KeyError("the user's own mistake")
        if self.fault == "exit":
            sys.exit(0)
        if self.fault == "crash":
            os._exit(7)
        if self.fault == "print":
            print("a step of the user's")
        loss = ((self.net(x) - y) ** 2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Autoencoder(Net):
    """Without a loader; a batch is its input."""

    train_dataloader = pl.LightningModule.train_dataloader
    example_input_array = torch.ones(8, 3)

    def on_train_batch_start(self, batch, batch_idx):
        assert batch.eq(1).all()

    def training_step(self, batch, batch_idx):
        batch.add_(1)  # a step may write into its batch
        return self.net(batch).square().mean()


class NeedsWidth(Autoencoder):
    """With an argument that has no default."""

    example_input_array = None

    def __init__(self, width):
        super().__init__(width)


class NoStep(pl.LightningModule):
    """Not finished yet."""

    def configure_optimizers(self):
        return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


def small():
    return Net(width=2)


def no_module():
    return nn.Linear(1, 1)


def a_batch():
    return torch.randn(8, 3), torch.randn(8, 1)


def lengths():
    for length in range(2, 9):
        yield torch.randn(length, 3), torch.randn(length, 1)


def nothing():
    return iter(())


ready = (torch.zeros(8, 3), torch.zeros(8, 1))
number = 3
