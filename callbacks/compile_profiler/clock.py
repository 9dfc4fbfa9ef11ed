"""What a pass costs on one device, synchronised: seconds and bytes."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch._C import _autograd
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

# No pass through Python is shorter; keeps a clock that stood still from asking for endless passes.
_MIN_PASS_S = 1e-6


class BlockTime(NamedTuple):
    """Seconds of one pass of a block: until its work was done, and until Python had launched it."""

    pass_s: float
    host_s: float


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds on a device that works while Python runs ahead of it.

    Attributes:
        device: the device whose work is waited for.
        read_s: the clock itself, in seconds; tests hand in scripted values.

    >>> times_s = iter([1.0, 2.0, 3.0, 99.0])
    >>> Clock(torch.device("cpu"), read_s=times_s.__next__).timed(lambda: None, num_passes=3)
    BlockTime(pass_s=1.0, host_s=1.0)
    """

    device: torch.device
    read_s: Callable[[], float] = time.perf_counter

    @property
    def lags(self) -> bool:
        """Whether the device works on while Python runs ahead."""
        accelerator = torch.accelerator.current_accelerator()
        return accelerator is not None and accelerator.type == self.device.type

    def synchronize(self) -> None:
        """Wait until the device has finished what it was given; returns at once where it works in step with Python."""
        if self.lags:
            torch.accelerator.synchronize(self.device)

    def now(self) -> float:
        """Seconds since some fixed moment, without waiting for the device."""
        return self.read_s()

    def timed(self, run: Callable[[], object], num_passes: int) -> BlockTime:
        """Time a block of ``num_passes`` calls in a row, up to the end of their work on the device.

        A pass takes the median of the block's passes, which a stall in one of them does not move. A device that lags is
        waited for twice, before and after the block, not between passes: launching runs ahead, as it does in training,
        and events between the passes tell their times; where the device has none, a pass takes the mean. What ``run``
        raises is raised.
        """
        self.synchronize()
        readings_s, marks = [self.now()], [self._mark()]
        for _ in range(num_passes):
            run()
            readings_s.append(self.now())
            marks.append(self._mark())
        host_s = statistics.median(end - start for start, end in itertools.pairwise(readings_s))
        if not self.lags:
            return BlockTime(pass_s=host_s, host_s=host_s)
        self.synchronize()
        pass_s = (self.now() - readings_s[0]) / num_passes
        if marks[0] is not None:
            pass_s = statistics.median(1e-3 * start.elapsed_time(end) for start, end in itertools.pairwise(marks))
        return BlockTime(pass_s=pass_s, host_s=min(host_s, pass_s))

    def _mark(self) -> Any:
        """A moment in the device's own work, or ``None`` where it works in step with Python or keeps no time."""
        if not self.lags or not hasattr(torch.get_device_module(self.device), "Event"):
            return None
        try:
            mark = torch.get_device_module(self.device).Event(enable_timing=True)
            mark.record()
        except (RuntimeError, NotImplementedError):  # another device than this package has been tried on
            return None
        return mark


class PassTimer:
    """Times the passes of a few real steps; nothing is run twice.

    The device is waited for at both ends of each, which the steps of a run that is being timed must not do.

    Args:
        clock: of the module's device.
        steps: which of the steps that come, counted from 0.

    >>> times_s = iter([1.0, 1.25, 1.75])
    >>> timer = PassTimer(Clock(torch.device("cpu"), read_s=times_s.__next__), range(1, 2))
    >>> for _ in range(3):
    ...     timer.start()
    ...     timer.stop()
    >>> timer.found, timer.is_over
    (BlockTime(pass_s=0.75, host_s=0.25), True)
    """

    def __init__(self, clock: Clock, steps: range) -> None:
        self._clock = clock
        self._steps = steps
        self._num_seen = 0
        self._began_s: float | None = None
        self._found: list[BlockTime] = []

    @property
    def is_over(self) -> bool:
        """Whether all has been timed that was to be."""
        return self._num_seen > self._steps[-1]

    def start(self) -> None:
        """Before the forward pass of the next step."""
        self._began_s = None
        if self._num_seen in self._steps:
            self._clock.synchronize()
            self._began_s = self._clock.now()
        self._num_seen += 1

    def stop(self) -> None:
        """After its backward pass was launched."""
        if self._began_s is not None:
            host_s = self._clock.now() - self._began_s
            self._clock.synchronize()
            self._found.append(BlockTime(pass_s=self._clock.now() - self._began_s, host_s=host_s))
            self._began_s = None

    @property
    def found(self) -> BlockTime | None:
        """The median pass, ``None`` if none was seen."""
        if not self._found:
            return None
        return BlockTime(*(statistics.median(column) for column in zip(*self._found, strict=True)))


def profiler_is_on() -> bool:
    """Whether a profiler of torch is recording in this thread, so that every operation costs more.

    >>> profiler_is_on()
    False
    """
    return bool(_autograd._profiler_enabled())


def passes_for(pass_s: float, *, min_block_s: float, max_block_s: float) -> int:
    """Passes that make a block long against clock and launch noise, at least one.

    Args:
        pass_s: seconds of one pass, roughly.
        min_block_s: length that the block should reach.
        max_block_s: length that it may not exceed, unless a single pass does.

    Raises:
        ValueError: ``max_block_s`` is below ``min_block_s``.

    >>> passes_for(0.004, min_block_s=0.03, max_block_s=0.1)
    8
    >>> passes_for(2.0, min_block_s=0.03, max_block_s=0.1)
    1
    """
    if max_block_s < min_block_s:
        raise ValueError(f"max_block_s must be at least min_block_s={min_block_s}, got {max_block_s}.")
    pass_s = max(pass_s, _MIN_PASS_S)
    return max(1, min(math.ceil(min_block_s / pass_s), math.floor(max_block_s / pass_s)))


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Most bytes that tensors occupied at one moment of ``run()``, which is called once in any case.

    * A device whose allocator keeps a peak (CUDA, XPU): its peak, weights and everything else alive included. The
      statistic is process-wide: a peak that the user is tracking starts anew.
    * CPU: what was allocated during ``run()``, without what was there before, from the allocations that the autograd
      profiler records, backward included. Costs about 30 us an operation.
    * ``None`` where that cannot be known: another device, or a CPU whose profiler is in use or missing.

    Eager and compiled figures of one device compare; those of CPU and CUDA do not.
    """
    if device.type == "cpu":
        return _cpu_peak_bytes(run)
    statistics: Any = getattr(torch, device.type, None)
    if not hasattr(statistics, "reset_peak_memory_stats"):
        run()
        return None
    statistics.reset_peak_memory_stats(device)
    run()
    return int(statistics.max_memory_allocated(device))


def _cpu_peak_bytes(run: Callable[[], object]) -> int | None:
    # The profiler below the one of torch.profiler sees the same allocations at a third of the cost. torch.profiler
    # takes a second to start for the first time, and writes two lines to stderr at each use (torch 2.13).
    if profiler_is_on() or not hasattr(_autograd, "_enable_profiler_legacy"):
        run()
        return None
    no, yes = False, True
    _autograd._enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, no, yes, no, no, no, _ExperimentalConfig()))
    try:
        run()
    finally:
        threads: list[list[Any]] = _autograd._disable_profiler_legacy()  # the stub has the wrong type for kind()
    # One list, in order: without another device backward runs in the calling thread.
    allocations = (event for events in threads for event in events if event.kind() == "memory_alloc")
    return max(accumulate((int(event.cpu_memory_usage()) for event in allocations), initial=0))
