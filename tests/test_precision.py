"""Precision and numerics settings of a Trainer: each trains with pairs, bit for bit, as without the callback."""

import warnings

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from compile_profiler import CompileProfiler
from runs import Regression, differences, left_behind, train
from test_manual import Accumulates, Adversarial

OPTIONS = {"backend": "eager", "fallback": False, "verbose": False, "warmup_steps": 1, "pair_every_n_steps": 2}
RUN = {"max_steps": 20, "limit_val_batches": 2}


class AnyPrecision(Regression):
    """Takes its batch in the dtype of its weights, as modules must under ``-true`` precisions."""

    def loss(self, batch):
        dtype = self.net[0].weight.dtype
        return super().loss([part.to(dtype) for part in batch])


def with_precision(precision="32-true", **options):
    """Options of a Trainer; float16 with its scaler too, which Lightning turns into bfloat16 on a CPU unless told."""
    if precision == "16-mixed":
        return {"plugins": [MixedPrecision("16-mixed", "cpu")], **options}
    return {"precision": precision, **options}


def both(module_class, options, **run_options):
    """What a run leaves behind without and with pairs, and the report; scaler and matmul settings included."""
    left, profiler = [], CompileProfiler(**{**OPTIONS, **options})
    for callbacks in ([], [profiler]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning's advice about detect_anomaly and half precision
            module, trainer = train(module_class, callbacks, **RUN, **with_precision(**run_options))
        left.append(left_behind(module, trainer))
        left[-1]["scaler"] = trainer.precision_plugin.state_dict()
        left[-1]["anomaly"] = torch.is_anomaly_enabled()
        left[-1]["default dtype"] = torch.get_default_dtype()
    return *left, profiler.report


PRECISIONS = ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"]


@pytest.mark.parametrize("reference", [None, "float64"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_trains_as_without_the_callback(precision, reference):
    """Weights, scaler and all else are bit-identical, pairs have been made, and eager is at no distance from itself."""
    plain, measured, report = both(AnyPrecision, {"drift_reference": reference}, precision=precision)

    assert differences(plain, measured) == []
    assert report.speedup.num_pairs > 0
    assert "error" not in report.speedup.void
    assert report.environment.precision == precision
    assert report.drift.grad_rel == 0
    assert report.drift.within_tolerance is True


@pytest.mark.parametrize("module_class", [Adversarial, Accumulates])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_under_manual_optimization(module_class, precision):
    plain, measured, report = both(module_class, {}, precision=precision)

    assert differences(plain, measured) == []
    assert report.speedup.num_pairs > 0
    assert report.drift.grad_rel == 0


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "64-true"])
def test_the_reference_in_float64_is_scaled_as_the_arms_are(precision):
    """An arm's error against it is that of its precision, not that of a loss scale."""

    class WithoutRandomness(AnyPrecision):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))

    _, _, report = both(WithoutRandomness, {"drift_reference": "float64"}, precision=precision)
    limits = {"32-true": 1e-5, "16-mixed": 0.1, "64-true": 1e-12}

    assert report.drift.reference["eager"] == report.drift.reference["compiled"] < limits[precision]


@pytest.mark.parametrize(
    "run_options",
    [
        {"detect_anomaly": True},
        {"deterministic": True},
        {"deterministic": "warn"},
        {"deterministic": False},
        {"inference_mode": True},
        {"inference_mode": False},
        {"benchmark": True},
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value", "precision": "16-mixed"},
        {"accumulate_grad_batches": 3, "precision": "16-mixed"},
    ],
    ids=str,
)
def test_every_setting_of_the_numerics_trains_as_without_the_callback(run_options):
    plain, measured, report = both(AnyPrecision, {"stages": ("train", "validate")}, **run_options)

    assert differences(plain, measured) == []
    assert report.speedup.num_pairs > 0
    assert "error" not in report.speedup.void


@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_every_precision_of_matrix_products_is_kept(setting):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        plain, measured, report = both(AnyPrecision, {})
        kept = torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision(before)

    assert differences(plain, measured) == []
    assert kept == setting
    assert report.speedup.num_pairs > 0


def test_a_scale_that_overflows_skips_its_steps_as_without_the_callback():
    """Infinite gradients halve the scale in training only, never in a pair."""

    class Overflows(AnyPrecision):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (1e30 if batch_idx % 4 == 1 else 1.0)

    plain, measured, report = both(Overflows, {}, precision="16-mixed")

    assert plain["scaler"]["scale"] < 65536
    assert differences(plain, measured) == []
    assert report.speedup.num_pairs > 0
