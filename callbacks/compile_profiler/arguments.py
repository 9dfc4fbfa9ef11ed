"""The arguments of ``CompileProfiler``, checked: a bad one gets one clear error at construction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from compile_profiler import arms
from compile_profiler.candidates import Candidate, checked_candidates
from compile_profiler.verdict import Limits

Target = Literal["step", "forward", "blocks"]
EndToEndMethod = Literal["estimate", "windows", "off"]

AUTO = "auto"
"""The mode that is no mode of torch's: a search for the best of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of ``CompileProfiler``, checked; ``options`` are those of ``torch.compile``.

    Attributes:
        searches: ``mode="auto"``: which configuration is compiled is found out in the run.
        candidates: those that the user wants to be tried, in this order; empty: the usual ones.
        remember: keep what a search has found for the next run of the same job.
    """

    searches: bool
    candidates: tuple[Candidate, ...]
    remember: bool
    target: str | tuple[str, ...]
    options: Mapping[str, Any]
    stages: tuple[str, ...]
    warmup_steps: int
    pair_every_n_steps: int
    overhead_budget: float
    end_to_end: str
    drift_tolerance: float | None
    drift_reference: str | None
    limits: Limits
    heal: bool
    seed: int
    log: bool
    verbose: bool

    @property
    def config(self) -> dict[str, Any]:
        """What is compiled how, as the report has it."""
        target = self.target if isinstance(self.target, str) else list(self.target)
        mode = {"mode": "auto"} if self.searches else {}
        return {"target": target, **self.options, "backend": _name_of(self.options["backend"]), **mode}

    @property
    def default_candidate(self) -> Candidate:
        """What is compiled where nothing can be searched."""
        if self.candidates:
            return self.candidates[0]
        return Candidate(target=self.target, mode=self.options["mode"], dynamic=self.options["dynamic"])

    def of(self, candidate: Candidate) -> Settings:
        """The same for one candidate of a search."""
        options = {**self.options, "mode": candidate.mode, "dynamic": candidate.dynamic}
        return replace(self, searches=False, candidates=(), target=candidate.target, options=options)

    @property
    def targets(self) -> list[str | tuple[str, ...]]:
        """What the user wants compiled, in a search each of the targets named for it."""
        return list(dict.fromkeys(one.target for one in self.candidates)) or [self.target]

    @property
    def hooks(self) -> list[str]:
        """Step methods that are to run compiled."""
        return [{"train": "training_step", "validate": "validation_step"}[stage] for stage in self.stages]

    @property
    def replays_cuda_graphs(self) -> bool:
        """Whether ``torch.compile`` is asked for CUDA graphs, in a search by any candidate."""
        if self.searches:
            return not self.candidates or any(candidate.replays_graphs for candidate in self.candidates)
        asked = (self.options["options"] or {}).get("triton.cudagraphs")
        return bool(asked) or self.options["mode"] in ("reduce-overhead", "max-autotune")

    @property
    def draws_eagers_numbers(self) -> bool:
        """Whether compiled code draws the same random numbers as eager: inductor has its own, unless told."""
        return self.options["backend"] != "inductor" or bool((self.options["options"] or {}).get("fallback_random"))

    def decisive(self) -> dict[str, Any]:
        """The arguments that a verdict depends on, in plain values."""
        return {
            **self.config,
            "stages": self.stages,
            "end_to_end": self.end_to_end,
            "drift_tolerance": self.drift_tolerance,
            "heal": self.heal,
            **({"candidates": [one.name for one in self.candidates]} if self.searches else {}),
            **asdict(self.limits),
        }


def checked(
    *,
    target: Any,
    options: dict[str, Any],
    candidates: Any,
    remember: Any,
    stages: Any,
    warmup_steps: Any,
    min_speedup: Any,
    confidence: Any,
    max_pairs: Any,
    pair_every_n_steps: Any,
    overhead_budget: Any,
    end_to_end: Any,
    drift: Any,
    drift_tolerance: Any,
    drift_reference: Any,
    fallback: Any,
    heal: Any,
    seed: Any,
    log: Any,
    verbose: Any,
) -> Settings:
    """The arguments as ``Settings``; ``options`` are those of ``torch.compile``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value that cannot work.
    """
    backend, mode = options["backend"], options["mode"]
    _check_type("backend", backend, (str, Callable), "a name or a callable")
    _check_type("mode", mode, (str, type(None)), "a name or None")
    _check_type("dynamic", options["dynamic"], (bool, type(None)), "True, False or None")
    _check_type("options", options["options"], (Mapping, type(None)), "a mapping or None")
    flags = {
        "fullgraph": options["fullgraph"],
        "fallback": fallback,
        "heal": heal,
        "remember": remember,
        "log": log,
        "verbose": verbose,
    }
    for name, flag in flags.items():
        _check_type(name, flag, (bool,), "True or False")
    _check_number("warmup_steps", warmup_steps, 0, integral=True)
    _check_number("max_pairs", max_pairs, 0, integral=True)
    _check_number("pair_every_n_steps", pair_every_n_steps, 1, integral=True)
    _check_number("seed", seed, -math.inf, integral=True)
    _check_number("min_speedup", min_speedup, 0)
    _check_number("confidence", confidence, 0)
    _check_number("overhead_budget", overhead_budget, 0)
    if not 0 < overhead_budget <= 1:
        raise ValueError(
            f"overhead_budget must lie between 0 and 1, got {overhead_budget}. "
            "It is a share of training time; to stop measuring after all, use max_pairs=0."
        )
    if drift_tolerance is not None:
        _check_number("drift_tolerance", drift_tolerance, 0)
    _check_choice("end_to_end", end_to_end, get_args(EndToEndMethod))
    _check_choice("drift_reference", drift_reference, (None, "float64"))
    searches = mode == AUTO
    if searches:
        _check_search(options, candidates, target, heal=heal, max_pairs=max_pairs)
        options = {**options, "mode": None}
    elif candidates is not None:
        raise ValueError(f"candidates are those of a search, got mode={mode!r}. Set mode='auto' or leave them out.")
    _check_compile_options(backend, options["mode"], options["options"])
    found = () if candidates is None else checked_candidates(candidates, known_modes=arms.known_modes())
    for candidate in found:
        _check_compile_options(backend, candidate.mode, None)
    return Settings(
        searches=searches,
        remember=remember,
        candidates=found,
        target=_checked_target(target),
        options={**options, "options": None if options["options"] is None else dict(options["options"])},
        stages=_checked_stages(stages),
        warmup_steps=warmup_steps,
        pair_every_n_steps=pair_every_n_steps,
        overhead_budget=overhead_budget,
        end_to_end=end_to_end,
        drift_tolerance=drift_tolerance,
        drift_reference=drift_reference,
        limits=Limits(
            min_speedup=min_speedup, confidence=confidence, max_pairs=max_pairs, drift=drift, fallback=fallback
        ),
        heal=heal,
        seed=seed,
        log=log,
        verbose=verbose,
    )


def _name_of(backend: Any) -> str:
    if isinstance(backend, str):
        return backend
    return str(getattr(backend, "__qualname__", type(backend).__qualname__))


def _check_type(name: str, value: Any, types: tuple[Any, ...], expected: str) -> None:
    if not isinstance(value, types):
        raise TypeError(f"{name} must be {expected}, got {value!r} of type {type(value).__name__}.")


def _check_number(name: str, value: Any, minimum: float, *, integral: bool = False) -> None:
    kind = "an integer" if integral else "a number"
    if isinstance(value, bool) or not isinstance(value, (int,) if integral else (int, float)):
        raise TypeError(f"{name} must be {kind}, got {value!r} of type {type(value).__name__}.")
    if not minimum <= value or value == math.inf:
        raise ValueError(f"{name} must be {kind} of at least {minimum}, got {value}.")


def _check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def _check_compile_options(backend: Any, mode: str | None, options: Any) -> None:
    if isinstance(backend, str) and backend not in (known := arms.known_backends()):
        raise ValueError(
            f"backend must be a callable or one of {', '.join(known)}, got {backend!r}. "
            "torch._dynamo.register_backend adds names."
        )
    if mode is not None and backend != "inductor":
        raise ValueError(f"mode={mode!r} is a setting of backend='inductor', got backend={backend!r}. Leave mode out.")
    if mode is not None and mode not in (modes := arms.known_modes()):
        raise ValueError(f"mode must be None, 'auto' or one of {', '.join(modes)}, got {mode!r}.")
    if mode is not None and options:
        raise ValueError(f"mode={mode!r} and options={options!r} exclude each other. Keep one of them.")


def _check_search(options: Mapping[str, Any], candidates: Any, target: Any, *, heal: bool, max_pairs: int) -> None:
    """What a search excludes."""
    if options["options"]:
        raise ValueError(f"mode='auto' and options={options['options']!r} exclude each other. Keep one of them.")
    if heal:
        raise ValueError("mode='auto' tries dynamic=True itself, got heal=True. Keep one of them.")
    if not max_pairs:
        raise ValueError("mode='auto' compares by pairs, got max_pairs=0. Give it some, or name the mode.")
    if candidates is not None and target != "step":
        raise ValueError(f"each candidate names its own target, got target={target!r} too. Leave target out.")
    if candidates is not None and options["dynamic"] is not None:
        raise ValueError(
            f"each candidate says whether it is dynamic, got dynamic={options['dynamic']} too. Leave it out."
        )


def _checked_target(target: Any) -> str | tuple[str, ...]:
    if isinstance(target, str):
        if target not in get_args(Target):
            raise ValueError(
                f"target must be one of {', '.join(map(repr, get_args(Target)))} or a list of submodule names, "
                f"got {target!r}. For one submodule write target=[{target!r}]."
            )
        return target
    if not isinstance(target, Sequence) or not all(isinstance(name, str) for name in target):
        raise TypeError(f"target must be a name or a list of submodule names, got {target!r}.")
    if not target or not all(target):
        raise ValueError(f"target must name at least one submodule and no empty name, got {target!r}.")
    return tuple(target)


def _checked_stages(stages: Any) -> tuple[str, ...]:
    if isinstance(stages, str) or not isinstance(stages, Sequence):
        raise TypeError(f"stages must be a sequence of names such as ('train',), got {stages!r}.")
    if "train" not in stages or not set(stages) <= {"train", "validate"}:
        raise ValueError(f"stages must be ('train',) or ('train', 'validate'), got {tuple(stages)!r}.")
    return tuple(stages)
