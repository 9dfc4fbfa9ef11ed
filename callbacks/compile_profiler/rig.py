"""What is on the module while its run is compiled."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from compile_profiler import host, machine
from compile_profiler.advice import advice
from compile_profiler.arguments import Settings
from compile_profiler.arms import CompiledArm, EagerArm
from compile_profiler.clock import Clock
from compile_profiler.contrast import Contrast, Ways
from compile_profiler.guard import Guard
from compile_profiler.matching import Matching
from compile_profiler.meeting import Exchange
from compile_profiler.notices import failure
from compile_profiler.pairs import Pairs
from compile_profiler.probe import Probe, module_dtype
from compile_profiler.records import Environment, Reason, Sample
from compile_profiler.step_door import StepDoor
from compile_profiler.tolerances import tolerance_for, unit_roundoff_for
from compile_profiler.verdict import ALARM, SKIPPED
from compile_profiler.watch import Watch
from compile_profiler.windows import StepTime


class RefusedError(Exception):
    """This run cannot be compiled; the message says why, for people."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def build(
    settings: Settings,
    trainer: host.Trainer,
    module: host.LightningModule,
    *,
    on_failure: Callable[[Exception], None],
    **others: Any,
) -> Rig:
    """Compile what was asked for, and put it on the module.

    Args:
        settings: the callback's arguments.
        trainer: the Trainer.
        module: its LightningModule.
        on_failure: as of ``Rig``.
        **others: what else ``Rig`` takes.

    Raises:
        RefusedError: torch or the module does not allow it.
    """
    is_sharded = host.parallelism(trainer) == "fsdp"
    if settings.options["backend"] == "inductor":
        obstacle = machine.missing(trainer.strategy.root_device)
        if obstacle is not None:
            raise RefusedError("compile_error", f"Nothing can be compiled here. {obstacle.rstrip('.')}")
    try:
        target = host.target_for(module, settings.target)
        arm = CompiledArm(
            module,
            target=target,
            hooks=settings.hooks,
            options=settings.options,
            on_error=on_failure if is_sharded else None,
        )
    except Exception as error:  # torch.compile refuses the Python version, the platform or the options
        text = failure("compile_error", error, advice(error, machine.system()))
        raise RefusedError("compile_error", text) from None
    if target == "networks" and not arm.compiled_names:
        raise RefusedError("nothing_compiled", "Manual optimization, and no child module owns parameters")
    return Rig(settings, trainer, module, arm, on_failure=on_failure, **others)


