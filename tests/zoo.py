"""Small modules, each with one hazard for whoever runs a step twice."""

import dataclasses
import random
from collections import OrderedDict, deque

import numpy as np
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from runs import Regression


class DropoutAndBatchNorm(Regression):
    """The modules everybody uses: random numbers, running statistics, a counter in a buffer."""


class Counters(Regression):
    """Numbers, lists, dicts, deques and sets on the module and below, also nested."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.history = []
        self.nested = {"a": [0, {"b": [0]}], "order": OrderedDict(x=1, y=2)}
        self.recent = deque(maxlen=3)
        self.tags = set()
        self.net.calls = 0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.calls += 1
        self.net.calls += 2
        self.history.append(batch_idx)
        self.nested["a"][1]["b"][0] += 1
        self.nested["order"].move_to_end("x")
        self.nested["order"][f"new{self.calls % 3}"] = self.calls
        self.recent.append(self.calls)
        self.tags.add(batch_idx % 5)
        return loss

    def left(self):
        return [self.calls, self.net.calls, self.history, self.nested, list(self.recent), sorted(self.tags)]


class Tally:
    """A plain object with slots."""

    __slots__ = ("last", "num", "total")

    def __init__(self):
        self.num, self.total = 0, 0.0

    def add(self, value):
        self.num += 1
        self.total += value
        self.last = value


class PlainObject(Regression):
    """Keeps a running value in a plain Python object."""

    def __init__(self):
        super().__init__()
        self.tally = Tally()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.tally.add(loss.item())
        return loss

    def left(self):
        return [self.tally.num, self.tally.total, self.tally.last]


class ClassCounter(Regression):
    """Counts on its class, shared by all its objects."""

    calls = 0
    history: list[int] = []  # noqa: RUF012, the hazard itself

    def __init__(self):
        super().__init__()
        type(self).calls = 0
        self.history.clear()

    def training_step(self, batch, batch_idx):
        type(self).calls += 1
        self.history.append(batch_idx)
        return super().training_step(batch, batch_idx)

    def left(self):
        return [type(self).calls, list(self.history)]


class KeptOutputs(Regression):
    """Collects losses over an epoch, as Lightning 2 asks people to."""

    def __init__(self):
        super().__init__()
        self.outputs, self.means = [], []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.means.append(torch.stack(self.outputs).mean().item())
        self.outputs.clear()

    def left(self):
        return [self.means, [value.item() for value in self.outputs]]


class MomentumQueue(Regression):
    """A momentum encoder and a queue in buffers, one written, one whose storage is replaced."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(8, 1).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(16))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.register_buffer("center", torch.zeros(1))

    @torch.no_grad()
    def remember(self, x):
        for p in self.teacher.parameters():
            p.mul_(0.9).add_(0.01)
        keys = self.teacher(x).flatten()
        self.center.data = 0.9 * self.center + 0.1 * keys.mean()
        at = int(self.pointer)
        self.queue[at : at + len(keys)] = keys
        self.pointer[0] = (at + len(keys)) % 16

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx) + self.queue.mean().clone()
        self.remember(batch[0])
        return loss


