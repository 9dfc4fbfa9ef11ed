"""Every way in which compiled code can go wrong unnoticed, planted in real runs, is found under its name."""

import gc
import random
import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from compile_profiler import CompileProfiler
from compile_profiler.contrast import OVERFLOW, Contrast
from compile_profiler.drift import Comparison
from runs import Regression, fit, train
from test_drift_in_runs import Plain, faulty_backward

OPTIONS = {"verbose": False, "min_speedup": 1e-6, "pair_every_n_steps": 2}


class Armed(pl.Callback):
    """A fault that is there in some steps and in the pairs after them."""

    def __init__(self, steps):
        self.steps = steps
        self.now = False

    def on_train_batch_start(self, trainer, *args):
        self.now = trainer.fit_loop.epoch_loop.total_batch_idx in self.steps


def run(module_class, backend, callbacks=(), *, max_steps=30, validate=False, options=None, **trainer_options):
    profiler = CompileProfiler(backend=backend, **{**OPTIONS, **(options or {})})
    train(module_class, [*callbacks, profiler], max_steps=max_steps, validate=validate, **trainer_options)
    assert profiler.report.verdict.reason != "disabled", profiler.report.verdict.message
    return profiler.report


@pytest.mark.parametrize(("name", "shape"), [("net.0.weight", (16, 8)), ("net.2.weight", (1, 16))])
def test_one_scaled_gradient_is_named_and_so_is_the_step(name, shape):
    armed = Armed(range(11, 100))
    backend = faulty_backward(lambda g: g * 1.01 if armed.now and g.shape == shape else g, every=True)

    report = run(Plain, backend, [armed])

    assert (report.verdict.decision, report.verdict.reason) == ("eager", "drift")
    assert report.drift.worst_parameter == name
    assert "from step 12 on" in report.verdict.message or "from step 11 on" in report.verdict.message


def test_a_fault_in_a_single_pair_does_not_end_compiling():
    armed = Armed([11, 12])
    backend = faulty_backward(lambda g: g * 1.5 if armed.now else g)

    report = run(Plain, backend, [armed])

    assert report.verdict.decision == "compiled"
    assert report.drift.within_tolerance is True


class Annealed(Plain):
    """Logs a factor that falls from step to step; torch is told that it never changes."""

    weight = 1.0

    @torch.compiler.assume_constant_result
    def factor(self):
        return self.weight

    def training_step(self, batch, batch_idx):
        factor = self.factor()
        self.log("factor", factor)
        return self.loss(batch)

    def on_train_batch_start(self, batch, batch_idx):
        self.weight = 0.99**batch_idx


def test_a_value_frozen_at_trace_time_is_found_among_the_logged_ones():
    """Loss and gradients are right; the value is wrong from the second step on."""
    report = run(Annealed, "eager")

    assert report.verdict.reason == "drift"
    assert report.drift.worst_effect == "logged factor"
    assert report.drift.grad_rel == 0
    assert "logged factor" in report.verdict.message


class WithAccuracy(Plain):
    """Logs a count, of which one rounding can flip one, and a constant."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("accuracy", (self(batch[0]) > 0).float().mean())
        self.log("one", 1.0)
        return loss


def test_a_count_among_the_logged_values_that_flips_is_no_drift():
    """A compiled output moved by a rounding or two changes it now and then."""

    def backend(graph, example_inputs):
        def moved(*inputs):
            outputs = graph.forward(*inputs)
            return [
                out if out.numel() != 1 else out + 0.125 * (random.random() < 0.3) * (i > 0)
                for i, out in enumerate(outputs)
            ]

        return torch._dynamo.disable(moved)

    report = run(WithAccuracy, backend, max_steps=60, options={"pair_every_n_steps": 1})

    assert report.drift.worst_effect in (None, "logged accuracy")
    assert report.verdict.reason != "drift"


class Stale(Regression):
    """A buffer follows the batches."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
        self.register_buffer("mean", torch.zeros(8))

    def loss(self, batch):
        self.mean.mul_(0.9).add_(0.1 * batch[0].mean(0))
        return super().loss(batch)


