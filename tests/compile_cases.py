"""Small modules, one compile case each; the line to be named is marked ``# here``."""

import inspect
import random

import numpy as np
import torch
from torch import nn
from torchmetrics.functional.classification import multiclass_accuracy

from runs import Regression


def line_of(module_class, mark="# here"):
    """Number of the marked line in the file of ``module_class``."""
    lines, first = inspect.getsourcelines(module_class)
    return first + next(n for n, line in enumerate(lines) if line.rstrip().endswith(mark))


def first_line(module_class):
    """Number of the line on which the step begins."""
    return inspect.getsourcelines(module_class.training_step)[1]


class Case(Regression):
    """A linear step, so that what is special about a case is all there is to it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        return self.error(self.net(batch[0]), batch)

    def error(self, output, batch):
        return ((output - batch[1]) ** 2).mean()


class Prints(Case):
    """Prints in the step."""

    def training_step(self, batch, batch_idx):
        output = self.net(batch[0])
        print("a step")  # here
        return self.error(output, batch)


class BranchesOnItem(Case):
    """Branches on a number read off a tensor."""

    def training_step(self, batch, batch_idx):
        output = self.net(batch[0])
        if output.sum().item() > 0:  # here
            output = output * 2
        return self.error(output, batch)


class Masks(Case):
    """Picks the rows that a mask selects."""

    def training_step(self, batch, batch_idx):
        output = self.net(batch[0])
        return (output[batch[1] > 0] ** 2).sum()  # here


class RaggedTail(Case):
    """A shorter last batch."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        tail = len(self.seen) % 6 == 5
        return [tensor[:3] for tensor in batch] if tail else batch


class VaryingLength(Case):
    """Twenty lengths."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        length = 2 + len(self.seen) % 20
        x, y = batch
        return [x[:, None].expand(-1, length, -1).contiguous(), y[:, None].expand(-1, length, -1).contiguous()]


class CountsItself(Case):
    """Counts its steps in a Python integer."""

    def __init__(self):
        super().__init__()
        self.n = 0

    def training_step(self, batch, batch_idx):
        self.n += 1  # here
        return super().training_step(batch, batch_idx) * self.n


class CountsInAHelper(Case):
    """Reads such a counter in a method that the step calls."""

    def __init__(self):
        super().__init__()
        self.n = 0

    def on_train_batch_start(self, batch, batch_idx):
        super().on_train_batch_start(batch, batch_idx)
        self.n += 1

    def scaled(self, loss):
        return loss * self.n  # here

    def training_step(self, batch, batch_idx):
        return self.scaled(super().training_step(batch, batch_idx))


class ReadsGlobalStep(Case):
    """Reads `self.global_step`."""

    def training_step(self, batch, batch_idx):
        loss = self.error(self.net(batch[0]), batch)
        return loss * (1 + self.global_step)  # here


class ReadsCurrentEpoch(Case):
    """Reads `self.current_epoch`."""

    def training_step(self, batch, batch_idx):
        loss = self.error(self.net(batch[0]), batch)
        return loss * (1 + self.current_epoch)  # here


class EveryThirdBatch(Case):
    """Branches on `batch_idx % 3`."""

    def training_step(self, batch, batch_idx):
        loss = self.error(self.net(batch[0]), batch)
        if batch_idx % 3 == 0:  # here
            loss = loss * 2
        return loss


class AnnealsFloat(Case):
    """A float that changes on every step."""

    def __init__(self):
        super().__init__()
        self.beta = 1.0

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.beta *= 0.9

    def training_step(self, batch, batch_idx):
        return self.error(self.net(batch[0]), batch) * self.beta  # here


class GrowsAList(Case):
    """Collects losses in a list."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.error(self.net(batch[0]), batch)
        self.losses.append(loss.detach())  # here
        return loss


class Recurrent(Case):
    """An LSTM."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(8, 8, batch_first=True)

    def training_step(self, batch, batch_idx):
        hidden, _ = self.rnn(batch[0][:, None])  # here
        return ((self.net(hidden[:, 0]) - batch[1]) ** 2).mean()


class FreshModule(Case):
    """Makes a module without parameters on every step."""

    def training_step(self, batch, batch_idx):
        activation = nn.LeakyReLU(0.1)
        return self.error(activation(self.net(batch[0])), batch)


class FreshClosure(Case):
    """Makes a closure on every step."""

    def training_step(self, batch, batch_idx):
        self.scale = lambda output: output * 2
        return self.error(self.scale(self.net(batch[0])), batch)


class FreshClass(Case):
    """Reads an object of a class that is made anew for every step."""

    def on_train_batch_start(self, batch, batch_idx):
        super().on_train_batch_start(batch, batch_idx)
        self.config = type("Config", (), {"scale": 2.0})()

    def training_step(self, batch, batch_idx):
        return self.error(self.net(batch[0]) * self.config.scale, batch)  # here


class Round(torch.autograd.Function):
    """Straight through: rounds forward, passes the gradient on."""

    @staticmethod
    def forward(ctx, value):
        return value.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class CustomFunction(Case):
    """An autograd function of the user's."""

    def training_step(self, batch, batch_idx):
        return self.error(Round.apply(self.net(batch[0])), batch)


@torch.compiler.disable
def by_hand(output):
    return output * 2