class RandomControlFlow(Regression):
    """Python's, NumPy's and torch's random numbers choose the way."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.numpy = np.random.default_rng(3)
        self.legacy = np.random.RandomState(3)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        scale = random.choice([0.5, 1.0, 2.0]) * (2.0 if np.random.rand() < 0.3 else 1.0)
        own = self.numpy.random() + self.legacy.rand()
        return loss * scale * own * torch.rand(1, generator=self.generator).item() * (1 + torch.rand(()))


class OwnRandom(Regression):
    """Draws from a random.Random of its own."""

    def __init__(self):
        super().__init__()
        self.random = random.Random(3)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.random.random()

    def left(self):
        return [self.random.getstate()]


class WritesBatch(Regression):
    """Normalises the batch in place."""

    def training_step(self, batch, batch_idx):
        batch[0].mul_(0.5).add_(1.0)
        return super().training_step(batch, batch_idx)


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


class OddBatches(Regression):
    """Dict, tuple, dataclass and nested batches in turn, from an iterable data set; the step pops from the dict."""

    class Stream(IterableDataset):
        def __iter__(self):
            generator = torch.Generator().manual_seed(5)
            for n in range(64):
                x, y = torch.randn(8, 8, generator=generator), torch.randn(8, 1, generator=generator)
                yield [{"x": x, "y": y}, (x, y), Pair(x, y), {"deep": [{"x": x}, (y, "name")]}][n % 4]

    def train_dataloader(self):
        return DataLoader(self.Stream(), batch_size=None)

    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append(str(type(batch)))

    def loss(self, batch):
        if isinstance(batch, Pair):
            return super().loss((batch.x, batch.y))
        if isinstance(batch, dict) and "deep" in batch:
            return super().loss((batch["deep"][0]["x"], batch["deep"][1][0]))
        if isinstance(batch, dict):
            return super().loss((batch.pop("x"), batch.pop("y")))
        return super().loss(batch)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, batch_size=8)
        return loss


class DictOutput(Regression):
    """Returns a dict."""

    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "more": batch[0].mean()}


class SkipsBatches(Regression):
    """Returns None on some batches."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 5 == 4 else loss


class ClosureOptimizer(Regression):
    """LBFGS calls the step several times for one optimizer step."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=3)


class FreezesParameters(Regression):
    """Freezes and unfreezes layers in mid-run."""

    def on_train_batch_start(self, batch, batch_idx):
        super().on_train_batch_start(batch, batch_idx)
        self.net[0].requires_grad_(batch_idx % 20 < 10)


class SharedParameters(Regression):
    """One weight, two names."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))
        self.net[2].weight = self.net[0].weight


class Checkpointing(Regression):
    """Runs part of forward again in backward, with its random numbers."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 1))

    def forward(self, x):
        return self.net[3](checkpoint(self.net[:3], x, use_reentrant=False))


class GradientPenalty(Regression):
    """Differentiates a gradient."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        x = batch[0].clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return super().training_step(batch, batch_idx) + 0.1 * slope.pow(2).mean()


class ComplexParameter(Regression):
    """A parameter with an imaginary part."""

    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x):
        return super().forward((x * self.phase).real)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3 * ctx.saved_tensors[0] ** 2


class CustomFunction(Regression):
    """An autograd function of the user's."""

    def forward(self, x):
        return super().forward(Cube.apply(x) * 0.1)


