"""What inductor does not do for a graph is told: operators left to ATen, CUDA graphs that are skipped."""

import logging

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch import nn

import compile_cases as cases
from compile_cases import line_of
from compile_profiler import CompileProfiler
from compile_profiler.compiler import BackendLog, Heard
from compile_profiler.shortfalls import of_heard
from runs import train

HERE = {"stage": "train", "step": 3, "epoch": 0, "shapes": None}
TRACE = f'  File "{cases.__file__}", line 30, in training_step\n    x += 1\n'


@pytest.mark.parametrize(
    ("text", "kind", "cause", "named"),
    [
        (f"skipping cudagraphs due to skipping cudagraphs due to cpu device (arg0_1). Found from : \n {TRACE}",
         "cudagraph_skip", "unsupported", "device=x.device"),
        (f"skipping cudagraphs due to mutated inputs (1 instances). Found from : \n {TRACE}",
         "cudagraph_skip", "side_effect", "x = x + 1"),
        ("skipping cudagraphs due to graph with symbolic shapes inputs and config.triton.cudagraph_skip_dynamic_graphs="
         f"True. Found from {TRACE}", "cudagraph_skip", "shape", "fixed sizes"),
        (f"skipping cudagraphs due to disabling cudagraphs due to incompatible op aten.nonzero Found from {TRACE}",
         "cudagraph_skip", "unsupported", "Move it out"),
        ("skipping cudagraph due to function 0 exceeding max re-recording limit (=128) on cudagraph node 3 due to x.",
         "cudagraph_skip", "shape", "recorded too often"),
        ("skipping cudagraphs due to a reason of a later version", "cudagraph_skip", "other", "kernel by kernel"),
        ("Not enough SMs to use max_autotune_gemm mode", "backend_fallback", "unsupported", "too small"),
        ("Using FallbackKernel: torch.ops.aten.cumprod.default", "backend_fallback", "unsupported", "aten.cumprod"),
    ],
)  # fmt: skip
def test_each_message_of_inductor_has_its_kind_cause_and_hint(text, kind, cause, named):
    event = of_heard(Heard(text), [], HERE)

    assert (event.kind, event.cause, event.step) == (kind, cause, 3)
    assert named in event.hint
    assert "Found from" not in event.detail
    assert (event.file, event.line) == ((cases.__file__, 30) if TRACE in text else (None, None))


def test_messages_about_nothing_that_is_missed_are_passed_over():
    attention = Heard("Using FallbackKernel: torch.ops.aten._scaled_dot_product_flash_attention.default")

    assert of_heard(attention, [], HERE) is None
    assert of_heard(Heard("Composable Kernel package is not installed"), [], HERE) is None


def test_listening_shows_and_hides_nothing_and_leaves_the_loggers_as_they_were(caplog):
    names = [name for name, _ in BackendLog._LEVELS]
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger.level, list(logger.filters)) for logger in loggers]
    listening, shown = BackendLog(), []
    handler = logging.Handler()
    handler.emit = shown.append
    fallbacks = logging.getLogger("torch._inductor.graph.__perf_hints")
    fallbacks.addHandler(handler)
    try:
        listening.open()
        listening.open()
        fallbacks.info("Using FallbackKernel: %s", "aten.cumprod")
        fallbacks.warning("to be seen")
        listening.close()
    finally:
        fallbacks.removeHandler(handler)

    assert [heard.text for heard in listening.heard] == ["Using FallbackKernel: aten.cumprod", "to be seen"]
    assert [record.getMessage() for record in shown] == ["to be seen"]
    assert [(logger.level, list(logger.filters)) for logger in loggers] == before


class LeavesInductor(cases.Case):
    """A Fourier layer with complex weights, and an operator of which inductor has no kernel."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, dtype=torch.complex64))

    def training_step(self, batch, batch_idx):
        x = torch.fft.ifft(torch.fft.fft(batch[0]) * self.weight).real
        return self.error(self.net(x.cumprod(1)), batch)  # here


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_what_inductor_leaves_to_aten_and_skips_is_told_with_its_line():
    """On a CPU there are no CUDA graphs: asked for, they are counted as skipped."""
    torch._dynamo.reset()
    profiler = CompileProfiler(mode="reduce-overhead", max_pairs=0, verbose=False, log=False)
    with torch._inductor.config.patch(force_disable_caches=True):  # of a cached graph nothing is said again
        train(LeavesInductor, [profiler], max_steps=3, validate=False)
    compiles = profiler.report.compiles
    fallbacks = {event.line: event for event in compiles.events if event.kind == "backend_fallback"}
    (skip,) = [event for event in compiles.events if event.kind == "cudagraph_skip"]

    line = line_of(LeavesInductor)
    assert {event.file for event in fallbacks.values()} == {__file__}
    assert set(fallbacks) == {line - 1, line}
    assert "aten.cumprod" in fallbacks[line].detail
    assert "no kernel for aten.cumprod" in fallbacks[line].hint
    assert "complex numbers" in fallbacks[line - 1].hint
    assert {event.owner for event in fallbacks.values()} == {"user"}
    assert (compiles.cudagraph_skips, compiles.cudagraphed) == (skip.count, 0)
    assert skip.count > 0
