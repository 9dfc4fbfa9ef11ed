"""Planted faults of the compiled arm are found in real runs, clean runs raise no alarm."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from compile_profiler import CompileProfiler
from runs import Regression, differences, left_behind, train


def faulty_backward(change, *, every=False):
    """A backend whose backward graph's first float output, a gradient, goes through ``change``; or every one."""

    def bw_compiler(graph, example_inputs):
        def run(*inputs):
            outputs = list(graph.forward(*inputs))
            found = [i for i, out in enumerate(outputs) if isinstance(out, torch.Tensor) and out.is_floating_point()]
            for i in found if every else found[:1]:
                outputs[i] = change(outputs[i])
            return outputs

        return torch._dynamo.disable(run)

    def fw_compiler(graph, example_inputs):
        return torch._dynamo.disable(graph.forward)

    from functorch.compile import make_boxed_func

    return aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(fw_compiler(graph, inputs)),
        bw_compiler=lambda graph, inputs: make_boxed_func(bw_compiler(graph, inputs)),
    )


class Plain(Regression):
    """Without random numbers."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))


def run(backend, **options):
    profiler = CompileProfiler(backend=backend, verbose=False, min_speedup=1e-6, pair_every_n_steps=2, **options)
    train(Plain, [profiler], max_steps=30, validate=False)
    return profiler.report


def test_a_wrong_gradient_in_three_pairs_in_a_row_ends_in_eager():
    report = run(faulty_backward(lambda gradient: gradient * 1.1))

    assert (report.verdict.decision, report.verdict.reason) == ("eager", "drift")
    assert report.speedup.num_pairs == 3
    assert report.drift.worst_parameter in dict(Plain().named_parameters())
    assert report.drift.within_tolerance is False
    assert 1e-3 < report.drift.grad_rel < 0.11


def test_a_wrong_gradient_is_only_reported_where_the_user_wants_that():
    assert run(faulty_backward(lambda gradient: gradient * 1.1), drift="warn").verdict.decision == "compiled"
    off = run(faulty_backward(lambda gradient: gradient * 1.1), drift="off")
    assert off.verdict.decision == "compiled"
    assert off.drift.grad_rel is None


def test_a_nan_in_compiled_alone_ends_in_eager_at_once():
    class OnlyInPairs(pl.Callback):
        """In a real step the NaN would have reached the weights, and eager's results with them."""

        armed = False

        def on_train_batch_end(self, *args):
            self.armed = True

        def on_train_batch_start(self, *args):
            self.armed = False

    pairs = OnlyInPairs()
    backend = faulty_backward(lambda gradient: torch.full_like(gradient, torch.nan) if pairs.armed else gradient)
    profiler = CompileProfiler(backend=backend, verbose=False, min_speedup=1e-6)
    train(Plain, [pairs, profiler], max_steps=30, validate=False)
    report = profiler.report

    assert (report.verdict.decision, report.verdict.reason) == ("eager", "non_finite")
    assert report.speedup.num_pairs == 1
    assert (report.drift.eager_finite, report.drift.compiled_finite) == (True, False)


def test_a_clean_run_is_within_tolerance_and_a_wider_one_is_the_users_to_set():
    report = run("aot_eager")
    assert report.drift.within_tolerance is True
    assert report.drift.grad_rel < 1e-6
    loose = run(faulty_backward(lambda gradient: gradient * 1.01), drift_tolerance=0.5)
    assert loose.verdict.reason != "drift"
    assert loose.drift.tolerance == 0.5


def test_a_float64_reference_clears_rounding_and_convicts_a_fault():
    clean = run("aot_eager", drift_reference="float64")
    assert 0 < clean.drift.reference["eager"] < 1e-5
    assert clean.drift.reference["compiled"] < 1e-5
    wrong = run(faulty_backward(lambda gradient: gradient * 1.1), drift_reference="float64")
    assert wrong.verdict.reason == "drift"


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_float64_reference_leaves_no_trace(precision):
    options = {"max_steps": 20, "validate": False, "precision": precision}
    profiler = CompileProfiler(
        backend="eager", verbose=False, fallback=False, pair_every_n_steps=2, drift_reference="float64"
    )
    plain = left_behind(*train(Plain, **options))
    measured = left_behind(*train(Plain, [profiler], **options))

    assert profiler.report.drift.rng == "none"
    assert profiler.report.speedup.num_pairs > 3
    assert differences(plain, measured) == []
