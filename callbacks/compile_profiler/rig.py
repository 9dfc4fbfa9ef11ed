"""What is on the module while its run is compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from compile_profiler import host, machine
from compile_profiler.advice import advice
from compile_profiler.arguments import Settings
from compile_profiler.arms import CompiledArm, EagerArm
from compile_profiler.clock import Clock
from compile_profiler.drift import tolerance_for, unit_roundoff_for
from compile_profiler.guard import Guard
from compile_profiler.notices import failure
from compile_profiler.pairs import Pairs
from compile_profiler.probe import Probe, module_dtype
from compile_profiler.records import Environment, Reason
from compile_profiler.step_door import StepDoor


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
    ) -> None:
        self.arm = arm
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
        self.probe = Probe(
            module,
            one_pass=self.door.one_pass,
            alone=self.door.alone,
            quiet=self.door.quiet,
            roots=self.door.roots,
            clock=clock,
            tolerance=tolerance,
            roundoff=roundoff,
            matched_rng=settings.draws_eagers_numbers,
            overwrites_gradients=settings.replays_cuda_graphs,
            shares_gradients=self.door.shares_gradients,
            writes_gradients=self.door.own_steps is not None,
            plain_pass=self.door.plain_pass if settings.drift_reference else None,
            seed=settings.seed,
        )
        self.pairs: Pairs | None = None  # of a run that is compiled and observed, never measured
        if settings.limits.max_pairs:
            self.pairs = Pairs(
                self.probe,
                eager=EagerArm(module),
                compiled=self.guards["training_step"],
                compiled_something=compiled_something,
                compares=settings.limits.drift != "off",
                together=self.door.together,
            )
        self.door.open(self.guards)

    @property
    def is_compiled(self) -> bool:
        """Whether training steps run compiled at present."""
        return self.guards["training_step"].enabled and not self.door.runs_instead

    def enable(self, enabled: bool) -> None:
        """Let the steps to come run compiled, or in eager."""
        for guard in self.guards.values():
            guard.enabled = enabled

    def take_seconds(self) -> float:
        """Seconds that the guards have spent on keeping since the last call."""
        return sum(guard.take_seconds() for guard in self.guards.values())

    def remove(self) -> None:
        """Give the module its own step back, release compiled code; may be called twice."""
        try:
            self.door.close()
        finally:
            self.arm.release()
