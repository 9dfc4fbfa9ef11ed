"""Run a compiled step so that a failing one costs nothing: the same batch is trained in eager instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from compile_profiler.arms import CompiledArm
from compile_profiler.sandbox import GENERATORS, RandomState, Snapshot

LEARNING_STEPS = 3
"""Steps in a row that must change nothing new before a step's state is kept by what it is known to change."""


class Guard:
    """Keeps what a compiled step may change, and gives it back when the step fails.

    A full snapshot on every step is too dear. The first steps take one and find out what a step of this module
    changes: which modules' Python attributes, which buffers, which random numbers, the batch or not. Later steps keep
    only that. Parameters and their gradients are not cloned (a forward pass that writes its own parameters is found by
    pairs); gradients of an accumulation window are kept while the guard is learning.

    Whose error it was is settled by the retry: if eager raises too, it is the user's own and is raised from the
    eager code, unchanged.

    Args:
        module: the LightningModule.
        arm: the compiled arm.
        on_failure: called with the error after the batch has been trained in eager.
    """

    def __init__(self, module: nn.Module, arm: CompiledArm, on_failure: Callable[[Exception], None]) -> None:
        self._module = module
        self._arm = arm
        self._on_failure = on_failure
        self.enabled = True  # False: steps run in eager, as in an eager window
        self._learning = LEARNING_STEPS
        self._owners: dict[int, Any] = {}
        self._buffers: dict[int, Tensor] = {}
        self._saved_buffers: list[Tensor] = []
        self._writes_batch = False
        self._draws: set[str] = set()
        self._state: Snapshot | None = None
        self._random: RandomState | None = None
        self._gradients: list[tuple[Tensor, Tensor | None, Tensor | None]] = []
        self._parameters = list(module.parameters())
        self._call: tuple[str, tuple[Any, ...], dict[str, Any]] | None = None

    @property
    def _device(self) -> torch.device:
        return self._parameters[0].device if self._parameters else torch.device("cpu")

    def forward(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        """Run the step method ``hook`` compiled, or in eager if that fails."""
        if not self.enabled:
            self._call = None
            return getattr(self._module, hook)(*args, **kwargs)
        self._keep(args, kwargs)
        try:
            output = self._arm.run_and_log(hook, *args, **kwargs)
        except Exception as error:
            failure = error
        else:
            self._learn()
            self._call = (hook, args, kwargs)
            return output
        # Outside the except block, so that an error of the user's own carries no foreign __context__.
        self._give_back()
        output = getattr(self._module, hook)(*args, **kwargs)
        self._on_failure(failure)
        return output

    def backward(self, run: Callable[[Tensor], None], loss: Tensor, eager_loss: Callable[..., Tensor]) -> None:
        """Run backward of the step that ``forward`` ran; if that fails, forward and backward in eager.

        Args:
            run: the backward pass for a given loss.
            loss: the compiled step's loss.
            eager_loss: the loss for backward, computed by the user's own step from the arguments of ``forward``.
        """
        if self._call is None:  # an eager step, or one that failed in forward
            return run(loss)
        (_, args, kwargs), self._call = self._call, None
        self._keep_gradients()
        try:
            run(loss)
        except Exception as error:
            failure = error
        else:
            self._gradients.clear()
            return None
        self._give_back()
        for parameter, gradient, value in self._gradients:
            parameter.grad = gradient
            if gradient is not None and value is not None:
                gradient.copy_(value)
        self._gradients.clear()
        run(eager_loss(*args, **kwargs))
        self._on_failure(failure)
        return None

    # -- keeping and giving back -----------------------------------------------------------------------------------

    def _keep(self, args: Any, kwargs: Any) -> None:
        self._call = None
        if self._learning:
            self._random = RandomState(self._device, GENERATORS)
            self._state = Snapshot([self._module, args, kwargs], parameters=False)
            return
        self._random = RandomState(self._device, self._draws)
        roots = [*self._owners.values(), *((args, kwargs) if self._writes_batch else ())]
        self._state = Snapshot(roots, parameters=False, submodules=False) if roots else None
        if self._buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._saved_buffers, list(self._buffers.values()))

    def _learn(self) -> None:
        """After a good forward pass: what did it change, is any of that new?"""
        if not self._learning or self._state is None or self._random is None:
            return
        known = (len(self._owners), len(self._buffers), self._writes_batch, len(self._draws))
        buffers = {id(buffer): buffer for buffer in self._module.buffers()}
        for target, owner in self._state.changed():
            if id(target) in buffers:
                self._buffers[id(target)] = target
            elif isinstance(owner, nn.Module):
                self._owners[id(owner)] = owner
            else:
                self._writes_batch = True
        self._draws |= self._random.moved()
        self._state.forget_unchanged()  # hooks that run before backward may change more: that stays
        nothing_new = known == (len(self._owners), len(self._buffers), self._writes_batch, len(self._draws))
        self._learning = self._learning - 1 if nothing_new else LEARNING_STEPS - 1
        if not self._learning:
            self._saved_buffers = [torch.empty_like(buffer) for buffer in self._buffers.values()]

    def _keep_gradients(self) -> None:
        self._gradients = [
            (p, p.grad, p.grad.clone() if p.grad is not None and self._learning else None) for p in self._parameters
        ]

    def _give_back(self) -> None:
        if self._state is not None:
            self._state.restore()
        if self._buffers and not self._learning:
            with torch.no_grad():
                torch._foreach_copy_(list(self._buffers.values()), self._saved_buffers)
        if self._random is not None:
            self._random.restore()
