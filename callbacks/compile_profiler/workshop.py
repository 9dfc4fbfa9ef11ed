"""Makes what one fit puts onto its module: compiled arms, and the rig for the first of them."""

from __future__ import annotations

import functools
from collections.abc import Callable

from compile_profiler import host, machine
from compile_profiler.advice import advice
from compile_profiler.arguments import Settings
from compile_profiler.arms import CompiledArm
from compile_profiler.clock import Clock
from compile_profiler.ledger import Ledger
from compile_profiler.matching import Matching, with_eagers_numbers
from compile_profiler.notices import failure
from compile_profiler.observe import Observer
from compile_profiler.records import Environment, Reason
from compile_profiler.rig import Rig


class RefusedError(Exception):
    """This run cannot be compiled; the message says why, for people."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Workshop:
    """Where arms of one fit come from; nothing is compiled before the first pass of one.

    Args:
        trainer: the Trainer.
        module: its LightningModule.
        clock: seconds on the module's device.
        environment: settings that tolerances depend on.
        observer: sees what is compiled.
        ledger: knows what compiling has taken so far.
        tell: prints a line.
        on_failure: called with the error of a compiled step whose batch has been trained in eager.
        on_trouble: called with an error of our own in the midst of a step.
    """

    def __init__(
        self,
        trainer: host.Trainer,
        module: host.LightningModule,
        *,
        clock: Clock,
        environment: Environment,
        observer: Observer,
        ledger: Ledger,
        tell: Callable[[str], None],
        on_failure: Callable[[Exception], None],
        on_trouble: Callable[[Exception], None],
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._clock = clock
        self._environment = environment
        self._observer = observer
        self._ledger = ledger
        self._tell = tell
        self._on_failure = on_failure
        self._on_trouble = on_trouble

    def obstacle(self, settings: Settings) -> tuple[Reason, str] | None:
        """Why this configuration is not to be compiled in this fit, with what to say about it."""
        disabled = machine.disabled()
        if disabled is not None:
            return "disabled", f"Nothing is compiled: {disabled}"
        if not self._observer.sees_compiling:
            return "unsupported", "This torch does not tell when it compiles"
        replays = settings.replays_cuda_graphs and self._clock.device.type == "cuda"
        if replays and not self._module.automatic_optimization:  # gradients live in the graphs' memory over steps
            return "unsupported", "Manual optimization is not compiled with CUDA graphs"
        return None

    def arm(self, settings: Settings) -> CompiledArm:
        """The compiled arm of this configuration.

        Raises:
            RefusedError: torch or the module does not allow it.
        """
        is_sharded = host.parallelism(self._trainer) == "fsdp"
        if settings.options["backend"] == "inductor":
            missing = machine.missing(self._trainer.strategy.root_device)
            if missing is not None:
                raise RefusedError("compile_error", f"Nothing can be compiled here. {missing.rstrip('.')}")
        target = host.target_for(self._module, settings.target)
        try:
            arm = CompiledArm(
                self._module,
                target=target,
                hooks=settings.hooks,
                options=settings.options,
                on_error=self._on_failure if is_sharded else None,
            )
        except Exception as error:  # torch.compile refuses the Python version, the platform or the options
            text = failure("compile_error", error, advice(error, machine.system()))
            raise RefusedError("compile_error", text) from None
        if target == "networks" and not arm.compiled_names:
            raise RefusedError("nothing_compiled", "Manual optimization, and no child module owns parameters")
        return arm

    def matching(self, settings: Settings) -> Matching:
        """What gives the same arm with eager's random numbers, once somebody asks, if the run can afford it."""
        target = host.target_for(self._module, settings.target)
        options = functools.partial(with_eagers_numbers, settings.options)
        return Matching(
            lambda: CompiledArm(self._module, target=target, hooks=["training_step"], options=options()),
            expected_s=self._ledger.compile_s,
            left_s=lambda: host.seconds_left(self._trainer, self._ledger.ordinary_s),
            budget=settings.overhead_budget,
            tell=self._tell,
        )

    def rig(self, settings: Settings) -> Rig:
        """The rig with an arm of this configuration on it.

        Raises:
            RefusedError: torch or the module does not allow it.
        """
        return Rig(
            settings,
            self._trainer,
            self._module,
            self.arm(settings),
            clock=self._clock,
            environment=self._environment,
            on_failure=self._on_failure,
            on_trouble=self._on_trouble,
            compiled_something=self._observer.compiling,
            matching=self.matching(settings),
        )
