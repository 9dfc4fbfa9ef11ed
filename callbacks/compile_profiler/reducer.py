"""What DDP's reducer needs to hear from each rank: every gradient once in a pass, also where that pass fails.

Private parts of ``DistributedDataParallel`` are touched here alone (names checked on torch 2.11 and 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

Call = Callable[..., Any]


def shares_gradients(wrapper: nn.Module | None) -> bool:
    """Whether gradients live in the reducer's memory, which the next pass writes."""
    return isinstance(wrapper, DistributedDataParallel) and bool(wrapper.gradient_as_bucket_view)


def compiling_for(wrapper: DistributedDataParallel) -> AbstractContextManager[None]:
    """Context in which the compiler splits graphs at the reducer's buckets, as inside the wrapper's forward.

    So that gradients of one part travel while backward of the next is computed.
    """
    inside = getattr(wrapper, "_inside_ddp_forward", None)
    return nullcontext() if inside is None else inside()


def reached(loss: Tensor) -> list[Tensor]:
    """The leaves into which backward of ``loss`` would add gradients, in no order.

    >>> weight, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    >>> [leaf is weight for leaf in reached((2 * weight).sum())]
    [True]
    """
    leaves: list[Tensor] = []
    seen: set[Any] = set()
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.append(leaf)
        stack += [function for function, _ in node.next_functions]
    return leaves


def zero_of(parameters: Iterable[Tensor]) -> Tensor:
    """A loss whose gradients are zero, for each of the parameters that has one.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> zero_of([weight]).backward()
    >>> weight.grad
    tensor([0., 0.])
    """
    sums = [parameter.sum() * 0 for parameter in parameters if parameter.requires_grad]
    return torch.stack([(one.real if one.is_complex() else one).float() for one in sums]).sum()


class Relay:
    """Keeps a rank that fails in step with the others: its part of the gradients becomes zero.

    The others are in the middle of backward, waiting for gradients. A pass that fails there, or before, is brought to
    its end, and all later ones consist of zeros alone. What has been computed is of no use to anyone then.

    Args:
        parameters: of the module.
        check: raises where an output holds no loss.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], check: Callable[[Any], object]) -> None:
        self._parameters = parameters
        self._check = check
        self._error: Exception | None = None

    def failure(self) -> Exception | None:
        """The first error, without its frames, if there was one."""
        return self._error

    def step(self, run: Call) -> Call:
        """The step, or zero where it fails."""

        def careful(*args: Any, **kwargs: Any) -> Any:
            if self._error is None:
                try:
                    output = run(*args, **kwargs)
                    self._check(output)
                    return output
                except Exception as error:
                    self._error = error.with_traceback(None)
            return zero_of(self._parameters)

        return careful

    def backward(self, run: Callable[[Tensor], None], loss: Tensor) -> None:
        """Backward of the loss; where it fails, zeros for the gradients that have not come."""
        try:
            run(loss)
        except Exception as error:
            self._error = self._error or error.with_traceback(None)
            rest = [leaf for leaf in reached(loss) if leaf.grad is None]
            if rest:
                zero_of(rest).backward()  # type: ignore[no-untyped-call]


class OwnCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether what runs inside sends something to other processes itself: a SyncBatchNorm, an ``all_gather``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Any operation, as it was."""
        self.found |= getattr(func, "namespace", "") in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))
