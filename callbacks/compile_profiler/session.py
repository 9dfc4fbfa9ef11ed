"""One fit: what runs compiled, when a pair is due, what follows from what was seen."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from compile_profiler import checkpoint, host, machine
from compile_profiler.advice import advice
from compile_profiler.arguments import Settings
from compile_profiler.arms import CompiledArm
from compile_profiler.clock import Clock, profiler_is_on
from compile_profiler.explainer import Explainer
from compile_profiler.export import Export
from compile_profiler.ledger import Ledger
from compile_profiler.matching import Matching, with_eagers_numbers
from compile_profiler.notices import failure, not_finite
from compile_profiler.records import Reason, Remedy, Report, Sample, Stage, Verdict
from compile_profiler.rig import Rig
from compile_profiler.verdict import UNSCHEDULED, judge
from compile_profiler.windows import SETTLE_STEPS, Alternation, Window

MAX_SHAPES_TO_REOPEN = 3
_MAX_BACKOFF = 10
_HOOKS = {"train": "training_step", "validate": "validation_step"}


class Session:
    """The compiled part of one fit, from start to finish.

    Args:
        settings: the callback's arguments.
        trainer: the Trainer.
        module: its LightningModule.
        export: where reports go.
        on_trouble: called with an error of our own in the midst of a step.
    """

    def __init__(
        self,
        settings: Settings,
        trainer: host.Trainer,
        module: host.LightningModule,
        export: Export,
        *,
        on_trouble: Callable[[Exception], None],
    ) -> None:
        self._settings = settings
        self._trainer = trainer
        self._module = module
        self._export = export
        self._on_trouble = on_trouble
        self._config = settings.config
        self._verdict = Verdict(config=self._config)
        self._environment = host.environment(trainer)
        self._identity = checkpoint.identity(module, settings.decisive(), self._environment)
        self._ledger = Ledger(confidence=settings.limits.confidence, whole_step=settings.end_to_end != "off")
        self._explainer = Explainer(settings, trainer, module, export, self._on_remedy)
        self._clock = Clock(trainer.strategy.root_device)
        self._window = Window(self._clock)
        windows = settings.end_to_end == "windows" and settings.limits.max_pairs
        self._alternation = Alternation(self._clock, seed=settings.seed) if windows else None
        self._rig: Rig | None = None  # while the run is compiled
        self._step = 0
        self._step_began_s = 0.0
        self._before_s = self._after_s = 0.0  # taken by the callback before the step at hand, after the last one
        self._num_clean = 0
        self._warm = False  # the first compiles of this fit are over
        self._num_since_pair = 0
        self._num_since_validation = 0
        self._told_not_finite = False
        self._news = True  # something to judge
        self._unlogged = True  # something to log

    # -- beginning and end -------------------------------------------------------------------------------------------

    def start(self, earlier: Any = None) -> None:
        """Compile the module, unless this run cannot be compiled or measured fairly, or was found not worth it before.

        Args:
            earlier: what ``for_checkpoint`` of the fit that is resumed gave.
        """
        obstacle = host.unsupported(self._trainer, self._module)
        if obstacle is not None:
            return self._refuse("unsupported", f"This version does not measure {obstacle}")
        obstacle = machine.disabled()
        if obstacle is not None:
            return self._refuse("disabled", f"Nothing is compiled: {obstacle}")
        if not self._explainer.observer.sees_compiling:
            return self._refuse("unsupported", "This torch does not tell when it compiles")
        if earlier is not None and self._go_on_from(earlier):
            return None
        if self._settings.options["backend"] == "inductor":
            obstacle = machine.missing(self._trainer.strategy.root_device)
            if obstacle is not None:
                return self._refuse("compile_error", f"Nothing can be compiled here. {obstacle.rstrip('.')}")
        hooks = [_HOOKS[stage] for stage in self._settings.stages]
        try:
            target = host.target_for(self._module, self._settings.target)
            arm = CompiledArm(self._module, target=target, hooks=hooks, options=self._settings.options)
        except Exception as error:  # torch.compile refuses the Python version, the platform or the options
            what_to_do = advice(error, machine.system())
            return self._refuse("compile_error", failure("compile_error", error, what_to_do))
        if target == "networks" and not arm.compiled_names:
            return self._refuse("nothing_compiled", "Manual optimization, and no child module owns parameters")
        if arm.compiled_names:
            self._config["modules"] = list(arm.compiled_names)
        self._rig = Rig(
            self._settings,
            self._trainer,
            self._module,
            arm,
            hooks=hooks,
            clock=self._clock,
            environment=self._environment,
            on_failure=self._on_failure,
            on_trouble=self._on_trouble,
            compiled_something=self._explainer.observer.compiling,
            matching=self._matching(target),
        )
        self._explainer.start(arm, target, hooks)
        return None

    def _matching(self, target: str | Sequence[str]) -> Matching:
        options = functools.partial(with_eagers_numbers, self._settings.options)
        return Matching(
            lambda: CompiledArm(self._module, target=target, hooks=["training_step"], options=options()),
            expected_s=self._ledger.compile_s,
            left_s=lambda: host.seconds_left(self._trainer, self._ledger.ordinary_s),
            budget=self._settings.overhead_budget,
            tell=self._export.tell,
        )

    def _go_on_from(self, data: Any) -> bool:
        """Take over what an earlier fit has found out; whether that settles it: no compiling."""
        earlier = checkpoint.unpacked(data, self._identity)
        if isinstance(earlier, str):
            self._export.tell(f"The checkpoint's measurements are of another {earlier}; measuring starts afresh.")
            return False
        self._ledger.go_on_from(earlier.evidence)
        if earlier.verdict is None:
            return False
        self._conclude(replace(earlier.verdict, config=self._config))
        self._export.tell(f"{earlier.verdict.message} Known from the checkpoint.")
        return earlier.verdict.decision == "eager"

    def for_checkpoint(self) -> dict[str, Any]:
        """What the next fit of this training can go on from, in plain values."""
        max_pairs = self._settings.limits.max_pairs
        return checkpoint.packed(self._identity, self._verdict, self._ledger.evidence(), max_pairs=max_pairs)

    def _refuse(self, reason: Reason, message: str) -> None:
        host.warn(f"{message}; training goes on as without the callback.")
        self._conclude(Verdict(decision="eager", reason=reason, message=f"{message}.", config=self._config))

    def finish(self) -> Report:
        """Take everything off the module, deliver the result; may be called twice."""
        self._leave()
        self._explainer.observer.stop()
        report = self.report()
        self._export.write(report)
        self._export.log(report, self._step, last=True)
        return report

    def _leave(self) -> None:
        """Back to the user's own step; compiled code is released."""
        if self._rig is not None:
            self._ledger.own_s += self._rig.take_seconds()
            self._rig.remove()
        self._rig = None
        self._explainer.release()

    def abandon(self, message: str) -> Report:
        """After an error of our own: take everything off, whatever else fails by then."""
        self._verdict = Verdict(decision="eager", reason="disabled", message=message, config=self._config)
        report = Report(verdict=self._verdict, environment=self._environment)
        rig, self._rig = self._rig, None
        with contextlib.suppress(Exception):
            if rig is not None:
                rig.remove()
        with contextlib.suppress(Exception):
            self._explainer.observer.stop()
            self._explainer.release()
        with contextlib.suppress(Exception):
            self._verdict = replace(self._verdict, step=self._step)
            report = self.report()
        with contextlib.suppress(Exception):
            self._export.write(report)
        return report

    # -- the training loop -------------------------------------------------------------------------------------------

    def on_step_start(self) -> None:
        """Before a training step: what was compiled up to here was not compiled for it."""
        if self._rig is not None:
            began_s = time.perf_counter()
            if self._explainer.observer.compiling():
                self._explainer.observer.skip()
            self._step_began_s = time.perf_counter()
            self._before_s = self._step_began_s - began_s

    def on_step_end(self, loss: torch.Tensor | None) -> None:
        """After a training step with this loss: account for it, run a pair if one is due, decide, log."""
        began_s = time.perf_counter()
        self._step = host.x_axis(self._trainer)
        self._ledger.num_steps += 1
        if self._rig is not None:
            self._before_s += self._rig.door.take_seconds()
            self._account(began_s - self._step_began_s)
            self._rig.watch.see(loss)
            if self._is_due():
                self._run_pair()
            if self._news:
                self._decide()
        if self._unlogged and host.logs_this_step(self._trainer):
            self._unlogged = False
            self._export.log(self.report(), self._step)
            self._pause_windows()
        self._after_s = time.perf_counter() - began_s
        self._ledger.own_s += self._before_s + self._after_s

    def _look(self, stage: Stage, batch: Any = None) -> bool:
        """Take what was compiled as events of ``stage``; whether there was anything."""
        if batch is None and self._rig is not None:
            batch = self._rig.door.last_call
        return self._explainer.look(stage, batch, step=self._step)

    def _on_remedy(self, remedy: Remedy) -> None:
        """The compiled target is another one from here on: pairs begin anew."""
        self._config["healed"] = [*self._config.get("healed", ()), remedy.change]
        self._verdict = replace(self._verdict, config=dict(self._config))
        self._ledger.ask()

    def _account(self, seconds: float) -> None:
        compiling = self._look("train")
        compiled = self._alternation is None or self._alternation.arm == "compiled"
        boundary = self._rig is not None and self._rig.door.at_boundary()
        self._ledger.add_step(self._step, seconds, compiled=compiled, compiling=compiling)
        self._num_since_pair += int(boundary)
        self._num_since_validation += int(boundary)
        if compiling:
            self._num_clean = 0
            self._news = True
            self._pause_windows()
            if self._warm:
                self._reopen("something was compiled again")
            return
        self._num_clean += 1
        self._warm |= self._num_clean >= self._settings.warmup_steps
        if self._alternation is None:
            self._window.step(self._before_s + self._after_s)
        elif self._num_clean >= self._settings.warmup_steps:
            self._alternate(boundary)

    def _alternate(self, boundary: bool) -> None:
        """Account for a step of the open window; the next step runs on the arm whose turn it is."""
        assert self._alternation is not None
        assert self._rig is not None
        sample = self._alternation.step(self._step, boundary=boundary, own_s=self._before_s + self._after_s)
        if sample is not None:
            self._ledger.window_samples.append(sample)
            self._news = True
            if self._verdict.decision != "undecided":
                self._alternation.rest(self._ledger.steps_per_couple(self._settings.overhead_budget))
        for guard in self._rig.guards.values():
            guard.enabled = self._alternation.arm == "compiled"

    def _pause_windows(self) -> None:
        self._window.pause(settle_steps=SETTLE_STEPS)
        if self._alternation is not None:
            self._alternation.pause()

    def on_validation_step_end(self, batch: Any) -> None:
        """After a batch of validation or the sanity check."""
        if self._rig is not None:
            stage = host.stage_of(self._trainer)
            compiling = self._look(stage, batch)
            self._news |= compiling
            if stage == "validate" and not compiling and self._num_since_validation >= self._pair_interval():
                self._compare_validation()

    def _compare_validation(self) -> None:
        """Compare both arms on the batch of validation at hand."""
        assert self._rig is not None
        call, pairs = self._rig.door.last_validation_call, self._rig.pairs
        if call is None or pairs is None or pairs.stopped or profiler_is_on():
            return
        began_s = time.perf_counter()
        self._num_since_validation = 0
        sample = pairs.compare_validation(call, step=self._step)
        self._look("probe")
        if sample is not None:
            self._ledger.add_validation(sample, time.perf_counter() - began_s)
            self._news = True
        self._ledger.own_s += time.perf_counter() - began_s

    def on_disturbance(self) -> None:
        """Validation, a checkpoint, a new epoch: neither a window nor a pair may lean on what follows."""
        self._pause_windows()
        self._num_clean = min(self._num_clean, self._settings.warmup_steps - 1)

    # -- pairs -------------------------------------------------------------------------------------------------------

    def _is_due(self) -> bool:
        return (
            self._rig is not None
            and self._rig.pairs is not None
            and not self._rig.pairs.stopped
            and (self._is_scheduled() or self._rig.watch.alarm is not None)
            and self._rig.door.at_boundary()
            and not profiler_is_on()  # it slows eager down more than compiled, and the pair would be in its record
            and (self._alternation is None or self._alternation.between)
        )

    def _is_scheduled(self) -> bool:
        warm = self._num_clean >= self._settings.warmup_steps
        return warm and self._num_since_pair >= self._pair_interval()

    def _pair_interval(self) -> float:
        """Optimizer steps between two pairs: fixed while undecided, afterwards what ``overhead_budget`` allows."""
        # A model that compiles in every pair would otherwise be measured in vain for ever.
        interval = self._settings.pair_every_n_steps << min(self._ledger.num_void_in_a_row, _MAX_BACKOFF)
        if self._verdict.decision == "undecided":
            return interval
        return max(interval, self._ledger.steps_per_pair(self._settings.overhead_budget))

    def _reopen(self, why: str) -> None:
        """Another regime than the one that was decided on: ask again, from here on; the run stays compiled."""
        if self._verdict.reason not in ("gain", "inconclusive"):
            return
        self._ledger.ask()
        self._verdict = Verdict(message=f"Asked again: {why}.", step=self._step, config=self._config)
        self._unlogged = True
        self._export.tell(f"measuring again at step {self._step}: {why}.")

    def _look_again(self, sample: Sample) -> None:
        """Whether this pair shows another regime, or an undecided question has rested long enough."""
        shapes = {earlier.shape for earlier in self._ledger.samples}
        # A run of ever new lengths was decided on many of them; its next new one is nothing new.
        if sample.void is None and shapes and sample.shape not in shapes and len(shapes) <= MAX_SHAPES_TO_REOPEN:
            self._reopen("batches of another shape came")
        rested = len(self._ledger.asked_samples) >= 2 * self._settings.limits.max_pairs
        if self._verdict.reason == "inconclusive" and rested:
            self._reopen("the answer was not clear")

    def _run_pair(self) -> None:
        assert self._rig is not None
        scheduled = self._is_scheduled()
        ordinary = self._window.close(settle_steps=SETTLE_STEPS)
        began_s = time.perf_counter()
        sample = self._rig.take_pair(step=self._step, ordinary=ordinary, scheduled=scheduled)
        if self._rig.pairs is not None and self._rig.pairs.memory is not None:
            self._ledger.memory = self._rig.pairs.memory
        self._look("probe")
        if self._rig.door.last_call is not None:
            self._explainer.time_guards(*self._rig.door.last_call)
        if not self._told_not_finite and self._rig.is_not_finite(sample):
            self._told_not_finite = True
            host.warn(not_finite(self._step, weights_finite=self._rig.weights_finite()))
        if sample.void not in UNSCHEDULED:
            self._num_since_pair = 0
        self._news = True
        self._window.drop(settle_steps=SETTLE_STEPS)
        self._look_again(sample)
        self._ledger.add_pair(sample, time.perf_counter() - began_s)

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        self._news = False
        obstacle = machine.disabled()
        if obstacle is not None and self._explainer.compiles().graphs == 0:  # switched off since the fit began
            self._refuse("disabled", f"Nothing is compiled: {obstacle}")
            return
        compiles, left_out = self._explainer.compiles(), self._explainer.observer.left_out
        if self._rig is not None and self._ledger.num_compiled_steps and (compiles.graphs == 0 or left_out is not None):
            self._explainer.find_other_targets(self._rig)
        verdict = judge(
            self._ledger.asked_samples,
            compiles,
            limits=self._settings.limits,
            step=self._step,
            config=self._config,
            num_compiled_steps=self._ledger.num_compiled_steps,
            num_steps_seen=self._ledger.num_steps,
            num_recent_compiling=self._ledger.num_recent_compiling,
            recent_compile_s=self._ledger.recent_compile_s,
            evidence=self._ledger.asked_windows if self._alternation is not None else None,
            left_out=left_out,
            never_ran=self._explainer.never_ran,
            other_targets=self._explainer.other_targets or (),
            validations=self._ledger.validations,
        )
        if (verdict.decision, verdict.reason) != (self._verdict.decision, self._verdict.reason):
            self._conclude(verdict)
            self._export.tell(verdict.message)
        elif verdict.decision == "undecided":
            self._verdict = verdict
        self._unlogged = True

    def _conclude(self, verdict: Verdict) -> None:
        """Act on a verdict: the one place where the active arm changes."""
        self._verdict = verdict
        self._unlogged = True
        if verdict.decision == "eager":
            self._leave()
        self._export.write(self.report())

    def _on_failure(self, error: Exception) -> None:
        """A compiled step failed and its batch has been trained in eager: so is the rest of the run."""
        self._step = step = host.x_axis(self._trainer)
        reason: Reason = "compile_error" if self._explainer.observer.failed(error) else "runtime_error"
        if isinstance(error, torch.OutOfMemoryError):
            reason = "out_of_memory"
        self._look(host.stage_of(self._trainer))
        message = failure(reason, error, advice(error, machine.system()))
        host.warn(f"{message} The batch was trained in eager, and so is the rest of the run.")
        self._conclude(Verdict(decision="eager", reason=reason, message=message, step=step, config=self._config))

    def report(self) -> Report:
        """Everything known now."""
        if self._rig is not None:
            self._ledger.own_s += self._rig.take_seconds()
        self._ledger.last_step = host.last_step(self._trainer)
        return self._ledger.report(self._verdict, self._explainer.compiles(), self._environment)
