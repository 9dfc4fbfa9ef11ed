"""The jobs that are measured: training steps on made-up data, each in a size for a CPU and in one for a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from compile_profiler.parts import submodules

NUM_BATCHES = 4
"""Different batches of a job; a run goes through them again and again, in one epoch."""


class Step(L.LightningModule):
    """The training step of every job: they differ in their network, loss and batches alone."""

    def __init__(self, net: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net = net
        self._loss = loss

    def forward(self, inputs: Tensor) -> Tensor:
        """The network's output."""
        output: Tensor = self.net(inputs)
        return output

    def loss_of(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The part of the step that can be compiled by hand, for nothing in it logs."""
        inputs, targets = batch
        return self._loss(self(inputs), targets)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss, logged."""
        loss = self.loss_of(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, so that the optimizer has its usual share of the step."""
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class StepByHand(Step):
    """The same step as one compiles it without help: ``self.log`` stays outside, where it does not crash."""

    def __init__(self, net: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], options: Mapping[str, Any]) -> None:
        super().__init__(net, loss)
        self._compiled: Callable[[tuple[Tensor, Tensor]], Tensor] = torch.compile(self.loss_of, **options)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The compiled loss, logged."""
        loss = self._compiled(batch)
        self.log("train_loss", loss)
        return loss


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """A few batches in memory under many indices; each is handed out after ``delay_s`` seconds of sleep."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]], length: int, delay_s: float) -> None:
        self._batches = batches
        self._length = length
        self._delay_s = delay_s

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._delay_s:
            time.sleep(self._delay_s)
        return self._batches[index % len(self._batches)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """How to make a job's network and one batch of it.

    Attributes:
        net: makes the network, on the default device.
        batch: makes one batch of inputs and targets.
        loss: of the network's output and the targets.
        precision: the Trainer's.
        delay_s: seconds that the loader sleeps before each batch.
    """

    net: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss
    precision: Any = "32-true"
    delay_s: float = 0.0

    def module(self, *, by_hand: Mapping[str, Any] | None = None, target: str = "step") -> Step:
        """A fresh module; with the options of ``torch.compile`` one whose ``target`` is compiled by hand.

        Raises:
            ValueError: the target is ``blocks``, and the network has no repeated ones.
        """
        if by_hand is not None and target == "step":
            return StepByHand(self.net(), self.loss, by_hand)
        module = Step(self.net(), self.loss)
        if by_hand is not None:
            for part in submodules(module, target).values():
                part.compile(**by_hand)
        return module

    def loader(self, num_steps: int, *, pinned: bool) -> DataLoader[tuple[Tensor, Tensor]]:
        """One epoch of so many batches, in page-locked memory if ``pinned``."""
        batches = [self.batch() for _ in range(NUM_BATCHES)]
        if pinned:
            batches = [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in batches]
        return DataLoader(Batches(batches, num_steps, self.delay_s), batch_size=None, num_workers=0)


def mlp(big: bool) -> Job:
    """Two matrix products with an activation between them."""
    width, hidden, rows = (1024, 4096, 256) if big else (128, 512, 64)
    return Job(
        net=lambda: nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)),
        batch=lambda: (torch.randn(rows, width), torch.randn(rows, width)),
    )


class Pointwise(nn.Module):
    """Layers that do nothing but read and write memory, elementwise: what a compiler fuses best."""

    def __init__(self, width: int, depth: int = 12) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(depth, width))
        self.shift = nn.Parameter(torch.zeros(depth, width))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) to the same shape."""
        for scale, shift in zip(self.scale.unbind(), self.shift.unbind(), strict=True):
            x = x + torch.tanh(F.gelu(x * scale + shift))
        return x


def pointwise(big: bool) -> Job:
    """Twelve elementwise layers."""
    rows, width = (2048, 4096) if big else (128, 256)
    return Job(net=lambda: Pointwise(width), batch=lambda: (torch.randn(rows, width), torch.randn(rows, width)))


class Block(nn.Module):
    """A transformer block, normalised before attention and before the MLP."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, length, width) to the same shape."""
        qkv = self.qkv(self.norm_attention(x)).unflatten(2, (3, self.num_heads, -1))
        q, k, v = qkv.transpose(1, 3).unbind(dim=2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        grown: Tensor = x + self.mlp(self.norm_mlp(x))
        return grown


class GPT(nn.Module):
    """A decoder that predicts the next token; the output layer shares its weights with the embedding."""

    def __init__(self, *, vocabulary: int, length: int, width: int, depth: int, num_heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(depth)), nn.LayerNorm(width))
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (rows, length) to logits (rows, vocabulary, length), as the loss wants them."""
        return F.linear(self.blocks(self.token(tokens) + self.position), self.token.weight).transpose(1, 2)


def gpt(big: bool) -> Job:
    """GPT-2 small; on a CPU two narrow blocks."""
    vocabulary, length, rows = (50257, 512, 16) if big else (256, 32, 4)
    width, depth, num_heads = (768, 12, 12) if big else (64, 2, 4)
    return Job(
        net=lambda: GPT(vocabulary=vocabulary, length=length, width=width, depth=depth, num_heads=num_heads),
        batch=lambda: (torch.randint(vocabulary, (rows, length)), torch.randint(vocabulary, (rows, length))),
        loss=F.cross_entropy,
        precision="bf16-mixed" if big else "32-true",
    )


def conv_norm(num_in: int, num_out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution that keeps the size but for its stride, and BatchNorm."""
    conv = nn.Conv2d(num_in, num_out, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(num_out))


class Bottleneck(nn.Module):
    """The residual block of ResNet-50: narrow, convolve, widen."""

    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        num_out = 4 * width
        self.narrow, self.conv = conv_norm(num_in, width, 1), conv_norm(width, width, 3, stride)
        self.widen = conv_norm(width, num_out, 1)
        keeps_shape = stride == 1 and num_in == num_out
        self.shortcut = nn.Identity() if keeps_shape else conv_norm(num_in, num_out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, num_in, h, w) to (rows, 4 * width, h / stride, w / stride)."""
        return F.relu(self.widen(F.relu(self.conv(F.relu(self.narrow(x))))) + self.shortcut(x))


def residual_network(width: int, depths: tuple[int, ...]) -> nn.Module:
    """A stem, stages of bottlenecks of doubling width, 1000 classes; (3, 4, 6, 3) with width 64 is ResNet-50."""
    layers: list[nn.Module] = [conv_norm(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    num_in = width
    for stage, depth in enumerate(depths):
        for index in range(depth):
            layers.append(Bottleneck(num_in, width << stage, 2 if stage and not index else 1))
            num_in = 4 * width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_in, 1000))


def resnet(big: bool) -> Job:
    """ResNet-50 on images of 224x224; on a CPU two thin stages on small images."""
    rows, size = (64, 224) if big else (4, 32)
    width, depths = (64, (3, 4, 6, 3)) if big else (8, (1, 1))
    return Job(
        net=lambda: residual_network(width, depths),
        batch=lambda: (torch.randn(rows, 3, size, size), torch.randint(1000, (rows,))),
        loss=F.cross_entropy,
        precision="bf16-mixed" if big else "32-true",
    )


class Recurrent(nn.Module):
    """torch's own LSTM, two layers, and a linear map of its last output. The compiler leaves it in eager."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, length, width) to (rows, width)."""
        last: Tensor = self.head(self.lstm(x)[0][:, -1])
        return last


def lstm(big: bool) -> Job:
    """A two-layer LSTM."""
    rows, length, width = (64, 128, 512) if big else (16, 16, 32)
    return Job(net=lambda: Recurrent(width), batch=lambda: (torch.randn(rows, length, width), torch.randn(rows, width)))


def linear(big: bool) -> Job:
    """Four square matrix products in fp32: all the time is spent in one library call."""
    width, rows = (8192, 2048) if big else (512, 128)
    return Job(
        net=lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(4))),
        batch=lambda: (torch.randn(rows, width), torch.randn(rows, width)),
    )


