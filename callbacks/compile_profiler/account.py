"""What each step adds to what is known: what was compiled in it, whether it is an ordinary one, its time."""

from __future__ import annotations

from collections.abc import Callable

from compile_profiler import host
from compile_profiler.ledger import Ledger
from compile_profiler.notices import long_compile, near_limit
from compile_profiler.observe import Observer
from compile_profiler.records import Stage
from compile_profiler.windows import StepTimes


class Account:
    """Follows the steps of one fit.

    Attributes:
        news: there is something to judge.
        compiled_again: something was compiled after the first compiles were over.
        compile_s: wall seconds that this process has spent on compiling.

    Args:
        observer: what the compiler does.
        ledger: where steps are added up.
        times: where their times are taken.
        warmup_steps: clean steps in a row after which what follows is ordinary.
        tell: prints a line.
    """

    def __init__(
        self, observer: Observer, ledger: Ledger, times: StepTimes, *, warmup_steps: int, tell: Callable[[str], None]
    ) -> None:
        self._observer = observer
        self._ledger = ledger
        self._times = times
        self._warmup_steps = warmup_steps
        self._tell = tell
        self._num_clean = 0
        self._has_been_warm = False  # the first compiles of this fit are over
        self.news = True
        self.compiled_again = False
        self.compile_s = 0.0

    @property
    def is_warm(self) -> bool:
        """Whether enough steps in a row were clean."""
        return self._num_clean >= self._warmup_steps

    def look(self, stage: Stage, *, step: int, epoch: int) -> bool:
        """Take what was compiled as events of ``stage``, say what cannot wait; whether there was anything."""
        if not self._observer.poll(stage, step=step, epoch=epoch):
            return False
        news = self._observer.news
        self.compile_s += news.compile_s
        for finding in news.near_limit:
            host.warn(near_limit(*finding))
        line = long_compile(news.events, news.compile_s)
        if line is not None:
            self._tell(line)
        return True

    def step(self, step: int, seconds: float, *, epoch: int, boundary: bool, compiled: bool, own_s: float) -> None:
        """A training step has ended.

        Args:
            step: its x-axis number.
            seconds: that it took.
            epoch: which one it was in.
            boundary: it ended with an optimizer step.
            compiled: it ran on the compiled arm.
            own_s: what the callback took beside it.
        """
        compiling = self.look("train", step=step, epoch=epoch)
        self._ledger.add_step(step, seconds, compiled=compiled, compiling=compiling)
        self.news |= compiling
        self.compiled_again |= compiling and self._has_been_warm
        self._num_clean = 0 if compiling else self._num_clean + 1
        self._has_been_warm |= self.is_warm
        self._times.step(step, boundary=boundary, compiling=compiling, warm=self.is_warm, own_s=own_s)

    def disturb(self) -> None:
        """Something other than a step comes."""
        self._times.pause()
        self._num_clean = min(self._num_clean, self._warmup_steps - 1)
