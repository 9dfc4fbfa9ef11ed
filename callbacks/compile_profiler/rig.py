"""What is on the module while its run is compiled."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from compile_profiler import host
from compile_profiler.arguments import Settings
from compile_profiler.arms import CompiledArm, EagerArm
from compile_profiler.clock import Clock
from compile_profiler.contrast import Contrast, Ways
from compile_profiler.guard import Guard
from compile_profiler.matching import Matching
from compile_profiler.meeting import Exchange
from compile_profiler.pairs import Pairs
from compile_profiler.probe import Probe, module_dtype
from compile_profiler.records import Environment, Sample
from compile_profiler.step_door import StepDoor
from compile_profiler.tolerances import tolerance_for, unit_roundoff_for
from compile_profiler.verdict import ALARM, SKIPPED
from compile_profiler.watch import Watch
from compile_profiler.windows import StepTime


class Stand:
    """One compiled arm with what protects its steps and what its pairs need.

    Args:
        arm: the compiled arm.
        guards: one for each step method that runs compiled.
        matching: gives an arm of the same configuration that draws eager's random numbers, if it can be had.
        pairs: takes its pairs; ``None`` in a run that is compiled and observed, never measured.
    """

    def __init__(
        self, arm: CompiledArm, guards: Mapping[str, Guard], *, matching: Matching, pairs: Pairs | None
    ) -> None:
        self.arm = arm
        self.guards = guards
        self.matching = matching
        self.pairs = pairs

    def release(self) -> None:
        """Drop the compiled code; may be called twice."""
        self.arm.release()
        self.matching.release()

    def forget(self) -> None:
        """Drop copies of batch and buffers too; to be called between two steps, which could still need them."""
        for guard in self.guards.values():
            guard.forget()


class Rig:
    """The way of a step through the compiled arm, and the means to measure it, or another one beside it.

    Attributes:
        active: what training steps run on, unless it is disabled: then they run in eager.
        measured: what pairs compare with eager; mostly the active one.
        pairs: takes them; ``None`` where none are taken.

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
        self._settings = settings
        self._trainer = trainer
        self._module = module
        self._on_failure = on_failure
        self._on_trouble = on_trouble
        self._compiled_something = compiled_something
        self.door = StepDoor(trainer, module, on_trouble=on_trouble, overwrites_gradients=settings.replays_cuda_graphs)
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
            matching=None if settings.draws_eagers_numbers else lambda: self.measured.matching.arm(),
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
        self.active = self.measured = self.stand(arm, matching)
        self.pairs = self.active.pairs
        self.door.open(self.active.guards)

    def stand(self, arm: CompiledArm, matching: Matching, *, quietly: bool = False) -> Stand:
        """What an arm needs to be measured and trained on.

        Args:
            arm: the compiled arm.
            matching: gives another of its configuration that draws eager's random numbers.
            quietly: say nothing about pairs that fail: somebody looks at them.
        """
        settings, trainer = self._settings, self._trainer
        guards = {
            hook: Guard(
                self._module,
                arm,
                self._on_failure,
                self._on_trouble,
                own_steps=self.door.own_steps,
                shares=trainer.world_size > 1,
                retries=host.parallelism(trainer) != "fsdp",
            )
            for hook in settings.hooks
        }
        pairs = None
        if settings.limits.max_pairs:
            pairs = Pairs(
                self.probe,
                eager=EagerArm(self._module),
                compiled=guards["training_step"],
                compiled_something=self._compiled_something,
                compares=settings.limits.drift != "off",
                together=self.door.together,
                validation=guards.get("validation_step"),
                tell=_say_nothing if quietly else host.warn,
            )
        return Stand(arm, guards, matching=matching, pairs=pairs)

    @property
    def arm(self) -> CompiledArm:
        """The compiled arm that pairs compare with eager."""
        return self.measured.arm

    def measure(self, stand: Stand) -> None:
        """From here on, take pairs of this one; training stays on the active one."""
        if stand is not self.measured:
            self.probe.memory = None
        self.measured, self.pairs = stand, stand.pairs

    def run_on(self, stand: Stand) -> None:
        """Train on this one from the next step on; to be called between two steps."""
        if stand is not self.active:
            self.door.close()
            self.active = stand
            self.door.open(stand.guards)

    @property
    def is_compiled(self) -> bool:
        """Whether training steps run compiled at present."""
        return self.active.guards["training_step"].enabled and self.door.watch is None

    def enable(self, enabled: bool) -> None:
        """Let the steps to come run compiled, or in eager."""
        for guard in self.active.guards.values():
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
        return sum(guard.take_seconds() for guard in self.active.guards.values())

    def remove(self) -> None:
        """Give the module its own step back, release compiled code; may be called twice."""
        try:
            self.door.close()
        finally:
            self.active.release()
            self.measured.release()


def _say_nothing(_message: str) -> None:
    """Instead of a warning."""
