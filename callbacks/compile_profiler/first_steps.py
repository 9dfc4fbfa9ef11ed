"""How several ranks begin: one step in eager, then compiling while none of them waits for another in training."""

from __future__ import annotations

import time
from collections.abc import Callable

from compile_profiler.meeting import Exchange, first_compile, largest
from compile_profiler.notices import LONG_COMPILE_S
from compile_profiler.reducer import OwnCollectives
from compile_profiler.rig import Rig


class FirstSteps:
    """The first step shows DDP the order of gradients, and whether the step itself talks to other ranks.

    Before the second each rank compiles in a pass that leaves no trace: first one on each machine, which fills the
    cache on disk, then the others, which read it.

    Args:
        rig: what is on the module.
        leads: whether this rank compiles before the others.
        failed: whether an error is one of compiling.
        on_failure: called with such an error.
        tell: prints a line.
    """

    def __init__(
        self,
        rig: Rig,
        *,
        leads: bool,
        failed: Callable[[BaseException], bool],
        on_failure: Callable[[Exception], None],
        tell: Callable[[str], None],
    ) -> None:
        self._rig = rig
        self._leads = leads
        self._failed = failed
        self._on_failure = on_failure
        self._tell = tell
        self._own = OwnCollectives()
        rig.door.run_instead(self._own)

    def end(self) -> Exchange[bool]:
        """Compile, unless the step talks to other ranks itself, so that none can run it alone; whether it does."""
        self._rig.door.run_instead(None)
        heard = yield from largest({"own": self._own.found})
        if heard["own"]:
            return True
        yield from first_compile(self, leads=self._leads)
        return False

    def compile_first(self) -> None:
        """Compile in a pass that leaves no trace and waits for nobody."""
        assert self._rig.door.last_call is not None
        args, kwargs = self._rig.door.last_call
        began_s = time.perf_counter()
        try:
            self._rig.probe.rehearse(self._rig.arm, *args, **kwargs)
        except Exception as error:  # one that is not of compiling will show, or not, when the step is trained
            if self._failed(error):
                self._on_failure(error)
        seconds = time.perf_counter() - began_s
        if seconds > LONG_COMPILE_S and self._leads:
            self._tell(f"compiled in {seconds:.1f} s on the first rank; the others follow.")