class OverriddenHooks(Regression):
    """Counts every hook that it overrides, and steps and backpropagates in its own way."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def count(self, hook):
        self.counts[hook] = self.counts.get(hook, 0) + 1

    def backward(self, loss, *args, **kwargs):
        self.count("backward")
        super().backward(loss * 1.5, *args, **kwargs)

    def optimizer_step(self, *args, **kwargs):
        self.count("optimizer_step")
        super().optimizer_step(*args, **kwargs)

    def on_before_zero_grad(self, optimizer):
        self.count("on_before_zero_grad")

    def on_before_backward(self, loss):
        self.count("on_before_backward")

    def on_after_backward(self):
        self.count("on_after_backward")

    def on_before_optimizer_step(self, optimizer):
        self.count("on_before_optimizer_step")

    def on_train_batch_start(self, batch, batch_idx):
        self.count("on_train_batch_start")
        return -1 if self.counts["on_train_batch_start"] == 70 else None

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.count("on_train_batch_end")

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.count("configure_gradient_clipping")
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def left(self):
        return self.counts


class Metrics(Regression):
    """Metrics updated in the step, logged as objects, called, and in a collection."""

    def __init__(self):
        super().__init__()
        self.mse = torchmetrics.MeanSquaredError()
        self.mae = torchmetrics.MeanAbsoluteError()
        self.all = torchmetrics.MetricCollection(
            {"r": torchmetrics.PearsonCorrCoef(), "c": torchmetrics.CatMetric()}, compute_groups=False
        )
        self.pair = torchmetrics.MetricCollection({"a": torchmetrics.MeanSquaredError(), "b": torchmetrics.R2Score()})

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        x, y = batch
        with torch.no_grad():
            z = self.net[4](self.net[0](x)).flatten()
        self.mse.update(z, y.flatten())
        self.log("mse", self.mse, on_step=False, on_epoch=True)
        self.log("mae", self.mae(z, y.flatten()), on_step=True)
        self.all["r"].update(z, y.flatten())
        self.all["c"].update(z)
        self.log_dict(self.pair(z, y.flatten()), on_step=True, on_epoch=False)
        return loss

    def on_train_epoch_end(self):
        self.log("kept", self.all["c"].compute().sum())
        self.all.reset()

    def left(self):
        return [self.mse._update_count, self.all["r"]._update_count, len(self.all["c"].value)]


class LogsEverything(Regression):
    """Hands every kind of value to ``log``, in forward too, and changes a tensor after logging it."""

    def forward(self, x):
        self.log("in_forward", x.mean())
        return super().forward(x)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        changing = batch[0].mean()
        self.log("changing", changing)
        changing.add_(100.0)
        self.log("numpy", np.float32(0.1) * 3)
        self.log("int", batch_idx, on_step=True, on_epoch=True, reduce_fx="max")
        self.log("bool", batch_idx % 2 == 0)
        self.log("float", 0.1 * batch_idx)
        self.log("sum", torch.tensor(2.0), reduce_fx="sum", on_epoch=True, on_step=False)
        self.log_dict({"a": loss, "b": 2.0}, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", ((self.net(x) - y) ** 2).mean())


class OwnGradient(Regression):
    """A leaf that is no parameter gathers a gradient of its own."""

    def on_fit_start(self):
        self.offset = torch.zeros(1, device=self.device, requires_grad=True)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + self.offset)

    def left(self):
        return [self.offset.grad.item()]


class Recurrent(Regression):
    """Carries a hidden state from batch to batch."""

    def __init__(self):
        super().__init__()
        self.net = nn.GRUCell(8, 8)
        self.head = nn.Linear(8, 1)
        self.hidden = None

    def forward(self, x):
        hidden = x.new_zeros(len(x), 8) if self.hidden is None or len(self.hidden) != len(x) else self.hidden
        new = self.net(x, hidden)
        if self.training:
            self.hidden = new.detach()
        return self.head(new)

    def left(self):
        return [self.hidden.sum().item()]


class Classifier(Regression):
    """Another loss, an embedding of the sign."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(2, 8)
        self.out = nn.Linear(8, 3)

    def loss(self, batch):
        x, y = batch
        z = self.out(self.embedding((x > 0).long()).mean(1))
        return F.cross_entropy(z, (y.flatten() > 0).long())


class KeepsValidationOutputs(Regression):
    """Tensors made in inference mode stay on the module through training."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.kept.append(self.net(batch[0]))

    def on_validation_epoch_start(self):
        self.kept.clear()

    def left(self):
        return [len(self.kept), sum(value.sum().item() for value in self.kept)]


class SeveralLoaders(Regression):
    """Two loaders at a time, combined."""

    def train_dataloader(self):
        data = TensorDataset(torch.randn(80, 8), torch.randn(80, 1))
        return {"a": DataLoader(data, 8, shuffle=True), "b": DataLoader(data, 4)}

    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append(float(batch["a"][0].sum()))

    def training_step(self, batch, batch_idx):
        return self.loss(batch["a"]) + self.loss(batch["b"])


ZOO = [
    DropoutAndBatchNorm,
    Counters,
    PlainObject,
    ClassCounter,
    KeptOutputs,
    MomentumQueue,
    RandomControlFlow,
    OwnRandom,
    WritesBatch,
    OddBatches,
    DictOutput,
    SkipsBatches,
    ClosureOptimizer,
    FreezesParameters,
    SharedParameters,
    Checkpointing,
    GradientPenalty,
    ComplexParameter,
    CustomFunction,
    OverriddenHooks,
    Metrics,
    LogsEverything,
    OwnGradient,
    Recurrent,
    Classifier,
    KeepsValidationOutputs,
    SeveralLoaders,
]

COMPILED_DIFFERS = {
    OwnRandom,  # torch 2.13 traces a random.Random and gets the same number from it on every call
    Checkpointing,  # the debugging backend does not give back random numbers when it runs forward again
}
"""Modules that torch.compile trains otherwise than eager does, whoever calls it."""
