"""The callback: Lightning says when."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec

from compile_profiler import host
from compile_profiler.arguments import EndToEndMethod, Target, checked
from compile_profiler.checkpoint import KEY
from compile_profiler.export import Export
from compile_profiler.judgement import after_trouble
from compile_profiler.parts import submodules
from compile_profiler.records import Report
from compile_profiler.render import print_table
from compile_profiler.session import Session
from compile_profiler.verdict import DriftPolicy

_Arguments = ParamSpec("_Arguments")


def _guarded(
    hook: Callable[Concatenate[CompileProfiler, _Arguments], None], *, raises: tuple[type[Exception], ...] = ()
) -> Callable[Concatenate[CompileProfiler, _Arguments], None]:
    """The hook behind a door that no error of our own passes: such an error ends measuring, never the run.

    Args:
        hook: a hook of the callback.
        raises: what it tells the user about their own input.
    """

    @functools.wraps(hook)
    def run(self: CompileProfiler, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        try:
            hook(self, *args, **kwargs)
        except raises:
            raise
        except Exception as error:
            self._give_up(error)

    return run


class CompileProfiler(host.Callback):
    """Compiles the module at fit start, keeps proving that it pays, goes back to eager when it does not.

    Example::

        profiler = CompileProfiler()
        Trainer(callbacks=[profiler]).fit(module)
        print(profiler.report.verdict.message)

    After ``warmup_steps`` compiled steps it runs a pair on every ``pair_every_n_steps``-th batch: the batch just
    trained once more through the eager and the compiled arm, forward and backward, in a sandbox that leaves no trace.
    Pairs go on until the evidence decides or ``max_pairs`` are spent; later ones are as sparse as ``overhead_budget``
    asks.

    Cost: one pair takes some ten passes and, while it runs, a copy of parameters, buffers and batch and two sets of
    gradients. An ordinary step costs two hooks and what the failure guard keeps; the device is not synchronised.

    Args:
        target: what to compile. ``"step"``: the whole ``training_step``, so that the compiler sees the loss too;
            ``"forward"``: the module's ``forward``; ``"blocks"``: each repeated block of a ``ModuleList`` or
            ``Sequential``, one compile for all; or a list of submodule names.
        backend: as in ``torch.compile``, a callable too.
        mode: as in ``torch.compile``; ``"auto"`` searches, in the run itself, for the target and the mode that end it
            soonest, and compiles nothing where the run is too short to pay for that.
        dynamic: as in ``torch.compile``.
        fullgraph: as in ``torch.compile``.
        options: as in ``torch.compile``.
        candidates: with ``mode="auto"``, what to try: names as ``"step/reduce-overhead"``, ``"step/default/dynamic"``,
            or mappings with ``target``, ``mode``, ``dynamic``; ``None``: what makes sense here for this module.
        remember: with ``mode="auto"``, keep what has won on disk, so that the next run of the same job begins with it;
            ``compile-profiler cache`` lists and clears what is kept.
        stages: ``("train",)``; add ``"validate"`` to compile ``validation_step`` too.
        warmup_steps: clean compiled steps in a row before the first pair.
        min_speedup: below this speedup of forward and backward the run goes back to eager.
        confidence: of the decision: the share of runs in which a gain or a loss of speed is not claimed wrongly.
        max_pairs: evidence budget of one decision, in pairs; 0 compiles and observes, and never measures.
        pair_every_n_steps: distance between two pairs while undecided, in optimizer steps.
        overhead_budget: share of training time that measuring may take after the decision.
        end_to_end: how the speedup of the whole step is found; ``"off"`` leaves it out.
        drift: ``"fallback"``: results that keep differing beyond the tolerance end in eager; ``"warn"``: they are only
            reported; ``"off"``: results are not compared.
        drift_tolerance: limit on the relative distance of loss and gradients; ``None`` takes it from the dtype.
        drift_reference: ``"float64"`` compares both arms with a double precision run.
        fallback: ``False`` keeps the run compiled whatever the verdict; only errors still go to eager.
        heal: change the compiled target where it is recompiled again and again and that can be mended: ``dynamic=True``
            for a size that varies, a symbolic integer for a number that changes. Data and user code stay as they are.
        seed: of the private coin that orders the arms.
        log: send scalars and texts to the trainer's loggers.
        verbose: print a line at each decision and a table at the end of fit.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value that cannot work.
    """

    def __init__(
        self,
        target: Target | Sequence[str] = "step",
        *,
        backend: str | Callable[..., Any] = "inductor",
        mode: str | None = None,
        dynamic: bool | None = None,
        fullgraph: bool = False,
        options: Mapping[str, Any] | None = None,
        candidates: Sequence[str | Mapping[str, Any]] | None = None,
        remember: bool = True,
        stages: Sequence[str] = ("train",),
        warmup_steps: int = 3,
        min_speedup: float = 1.02,
        confidence: float = 0.95,
        max_pairs: int = 40,
        pair_every_n_steps: int = 5,
        overhead_budget: float = 0.02,
        end_to_end: EndToEndMethod = "estimate",
        drift: DriftPolicy = "fallback",
        drift_tolerance: float | None = None,
        drift_reference: Literal["float64"] | None = None,
        fallback: bool = True,
        heal: bool = False,
        seed: int = 0,
        log: bool = True,
        verbose: bool = True,
    ) -> None:
        super().__init__()
        self._settings = checked(
            target=target,
            options={
                "backend": backend,
                "mode": mode,
                "dynamic": dynamic,
                "fullgraph": fullgraph,
                "options": options,
            },
            candidates=candidates,
            remember=remember,
            stages=stages,
            warmup_steps=warmup_steps,
            min_speedup=min_speedup,
            confidence=confidence,
            max_pairs=max_pairs,
            pair_every_n_steps=pair_every_n_steps,
            overhead_budget=overhead_budget,
            end_to_end=end_to_end,
            drift=drift,
            drift_tolerance=drift_tolerance,
            drift_reference=drift_reference,
            fallback=fallback,
            heal=heal,
            seed=seed,
            log=log,
            verbose=verbose,
        )
        self._session: Session | None = None
        self._export: Export | None = None  # from the start of fit to its end
        self._unseen = False  # a table that nobody has seen
        self._report = Report()
        self._directory: Path | None = None
        self._gave_up = False  # an error of our own has ended the fit's measuring
        self._earlier: dict[str, Any] | None = None  # of the fit before, for a checkpoint or from one

    @property
    def report(self) -> Report:
        """Everything known about the fit at hand, or about the last one."""
        try:
            return self._session.report() if self._session is not None else self._report
        except Exception as error:
            self._give_up(error)
            return self._report

    def __getstate__(self) -> dict[str, Any]:
        """Without the fit at hand: a copy of the callback, or of a module with its trainer, starts afresh."""
        return {**self.__dict__, "_session": None, "_export": None, "_report": self.report}

    # -- hooks -------------------------------------------------------------------------------------------------------

    @functools.partial(_guarded, raises=(ValueError,))
    def setup(self, trainer: host.Trainer, pl_module: host.LightningModule, stage: str) -> None:
        """Check what can be checked before the first step."""
        if stage != "fit":
            return
        self._gave_up = False
        if sum(isinstance(callback, CompileProfiler) for callback in trainer.callbacks) > 1:
            raise ValueError(
                "the Trainer has more than one CompileProfiler; a module can be compiled by one. Keep one."
            )
        for target in self._settings.targets:
            if target != "step":
                submodules(pl_module, target)
        # Here and not when writing: log_dir is a collective that all ranks must call.
        self._directory = Path(trainer.log_dir or trainer.default_root_dir)
        self._report = Report()
        self._earlier = None

    @_guarded
    def on_fit_start(self, trainer: host.Trainer, pl_module: host.LightningModule) -> None:
        """Say what is compiled how, before Lightning logs the user's hyperparameters."""
        assert self._directory is not None
        self._export = Export(trainer, self._directory, log=self._settings.log, verbose=self._settings.verbose)
        self._export.describe(self._settings.config)

    @_guarded
    def on_sanity_check_start(self, trainer: host.Trainer, pl_module: host.LightningModule) -> None:
        """Compile before the first validation step if validation is to be compiled."""
        if "validate" in self._settings.stages:
            self._start(trainer, pl_module)

    @_guarded
    def on_train_start(self, trainer: host.Trainer, pl_module: host.LightningModule) -> None:
        """Compile, once weights are restored and tuners are done."""
        self._start(trainer, pl_module)

    def _start(self, trainer: host.Trainer, pl_module: host.LightningModule) -> None:
        if self._session is None and not self._gave_up:
            assert self._export is not None
            self._session = Session(self._settings, trainer, pl_module, self._export, on_trouble=self._give_up)
            self._session.start(self._earlier)

    @_guarded
    def on_train_batch_start(
        self, trainer: host.Trainer, pl_module: host.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start accounting for a step."""
        if self._session is not None:
            self._session.on_step_start()

    @_guarded
    def on_train_batch_end(
        self, trainer: host.Trainer, pl_module: host.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Account for the step; run a pair on its batch if one is due."""
        if self._session is not None:
            self._session.on_step_end(host.loss_in(outputs))

    @_guarded
    def on_validation_start(self, trainer: host.Trainer, pl_module: host.LightningModule) -> None:
        """Validation leaves caches and clocks in another state than training does."""
        self._disturb()

    @_guarded
    def on_validation_batch_end(
        self,
        trainer: host.Trainer,
        pl_module: host.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Account for what was compiled in validation."""
        if self._session is not None:
            self._session.on_validation_step_end(batch)

    @_guarded
    def on_save_checkpoint(
        self, trainer: host.Trainer, pl_module: host.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """So does writing a checkpoint, which carries what has been found out so far."""
        if self._session is not None:
            self._earlier = self._session.for_checkpoint()
        if self._earlier is not None:
            checkpoint[KEY] = self._earlier
        self._disturb()

    @_guarded
    def on_load_checkpoint(
        self, trainer: host.Trainer, pl_module: host.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take what a checkpoint knows; whether it applies here shows when the fit starts."""
        if self._session is None:
            self._earlier = checkpoint.get(KEY, self._earlier)

    @_guarded
    def on_train_epoch_end(self, trainer: host.Trainer, pl_module: host.LightningModule) -> None:
        """And so does a new epoch, with its loader's workers."""
        self._disturb()

    def _disturb(self) -> None:
        if self._session is not None:
            self._session.on_disturbance()

    @_guarded
    def on_train_end(self, trainer: host.Trainer, pl_module: host.LightningModule) -> None:
        """Take everything off the module, write the report."""
        self._unseen = self._settings.verbose and trainer.is_global_zero and self._session is not None
        self._close(orderly=True)

    @_guarded
    def on_fit_end(self, trainer: host.Trainer, pl_module: host.LightningModule) -> None:
        """Show the report, now that the progress bars are done."""
        if self._unseen:
            print_table(self._report)
        self._unseen = False

    @_guarded
    def on_exception(self, trainer: host.Trainer, pl_module: host.LightningModule, exception: BaseException) -> None:
        """Take everything off the module, write the report."""
        self._close()
        self._export = None

    @_guarded
    def teardown(self, trainer: host.Trainer, pl_module: host.LightningModule, stage: str) -> None:
        """The same where neither of the two was called."""
        self._close()
        if self._export is not None:
            self._export.describe_late(self._settings.config, self._report)
            self._export = None

    def _close(self, *, orderly: bool = False) -> None:
        if self._session is not None:
            self._report = self._session.finish(orderly=orderly)
            self._earlier = self._session.for_checkpoint()
            self._session = None

    def _give_up(self, error: Exception) -> None:
        """After an error of our own: everything off, said once; the run goes on as without the callback."""
        if self._gave_up:
            return
        session, self._session, self._gave_up = self._session, None, True
        verdict, told = after_trouble(error), ""
        if verdict.reason == "disabled":
            told = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            told = f" Please report this:\n{told}"
        if session is not None:
            self._report = session.abandon(verdict)
        elif self._report == Report():  # before the first step; afterwards the report is that of the finished fit
            self._report = Report(verdict=verdict)
        with suppress(Exception):  # warnings that are errors: there is nobody left to tell
            host.warn(f"{verdict.message.removesuffix('.')}; training goes on without it.{told}")