class Branches(nn.Module):
    """Layers whose activation depends on the data, so that a graph ends at each of them."""

    def __init__(self, width: int, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) to the same shape."""
        for layer in self.layers:
            x = layer(x)
            x = F.relu(x) if x.mean() > 0 else F.gelu(x)
        return x


def branches(big: bool) -> Job:
    """Data-dependent branches in eight layers."""
    width, rows = (1024, 256) if big else (64, 32)
    return Job(net=lambda: Branches(width), batch=lambda: (torch.randn(rows, width), torch.randn(rows, width)))


def cnn(big: bool) -> Job:
    """Two convolutions and a linear layer."""
    rows, size, width = (256, 32, 32) if big else (64, 8, 16)
    return Job(
        net=lambda: nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(width * size * size // 4, 10),
        ),
        batch=lambda: (torch.randn(rows, 3, size, size), torch.randint(10, (rows,))),
        loss=F.cross_entropy,
    )


class Filter(nn.Module):
    """A bank of gated leaky integrators, unrolled in time: tiny operations one after the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.feedback = nn.Parameter(torch.zeros(width))
        self.memory = nn.Parameter(torch.linspace(-2, 3, width))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, length, width) to (rows, width)."""
        state = torch.zeros_like(x[:, 0])
        for signal in x.unbind(dim=1):
            keep = torch.sigmoid(self.memory + self.feedback * state)
            state = keep * state + (1 - keep) * torch.tanh(signal)
        return state


def recurrent_filter(big: bool, delay_s: float = 0.0) -> Job:
    """A hand-written recurrent filter: 24 steps on a tensor of 64x16, in both sizes."""
    return Job(net=lambda: Filter(16), batch=lambda: (torch.randn(64, 24, 16), torch.randn(64, 16)), delay_s=delay_s)


def input_bound(big: bool) -> Job:
    """The recurrent filter once more, its loader 20 ms late with each batch: the same speedup of a smaller share."""
    return recurrent_filter(big, delay_s=0.02)


JOBS: dict[str, Callable[[bool], Job]] = {
    "mlp": mlp,
    "pointwise": pointwise,
    "gpt": gpt,
    "resnet": resnet,
    "lstm": lstm,
    "linear": linear,
    "branches": branches,
    "cnn": cnn,
    "filter": recurrent_filter,
    "input_bound": input_bound,
}
"""By name: a function of whether the job shall be big enough for a GPU."""
