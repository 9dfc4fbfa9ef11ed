"""Seconds and bytes of a pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from compile_profiler.clock import Clock, passes_for, peak_bytes

CPU = torch.device("cpu")
MIB = 1 << 20


def test_each_pass_is_timed_on_a_device_that_keeps_step_and_the_median_counts():
    """A process put to sleep in one pass does not move the figure."""
    log = []
    times_s = iter([10.0, 10.5, 70.0, 70.75])

    def read_s():
        log.append("clock")
        return next(times_s)

    block = Clock(CPU, read_s=read_s).timed(lambda: log.append("pass"), num_passes=3)

    assert block == (0.75, 0.75)
    assert log == ["clock", "pass", "clock", "pass", "clock", "pass", "clock"]


def test_the_default_clock_goes_forward():
    """Without a clock handed in, time passes."""
    clock = Clock(CPU)

    assert clock.now() <= clock.now()
    assert clock.timed(lambda: sum(range(10_000)), num_passes=3).pass_s > 0


def test_an_error_of_a_pass_is_raised_unchanged():
    """Timing hides no error."""
    error = RuntimeError("of the user")

    def fail():
        raise error

    with pytest.raises(RuntimeError) as caught:
        Clock(CPU).timed(fail, num_passes=2)

    assert caught.value is error


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_block_ends_when_the_device_has_finished():
    """A block of launches is as long as the work launched, not as long as launching it."""
    device = torch.device("cuda", torch.cuda.current_device())
    cycles = 100_000_000  # some 50 ms on any clock rate below 2 GHz

    block = Clock(device).timed(lambda: torch.cuda._sleep(cycles), num_passes=2)
    assert block.pass_s > 0.02
    assert block.host_s < block.pass_s / 2


@pytest.mark.parametrize(
    ("pass_s", "expected"),
    [
        (0.001, 20),  # long enough at the lower limit
        (0.015, 2),  # rounded up
        (0.045, 1),  # one pass is a block
        (3.0, 1),  # a pass longer than the upper limit still runs once
        (0.0, 20_000),  # a clock that stood still does not ask for endless passes
    ],
)
def test_passes_fill_a_block(pass_s, expected):
    """As few passes as reach the lower limit."""
    assert passes_for(pass_s, min_block_s=0.02, max_block_s=0.05) == expected


def test_the_upper_limit_wins():
    """Two passes would be too long where only one fits."""
    assert passes_for(0.04, min_block_s=0.05, max_block_s=0.06) == 1


def test_limits_in_the_wrong_order_are_refused():
    """The message has both values."""
    with pytest.raises(ValueError, match=r"at least min_block_s=0\.1, got 0\.01"):
        passes_for(0.001, min_block_s=0.1, max_block_s=0.01)


def test_the_peak_is_of_what_lived_at_the_same_time():
    """64 MiB that are freed before the next 64 MiB come count once, next to 16 MiB that stay."""

    def run():
        kept = torch.empty(16 * MIB, dtype=torch.uint8)
        for _ in range(3):
            torch.empty(64 * MIB, dtype=torch.uint8)
        return kept

    assert peak_bytes(run, CPU) == pytest.approx(80 * MIB, rel=0.01)


def test_the_peak_leaves_out_what_was_there_before():
    """Memory held before the pass, also when the pass frees it, is not of the pass."""
    before = [torch.empty(32 * MIB, dtype=torch.uint8)]

    def run():
        before.clear()
        torch.empty(8 * MIB, dtype=torch.uint8)

    assert peak_bytes(run, CPU) == pytest.approx(8 * MIB, rel=0.01)


def test_backward_is_followed_too():
    """A backward that allocates 32 MiB in an autograd function counts."""

    class Hungry(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:
            torch.empty(32 * MIB, dtype=torch.uint8)
            return gradient

    weight = torch.ones(4, requires_grad=True)

    assert peak_bytes(lambda: Hungry.apply(weight).sum().backward(), CPU) == pytest.approx(32 * MIB, rel=0.01)


def test_a_pass_without_tensors_needs_no_memory():
    """Nothing allocated is 0, a known figure."""
    assert peak_bytes(lambda: None, CPU) == 0


def test_a_compiled_pass_is_not_compiled_again():
    """The profiler is invisible to guards: measuring a compiled pass makes no new graph, nor does the pass after it."""
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    compiled = torch.compile(model, backend=backend)
    batch = torch.ones(4, 8)

    def run():
        compiled(batch).sum().backward()

    run()
    run()  # .grad exists from here on
    expected = len(graphs)
    peak = peak_bytes(run, CPU)
    run()

    assert expected == 1
    assert len(graphs) == expected
    assert peak is not None
    assert peak > 0


def test_a_profiler_in_use_is_left_alone():
    """Where the user profiles, the pass runs and the figure is unknown; the user's profile goes on."""
    passes = []
    with torch.autograd.profiler.profile() as profile:
        peak = peak_bytes(lambda: passes.append(1), CPU)
        torch.ones(3) + 1

    assert peak is None
    assert passes == [1]
    assert "aten::add" in {event.name for event in profile.function_events}


def test_an_unknown_device_has_no_peak():
    """A device without statistics runs the pass and reports nothing."""
    passes = []

    assert peak_bytes(lambda: passes.append(1), torch.device("meta")) is None
    assert passes == [1]


def test_an_error_leaves_no_profiler_behind():
    """After a failed pass the next measurement works."""

    def fail():
        raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        peak_bytes(fail, CPU)

    assert peak_bytes(lambda: torch.empty(MIB, dtype=torch.uint8), CPU) == pytest.approx(MIB, rel=0.01)


def test_measuring_prints_nothing(capfd):
    """Neither stream gets a line, also not from the C++ side."""
    peak_bytes(lambda: torch.ones(10) + 1, CPU)

    assert capfd.readouterr() == ("", "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_peak_of_a_gpu_counts_everything_alive():
    """64 MiB held and 32 MiB passing by are at least 96 MiB."""
    device = torch.device("cuda", torch.cuda.current_device())
    held = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    before = torch.cuda.memory_allocated(device)

    assert peak_bytes(lambda: torch.empty(32 * MIB, dtype=torch.uint8, device=device), device) == before + 32 * MIB
    assert held.numel() == 64 * MIB
