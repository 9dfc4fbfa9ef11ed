"""Take the gradients of one pass, each when it is complete."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class ArrivedTwiceError(RuntimeError):
    """Backward has added to a gradient that had been taken as complete."""


class Arrivals:
    """Gradients of one pass on their way, each as it was when its optimizer would first have used it.

    Args:
        names: of the parameters, by identity.
        receive: what to do with one.
        gives_away: whether a gradient that has been taken is taken off its parameter.
        copies: whether to hand on copies: the next pass may write into the same memory.
    """

    def __init__(
        self, names: dict[int, str], receive: Callable[[str, Tensor], None], *, gives_away: bool, copies: bool
    ) -> None:
        self._names = names
        self._receive = receive
        self._gives_away = gives_away
        self._copies = copies
        self._taken: set[int] = set()
        self._num_arrived: Counter[int] = Counter()
        self.spent_s = 0.0

    @property
    def twice(self) -> bool:
        """Whether a gradient has arrived in more than one piece."""
        return any(num > 1 for num in self._num_arrived.values())

    def take(self, parameters: Iterable[nn.Parameter]) -> None:
        """Read the gradients of these parameters unless they have been read."""
        for parameter in parameters:
            if parameter.grad is None or id(parameter) in self._taken or id(parameter) not in self._names:
                continue
            self._taken.add(id(parameter))
            gradient = parameter.grad.detach()
            if self._gives_away:
                parameter.grad = None
            self._receive(self._names[id(parameter)], gradient.clone() if self._copies else gradient)

    @contextmanager
    def listening(self, parameters: Iterable[nn.Parameter], *, early: bool) -> Iterator[None]:
        """Inside, count what arrives at these parameters; if ``early``, take it at once."""

        def arrived(parameter: Any) -> None:
            began_s = time.perf_counter()
            self._num_arrived[id(parameter)] += 1
            if early:
                self.take([parameter])
            self.spent_s += time.perf_counter() - began_s

        listened = [(p, p._post_accumulate_grad_hooks) for p in parameters if p.requires_grad]
        handles = [p.register_post_accumulate_grad_hook(arrived) for p, _ in listened]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle, (parameter, before) in zip(handles, listened, strict=True):
                handle.remove()
                if before is None:
                    parameter._post_accumulate_grad_hooks = None
