"""What a search can try: configurations of ``torch.compile``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from compile_profiler.plain import Record

TARGETS = ("step", "forward", "blocks")
MODES = (None, "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")
GRAPH_MODES = frozenset({"reduce-overhead", "max-autotune"})
AUTOTUNE_MODES = frozenset({"max-autotune", "max-autotune-no-cudagraphs"})
WITHOUT_AUTOTUNE = {"max-autotune": "reduce-overhead", "max-autotune-no-cudagraphs": None}
AUTOTUNE_FROM_S = 900.0
"""Autotuning takes minutes and is hoped to save a tenth: not where less than a quarter of an hour is left."""

_DYNAMIC = {None: "", True: "/dynamic", False: "/static"}
_EXPECTED = (
    'a name such as "step/reduce-overhead" (target[/mode][/dynamic]) or a mapping with "target", "mode", "dynamic"'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Record):
    """One configuration: ``target`` as of ``CompileProfiler``, ``mode`` and ``dynamic`` as of ``torch.compile``.

    >>> Candidate(target="step", mode="reduce-overhead", dynamic=True).name
    'step/reduce-overhead/dynamic'
    >>> Candidate.from_dict(Candidate(target=("encoder", "decoder")).to_dict()).name
    'encoder+decoder/default'
    """

    target: str | tuple[str, ...] = "step"
    mode: str | None = None
    dynamic: bool | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Candidate:
        """The candidate that ``to_dict`` was called on, or that a user has written; see `checked_candidates`."""
        return checked_candidates([data])[0]

    @property
    def name(self) -> str:
        """Target, mode and, where it was asked for, how shapes are taken."""
        target = self.target if isinstance(self.target, str) else "+".join(self.target)
        return f"{target}/{self.mode or 'default'}{_DYNAMIC[self.dynamic]}"

    @property
    def replays_graphs(self) -> bool:
        """Whether its mode asks for CUDA graphs."""
        return self.mode in GRAPH_MODES

    @property
    def autotunes(self) -> bool:
        """Whether its mode tries out kernels while compiling."""
        return self.mode in AUTOTUNE_MODES


class Pruned(NamedTuple):
    """A candidate that is not tried, and why, in a short phrase."""

    candidate: Candidate
    why: str


class Choice(NamedTuple):
    """What there is to try, in order of preference, and what was left out."""

    candidates: tuple[Candidate, ...]
    pruned: tuple[Pruned, ...] = ()


def candidates_for(
    device_type: str,
    *,
    has_blocks: bool,
    shapes_vary: bool,
    seconds_left: float | None = None,
    targets: Sequence[str] = TARGETS,
    no_graphs: str | None = None,
) -> Choice:
    """What is worth considering on such a device, for such a module and run.

    The order is that of preference among equals; which is tried first, a search decides by what it could save.

    Args:
        device_type: of the module: ``cuda``, ``cpu``, ...
        has_blocks: the module has repeated blocks, so that the target ``blocks`` means something.
        shapes_vary: batches of more than one shape have been seen or are expected.
        seconds_left: of the run, at the pace of today; ``None``: nobody knows.
        targets: those that this run can be compiled with.
        no_graphs: why CUDA graphs cannot be had in this run (manual optimization, for example), if they cannot.

    >>> choice = candidates_for("cpu", has_blocks=False, shapes_vary=False, seconds_left=60.0)
    >>> [candidate.name for candidate in choice.candidates]
    ['step/default', 'forward/default']
    >>> dict(choice.pruned)[Candidate(mode="reduce-overhead")]
    'CUDA graphs need a CUDA device'
    """
    if device_type != "cuda":
        no_graphs = "CUDA graphs need a CUDA device"
    elif shapes_vary:
        no_graphs = no_graphs or "batches vary in shape, and each shape would need a CUDA graph of its own"

    def objection(candidate: Candidate) -> str | None:
        if candidate.target not in targets:
            return "this run cannot be compiled with this target"
        if candidate.target == "blocks" and not has_blocks:
            return "the module has no repeated blocks"
        if candidate.dynamic and not shapes_vary:
            return "all batches have one shape"
        if candidate.replays_graphs and no_graphs is not None:
            return no_graphs
        if candidate.autotunes and seconds_left is not None and seconds_left < AUTOTUNE_FROM_S:
            return f"autotuning takes minutes, {seconds_left:.0f} s are left"
        return None

    kept: list[Candidate] = []
    pruned: list[Pruned] = []
    for dynamic, mode, target in itertools.product((None, True), MODES, TARGETS):
        candidate = Candidate(target=target, mode=mode, dynamic=dynamic)
        why = objection(candidate)
        if why is None:
            kept.append(candidate)
        else:
            pruned.append(Pruned(candidate, why))
    return Choice(tuple(kept), tuple(pruned))


def configured(config: Mapping[str, Any]) -> Candidate | None:
    """The candidate that a verdict's configuration names, ``None`` where it names none.

    >>> configured({"target": "step", "mode": "reduce-overhead", "dynamic": None}).name
    'step/reduce-overhead'
    """
    try:
        return Candidate.from_dict({name: config[name] for name in ("target", "mode", "dynamic")})
    except (KeyError, TypeError, ValueError):
        return None


def checked_candidates(candidates: Any, *, known_modes: Sequence[str] = ()) -> tuple[Candidate, ...]:
    """The candidates that a user has named.

    Args:
        candidates: a sequence of names, mappings or ``Candidate`` objects.
        known_modes: of this torch, beside those of the list above.

    Raises:
        TypeError: it is no such sequence, or an item is of another type.
        ValueError: it is empty, an item is named twice, or has a target, mode or key that there is not.

    >>> [one.name for one in checked_candidates(["step", {"target": "blocks", "mode": "reduce-overhead"}])]
    ['step/default', 'blocks/reduce-overhead']
    """
    if isinstance(candidates, (str, Mapping)) or not isinstance(candidates, Sequence):
        raise TypeError(
            f"candidates must be a sequence, each item {_EXPECTED}; got {candidates!r} "
            f"of type {type(candidates).__name__}. For a single one write [{candidates!r}], or set target and mode."
        )
    modes = [*filter(None, MODES), *(mode for mode in known_modes if mode not in MODES and mode != "default")]
    found = tuple(_checked(item, modes) for item in candidates)
    if not found:
        raise ValueError("candidates must name at least one configuration, got none. Leave it out for the usual ones.")
    twice = next((one.name for n, one in enumerate(found) if one in found[:n]), None)
    if twice is not None:
        raise ValueError(f"candidates must differ, got {twice!r} twice. Remove one of them.")
    return found


def _checked(item: Any, modes: Sequence[str]) -> Candidate:
    if isinstance(item, Candidate):
        data: Mapping[str, Any] = {"target": item.target, "mode": item.mode, "dynamic": item.dynamic}
    elif isinstance(item, str):
        data = _parsed(item)
    elif isinstance(item, Mapping):
        data = item
    else:
        raise TypeError(f"a candidate must be {_EXPECTED}, got {item!r} of type {type(item).__name__}.")
    unknown = [key for key in data if key not in ("target", "mode", "dynamic")]
    if unknown:
        raise ValueError(
            f"a candidate has the keys target, mode and dynamic, got {unknown[0]!r} in {item!r}. "
            "Other arguments of torch.compile are those of the callback and hold for all candidates."
        )
    target, mode, dynamic = data.get("target", "step"), data.get("mode"), data.get("dynamic")
    mode = None if mode == "default" else mode
    if mode is not None and mode not in modes:
        raise ValueError(
            f"mode of a candidate must be 'default' or one of {', '.join(map(repr, modes))}, got {item!r}."
        )
    if dynamic is not None and not isinstance(dynamic, bool):
        raise TypeError(f"dynamic of a candidate must be True, False or None, got {item!r}.")
    return Candidate(target=_checked_target(target, item), mode=mode, dynamic=dynamic)


def _checked_target(target: Any, item: Any) -> str | tuple[str, ...]:
    if isinstance(target, str):
        if target not in TARGETS:
            raise ValueError(
                f"target of a candidate must be one of {', '.join(map(repr, TARGETS))} or a list of submodule names, "
                f"got {item!r}. For one submodule write {{'target': [{target!r}]}}."
            )
        return target
    if not isinstance(target, Sequence) or not target or not all(isinstance(name, str) and name for name in target):
        raise TypeError(f"target of a candidate must be a name or a list of submodule names, got {item!r}.")
    return tuple(target)


def _parsed(text: str) -> dict[str, Any]:
    target, *rest = text.split("/")
    found: dict[str, Any] = {"target": target}
    named = {"dynamic": True, "static": False}
    if rest and rest[-1] in named:
        found["dynamic"] = named[rest.pop()]
    if len(rest) > 1:
        raise ValueError(f"a candidate must be {_EXPECTED}, got {text!r}.")
    return {**found, "mode": rest[0] if rest else None}