class CallsDisabled(Case):
    """Calls a function marked with `torch.compiler.disable`."""

    def training_step(self, batch, batch_idx):
        return self.error(by_hand(self.net(batch[0])), batch)  # here


class CallsNumPy(Case):
    """Calls a NumPy function that torch does not have."""

    def training_step(self, batch, batch_idx):
        output = self.net(batch[0])
        weight = float(np.poly1d([1.0, 2.0])(1.0))  # here
        return self.error(output, batch) * weight


class CallsALibrary(Case):
    """Computes a metric by a library's function."""

    def training_step(self, batch, batch_idx):
        output = self.net(batch[0])
        hits = multiclass_accuracy((output[:, 0] > 0).int(), (batch[1][:, 0] > 0).int(), num_classes=2)  # here
        return self.error(output, batch) + 0 * hits


class WithMeta(torch.Tensor):
    """A tensor that carries where it came from."""


class TensorSubclass(Case):
    """A batch that holds a subclass of `Tensor`."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        x = batch[0].as_subclass(WithMeta)
        x.origin = "somewhere"
        return [x, batch[1]]

    def training_step(self, batch, batch_idx):
        return ((self.net(batch[0]) - batch[1]) ** 2).mean()  # here


class LayerDrop(Case):
    """Skips a layer at random."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        x = self.net.weight * batch[0]
        if random.random() < 0.5:  # here
            x = self.extra(x)
        return self.error(self.net(x), batch)


class BatchIdxInArithmetic(Case):
    """Computes with `batch_idx`."""

    def training_step(self, batch, batch_idx):
        return self.error(self.net(batch[0]), batch) * (1 + batch_idx)  # here


class MultipliesFloats(Case):
    """Two floats that change, multiplied in Python."""

    def __init__(self):
        super().__init__()
        self.a = self.b = 1.0

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.a *= 0.9
        self.b *= 1.1

    def training_step(self, batch, batch_idx):
        return self.error(self.net(batch[0]), batch) * (self.a * self.b)  # here


class ReadsLearningRate(Case):
    """Reads a learning rate that changes on every step."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def training_step(self, batch, batch_idx):
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]  # here
        return self.error(self.net(batch[0]), batch) * rate


class SamplesRows(Case):
    """Picks rows by Python's random numbers."""

    def training_step(self, batch, batch_idx):
        rows = random.sample(range(8), 4)  # here
        return ((self.net(batch[0]) - batch[1])[rows] ** 2).mean()


class RoundWithSetup(torch.autograd.Function):
    """The same, its context set up apart."""

    @staticmethod
    def forward(value):
        return value.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class CustomFunctionWithSetup(Case):
    """An autograd function that sets its context up apart."""

    def training_step(self, batch, batch_idx):
        return self.error(RoundWithSetup.apply(self.net(batch[0])), batch)


class WeightNorm(Case):
    """A weight norm."""

    def __init__(self):
        super().__init__()
        self.net = nn.utils.parametrizations.weight_norm(nn.Linear(8, 1))


class SpectralNorm(Case):
    """A spectral norm."""

    def __init__(self):
        super().__init__()
        self.net = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 1))


class Adapter(nn.Module):
    """A frozen layer with a small trainable one beside it."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2), nn.Linear(2, 8)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x)).relu()


class Adapters(Case):
    """Equal blocks with adapters; only the first one's input needs no gradient."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Adapter() for _ in range(4))

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for block in self.blocks:
            x = block(x)  # here
        return self.error(self.net(x), batch)


class PrintsByLightning(Case):
    """Prints by `self.print`."""

    def training_step(self, batch, batch_idx):
        output = self.net(batch[0])
        self.print("a step", end="")  # here
        return self.error(output, batch)


class WatchesGradients(Case):
    """Hooks on the parameters, as loggers put there that watch gradients."""

    def on_fit_start(self):
        self.largest = 0.0
        for parameter in self.parameters():
            parameter.register_hook(self.note)

    def note(self, gradient):
        self.largest = max(self.largest, gradient.abs().max().item())


class WatchesOutputs(Case):
    """A hook on a module that reads a number off what passes."""

    def on_fit_start(self):
        self.net.register_forward_hook(self.note)

    def note(self, module, args, output):
        self.largest = output.abs().max().item()  # here


class ScoresInValidation(Case):
    """Computes a metric by a library's function, in validation."""

    def validation_step(self, batch, batch_idx):
        output = self.net(batch[0])
        hits = multiclass_accuracy((output[:, 0] > 0).int(), (batch[1][:, 0] > 0).int(), num_classes=2)  # here
        self.log("hits", hits)


class CompilesWithoutEnd(Case):
    """Makes code anew on every step: ever new functions, of which none meets torch's limit."""

    def training_step(self, batch, batch_idx):
        return self.error(by_a_new_function(self.net(batch[0])), batch)


@torch.compiler.disable(recursive=False)
def by_a_new_function(output):
    return eval("lambda output: output * 2")(output)  # here


class UnrollsTheLength(VaryingLength):
    """A Python loop over a length that varies: no symbolic size can save it."""

    def training_step(self, batch, batch_idx):
        total = 0.0
        for step in range(batch[0].shape[1]):
            total = total + self.net(batch[0][:, step]).mean()
        return total
