"""Where a step passes from the Trainer to the module, and its loss back into ``backward``.

Names checked on lightning 2.5 to 2.6.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from compile_profiler import host
from compile_profiler.arms import Arm, Call, EagerArm, called_once, disguised, patched
from compile_profiler.clock import PassTimer
from compile_profiler.guard import Guard
from compile_profiler.logs import DeferredLogs
from compile_profiler.manual import Counted, OwnSteps, Take
from compile_profiler.reducer import Relay, compiling_for, shares_gradients
from compile_profiler.scaling import LossScale


class NoLossError(RuntimeError):
    """The step returned no loss for this batch, so there is no backward pass to time."""


ATOMS_OF_A_BATCH = frozenset({Tensor, bool, int, float, str, type(None)})
"""Classes of what hangs in a batch as it is; told first, because every step passes here."""


class StepDoor:
    """Where a step passes from the Trainer to the module and its loss back into ``backward``.

    Between ``open`` and ``close`` the strategy's step methods and the precision plugin's ``backward`` pass through
    here. What the Trainer and other callbacks see of the module stays as its author wrote it: a stand-in for the step
    is on it only from the strategy to the call.

    Args:
        trainer: the Trainer.
        module: its LightningModule.
        on_trouble: called with an error of our own; it takes the door off.
        overwrites_gradients: whether the compiled arm replays CUDA graphs, whose next run writes into the memory that
            the gradients of the last one live in.
    """

    def __init__(
        self,
        trainer: host.Trainer,
        module: host.LightningModule,
        *,
        on_trouble: Callable[[Exception], None],
        overwrites_gradients: bool = False,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._on_trouble = on_trouble
        self._overwrites_gradients = overwrites_gradients
        self._undo = ExitStack()
        self._strategy_step: Call = trainer.strategy.training_step
        self._strategy_validation: Call = trainer.strategy.validation_step
        self._precision_backward: Call = trainer.strategy.precision_plugin.backward
        self._callbacks: list[Any] = list(trainer.callbacks)
        self._is_open = False
        self.scale = LossScale(getattr(trainer.strategy.precision_plugin, "scaler", None))
        self.last_call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.last_validation_call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._seconds = 0.0
        self.own_steps = None if module.automatic_optimization else self._new_own_steps()
        wrapper = trainer.strategy.model
        self._ddp = wrapper if isinstance(wrapper, DistributedDataParallel) else None
        self.watch: AbstractContextManager[Any] | None = None  # around training steps that run in eager
        self.passes: PassTimer | None = None  # of the passes of real steps
        self._relay: Relay | None = None  # in passes that all ranks make together
        self.before_step: Callable[[], None] | None = None  # called before each training step, with ``last_call`` set
        self._own_losses: list[Tensor] = []  # that a step has run backward from, in a pair

    def at_boundary(self) -> bool:
        """Whether the batch at hand ended with an optimizer step, so that no accumulation window is open."""
        if self.own_steps is not None:
            return self.own_steps.stepped
        trainer = self._trainer
        return trainer.accumulate_grad_batches == 1 or not trainer.fit_loop._should_accumulate()

    def open(self, guards: Mapping[str, Guard]) -> None:
        """Let each of these step methods run under its guard."""
        strategy, precision = self._trainer.strategy, self._trainer.strategy.precision_plugin
        patches: list[tuple[Any, str, Any]] = [
            (strategy, hook, self._entry(hook, getattr(strategy, hook), guard)) for hook, guard in guards.items()
        ]
        if self.own_steps is None:
            backward = guards["training_step"].backward
            through = functools.partial(backward, self._precision_backward, eager_loss=self._eager_loss)
            patches.append((precision, "backward", self._exit(through)))
        else:
            patches += [(precision, name, hook) for name, hook in self._backward_hooks.items()]
            patches.append((precision, "backward", self._exit(self._precision_backward)))
            self.own_steps.open()
            self._undo.callback(self.own_steps.close)
        self._undo.enter_context(patched(patches))
        self._is_open = True

    def close(self) -> None:
        """Take everything off again; may be called twice."""
        self._undo.close()
        self._is_open = False
        self.last_call = self.last_validation_call = None

    def _entry(self, hook: str, step: Call, guard: Guard) -> Call:
        run = functools.partial(guard.forward, hook)

        def enter(*args: Any, **kwargs: Any) -> Any:
            began_s, is_ours = time.perf_counter(), False
            try:
                is_ours = self._prepare(hook, args, kwargs)
            except Exception as error:
                self._on_trouble(error)
            self._seconds += time.perf_counter() - began_s
            if not is_ours:
                return step(*args, **kwargs)
            if hook != "training_step":
                return called_once(self._module, hook, run, step, *args, **kwargs)
            this = run if self.watch is None else self._eager_step
            if self.own_steps is None:
                return called_once(self._module, hook, this, step, *args, **kwargs)
            try:
                self.own_steps.begin_batch()
            except Exception as error:
                self._on_trouble(error)
                return step(*args, **kwargs)
            try:
                return called_once(self._module, hook, this, step, *args, **kwargs)
            finally:
                try:
                    self.own_steps.end_batch()
                except Exception as error:
                    self._on_trouble(error)

        return enter

    def _prepare(self, hook: str, args: Any, kwargs: Any) -> bool:
        """Before a step of the trainer's; whether it is one of ours."""
        if self._trainer.callbacks != self._callbacks and self._tuner_is_at_work():
            return False
        call = (_repacked(args), _repacked(kwargs) if kwargs else {})
        if hook != "training_step":
            self.last_validation_call = call
            return True
        self.last_call = call
        if self.before_step is not None:
            self.before_step()
        if self.passes is not None and self.own_steps is None:  # such a step may run backward any number of times
            self.passes.start()
        return self._is_open

    def take_seconds(self) -> float:
        """Seconds that steps have spent in the door since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def run_instead(self, watch: AbstractContextManager[Any] | None) -> None:
        """Let training steps run in eager inside this context; ``None``: as before."""
        self.watch = watch

    def _eager_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's own step under watch; its logs, which may be collective, wait until it is over."""
        assert self.watch is not None
        logs = DeferredLogs()
        with patched(disguised(self._module, logs.stand_ins)), self.watch:
            output = self._module.training_step(*args, **kwargs)
        for log in logs.taken(self._module):
            log()
        return output

    def _tuner_is_at_work(self) -> bool:
        """Whether these are the trial steps of a tuner, during a fit: it puts all callbacks aside."""
        return not any(callback in self._callbacks for callback in self._trainer.callbacks)

    def _new_own_steps(self) -> OwnSteps:
        trainer, strategy = self._trainer, self._trainer.strategy
        # Where manual_backward calls the hooks of callbacks and module; all that it does beside is to scale.
        precision = strategy.precision_plugin
        self._backward_hooks = {
            "pre_backward": Counted(precision.pre_backward, self._own_loss),
            "post_backward": Counted(precision.post_backward, lambda tensor, _module: tensor.detach()),
        }

        def wrapped() -> Iterator[tuple[Any, Any]]:
            yield from ((wrapper, wrapper.optimizer) for wrapper in strategy._lightning_optimizers)
            yield from ((optimizer, optimizer) for optimizer in trainer.optimizers)

        return OwnSteps(
            self._module,
            wrapped=wrapped,
            schedulers=[config.scheduler for config in trainer.lr_scheduler_configs],
            hooks=list(self._backward_hooks.values()),
        )

    def _own_loss(self, tensor: Tensor, _module: Any) -> Tensor:
        self._own_losses.append(tensor.detach())
        return self._by_scaler(tensor)

    def _exit(self, through: Call) -> Call:
        """The precision plugin's ``backward``, which goes ``through`` this."""

        def backward(*args: Any, **kwargs: Any) -> None:
            fresh: list[nn.Parameter] = []
            if self._overwrites_gradients:
                try:
                    fresh = self._without_gradient()
                except Exception as error:
                    self._on_trouble(error)
            through(*args, **kwargs)
            if fresh or self.passes is not None:
                try:
                    self._keep_gradients(fresh)
                    if self.passes is not None:
                        self.passes.stop()
                except Exception as error:
                    self._on_trouble(error)

        return backward

    def _without_gradient(self) -> list[nn.Parameter]:
        """Before backward: parameters whose new gradient must not stay where a CUDA graph puts it."""
        # A step that runs backward itself may do so again before it uses what it has got.
        if not self._overwrites_gradients or (self.own_steps is None and self.at_boundary()):
            return []
        return [parameter for parameter in self._module.parameters() if parameter.grad is None]

    def _keep_gradients(self, fresh: Iterable[nn.Parameter]) -> None:
        """After backward: move their gradients out of a CUDA graph's memory, for a window that goes on to its replay.

        Left there they are gone by the next step (PyTorch issue 169545), and eager cannot add to them either.
        """
        for parameter in fresh:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def _eager_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of the user's own step, without a second round of hooks and logs."""
        with self._trainer.strategy.precision_plugin.train_step_context():
            output = EagerArm(self._module).run("training_step", *args, **kwargs)
        return self._scaled(loss_of(output))

    def _scaled(self, loss: Tensor) -> Tensor:
        """As the closure and the precision plugin scale a loss before ``backward``."""
        return self._by_scaler(loss / self._trainer.accumulate_grad_batches)

    def _by_scaler(self, loss: Tensor) -> Tensor:
        return self.scale.of(loss)

    def one_pass(
        self, arm: Arm, parameters: Iterable[nn.Parameter], take: Take, *args: Any, **kwargs: Any
    ) -> Tensor | None:
        """Forward and backward of one batch as in training, without hooks, logging and optimizer step.

        Gradients are set to ``None`` between the two, where Lightning does it. Under manual optimization the whole
        step of the user's is run, which does that itself, and ``take`` is called wherever it steps an optimizer.

        Returns:
            The detached loss as the step returned it, a scalar. Under manual optimization the sum of all that it ran
            backward from if it returned none, and ``None`` if that cannot be seen either.

        Raises:
            NoLossError: the step returned none and left backward to Lightning.
        """
        # No torch.compiler.cudagraph_mark_step_begin() here: once anybody in the process has called it, torch relies on
        # it alone, and the real steps, which do not call it, would never start a new generation again.
        with torch.enable_grad():
            run: Call = functools.partial(arm.run, "training_step")
            if self._relay is not None:
                run = self._relay.step(run)
            through: Call = functools.partial(called_once, self._module, "training_step", run, self._strategy_step)
            if self.own_steps is not None:
                return self._own_pass(self.own_steps, take, through, *args, **kwargs)
            loss = loss_of(through(*args, **kwargs))
            for parameter in parameters:
                parameter.grad = None
            optimizer = self._trainer.optimizers[0] if self._trainer.optimizers else None
            backward: Callable[[Tensor], None] = functools.partial(
                self._precision_backward, model=self._module, optimizer=optimizer
            )
            if self._relay is not None:
                self._relay.backward(backward, self._scaled(loss))
            else:
                backward(self._scaled(loss))
        return loss.detach()

    @property
    def shares_gradients(self) -> bool:
        """Whether gradients live in memory that the next pass writes."""
        return shares_gradients(self._ddp)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Passes that wait for no other rank: past DDP's wrapper, which is what adds up gradients.

        The reducer hears nothing of them: it expects gradients only after a forward pass of the wrapper.
        """
        if self._ddp is None:
            yield
            return
        with patched([(self._trainer.strategy, "_model", self._module)]), compiling_for(self._ddp):
            yield

    @contextmanager
    def together(self) -> Iterator[Callable[[], Exception | None]]:
        """Passes that all ranks make together, to their end even where one fails; yields what has failed here."""
        if self._ddp is None:
            yield lambda: None
            return
        self._relay = Relay(list(self._module.parameters()), loss_of)
        try:
            yield self._relay.failure
        finally:
            self._relay = None

    def plain_pass(self, take: Take, *args: Any, **kwargs: Any) -> Tensor | None:
        """Forward and backward of the user's own step in the module's dtype, without autocast.

        Returns:
            What ``one_pass`` returns; gradients are scaled as there.
        """
        step = functools.partial(EagerArm(self._module).run, "training_step")
        with torch.enable_grad(), torch.autocast(self._trainer.strategy.root_device.type, enabled=False):
            if self.own_steps is not None:
                return self._own_pass(self.own_steps, take, step, *args, **kwargs)
            loss = loss_of(step(*args, **kwargs))
            self._module.backward(self._scaled(loss))
        return loss.detach()

    def validation_pass(self, arm: Arm, *args: Any, **kwargs: Any) -> Any:
        """One validation step, in the trainer's precision; its output."""
        run = functools.partial(arm.run, "validation_step")
        return called_once(self._module, "validation_step", run, self._strategy_validation, *args, **kwargs)

    def gradient_scale(self) -> float:
        """By how much gradients are larger than those of the loss that the step returned; waits for the device."""
        return self.scale.read() / (1 if self.own_steps is not None else self._trainer.accumulate_grad_batches)

    def _own_pass(self, own_steps: OwnSteps, take: Take, step: Call, *args: Any, **kwargs: Any) -> Tensor | None:
        """A step that runs backward itself, moving nothing."""
        self._own_losses.clear()
        with own_steps.muted(take):
            output = step(*args, **kwargs)
        try:
            return loss_of(output).detach()
        except NoLossError:
            return torch.stack(self._own_losses).sum() if self._own_losses else None
        finally:
            self._own_losses.clear()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Loggers that swallow everything, for what a step sends to ``self.logger`` directly."""
        silent = [host.silent_logger(self._trainer) for _ in self._trainer.loggers]
        with patched([(self._trainer, "_loggers", silent)]):
            yield

    def roots(self) -> list[Any]:
        """What a step could write beside the module: the optimizers' parameter groups."""
        own = [] if self.own_steps is None else self.own_steps.roots()
        return [*(optimizer.param_groups for optimizer in self._trainer.optimizers), *own]


def loss_of(output: Any) -> Tensor:
    """The loss in the output of a ``training_step``.

    Raises:
        NoLossError: there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise NoLossError(f"training_step returned {type(output).__name__} without a loss")
    return loss


def _repacked(batch: Any) -> Any:
    """The same tensors in containers of our own: a step may pop from its batch, a pair needs it whole."""
    kind = type(batch)
    if kind is dict:
        return {key: value if type(value) in ATOMS_OF_A_BATCH else _repacked(value) for key, value in batch.items()}
    if kind is list or kind is tuple:
        return kind([item if type(item) in ATOMS_OF_A_BATCH else _repacked(item) for item in batch])
    return copy.copy(batch) if isinstance(batch, (MutableMapping, MutableSequence)) else batch
