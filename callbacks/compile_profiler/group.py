"""The way of short messages between the ranks of one fit, apart from training's own collectives."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from compile_profiler.meeting import Exchange, Most

MEETING_S = 120.0
"""How long a rank waits for the others at a meeting: well below NCCL's watchdog (10 minutes) and gloo's (30)."""
COMPILING_S = 4 * 3600.0
TELL_EVERY_S = 30.0
MAX_TEXT_BYTES = 4096

T = TypeVar("T")


class LostError(RuntimeError):
    """The other ranks did not come, or are gone."""


class Group:
    """All ranks, connected by gloo: through the host's memory, so that no device is waited for or interrupted.

    Creating it is collective, and so is each conversation. With NCCL at work beside it, a meeting costs what a round
    through the network does, and leaves the queue of the device as it is.

    Args:
        tell: prints a line while others compile.
        meeting_s: seconds to wait for the others at a meeting, ``MEETING_S`` by default.
        compiling_s: seconds to wait for others that compile.
    """

    def __init__(
        self, tell: Callable[[str], None], *, meeting_s: float | None = None, compiling_s: float = COMPILING_S
    ) -> None:
        self._tell = tell
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._quick = dist.new_group(backend="gloo", timeout=timedelta(seconds=meeting_s or MEETING_S))
        self._patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=compiling_s))
        self.num_collectives = 0

    def run(self, exchange: Exchange[T]) -> T:
        """Run a conversation to its end.

        Raises:
            LostError: the others did not come in time; nobody can agree on anything any more.
        """
        answer: Any = None
        try:
            while True:
                wish = exchange.send(answer)
                try:
                    self.num_collectives += 1
                    answer = self._most(wish) if isinstance(wish, Most) else self._told(wish.text, wish.source)
                except RuntimeError as error:  # whatever gloo says, there is one reason
                    raise LostError(f"the other processes did not come: {' '.join(str(error).split())[:200]}") from None
        except StopIteration as stop:
            return cast("T", stop.value)
        finally:
            exchange.close()

    def _most(self, wish: Most) -> tuple[float, ...]:
        numbers = torch.tensor(wish.values, dtype=torch.float64)
        if wish.patient:
            self._wait(dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._patient, async_op=True))
        else:
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._quick)
        return tuple(numbers.tolist())

    def _wait(self, work: Any) -> None:
        began_s = time.monotonic()
        told_s = began_s
        while not work.is_completed():
            time.sleep(0.001)
            if time.monotonic() - told_s > TELL_EVERY_S:
                told_s = time.monotonic()
                self._tell(f"waiting for other processes that compile, for {told_s - began_s:.0f} s so far.")
        work.wait()

    def _told(self, text: str, source: int) -> str:
        letters = torch.zeros(MAX_TEXT_BYTES, dtype=torch.uint8)
        if source == self.rank and text:
            data = text.encode()[:MAX_TEXT_BYTES]
            letters[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(letters, source, group=self._quick)
        return bytes(letters.tolist()).rstrip(b"\0").decode(errors="ignore")

    def close(self) -> None:
        """Give the connections back; the fit at hand is over on this rank."""
        for group in (self._quick, self._patient):
            dist.destroy_process_group(group)
