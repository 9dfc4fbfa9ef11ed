"""What of a fit survives in a checkpoint: verdict and evidence, and whose they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from compile_profiler.records import Environment, Evidence, Reason, Verdict

KEY = "compile_profiler"
"""Where it stands in a checkpoint. Not the callback's ``state_dict``: with one, Lightning warns a run that resumes
without the callback to add it again, and a profiled checkpoint is to load anywhere in silence."""

MAX_LATER_SAMPLES = 200
"""Pairs kept beyond those of the decision, the latest: enough to go on watching for a gain that is lost."""

_TRIED_AGAIN: frozenset[Reason] = frozenset(
    {"compile_error", "runtime_error", "out_of_memory", "unsupported", "disabled", "pending"}
)
"""An error decides about the rest of its own run alone; whether a run can be measured at all is looked at each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What an earlier part of the same training has found out; ``verdict`` is ``None`` where it is to be found anew."""

    evidence: Evidence
    verdict: Verdict | None


def identity(module: nn.Module, config: Mapping[str, Any], environment: Environment) -> dict[str, str]:
    """On what evidence was gathered: only where all of it is the same does it say anything.

    Args:
        module: the LightningModule; its class and the names and shapes of its parameters count.
        config: what was asked for.
        environment: versions, device and settings.

    >>> same = identity(nn.Linear(2, 3), {"mode": None}, Environment())
    >>> same == identity(nn.Linear(2, 3), {"mode": None}, Environment())
    True
    >>> other = identity(nn.Linear(2, 4), {"mode": None}, Environment())
    >>> [part for part in same if same[part] != other[part]]
    ['module']
    """
    shapes = [f"{name} {'lazy' if is_lazy(p) else tuple(p.shape)}" for name, p in module.named_parameters()]
    digest = hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16]
    return {
        "module": f"{type(module).__module__}.{type(module).__qualname__} {digest}",
        "configuration": json.dumps(config, sort_keys=True, default=repr),
        "machine": json.dumps(machine_of(environment), sort_keys=True),
    }


def machine_of(environment: Environment) -> dict[str, Any]:
    """On what times were measured, in plain values.

    >>> machine_of(Environment(device="cpu"))["device"]
    'cpu'
    """
    # The environment calls every CPU "cpu"; what a compiler makes of one depends on these two.
    cpu = {"cpu": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}
    return {**environment.to_dict(), **cpu}


def packed(whose: Mapping[str, str], verdict: Verdict, evidence: Evidence, *, max_pairs: int) -> dict[str, Any]:
    """Plain values for a checkpoint, such as ``torch.load(weights_only=True)`` accepts."""
    return {
        "identity": dict(whose),
        "verdict": verdict.to_dict(),
        "evidence": evidence.shortened(num_first=max_pairs, num_last=MAX_LATER_SAMPLES).to_dict(),
    }


def unpacked(data: Any, whose: Mapping[str, str]) -> Earlier | str:
    """What ``packed`` was given, or in one word why it does not apply here.

    >>> whose = {"module": "a", "configuration": "b", "machine": "c"}
    >>> data = packed(whose, Verdict(), Evidence(num_steps=7), max_pairs=40)
    >>> unpacked(data, whose).evidence.num_steps
    7
    >>> unpacked(data, {**whose, "machine": "d"})
    'machine'
    """
    try:
        differing = [part for part in whose if data["identity"][part] != whose[part]]
        if differing:
            return " and ".join(differing)
        verdict = Verdict.from_dict(data["verdict"])
        return Earlier(
            evidence=Evidence.from_dict(data["evidence"]),
            verdict=None if verdict.reason in _TRIED_AGAIN else verdict,
        )
    except (KeyError, TypeError, ValueError):  # written by another version of this package
        return "format"
