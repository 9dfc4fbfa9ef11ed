"""Functions to compile that share nothing with anybody else's, and an end to what torch has made of them.

Names checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.resume_execution import ContinueExecutionCache


class OwnCode:
    """Copies of functions, each with a code object of its own.

    Dynamo keeps compiled entries and the recompile limit by code object; without this a second fit, a second arm or
    another model of the same class would start with the first one's budget used (torch 2.13 has
    ``isolate_recompiles``, earlier versions nothing).
    """

    def __init__(self) -> None:
        self._codes: list[types.CodeType] = []

    def of(self, function: Callable[..., Any]) -> types.FunctionType:
        """The same function with a code object that nobody else runs."""
        assert isinstance(function, types.FunctionType)
        own = types.FunctionType(
            function.__code__.replace(),
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        own.__kwdefaults__ = function.__kwdefaults__
        own.__qualname__, own.__module__ = function.__qualname__, function.__module__
        self._codes.append(own.__code__)
        return own

    def free(self) -> None:
        """Let torch forget what it has compiled of all copies so far.

        Dropping the functions is not enough: torch's map from compiled code to the code that it is of, and its map of
        the parts behind graph breaks, keep both alive for good.
        """
        codes, self._codes = self._codes, []
        for code in codes:
            resumed = ContinueExecutionCache.cache.get(code)
            if resumed:
                for part in resumed.values():
                    reset_code(part)
                ContinueExecutionCache.cache[code] = {}
            reset_code(code)
