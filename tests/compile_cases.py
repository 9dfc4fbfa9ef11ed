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
    def training_step(self, batch, batch_idx):
        output = self.net(batch[0])
        print("a step")  # here
        return self.error(output, batch)


class BranchesOnItem(Case):
    def training_step(self, batch, batch_idx):
        output = self.net(batch[0])
        if output.sum().item() > 0:  # here
            output = output * 2
        return self.error(output, batch)


class Masks(Case):
    def training_step(self, batch, batch_idx):
        output = self.net(batch[0])
        return (output[batch[1] > 0] ** 2).sum()  # here


class RaggedTail(Case):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        tail = len(self.seen) % 6 == 5
        return [tensor[:3] for tensor in batch] if tail else batch


class VaryingLength(Case):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        length = 2 + len(self.seen) % 20
        x, y = batch
        return [x[:, None].expand(-1, length, -1).contiguous(), y[:, None].expand(-1, length, -1).contiguous()]


class CountsItself(Case):
    def __init__(self):
        super().__init__()
        self.n = 0

    def training_step(self, batch, batch_idx):
        self.n += 1  # here
        return super().training_step(batch, batch_idx) * self.n


class CountsInAHelper(Case):
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
    def training_step(self, batch, batch_idx):
        loss = self.error(self.net(batch[0]), batch)
        return loss * (1 + self.global_step)  # here


class ReadsCurrentEpoch(Case):
    def training_step(self, batch, batch_idx):
        loss = self.error(self.net(batch[0]), batch)
        return loss * (1 + self.current_epoch)  # here


class EveryThirdBatch(Case):
    def training_step(self, batch, batch_idx):
        loss = self.error(self.net(batch[0]), batch)
        if batch_idx % 3 == 0:  # here
            loss = loss * 2
        return loss


class AnnealsFloat(Case):
    def __init__(self):
        super().__init__()
        self.beta = 1.0

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.beta *= 0.9

    def training_step(self, batch, batch_idx):
        return self.error(self.net(batch[0]), batch) * self.beta  # here


class GrowsAList(Case):
    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.error(self.net(batch[0]), batch)
        self.losses.append(loss.detach())  # here
        return loss


class Recurrent(Case):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(8, 8, batch_first=True)

    def training_step(self, batch, batch_idx):
        hidden, _ = self.rnn(batch[0][:, None])  # here
        return ((self.net(hidden[:, 0]) - batch[1]) ** 2).mean()


class FreshModule(Case):
    def training_step(self, batch, batch_idx):
        activation = nn.LeakyReLU(0.1)
        return self.error(activation(self.net(batch[0])), batch)


class FreshClosure(Case):
    def training_step(self, batch, batch_idx):
        self.scale = lambda output: output * 2
        return self.error(self.scale(self.net(batch[0])), batch)


class FreshClass(Case):
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
    def training_step(self, batch, batch_idx):
        return self.error(Round.apply(self.net(batch[0])), batch)


@torch.compiler.disable
def by_hand(output):
    return output * 2


class CallsDisabled(Case):
    def training_step(self, batch, batch_idx):
        return self.error(by_hand(self.net(batch[0])), batch)  # here


class CallsNumPy(Case):
    def training_step(self, batch, batch_idx):
        output = self.net(batch[0])
        weight = float(np.poly1d([1.0, 2.0])(1.0))  # here
        return self.error(output, batch) * weight


class CallsALibrary(Case):
    def training_step(self, batch, batch_idx):
        output = self.net(batch[0])
        hits = multiclass_accuracy((output[:, 0] > 0).int(), (batch[1][:, 0] > 0).int(), num_classes=2)  # here
        return self.error(output, batch) + 0 * hits


class WithMeta(torch.Tensor):
    """A tensor that carries where it came from."""


class TensorSubclass(Case):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        x = batch[0].as_subclass(WithMeta)
        x.origin = "somewhere"
        return [x, batch[1]]

    def training_step(self, batch, batch_idx):
        return ((self.net(batch[0]) - batch[1]) ** 2).mean()  # here


class LayerDrop(Case):
    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        x = self.net.weight * batch[0]
        if random.random() < 0.5:  # here
            x = self.extra(x)
        return self.error(self.net(x), batch)