class Rig:
    """The way of a step through the compiled arm, and the means to measure it.

    Args:
        settings: the callback's arguments.
        trainer: the Trainer.
        module: its LightningModule.
        arm: the compiled arm; it is released with the rest.
        clock: seconds on the module's device.
        environment: settings that tolerances depend on.
        on_failure: called with the error of a compiled step whose batch has been trained in eager.
        on_trouble: called with an error of our own in the midst of a step.
        compiled_something: whether anything was compiled since a pair began.
        matching: gives an arm that draws eager's random numbers, if it can be had.
    """

    def __init__(
        self,
        settings: Settings,
        trainer: host.Trainer,
        module: host.LightningModule,
        arm: CompiledArm,
        *,
        clock: Clock,
        environment: Environment,
        on_failure: Callable[[Exception], None],
        on_trouble: Callable[[Exception], None],
        compiled_something: Callable[[], bool],
        matching: Matching,
    ) -> None:
        self.arm = arm
        self._module = module
        self._matching = matching
        self.door = StepDoor(trainer, module, on_trouble=on_trouble, overwrites_gradients=settings.replays_cuda_graphs)
        shares, retries = trainer.world_size > 1, host.parallelism(trainer) != "fsdp"
        self.guards = {
            hook: Guard(
                module,
                arm,
                on_failure,
                on_trouble,
                own_steps=self.door.own_steps,
                shares=shares,
                retries=retries,
            )
            for hook in settings.hooks
        }
        tolerance, roundoff = settings.drift_tolerance, None
        if tolerance is None:
            dtype, tf32 = module_dtype(module), bool(environment.tf32)
            autocast = host.autocast_dtype(trainer)
            with contextlib.suppress(ValueError):  # a dtype of which no limit is known: drift is shown, not judged
                tolerance = tolerance_for(dtype, autocast_dtype=autocast, tf32=tf32)
                roundoff = unit_roundoff_for(dtype, autocast_dtype=autocast, tf32=tf32)
        door = self.door
        ways = Ways(
            one_pass=door.one_pass,
            plain_pass=door.plain_pass if settings.drift_reference else None,
            validation_pass=door.validation_pass,
            gradient_scale=door.gradient_scale,
            unscaled=functools.partial(door.scale.set_to, 1.0) if door.scale.is_there else None,
            streams=door.own_steps is None,
            matched_rng=settings.draws_eagers_numbers,
            matching=None if settings.draws_eagers_numbers else matching.arm,
        )
        self.probe = Probe(
            module,
            one_pass=self.door.one_pass,
            alone=self.door.alone,
            contrast=Contrast(module, ways=ways, clock=clock, tolerance=tolerance, roundoff=roundoff),
            quiet=self.door.quiet,
            roots=self.door.roots,
            clock=clock,
            overwrites_gradients=settings.replays_cuda_graphs,
            shares_gradients=self.door.shares_gradients,
            writes_gradients=self.door.own_steps is not None,
            seed=settings.seed,
        )
        self.watch = Watch(door.scale, rest_steps=settings.pair_every_n_steps)
        self.pairs: Pairs | None = None  # of a run that is compiled and observed, never measured
        if settings.limits.max_pairs:
            self.pairs = Pairs(
                self.probe,
                eager=EagerArm(module),
                compiled=self.guards["training_step"],
                compiled_something=compiled_something,
                compares=settings.limits.drift != "off",
                together=self.door.together,
                validation=self.guards.get("validation_step"),
            )
        self.door.open(self.guards)

    @property
    def is_compiled(self) -> bool:
        """Whether training steps run compiled at present."""
        return self.guards["training_step"].enabled and self.door.watch is None

    def enable(self, enabled: bool) -> None:
        """Let the steps to come run compiled, or in eager."""
        for guard in self.guards.values():
            guard.enabled = enabled

    def take_pair(self, *, step: int, ordinary: StepTime | None, scheduled: bool) -> Exchange[Sample]:
        """The pair on the batch just trained; after an alarm, under the loss scale at which a step was skipped.

        Args:
            step: x-axis number of the batch.
            ordinary: the time of one step in the window that ended at this pair.
            scheduled: whether the pair was due without an alarm too; only then do its times count.
        """
        assert self.pairs is not None
        assert self.door.last_call is not None
        alarm, scale = self.watch.alarm, self.watch.scale_before
        with self.door.scale.set_to(scale) if alarm == "skip" and scale else contextlib.nullcontext():
            sample = yield from self.pairs.take(self.door.last_call, step=step, ordinary=ordinary)
        if alarm is not None:
            self.watch.rest()
            if sample.void is None and not (scheduled and alarm == "loss"):
                sample = replace(sample, void=SKIPPED if alarm == "skip" else ALARM)
        return sample

    def is_not_finite(self, sample: Sample) -> bool:
        """Whether both arms gave NaN or infinity, and not only because a gradient scaler scales until that happens."""
        drift = sample.drift
        return drift is not None and drift.eager_finite is False and not self.door.scale.is_there

    def weights_finite(self) -> bool:
        """Whether no weight is NaN or infinite; waits for the device."""
        return all(bool(torch.isfinite(parameter).all()) for parameter in self._module.parameters())

    def take_seconds(self) -> float:
        """Seconds that the guards have spent on keeping since the last call."""
        return sum(guard.take_seconds() for guard in self.guards.values())

    def remove(self) -> None:
        """Give the module its own step back, release compiled code; may be called twice."""
        try:
            self.door.close()
        finally:
            self.arm.release()
            self._matching.release()
