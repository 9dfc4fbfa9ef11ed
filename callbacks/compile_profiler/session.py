"""One fit: what runs compiled, when a pair is due, when the ranks meet."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from compile_profiler import checkpoint, host, machine
from compile_profiler.account import Account
from compile_profiler.arguments import Settings
from compile_profiler.candidates import Candidate, configured
from compile_profiler.clock import Clock, profiler_is_on
from compile_profiler.company import Company
from compile_profiler.contest import Contest
from compile_profiler.explainer import Explainer
from compile_profiler.export import Export
from compile_profiler.group import LostError
from compile_profiler.judgement import Judgement, is_failure, packed, unpacked
from compile_profiler.ledger import Ledger
from compile_profiler.lookout import Lookout
from compile_profiler.meeting import Exchange
from compile_profiler.notices import not_finite
from compile_profiler.records import Reason, Remedy, Report, Stage, Verdict
from compile_profiler.rig import Rig
from compile_profiler.seat import Seat
from compile_profiler.verdict import UNSCHEDULED
from compile_profiler.windows import StepTimes
from compile_profiler.workshop import RefusedError, Workshop


class Session:
    """The compiled part of one fit, from start to finish; at a meeting of ranks it is what ``Does`` describes.

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
        self._cannot_search = settings.searches and (trainer.world_size > 1 or host.parallelism(trainer) == "fsdp")
        if self._cannot_search:
            settings = settings.of(settings.default_candidate)
        self._settings = settings
        self._trainer = trainer
        self._module = module
        self._export = export
        self._config = settings.config
        self._environment = host.environment(trainer)
        self._identity = checkpoint.identity(module, settings.decisive(), self._environment)
        self._ledger = Ledger(confidence=settings.limits.confidence, whole_step=settings.end_to_end != "off")
        self._explainer = Explainer(settings, trainer, module, export, self._on_remedy)
        self._judgement = Judgement(settings.limits, self._config, self._ledger, self._explainer)
        self._clock = Clock(trainer.strategy.root_device)
        self._times = StepTimes(
            self._clock,
            measures=settings.limits.max_pairs > 0,
            alternates=settings.end_to_end == "windows" and settings.limits.max_pairs > 0 and not settings.searches,
            seed=settings.seed,
            of_all=trainer.world_size > 1,
        )
        self._account = Account(self._explainer, self._ledger, self._times, warmup_steps=settings.warmup_steps)
        self._seat = Seat(settings, self._ledger, self._explainer, self._times, self._account, self._judgement)
        self._workshop = Workshop(
            trainer,
            module,
            clock=self._clock,
            environment=self._environment,
            observer=self._explainer.observer,
            ledger=self._ledger,
            tell=export.tell,
            on_failure=self._on_failure,
            on_trouble=on_trouble,
        )
        self._contest: Contest | None = None
        self._known: Candidate | None = None  # from an earlier part of this training
        self._step = 0
        self._num_since_validation = 0
        self._told_not_finite = False
        self._step_began_s = 0.0
        self._before_s = self._after_s = 0.0  # taken by the callback before the step at hand, after the last one
        self._unlogged = True  # something to log
        self._company = Company(settings, trainer, export.tell)
        self._is_sharded = host.parallelism(trainer) == "fsdp"
        self._can_rehearse = True  # a pass of one rank alone waits for no other

    # -- beginning and end -------------------------------------------------------------------------------------------

    def start(self, earlier: Any = None) -> None:
        """Compile the module, unless this run cannot be compiled or measured fairly, or was found not worth it before.

        Args:
            earlier: what ``for_checkpoint`` of the fit that is resumed gave.
        """
        if self._cannot_search:
            instead = self._settings.default_candidate.name
            host.warn(f"mode='auto' searches in a run of one process; in this one {instead} is compiled.")
        obstacle = host.unsupported(self._trainer, self._module, self._settings.target)
        if obstacle is not None:
            return self._refuse(self._refusal("unsupported", f"This version does not measure {obstacle}"))
        try:
            self._company.gather()
            if self._go_on_from(earlier):
                return None
            refusal = self._compile()
            text = self._company.first_voice(None if refusal is None else packed(refusal))
        except LostError as error:
            return self._lost(error)
        if text is not None:
            self._leave()
            return self._refuse(unpacked(text, self._config))
        if self._seat.rig is not None:
            self._explainer.start(self._seat.rig.arm, self._target)
            if self._settings.searches:
                self._contest = self._new_contest(self._seat.rig)
        return None

    def _new_contest(self, rig: Rig) -> Contest:
        return Contest(
            self._settings,
            self._trainer,
            self._module,
            rig=rig,
            workshop=self._workshop,
            ledger=self._ledger,
            explainer=self._explainer,
            times=self._times,
            tell=self._export.tell,
            lookout=Lookout(
                self._settings,
                self._module,
                clock=self._clock,
                moves_optimizers=not self._module.automatic_optimization,
                environment=self._environment,
                known=self._known,
            ),
        )

    @property
    def _search(self) -> Contest | None:
        """The search, while it goes on."""
        return self._contest if self._contest is not None and self._contest.is_on else None

    @property
    def _target(self) -> str | Sequence[str]:
        return host.target_for(self._module, self._settings.target)

    def _compile(self) -> Verdict | None:
        """Put the compiled arm on the module, or say why not."""
        obstacle = self._workshop.obstacle(replace(self._settings, searches=False))
        if obstacle is not None:
            return self._refusal(*obstacle)
        try:
            self._seat.rig = self._workshop.rig(self._settings)
        except RefusedError as refused:
            return self._refusal(refused.reason, str(refused))
        if any(self._seat.rig.arm.compiled_names):  # the module itself has no name
            self._config["modules"] = list(self._seat.rig.arm.compiled_names)
        if self._is_sharded:
            self._do_without_pairs("Each pass of a sharded module gathers weights from all processes")
        elif not self._company.is_alone:
            self._seat.rig.door.before_step = self._before_step
        return None

    def _go_on_from(self, data: Any) -> bool:
        """Take over what an earlier fit has found out; whether that settles it: no compiling."""
        earlier = None if data is None else checkpoint.unpacked(data, self._identity)
        is_afresh = not isinstance(earlier, checkpoint.Earlier)
        if self._company.any(is_afresh) or not isinstance(earlier, checkpoint.Earlier):
            if earlier is not None:
                whose = earlier if isinstance(earlier, str) else "machine on another rank"
                self._export.tell(f"The checkpoint's measurements are of another {whose}; measuring starts afresh.")
            return False
        if self._settings.searches and (earlier.verdict is None or earlier.verdict.decision == "compiled"):
            # A search takes its own pairs; what has won before is where it begins.
            self._known = None if earlier.verdict is None else configured(earlier.verdict.config)
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
        return checkpoint.packed(self._identity, self._judgement.verdict, self._ledger.evidence(), max_pairs=max_pairs)

    def _refusal(self, reason: Reason, message: str) -> Verdict:
        return Verdict(decision="eager", reason=reason, message=f"{message}.", config=self._config)

    def _refuse(self, verdict: Verdict) -> None:
        host.warn(f"{verdict.message.removesuffix('.')}; training goes on as without the callback.")
        self._conclude(verdict)

    def finish(self, *, orderly: bool = False) -> Report:
        """Take everything off the module, deliver the result; may be called twice.

        Args:
            orderly: all ranks have come to the end of training, so that they can meet once more.
        """
        if orderly and self._seat.rig is not None and not self._company.is_alone:
            self._seat.is_over = True
            self._meet()
        self._leave()
        self._explainer.observer.stop()
        report = self.report()
        self._export.write(report)
        self._export.log(report, self._step, last=True)
        return report

    def _leave(self) -> None:
        """Back to the user's own step; compiled code is released, and so are the ways to the other ranks."""
        if self._seat.rig is not None:
            self._ledger.own_s += self._seat.rig.take_seconds()
            self._seat.rig.remove()
        self._seat.rig = None
        if self._contest is not None:
            self._contest.release()
        self._company.part()
        self._explainer.release()

    def abandon(self, verdict: Verdict) -> Report:
        """After an error that is not of a step: take everything off, whatever else fails by then."""
        verdict = replace(verdict, config=self._config)
        self._judgement.verdict = verdict
        report = Report(verdict=verdict, environment=self._environment)
        rig, self._seat.rig = self._seat.rig, None
        with contextlib.suppress(Exception):
            if rig is not None:
                rig.remove()
        with contextlib.suppress(Exception):
            if self._contest is not None:
                self._contest.release()
        with contextlib.suppress(Exception):
            self._company.part()
        with contextlib.suppress(Exception):
            self._explainer.observer.stop()
            self._explainer.release()
        with contextlib.suppress(Exception):
            self._judgement.verdict = replace(verdict, step=self._step)
            report = self.report()
        with contextlib.suppress(Exception):
            self._export.write(report)
        return report

    # -- the training loop -------------------------------------------------------------------------------------------

    def on_step_start(self) -> None:
        """Before a training step: what was compiled up to here was not compiled for it."""
        if self._seat.rig is not None:
            began_s = time.perf_counter()
            if self._explainer.observer.compiling():
                self._explainer.observer.skip()
            self._step_began_s = time.perf_counter()
            self._before_s = self._step_began_s - began_s

    def on_step_end(self, loss: Tensor | None) -> None:
        """After a training step with this loss: account for it, run a pair if one is due, decide, log."""
        began_s = time.perf_counter()
        self._step = host.x_axis(self._trainer)
        self._ledger.num_steps += 1
        rig = self._seat.rig
        if rig is not None:
            boundary = rig.door.at_boundary()
            self._before_s += rig.door.take_seconds()
            self._account.step(
                self._step,
                began_s - self._step_began_s,
                batch=rig.door.last_call,
                boundary=boundary,
                compiled=rig.is_compiled,
                own_s=self._before_s + self._after_s,
            )
            rig.watch.see(loss)
            self._company.count(boundary=boundary)
            self._num_since_validation += int(boundary)
            if self._search is not None:
                self._account.news |= self._search.on_step(boundary=boundary)
            if self._times.alternates and self._search is not None:
                self._search.switch(self._times.arm)
            elif self._times.alternates:
                rig.enable(self._times.arm == "compiled" and self._seat.failed is None)
            if self._company.is_due(self._seat, self._times, boundary=boundary):
                self._meet()
        if self._unlogged and host.logs_this_step(self._trainer):
            self._unlogged = False
            self._export.log(self.report(), self._step)
            self._times.pause()
        self._after_s = time.perf_counter() - began_s
        self._ledger.own_s += self._before_s + self._after_s

    def _look(self, stage: Stage, batch: Any = None) -> bool:
        if batch is None and self._seat.rig is not None:
            batch = self._seat.rig.door.last_call
        return self._account.look(stage, batch, step=self._step)

    def _on_remedy(self, remedy: Remedy) -> None:
        """The compiled target is another one from here on: pairs begin anew."""
        self._config["healed"] = [*self._config.get("healed", ()), remedy.change]
        self._judgement.verdict = replace(self._judgement.verdict, config=dict(self._config))
        self._ledger.ask()

    def on_validation_step_end(self, batch: Any) -> None:
        """After a batch of validation or the sanity check."""
        if self._seat.rig is not None:
            stage = host.stage_of(self._trainer)
            compiling = self._look(stage, batch)
            self._account.news |= compiling
            # Alone only: a pass of validation may talk to other ranks, which are not asked.
            if stage != "validate" or compiling or not self._company.is_alone:
                return
            if self._num_since_validation >= self._seat.steps_per_pair:
                self._compare_validation()

    def _compare_validation(self) -> None:
        """Compare both arms on the batch of validation at hand."""
        assert self._seat.rig is not None
        call, pairs = self._seat.rig.door.last_validation_call, self._seat.rig.pairs
        if call is None or pairs is None or pairs.stopped or profiler_is_on() or self._search is not None:
            return
        began_s = time.perf_counter()
        self._num_since_validation = 0
        sample = pairs.compare_validation(call, step=self._step)
        self._look("probe")
        if sample is not None:
            self._ledger.add_validation(sample, time.perf_counter() - began_s)
            self._account.news = True
        self._ledger.own_s += time.perf_counter() - began_s

    def on_disturbance(self) -> None:
        """Validation, a checkpoint, a new epoch: neither a window nor a pair may lean on what follows."""
        self._account.disturb()

    # -- meeting -----------------------------------------------------------------------------------------------------

    def _meet(self) -> None:
        try:
            self._company.meet(self._seat, self)
        except LostError as error:
            self._lost(error)

    def _lost(self, error: LostError) -> None:
        """Nobody can agree on anything any more: each rank trains on by itself, as without the callback."""
        message = f"The ranks could not meet at step {self._step}: {error}"
        host.warn(f"{message}; training goes on as without the callback.")
        self._conclude(replace(self._refusal("runtime_error", message), step=self._step))

    def pair(self, *, scheduled: bool) -> Exchange[bool]:
        """Take a pair, together with the other ranks; whether it counts as one that was ``scheduled``."""
        rig = self._seat.rig
        assert rig is not None
        ordinary = self._times.before_pair()
        began_s, compiled_before_s, search = time.perf_counter(), self._account.compile_s, self._search
        with contextlib.nullcontext() if search is None else search.pair():
            sample = yield from rig.take_pair(step=self._step, ordinary=ordinary, scheduled=scheduled)
            self._look("probe" if search is None else "train")  # what a search compiles is there to be trained on
        if search is None and rig.pairs is not None and rig.pairs.memory is not None:
            self._ledger.memory = rig.pairs.memory
        if search is None and rig.door.last_call is not None:
            self._explainer.time_guards(*rig.door.last_call)
        if not self._told_not_finite and rig.is_not_finite(sample):
            self._told_not_finite = True
            host.warn(not_finite(self._step, weights_finite=rig.weights_finite()))
        self._times.after_pair()
        seconds = time.perf_counter() - began_s
        if search is not None:
            compile_s = min(self._account.compile_s - compiled_before_s, seconds)
            self._ledger.add_trial(seconds, compile_s=compile_s)
            search.saw_pair(sample, seconds, compile_s)
            return sample.void not in UNSCHEDULED
        if self._company.rank == 0:
            self._reopen(self._judgement.another_regime(sample))
        self._ledger.add_pair(sample, seconds)
        return sample.void not in UNSCHEDULED

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _reopen(self, why: str | None) -> None:
        if why is not None and self._judgement.reopen(why, self._step):
            self._unlogged = True
            self._export.tell(f"measuring again at step {self._step}: {why}.")

    def judge(self) -> str:
        """What follows from all that has been found."""
        if self._search is not None:
            return self._next_of(self._search)
        if self._seat.common.compiled_again:
            self._reopen("something was compiled again")
        obstacle = machine.disabled()
        if obstacle is not None and self._explainer.compiles().graphs == 0:  # switched off since the fit began
            return packed(replace(self._refusal("disabled", f"Nothing is compiled: {obstacle}"), step=self._step))
        is_in_vain = self._seat.common.without_graph or self._seat.common.left_out
        if is_in_vain and self._seat.rig is not None and self._can_rehearse:
            self._explainer.find_other_targets(self._seat.rig)
        verdict = self._judgement.judge(self._step, self._seat.common, by_windows=self._times.alternates)
        if self._contest is not None and verdict.decision == "eager":
            self._contest.failed(verdict)
            return self._next_of(self._contest)
        if self._contest is not None and verdict.reason == "pending" and self._judgement.verdict.decision == "compiled":
            return packed(self._judgement.verdict)  # found by the search, which had its own evidence
        return packed(verdict)

    def _next_of(self, search: Contest) -> str:
        verdict = search.judge(self._step, self._seat.common)
        self._config.clear()
        self._config.update(verdict.config)
        return packed(verdict)

    def obey(self, text: str) -> None:
        """Act on what was decided; every rank does at the same step."""
        verdict, mine = unpacked(text, self._config), self._judgement.verdict
        if (verdict.decision, verdict.reason) != (mine.decision, mine.reason):
            if verdict.decision == "undecided":
                self._ledger.ask()
            if is_failure(verdict):
                host.warn(f"{verdict.message} Its batch was trained in eager, and so is the rest of the run.")
            self._conclude(verdict)
            self._export.tell(verdict.message)
        elif verdict.decision == "undecided":
            self._judgement.verdict = verdict
        self._unlogged = True

    def _conclude(self, verdict: Verdict) -> None:
        """Act on a verdict: the one place where the active arm changes."""
        self._judgement.verdict = verdict
        self._unlogged = True
        if verdict.decision == "eager":
            self._leave()
        self._export.write(self.report())

    def _on_failure(self, error: Exception) -> None:
        """A compiled step failed and its batch has been trained in eager: so is the rest of the run.

        One of several ranks trains on in eager until the next meeting, where it becomes everybody's verdict.
        """
        self._step = host.x_axis(self._trainer)
        is_alone = self._company.is_alone
        verdict = self._judgement.on_failure(error, self._step, None if is_alone else self._company.rank)
        self._look(host.stage_of(self._trainer))
        if self._contest is not None:
            self._contest.failed(verdict)
            self._account.news = True
        elif is_alone:
            host.warn(f"{verdict.message} The batch was trained in eager, and so is the rest of the run.")
            self._conclude(verdict)
        elif self._seat.rig is not None:
            self._seat.failed = self._seat.failed or verdict
            self._seat.rig.enable(False)

    def report(self) -> Report:
        """Everything known now."""
        if self._seat.rig is not None:
            self._ledger.own_s += self._seat.rig.take_seconds()
        self._ledger.last_step = host.last_step(self._trainer)
        report = self._ledger.report(
            self._judgement.verdict, self._explainer.compiles(), self._environment, self._seat.ranks
        )
        return report if self._contest is None else replace(report, search=self._contest.report())

    # -- the first steps of several ranks ----------------------------------------------------------------------------

    def _before_step(self) -> None:
        """Before each of the first two training steps."""
        assert self._seat.rig is not None
        try:
            talks = self._company.before_step(
                self._seat.rig, failed=self._explainer.observer.failed, on_failure=self._on_failure
            )
            if talks:
                self._do_without_pairs("The step itself sends something to other processes")
            elif talks is not None:
                # A rank that could not compile is everybody's affair at once.
                self._company.meet(self._seat, self)
        except LostError as error:
            self._lost(error)

    def _do_without_pairs(self, why: str) -> None:
        assert self._seat.rig is not None
        self._seat.rig.pairs = None
        self._can_rehearse = False
        if self._settings.limits.max_pairs:
            host.warn(f"{why}, so no pair can be taken; both ways are timed in windows of real steps instead.")
            self._times.alternate()
