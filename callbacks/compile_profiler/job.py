"""Which job a run is, as one key: two runs of it can expect the same of each way to compile it."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from compile_profiler.checkpoint import machine_of
from compile_profiler.reach import code_of
from compile_profiler.records import Environment
from compile_profiler.shapes import layout_of

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in what an object says of itself: another in each process


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job under two keys, of 64 hexadecimal digits each.

    Attributes:
        name: the module's class.
        key: with the sizes of the batch.
        key_any_size: without them, for a job whose batches differ in size: its next run starts with another batch.
    """

    name: str
    key: str
    key_any_size: str


def job_of(module: nn.Module, batch: Any, *, environment: Environment, configuration: Mapping[str, Any]) -> Job | str:
    """The job that a run is, or in one sentence why it has no key.

    A key is made of all that the speed of compiled code depends on, as far as it is known before the first step: the
    code of the step, the layers with their settings, parameters and buffers, the batch, precision, strategy, machine,
    versions, and what was asked for. It is the same in every process and for every copy of the module. Weights, random
    seeds, learning rates and paths are not in it.

    Cost: about 12 ms for a ResNet-50 of 194 modules; nothing is run but ``extra_repr`` of each, nothing is changed.

    Args:
        module: the LightningModule; what this package puts on it while it is compiled does not count.
        batch: the first batch.
        environment: versions, device and settings.
        configuration: what was asked for, the candidates among it.

    >>> import torch
    >>> said = {"environment": Environment(), "configuration": {"mode": "auto"}}
    >>> job, other = (job_of(nn.Linear(2, 2), torch.ones(n, 2), **said) for n in (3, 4))
    >>> job.name, job.key == other.key, job.key_any_size == other.key_any_size
    ('Linear', False, True)
    """
    try:
        parts = {
            "code": code_of(module),
            "layers": list(_layers(module)),
            "tensors": [_described(name, tensor) for name, tensor in _tensors(module)],
            "machine": machine_of(environment),
            "configuration": configuration,
            "versions": [platform.python_version_tuple()[:2], _own_version()],  # bytecode is that of one Python
        }
        digest = _digest(parts)
        fixed, any_size = (_digest([digest, sizes, layout_of(batch, sizes=sizes)]) for sizes in (True, False))
    # A module or a batch can be of any class, whose attributes may do anything; then there is nothing to remember.
    except Exception as error:
        return f"{type(module).__qualname__} cannot be recognised: {error}."
    return Job(name=type(module).__qualname__, key=fixed, key_any_size=any_size)


def _layers(module: nn.Module) -> Iterator[list[Any]]:
    """Each module with what its class says of it and its whole numbers.

    Strides and heads can be found nowhere else. Texts and fractions are left out: they are as often the name or the
    learning rate of one run, and a key that is new in every run would never be found again.
    """
    for name, layer in module.named_modules():
        said = ""
        with suppress(Exception):  # it is the user's code, and only for people to read
            said = _ADDRESS.sub("", layer.extra_repr())
        numbers = {key: value for key, value in vars(layer).items() if _is_setting(key, value)}
        yield [name, type(layer).__qualname__, said, numbers]


def _is_setting(key: str, value: Any) -> bool:
    return type(value) in (int, bool) and key != "training" and not key.startswith("_")


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _described(name: str, tensor: Tensor) -> list[Any]:
    shape = "lazy" if is_lazy(tensor) else list(tensor.shape)
    return [name, type(tensor).__qualname__, shape, str(tensor.dtype), tensor.device.type, tensor.requires_grad]


def _digest(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=_named).encode()).hexdigest()


def _named(value: Any) -> Any:
    """What is no plain value, by the name that it has in every process."""
    return getattr(value, "__qualname__", type(value).__qualname__)


@functools.cache
def _own_version() -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version("lightning-compile-profiler")
    return None
