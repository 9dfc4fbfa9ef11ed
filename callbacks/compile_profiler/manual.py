"""Let a step that moves its optimizers itself run more than once while every optimizer moves once."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from compile_profiler.arms import Call, patched
from compile_profiler.sandbox import Snapshot

Take = Callable[[Iterable[nn.Parameter]], None]
"""Called with the parameters that an optimizer would move now, for their gradients to be read."""


class Counted:
    """A call that is made the first time a step of training runs, and replaced when the step runs again.

    Args:
        call: the call.
        instead: what takes its place.
    """

    def __init__(self, call: Call, instead: Call) -> None:
        self._call = call
        self._instead = instead
        self.num_made = 0
        self.num_to_replace: float = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The call, or what takes its place."""
        if self.num_to_replace > 0:
            self.num_to_replace -= 1
            return self._instead(*args, **kwargs)
        self.num_made += 1
        return self._call(*args, **kwargs)


class OwnSteps:
    """The optimizers and schedulers that a training step moves itself.

    It finds them by torch's own hook on every optimizer's step, so that those count, too, which Lightning has never
    heard of. When the step is to run without moving anything, stand-ins are put on the optimizers that are known by
    then; what another one does then, such as one that the step makes for an inner loop, is undone. Schedulers are
    muted by class.

    Args:
        module: the LightningModule.
        wrapped: gives the optimizers as the step sees them, each with the torch optimizer behind it.
        schedulers: those that Lightning knows.
        hooks: calls beside the steps that a second run of the training step shall not repeat.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        wrapped: Callable[[], Iterable[tuple[Any, Any]]],
        schedulers: Iterable[Any],
        hooks: Sequence[Counted],
    ) -> None:
        self._wrapped = wrapped
        self._hooks = hooks
        self._parameters = list(module.parameters())  # once: walking the modules at every step is slow
        self._schedulers = [*schedulers, *_attached(module, LRScheduler)]
        self._scalers = list(_attached(module, torch.amp.GradScaler))
        self._seen: WeakSet[Optimizer] = WeakSet(_attached(module, Optimizer))
        self._undo = ExitStack()
        self._in_batch = False
        self._trouble: Exception | None = None  # our own, in the midst of an optimizer's step
        self._num_made: Counter[int] = Counter()  # steps of this batch, by optimizer
        # By parameter, the gradient that an optimizer has used last, as identity and version.
        self._used: dict[int, tuple[int, int]] = {}
        self._visitors: dict[int, Snapshot] | None = None  # optimizers that are not known, in a run that moves nothing
        self._flags: list[bool] = []
        # By parameter, its gradient before the step and a copy, for a step that adds to it.
        self._gradients: list[tuple[nn.Parameter, Tensor | None, Tensor | None]] = []
        self._epochs: list[tuple[Any, int]] = []

    def open(self) -> None:
        """Listen to the optimizers of the process."""
        self._undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._undo.callback(register_optimizer_step_post_hook(self._after_step).remove)

    def close(self) -> None:
        """Stop that; may be called twice."""
        self._undo.close()
        self._flags, self._gradients, self._epochs = [], [], []

    @property
    def stepped(self) -> bool:
        """Whether an optimizer has moved in the batch at hand, so that its gradients have been used."""
        return bool(self._num_made)

    def roots(self) -> list[Any]:
        """What else a step can change: options of optimizers, schedulers, scalers."""
        return [*(optimizer.param_groups for optimizer in self._seen), *self._schedulers, *self._scalers]

    # -- a batch of training -----------------------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """Before the training step of one batch: what it moves is counted."""
        self._num_made.clear()
        for hook in self._hooks:
            hook.num_made = 0
        self._in_batch = True

    def end_batch(self) -> None:
        """After it.

        Raises:
            Exception: our own, of the midst of an optimizer's step.
        """
        self._in_batch = False
        self._flags, self._gradients, self._epochs = [], [], []
        if self._trouble is not None:
            raise self._trouble

    def keep(self) -> None:
        """Remember what ``again`` gives back.

        Gradients that have been written since an optimizer used them are copied: the step will add to them. The others
        are left to the step, which zeroes them first; to hold them would cost the memory that it frees by that.
        """
        self._flags = [parameter.requires_grad for parameter in self._parameters]
        self._gradients = []
        used = self._used
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is None:
                self._gradients.append((parameter, None, None))
            elif used.get(id(parameter)) != (id(gradient), gradient._version):
                self._gradients.append((parameter, gradient, gradient.detach().clone()))
        self._epochs = [(scheduler, _epoch(scheduler)) for scheduler in self._schedulers]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around a second run of the training step whose first run has failed: what has been done is left out.

        Gradients and ``requires_grad`` are those before the step. An optimizer or scheduler that moved in the first
        run does so as many times less in the second, and no hook that has been called is called again.
        """
        for parameter, flag in zip(self._parameters, self._flags, strict=False):
            parameter.requires_grad_(flag)
        for parameter, gradient, value in self._gradients:
            if gradient is not None and value is not None:
                gradient.data.copy_(value)
            parameter.grad = gradient
        left = Counter(self._num_made)
        left.update({id(scheduler): _epoch(scheduler) - epoch for scheduler, epoch in self._epochs})
        for hook in self._hooks:
            hook.num_to_replace = hook.num_made

        try:
            with self._replaced(left, lambda _parameters: None):
                yield
        finally:
            for hook in self._hooks:
                hook.num_to_replace = 0

    # -- a pair ------------------------------------------------------------------------------------------------------

    @contextmanager
    def muted(self, take: Take) -> Iterator[None]:
        """Around a run of the training step that moves nothing and calls no hook.

        Args:
            take: called wherever an optimizer would have moved.
        """
        for hook in self._hooks:
            hook.num_to_replace = math.inf
        self._visitors = {}
        try:
            with self._replaced(None, take):
                yield
        finally:
            visitors, self._visitors = self._visitors, None
            for visitor in visitors.values():
                visitor.restore()
            for hook in self._hooks:
                hook.num_to_replace = 0

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._visitors is not None and id(optimizer) not in self._visitors:
            self._visitors[id(optimizer)] = Snapshot([optimizer])

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._in_batch:
            self._num_made[id(optimizer)] += 1
            try:
                self._seen.add(optimizer)
                for parameter in _parameters_of(optimizer):
                    if (gradient := parameter.grad) is not None:
                        self._used[id(parameter)] = id(gradient), gradient._version
            except Exception as error:
                self._trouble = error

    @contextmanager
    def _replaced(self, left: Counter[int] | None, take: Take) -> Iterator[None]:
        """Optimizers and schedulers whose steps are left out: so many of each that is named, or, of ``None``, all."""

        def standing_in(step: Call, optimizer: Any) -> Call:
            def stand_in(*args: Any, **kwargs: Any) -> Any:
                if left is not None:
                    left[id(optimizer)] -= 1
                    if left[id(optimizer)] < 0:
                        return step(*args, **kwargs)
                closure = args[0] if args else kwargs.get("closure")
                result = None if closure is None else closure()  # it computes the gradients that would be used now
                take(_parameters_of(optimizer))
                return result

            return functools.update_wrapper(stand_in, step)  # a scheduler looks for its mark on the step

        known = {id(optimizer): (optimizer, optimizer) for optimizer in self._seen}
        known.update({id(wrapper): (wrapper, optimizer) for wrapper, optimizer in self._wrapped()})
        patches = [(wrapper, "step", standing_in(wrapper.step, optimizer)) for wrapper, optimizer in known.values()]
        with patched(patches), _schedulers_asked(left):
            yield


