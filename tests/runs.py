"""A small module with the usual hazards, real Trainer runs of it, and everything that a run leaves behind."""

import copy
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(pl.LightningModule):
    """Linear layers with BatchNorm and Dropout, momentum, values logged on step and on epoch."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 1))
        self.seen = []

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        x, y = batch
        return ((self(x) - y) ** 2).mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"twice": loss * 2, "one": 1.0})
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10), "interval": "step"}]

    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append(float(batch[0].sum()))


class MovesItsOptimizer:
    """Mixed into a module with a ``loss``: its step moves the optimizer itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss.detach())


class InMemoryLogger(Logger):
    """Keeps what it is sent: a real logger, for reading back."""

    def __init__(self):
        super().__init__()
        self.rows = []

    name = "memory"
    version = 0

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params, *args, **kwargs):
        pass

    def of_user(self):
        """Rows without the callback's own tags."""
        return [(step, row) for step, row in self.rows if not any(tag.startswith("compile/") for tag in row)]

    def steps_of(self, tag):
        """x-axis numbers at which a tag was logged."""
        return [step for step, row in self.rows if tag in row]


class Files(InMemoryLogger):
    """Keeps a file of each text, as the loggers of services do."""

    def __init__(self):
        super().__init__()
        self.texts, self.described = [], {}

    def log_text(self, key, columns=None, data=None, step=None):
        self.texts.append((key, data[0][0]))

    def log_hyperparams(self, params, *args, **kwargs):
        self.described.update(params)


def loaders(num=320, batch_size=8):
    """A shuffled training loader and a validation loader over the same random numbers."""
    data = TensorDataset(torch.randn(num, 8), torch.randn(num, 1))
    return DataLoader(data, batch_size, shuffle=True), DataLoader(data, 4 * batch_size)


def fit(module, callbacks=(), *, validate=True, trainer_class=pl.Trainer, seed=1, ckpt_path=None, **options):
    """Train ``module`` for real; returns the trainer."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    options = {
        "max_steps": 60,
        "logger": InMemoryLogger(),
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "deterministic": True,
        "accelerator": "cpu",
        **options,
    }
    trainer = trainer_class(callbacks=list(callbacks), **options)
    train, val = loaders()
    if is_overridden("train_dataloader", module):  # a module with a loader of its own
        train = None
    trainer.fit(module, train, val if validate else None, ckpt_path=ckpt_path)
    return trainer


def train(module_class, callbacks=(), **options):
    """Make a module under a fixed seed and train it; returns the module and the trainer."""
    torch.manual_seed(7)
    module = module_class()
    return module, fit(module, callbacks, **options)


def left_behind(module, trainer):
    """Everything that a later reader of a run could tell apart, as a flat dict."""
    left = {f"weights/{name}": value.clone() for name, value in module.state_dict().items()}
    for n, optimizer in enumerate(trainer.optimizers):
        for key, state in optimizer.state_dict()["state"].items():
            left.update({f"optimizer/{n}/{key}/{name}": value for name, value in state.items()})
    for n, config in enumerate(trainer.lr_scheduler_configs):
        left[f"scheduler/{n}"] = config.scheduler.state_dict()
    left.update({f"metric/{name}": value for name, value in trainer.callback_metrics.items()})
    left["random/torch"] = torch.get_rng_state()
    if torch.cuda.is_available():
        left["random/cuda"] = torch.cuda.get_rng_state()
    left["random/python"] = random.getstate()
    left["random/numpy"] = tuple(map(str, np.random.get_state()))
    left["logged"] = trainer.logger.of_user() if isinstance(trainer.logger, InMemoryLogger) else None
    left["steps"] = trainer.global_step
    left["batches"] = getattr(module, "seen", None)
    left["attributes"] = sorted(vars(module))
    left["of its own"] = copy.deepcopy(module.left()) if hasattr(module, "left") else None
    return left


def differences(a, b):
    """Names under which two runs left something different behind."""
    assert a.keys() == b.keys()
    return [name for name in a if not _same(a[name], b[name])]


def _same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and _same(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


def sleepy(seconds):
    """A backend whose truth is known: each call of a graph takes so much longer."""

    def backend(graph, example_inputs):
        def run(*inputs):
            time.sleep(seconds)
            return graph.forward(*inputs)

        return run

    return backend


def as_module(*arguments, **environment):
    """Run ``python -m compile_profiler`` in a process of its own."""
    path = os.pathsep.join([str(Path(__file__).parents[1] / "callbacks"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "compile_profiler", *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
