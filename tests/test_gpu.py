"""The same promises on a CUDA device, where launches run ahead of the clock and graphs replay in fixed memory."""

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from compile_profiler import CompileProfiler
from runs import Regression, differences, left_behind, train
from test_manual import Accumulates, AccumulatesAndDrops, Adversarial
from zoo import COMPILED_DIFFERS, ZOO, Checkpointing, Counters, CustomFunction, DropoutAndBatchNorm, MomentumQueue

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # inductor's advice about TF32 and SMs is no concern of these tests
]
ON_GPU = {"accelerator": "gpu", "devices": 1, "max_steps": 40}


@pytest.fixture(autouse=True)
def _workspace(monkeypatch):
    """cuBLAS needs a fixed workspace to be deterministic."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


class Wide(Regression):
    """Pointwise layers over a large activation: what fusion is made for."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024, 4096))
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        x = self.scale
        for _ in range(12):
            x = torch.nn.functional.gelu(x) * 1.01 + 0.1
        loss = self.loss(batch) + x.mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_an_eager_backend_leaves_the_run_bit_identical(precision):
    profiler = CompileProfiler(backend="eager", fallback=False, verbose=False, pair_every_n_steps=2)
    options = {**ON_GPU, "precision": precision}
    plain = left_behind(*train(Regression, **options))
    measured = left_behind(*train(Regression, [profiler], **options))

    assert profiler.report.speedup.num_pairs > 3
    assert differences(plain, measured) == []


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_inductor_leaves_the_run_bit_identical_to_the_same_run_without_probes(mode, accumulate):
    kept = {"mode": mode, "fallback": False, "verbose": False, "pair_every_n_steps": 2}
    options = {**ON_GPU, "accumulate_grad_batches": accumulate, "validate": False}
    profiler = CompileProfiler(**kept)
    observed = left_behind(*train(Regression, [CompileProfiler(**kept, max_pairs=0)], **options))
    measured = left_behind(*train(Regression, [profiler], **options))

    assert profiler.report.speedup.num_pairs > 3
    assert profiler.report.speedup.void.get("error", 0) == 0
    assert differences(observed, measured) == []


@pytest.mark.parametrize("module_class", ZOO, ids=lambda kind: kind.__name__)
def test_the_zoo_trains_on_a_gpu_as_without_the_callback(module_class):
    """cuDNN and the device's random numbers included."""
    options = {"backend": "eager", "fallback": False, "verbose": False, "warmup_steps": 1, "pair_every_n_steps": 2}
    run = {**ON_GPU, "max_steps": 24, "limit_val_batches": 2}
    profiler = CompileProfiler(**options)
    observed = left_behind(*train(module_class, [CompileProfiler(**options, max_pairs=0)], **run))
    measured = left_behind(*train(module_class, [profiler], **run))

    assert differences(observed, measured) == []
    if module_class not in COMPILED_DIFFERS:
        assert differences(left_behind(*train(module_class, **run)), measured) == []
    assert profiler.report.speedup.num_pairs > 0
    assert "error" not in profiler.report.speedup.void


REPLAYED = [DropoutAndBatchNorm, MomentumQueue, Counters, CustomFunction, Checkpointing]


@pytest.mark.parametrize("module_class", REPLAYED, ids=lambda kind: kind.__name__)
def test_the_zoo_replayed_from_cuda_graphs_leaves_the_same_run_as_without_probes(module_class):
    """Whether the module's graphs can be replayed or torch skips them."""
    kept = {"mode": "reduce-overhead", "fallback": False, "verbose": False, "pair_every_n_steps": 2}
    options = {**ON_GPU, "max_steps": 24, "validate": False}
    profiler = CompileProfiler(**kept)
    observed = left_behind(*train(module_class, [CompileProfiler(**kept, max_pairs=0)], **options))
    measured = left_behind(*train(module_class, [profiler], **options))

    assert differences(observed, measured) == []
    assert measured_or_in_eager(profiler.report)
    assert "error" not in profiler.report.speedup.void


def measured_or_in_eager(report):
    """Whether pairs were made, or torch could not replay this module, so that it was trained in eager."""
    return report.speedup.num_pairs > 0 or (report.verdict.decision, report.verdict.reason) == (
        "eager",
        "runtime_error",
    )


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("module_class", [Adversarial, Accumulates, AccumulatesAndDrops])
def test_manual_optimization_leaves_the_run_bit_identical_to_the_same_run_without_probes(module_class, mode):
    """Also where gradients stay in the memory of a CUDA graph from one batch to the next."""
    kept = {"mode": mode, "fallback": False, "verbose": False, "pair_every_n_steps": 2}
    options = {**ON_GPU, "validate": False}
    profiler = CompileProfiler(**kept)
    observed = left_behind(*train(module_class, [CompileProfiler(**kept, max_pairs=0)], **options))
    measured = left_behind(*train(module_class, [profiler], **options))

    assert profiler.report.speedup.num_pairs > 0 if mode is None else measured_or_in_eager(profiler.report)
    assert differences(observed, measured) == []


def test_the_gpus_random_numbers_go_on_as_if_nothing_had_been_measured():
    profiler = CompileProfiler(backend="aot_eager", fallback=False, verbose=False, pair_every_n_steps=2)
    options = {**ON_GPU, "validate": False}
    train(Regression, **options)
    expected = torch.cuda.get_rng_state()
    train(Regression, [profiler], **options)

    assert profiler.report.drift.rng == "matched"
    assert torch.equal(torch.cuda.get_rng_state(), expected)


def test_a_fusable_step_is_a_gain_with_both_peaks_and_no_drift():
    profiler = CompileProfiler(verbose=False)
    train(Wide, [profiler], **{**ON_GPU, "max_steps": 80, "validate": False, "deterministic": False})
    report = profiler.report

    assert (report.verdict.decision, report.verdict.reason) == ("compiled", "gain")
    assert report.speedup.low > 1.2
    assert report.memory.eager_peak_bytes > report.memory.compiled_peak_bytes > 0
    assert report.drift.within_tolerance is True
    assert (report.compiles.graphs, report.compiles.graph_breaks) == (1, 0)


def test_a_step_that_fails_on_the_gpu_is_trained_in_eager():
    def fails(graph, example_inputs):
        raise RuntimeError("planted")

    profiler = CompileProfiler(backend=fails, verbose=False)
    plain = left_behind(*train(Regression, **ON_GPU))
    measured = left_behind(*train(Regression, [profiler], **ON_GPU))

    assert profiler.report.verdict.reason == "compile_error"
    assert differences(plain, measured) == []


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("views", [False, True])
def test_pairs_through_ddps_wrapper_leave_no_trace(mode, views):
    """One process under DDP has the wrapper, the reducer and NCCL."""
    kept = {"mode": mode, "fallback": False, "verbose": False, "pair_every_n_steps": 2}

    def options():
        return {**ON_GPU, "strategy": DDPStrategy(gradient_as_bucket_view=views), "validate": False}

    profiler = CompileProfiler(**kept)
    observed = left_behind(*train(Regression, [CompileProfiler(**kept, max_pairs=0)], **options()))
    measured = left_behind(*train(Regression, [profiler], **options()))

    assert profiler.report.speedup.num_pairs > 3
    assert differences(observed, measured) == []