@contextmanager
def _schedulers_asked(left: Counter[int] | None) -> Iterator[None]:
    """Schedulers of every class ask before each step whether to leave it out.

    By class, because nothing tells which scheduler objects a step can reach.
    """

    def asking(step: Call) -> Call:
        def stand_in(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if left is not None:
                left[id(scheduler)] -= 1
                if left[id(scheduler)] < 0:
                    return step(scheduler, *args, **kwargs)
            return None

        return functools.update_wrapper(stand_in, step)

    steps = [(kind, vars(kind)["step"]) for kind in _with_subclasses(LRScheduler) if "step" in vars(kind)]
    try:
        for kind, step in steps:
            kind.step = asking(step)
        yield
    finally:
        for kind, step in steps:
            kind.step = step


def _with_subclasses(kind: type[Any]) -> set[type[Any]]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def _attached(module: nn.Module, kind: type[Any]) -> Iterator[Any]:
    """Objects of a class that hang on the module or a submodule, also in a list or a dict."""
    for submodule in module.modules():
        for value in vars(submodule).values():
            items = (
                value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
            )
            yield from (item for item in items if isinstance(item, kind))


def _parameters_of(optimizer: Any) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _epoch(scheduler: Any) -> int:
    return int(getattr(scheduler, "last_epoch", 0))
