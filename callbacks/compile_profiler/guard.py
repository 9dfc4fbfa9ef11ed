"""Run a compiled step so that a failing one costs nothing: the same batch is trained in eager instead."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compile_profiler.arms import Call, CompiledArm
from compile_profiler.logs import DeferredLogs
from compile_profiler.manual import OwnSteps
from compile_profiler.reducer import reached
from compile_profiler.sandbox import GENERATORS, RandomState, Snapshot

RECENT_CALLS = 50
"""Calls whose median is the usual time of a call: steps that compile or stall are far fewer."""
LEARNING_STEPS = 3
"""Steps in a row that must change nothing new before a step's state is kept by what it is known to change."""


class Guard:
    """Keeps what a compiled step may change, and gives it back when the step fails.

    A full snapshot on every step is too dear. The first steps take one and find out what a step of this module
    changes: which modules' Python attributes, which buffers, which random numbers, the batch or not. Later steps keep
    only that. Parameters are not cloned (a forward pass that writes its own parameters is found by pairs).

    Whose error it was is settled by the retry: if eager raises too, it is the user's own and is raised from the
    eager code, unchanged.

    Args:
        module: the LightningModule.
        arm: the compiled arm.
        on_failure: called with the error after the batch has been trained in eager.
        on_trouble: called with an error of our own in doing so.
        own_steps: the optimizers that the step moves itself; such a step is retried as a whole, backward included.
        shares: whether other processes wait for each gradient, which must reach them once.
        retries: whether a step may run again as a whole; if not, the arm itself has to fall back.
    """

    name = "compiled"

    def __init__(
        self,
        module: nn.Module,
        arm: CompiledArm,
        on_failure: Callable[[Exception], None],
        on_trouble: Callable[[Exception], None],
        *,
        own_steps: OwnSteps | None = None,
        shares: bool = False,
        retries: bool = True,
    ) -> None:
        self._module = module
        self._arm = arm
        self._on_failure = on_failure
        self._on_trouble = on_trouble
        self._own_steps = own_steps
        self._shares = shares
        self._retries = retries
        self.enabled = True  # False: steps run in eager, as in an eager window
        self._seconds = 0.0
        self._in_steps_s: deque[float] = deque(maxlen=RECENT_CALLS)
        self._in_pairs_s: deque[float] = deque(maxlen=RECENT_CALLS)
        self._learning = LEARNING_STEPS
        self._known = _Known()
        self._owners: list[nn.Module] = []
        self._saved_buffers: list[_Group] = []
        self._kept_buffers = False
        self._state: Snapshot | None = None
        self._random: RandomState | None = None
        self._parameters = list(module.parameters())
        self._call: tuple[str, tuple[Any, ...], dict[str, Any]] | None = None

    @property
    def logs(self) -> DeferredLogs:
        """Those of the arm."""
        return self._arm.logs

    @property
    def _device(self) -> torch.device:
        return self._parameters[0].device if self._parameters else torch.device("cpu")

    def forward(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        """Run the step method ``hook`` compiled, or in eager if that fails."""
        self._call = None
        # What a step that fails before anything is kept would be given back: nothing.
        self._state, self._random, self._kept_buffers = None, None, False
        if not self.enabled:
            return getattr(self._module, hook)(*args, **kwargs)
        if not self._retries:
            output = self._arm.call(hook, *args, **kwargs)
            for log in self._arm.logs.taken(self._module):
                log()
            return output
        try:
            began_s = time.perf_counter()
            self._keep(args, kwargs)
            if self._own_steps is not None:
                self._own_steps.keep()
            kept_s = time.perf_counter()
            output = self._arm.call(hook, *args, **kwargs)
            ended_s = time.perf_counter()
            self._in_steps_s.append(ended_s - kept_s)
            logs: list[Call] = []
            try:
                logs = self._arm.logs.taken(self._module)
                if self._learning:
                    self._learn()
            except Exception as error:
                if self._own_steps is None:
                    raise
                logs = logs or self._arm.logs.plainly_taken(self._module)
                self._on_trouble(error)  # the optimizers have moved: the step is done
            self._seconds += kept_s - began_s + time.perf_counter() - ended_s
            for log in logs:
                log()
        except Exception as error:
            failure = error
        else:
            self._call = (hook, args, kwargs)
            return output
        # Outside the except block, so that an error of the user's own carries no foreign __context__.
        retry, trouble = ExitStack(), None
        for _ in range(2):  # out of memory, say, half-way: half a state is the worst to train on
            try:
                self._rewind(failure)
                break
            except Exception as error:
                trouble = error
        try:
            if self._own_steps is not None:
                retry.enter_context(self._own_steps.again())
        except Exception as error:
            trouble = error
        with retry:
            output = getattr(self._module, hook)(*args, **kwargs)
        try:
            self._settle(failure, trouble)
        except Exception as error:
            self._on_trouble(error)
        return output

    def backward(
        self, run: Call, loss: Tensor, *others: Any, eager_loss: Callable[..., Tensor], **options: Any
    ) -> None:
        """Run backward of the step that ``forward`` ran; if that fails, forward and backward in eager.

        Args:
            run: the backward pass, called with a loss and the arguments below.
            loss: the compiled step's loss.
            *others: further arguments of ``run``.
            eager_loss: the loss for backward, computed by the user's own step from the arguments of ``forward``.
            **options: further arguments of ``run``.
        """
        if self._call is None:  # an eager step, or one that failed in forward
            run(loss, *others, **options)
            return
        (_, args, kwargs), self._call = self._call, None
        gradients: list[tuple[Tensor, int] | None] = []
        trouble = None
        try:
            # The plainest loop that tells it: on every step it comes to every parameter.
            gradients = [None if (g := p.grad) is None else (g, g._version) for p in self._parameters]
            run(loss, *others, **options)
        except Exception as error:
            failure = error
        else:
            return
        del loss  # and with it what the failed pass holds: there may be no room for both
        bring_back = None
        for _ in range(2):
            try:
                bring_back = self._rewind(failure)
                break
            except Exception as error:
                trouble = error
        loss = eager_loss(*args, **kwargs)
        if bring_back is not None:
            bring_back()
        # None where taking them has failed.
        before = [(p, *(kept or (None, 0))) for p, kept in zip(self._parameters, gradients, strict=False)]
        if self._shares:
            # What has come has been handed on already; the other processes wait for the rest, once.
            late = {id(p) for p, gradient, version in before if not _has_come(p, gradient, version)}
            rest = [leaf for leaf in reached(loss) if id(leaf) in late]
            if rest or not before:
                run(loss, *others, **options, **({"inputs": rest} if len(late) < len(before) else {}))
        else:
            complete = []
            for parameter, gradient, version in before:
                if gradient is not None and gradient._version != version:
                    # Autograd adds to a leaf once in a pass, and all of it: this one had its share before the failure.
                    complete.append((parameter, gradient))
                    gradient = None
                parameter.grad = gradient
            run(loss, *others, **options)
            for parameter, gradient in complete:
                parameter.grad = gradient
        try:
            self._settle(failure, trouble)
        except Exception as error:
            self._on_trouble(error)

    def _settle(self, failure: Exception, trouble: Exception | None) -> None:
        """The batch has been trained in eager: say why, and so what becomes of the rest of the run."""
        if trouble is None:
            self._on_failure(failure)
        else:
            self._on_trouble(trouble)

    def run(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        """Run the step as the compiled arm of a pair: at the price of a real one, with what is kept for a retry."""
        self._keep(args, kwargs)
        began_s = time.perf_counter()
        output = self._arm.run(hook, *args, **kwargs)
        self._in_pairs_s.append(time.perf_counter() - began_s)
        self._learn()  # an arm that no step has run on yet
        return output

    def take_seconds(self) -> float:
        """Seconds spent on keeping since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def forget(self) -> None:
        """Let go of what is kept for a retry: no step runs here any more."""
        self._state, self._random, self._call, self._kept_buffers = None, None, None, False
        self._saved_buffers, self._known, self._learning = [], _Known(), LEARNING_STEPS

    @property
    def coldness(self) -> float | None:
        """How much longer Python is in the compiled call of a real step than in a pair's, ``None`` while not known.

        Passes in a row find caches and predictors warm. Between two real steps the optimizer, the loader and Lightning
        have passed through them.
        """
        if not self._in_steps_s or not self._in_pairs_s:
            return None
        return statistics.median(self._in_steps_s) / statistics.median(self._in_pairs_s)

    # -- keeping and giving back -----------------------------------------------------------------------------------

    def _keep(self, args: Any, kwargs: Any) -> None:
        self._state, self._random, self._kept_buffers = None, None, False
        known = self._known
        if not self._learning and self._saved_buffers and not self._copy_buffers():
            self._learning = LEARNING_STEPS
        if self._learning:
            self._random = RandomState(self._device, GENERATORS)
            self._state = Snapshot([self._module, args, kwargs], parameters=False)
            return
        if known.draws:
            self._random = RandomState(self._device, known.draws)
        if self._owners or known.batch:
            roots = [*self._owners, *((args, kwargs) if known.batch else ())]
            self._state = Snapshot(roots, parameters=False, tensors=known.tensors, submodules=False)

    def _copy_buffers(self) -> bool:
        """Keep the buffers that steps write, a launch or two in all; ``False`` if one has another shape by now."""
        try:
            with torch.no_grad():
                for group in self._saved_buffers:
                    torch._foreach_copy_(group.values, group.buffers)
        except RuntimeError:
            return False
        self._kept_buffers = True
        return True

    def _learn(self) -> None:
        """After a good forward pass: what did it change, is any of that new?"""
        if self._state is None or self._random is None:
            return
        known, size_before = self._known, self._known.size()
        buffers = {id(buffer): buffer for buffer in self._module.buffers()}
        for target, owner in self._state.changed():
            if id(target) in buffers:
                known.buffers[id(target)] = target
                continue
            if isinstance(owner, nn.Module):
                known.owners[id(owner)] = owner
            else:
                known.batch = True
            known.tensors |= isinstance(target, Tensor)
        known.draws |= self._random.moved()
        self._state.forget_unchanged()  # hooks that run before backward may change more: that stays
        self._learning = self._learning - 1 if known.size() == size_before else LEARNING_STEPS - 1
        if not self._learning:
            self._owners = list(known.owners.values())
            self._saved_buffers = _grouped(known.buffers.values())

    def _rewind(self, failure: Exception) -> Callable[[], None]:
        """Give back what was kept; returns what to call after the retry (see ``Snapshot.rewind``)."""
        _drop_frames(failure)
        self._arm.logs.entries.clear()
        bring_back = self._state.rewind() if self._state is not None else _nothing
        if self._kept_buffers:
            with torch.no_grad():
                for group in self._saved_buffers:
                    for buffer, value in zip(group.buffers, group.values, strict=True):
                        buffer.data.copy_(value)
        if self._random is not None:
            self._random.restore()
        return bring_back


@dataclass(slots=True)
class _Known:
    """What the steps of a module have been seen to change."""

    owners: dict[int, nn.Module] = field(default_factory=dict)
    """Modules with Python attributes that change."""
    buffers: dict[int, Tensor] = field(default_factory=dict)
    draws: set[str] = field(default_factory=set)
    batch: bool = False
    tensors: bool = False
    """Whether tensors that are no buffers are written in place."""

    def size(self) -> int:
        return len(self.owners) + len(self.buffers) + len(self.draws) + self.batch + self.tensors


class _Group(NamedTuple):
    """Buffers of one dtype and device, which torch copies together, with room for their values."""

    buffers: list[Tensor]
    values: list[Tensor]


def _grouped(buffers: Iterable[Tensor]) -> list[_Group]:
    groups: dict[tuple[torch.dtype, torch.device], _Group] = {}
    for buffer in buffers:
        group = groups.setdefault((buffer.dtype, buffer.device), _Group([], []))
        group.buffers.append(buffer)
        group.values.append(torch.empty_like(buffer))
    return list(groups.values())


def _has_come(parameter: nn.Parameter, before: Tensor | None, version: int) -> bool:
    """Whether backward has added to this parameter's gradient: all at once, as autograd does for a leaf."""
    return parameter.grad is not before or (before is not None and before._version != version)


def _nothing() -> None:
    pass


def _drop_frames(error: Exception) -> None:
    """Take the tracebacks off, whose frames hold every tensor of the failed pass."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
