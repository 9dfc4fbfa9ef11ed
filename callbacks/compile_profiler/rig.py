"""What is on the module while its run is compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from compile_profiler import host
from compile_profiler.arguments import Settings
from compile_profiler.arms import CompiledArm, EagerArm
from compile_profiler.clock import Clock
from compile_profiler.drift import tolerance_for, unit_roundoff_for
from compile_profiler.guard import Guard
from compile_profiler.pairs import Pairs
from compile_profiler.probe import Probe, module_dtype
from compile_profiler.records import Environment
from compile_profiler.step_door import StepDoor


class Rig:
    """The way of a step through the compiled arm, and the means to measure it.

    Args:
        settings: the callback's arguments.
        trainer: the Trainer.
        module: its LightningModule.
        arm: the compiled arm; it is released with the rest.
        hooks: step methods that run compiled.
        clock: seconds on the module's device.
        environment: settings that tolerances depend on.
        on_failure: called with the error of a compiled step whose batch has been trained in eager.
        compiled_something: whether anything was compiled since a pair began.
    """

    def __init__(
        self,
        settings: Settings,
        trainer: host.Trainer,
        module: host.LightningModule,
        arm: CompiledArm,
        *,
        hooks: Sequence[str],
        clock: Clock,
        environment: Environment,
        on_failure: Callable[[Exception], None],
        compiled_something: Callable[[], bool],
    ) -> None:
        self.arm = arm
        self.door = StepDoor(trainer, module, overwrites_gradients=settings.replays_cuda_graphs)
        shares = trainer.world_size > 1
        self.guards = {hook: Guard(module, arm, on_failure, self.door.own_steps, shares) for hook in hooks}
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
        self.door.close()
        self.arm.release()