def test_a_buffer_that_compiled_code_writes_wrongly_is_named():
    def backend(graph, example_inputs):
        def wrong(*inputs):
            outputs = graph.forward(*inputs)
            for tensor in inputs:
                if tensor.shape == (8,) and not tensor.requires_grad:
                    tensor.mul_(1.1)
            return outputs

        return torch._dynamo.disable(wrong)

    report = run(Stale, backend)

    assert report.verdict.reason == "drift"
    assert report.drift.worst_effect == "buffer mean"
    assert report.drift.effect_rel == pytest.approx(0.1, rel=0.01)
    assert run(Stale, "aot_eager").drift.within_tolerance is True


class RandomWay(Plain):
    """Python's or NumPy's random numbers choose the way; compiled code may have the choice built in."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1.0 if random.random() < 0.5 else 3.0)


@pytest.mark.filterwarnings("ignore")  # Dynamo's, about a generator that it does not trace
def test_random_control_flow_is_shown_and_never_drift():
    report = run(RandomWay, faulty_backward(lambda g: g * 2))

    assert report.drift.rng == "unmatched"
    assert report.drift.within_tolerance is None
    assert report.drift.grad_rel > 0.1
    assert report.verdict.reason != "drift"


class StopsEarly(pl.Callback):
    """In a run that would have been long: what it can afford goes by what is left of it."""

    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = trainer.global_step >= 40


@pytest.mark.slow
def test_dropout_under_inductor_is_compared_through_a_second_arm_where_that_is_affordable():
    """Which is compiled once, recompiles nothing of the first, and is not counted as training."""
    report = run(Regression, "inductor", [StopsEarly()], options={"fallback": False}, max_steps=10**7)
    poor = run(Regression, "inductor", options={"fallback": False}, max_steps=30)

    assert (report.drift.rng, report.drift.within_tolerance) == ("matched", True)
    assert report.drift.grad_rel < 1e-5
    assert (report.compiles.graphs, report.compiles.recompiles) == (1, 0)
    assert report.compiles.by_stage["probe"]["graph"] == 1
    assert (poor.drift.rng, poor.drift.within_tolerance) == ("unmatched", None)
    assert poor.drift.grad_rel > 0.01


class SkipsBadGradients(Plain):
    """As many do: gradients that are not finite are thrown away."""

    def on_before_optimizer_step(self, optimizer):
        for parameter in self.parameters():
            if not torch.isfinite(parameter.grad).all():
                parameter.grad.zero_()


RARELY = {"pair_every_n_steps": 1000}


def test_a_loss_that_compiled_code_spoils_is_looked_into_at_once():
    """Between two pairs, in a step that no pair was due for."""
    armed = Armed(range(17, 100))

    def backend(graph, example_inputs):
        def spoils(*inputs):
            outputs = graph.forward(*inputs)
            return [out * torch.nan if armed.now and out.numel() == 1 else out for out in outputs]

        return torch._dynamo.disable(spoils)

    report = run(SkipsBadGradients, backend, [armed], options=RARELY)

    assert (report.verdict.decision, report.verdict.reason, report.verdict.step) == ("eager", "non_finite", 17)
    assert report.speedup.void == {"alarm": 1}


class LosesItself(SkipsBadGradients):
    """Its own loss is infinite on every batch from the fifth on."""

    def loss(self, batch):
        return super().loss(batch) * self.factor

    def on_train_batch_start(self, batch, batch_idx):
        self.factor = torch.tensor(torch.inf if batch_idx >= 5 else 1.0)


def test_a_loss_that_is_not_finite_in_eager_either_is_the_users_and_said_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = run(LosesItself, "eager", options=RARELY)

    told = [str(w.message) for w in caught if "not a matter of compiling" in str(w.message)]
    assert len(told) == 1
    assert "at step 5, in eager as well" in told[0]
    assert report.verdict.reason != "non_finite"
    assert report.speedup.void == {"alarm": 1}  # and looked into once in so many steps


def mixed_precision():
    return {"plugins": [MixedPrecision("16-mixed", "cpu")]}


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")  # torch's, about a first step that is skipped
def test_steps_that_a_scaler_skips_for_compiled_alone_are_drift():
    """Compiled gradients overflow far below eager's; at every skipped step both are compared under the scale then."""
    backend = faulty_backward(lambda g: torch.where(g.abs() > 1.0, torch.inf, g))

    report = run(Plain, backend, options={"pair_every_n_steps": 1}, **mixed_precision())

    assert (report.verdict.decision, report.verdict.reason) == ("eager", "drift")
    assert report.drift.worst_effect == OVERFLOW
    assert report.speedup.void["skipped"] == 3


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_steps_that_a_scaler_skips_for_eager_too_are_its_ordinary_business():
    class TooLarge(Plain):
        def loss(self, batch):
            return super().loss(batch) * 1e30

    report = run(TooLarge, "aot_eager", options={"pair_every_n_steps": 1}, **mixed_precision())

    assert report.speedup.void["skipped"] >= 1
    assert report.verdict.reason not in ("drift", "non_finite")


def stale_in_validation(graph, example_inputs):
    """Without gradients it computes with the weights of its first call."""
    first = []

    def run(*inputs):
        if torch.is_grad_enabled():
            return graph.forward(*inputs)
        if not first:
            first.extend(out.clone() for out in graph.forward(*inputs))
        return list(first)

    return torch._dynamo.disable(run)


def test_validation_with_stale_weights_is_found():
    options = {"stages": ("train", "validate"), "pair_every_n_steps": 4}
    often = {"validate": True, "val_check_interval": 4, "limit_val_batches": 2, "max_steps": 40}

    report = run(Regression, stale_in_validation, options=options, **often)

    assert (report.verdict.decision, report.verdict.reason) == ("eager", "drift")
    assert (report.drift.stage, report.drift.worst_effect) == ("validate", "logged val_loss")
    assert "3 batches of validation in a row" in report.verdict.message
    assert run(Regression, "aot_eager", options=options, **often).verdict.reason != "drift"


class Deep(pl.LightningModule):
    """Eight square layers, one behind the other."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))

    def training_step(self, batch, batch_idx):
        x = batch
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()

    def train_dataloader(self):
        return DataLoader(torch.randn(12, 64), 4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def num_alive():
    """Tensors of the size of a weight that Python holds."""
    return len({t.data_ptr() for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == (64, 64)})


def test_eagers_gradients_are_let_go_as_the_second_arms_arrive(monkeypatch):
    """With both sets kept, there would be more tensors at the end of the compiled arm's backward, not fewer."""
    counts, passes = [], []
    compare, against = Comparison.gradient, Contrast._against

    def counted(self, name, gradient):
        compare(self, name, gradient)
        counts.append(num_alive())

    def counted_pass(self, *args, **kwargs):
        counts.clear()
        found = against(self, *args, **kwargs)
        passes.append(list(counts))
        return found

    monkeypatch.setattr(Comparison, "gradient", counted)
    monkeypatch.setattr(Contrast, "_against", counted_pass)
    profiler = CompileProfiler(
        backend="eager", verbose=False, fallback=False, warmup_steps=1, pair_every_n_steps=3, max_pairs=1
    )
    fit(Deep(), [profiler], validate=False, max_steps=3)

    again, compiled = passes
    assert profiler.report.drift.grad_rel == 0
    assert len(again) == len(compiled) == 8
    assert again[-1] == again[0]  # eager's first gradients are still needed after its second pass
    assert compiled[-1] <= compiled[0] - 6
