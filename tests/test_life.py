"""The life of a run: stopped and resumed, fitted twice, interrupted, described in YAML, typed into a notebook."""

import json
import logging
import os
import pickle
import signal
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from compile_profiler import CompileProfiler, Report
from compile_profiler.checkpoint import KEY
from runs import Regression, differences, fit, left_behind, loaders, sleepy, train

KEPT = {"backend": "eager", "fallback": False, "verbose": False, "warmup_steps": 1, "pair_every_n_steps": 2}
QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "accelerator": "cpu",
    "limit_train_batches": 10,  # so that runs stop where an epoch ends: loaders cannot be resumed in the middle of one
    "max_epochs": -1,
}
SHORT = {"max_steps": 20, "max_epochs": -1, "limit_train_batches": 10}


def resumed(module_class, callbacks, path, **options):
    """Go on from a checkpoint with a fresh module."""
    torch.manual_seed(11)
    module = module_class()
    trainer = pl.Trainer(callbacks=callbacks, **{**QUIET, "max_steps": 40, "log_every_n_steps": 1, **options})
    trainer.fit(module, *loaders(), ckpt_path=path)
    return module, trainer


# -- stopped and resumed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [False, True], ids=["from plain", "from measured"])
@pytest.mark.parametrize("second", [False, True], ids=["to plain", "to measured"])
def test_a_checkpoint_resumes_with_and_without_the_callback(first, second):
    """Without a word from Lightning about callbacks that are missing: warnings are errors here."""

    def run(profiled):
        return [CompileProfiler(**KEPT)] if profiled else []

    _, trainer = train(Regression, [], **SHORT)
    trainer.save_checkpoint("expected.ckpt")
    _, trainer = train(Regression, run(first), **SHORT)
    trainer.save_checkpoint("found.ckpt")
    expected = left_behind(*resumed(Regression, [], "expected.ckpt"))

    assert (KEY in torch.load("found.ckpt", weights_only=True)) is first
    assert differences(expected, left_behind(*resumed(Regression, run(second), "found.ckpt"))) == []


def stopped(profiler):
    """A run of 60 steps and its checkpoint."""
    _, trainer = train(Regression, [profiler], **{**SHORT, "max_steps": 60}, validate=False)
    trainer.save_checkpoint("stopped.ckpt")
    return profiler.report


def test_a_decision_for_eager_is_remembered_and_nothing_is_compiled_again():
    options = {"backend": sleepy(0.02), "verbose": False, "warmup_steps": 1, "pair_every_n_steps": 2}
    before = stopped(CompileProfiler(**options))
    after = CompileProfiler(**options)
    resumed(Regression, [after], "stopped.ckpt", max_steps=70)

    assert (before.verdict.decision, before.verdict.reason) == ("eager", "no_gain")
    assert after.report.verdict == before.verdict
    assert after.report.compiles.graphs == 0
    assert after.report.speedup == before.speedup


def test_a_gain_is_remembered_and_the_run_is_compiled_from_its_first_step():
    options = {**KEPT, "min_speedup": 0.2, "fallback": True}
    before = stopped(CompileProfiler(**options))
    after = CompileProfiler(**options)
    resumed(Regression, [after], "stopped.ckpt", max_steps=70)

    assert before.verdict.reason == after.report.verdict.reason == "gain"
    assert after.report.verdict.step == before.verdict.step
    assert after.report.compiles.graphs == 1


def test_evidence_without_a_decision_is_gone_on_from():
    before = stopped(CompileProfiler(**{**KEPT, "max_pairs": 1000, "confidence": 0.999999999}))
    after = CompileProfiler(**{**KEPT, "max_pairs": 1000, "confidence": 0.999999999})
    resumed(Regression, [after], "stopped.ckpt", max_steps=66)
    profiler = CompileProfiler(**{**KEPT, "max_pairs": 1000, "confidence": 0.999999999})
    train(Regression, [profiler], max_steps=6)

    assert before.verdict.reason == "pending"
    assert after.report.speedup.num_pairs > before.speedup.num_pairs > profiler.report.speedup.num_pairs
    assert after.report.time.probe_s > before.time.probe_s


class Wider(Regression):
    """Another module, whose checkpoint does not fit: it takes the weights that do."""

    strict_loading = False

    def __init__(self):
        super().__init__()
        self.extra = torch.nn.Linear(2, 2)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)


@pytest.mark.parametrize(
    ("changed", "word"), [("module", "module"), ("min_speedup", "configuration"), ("threads", "machine")]
)
def test_where_anything_else_is_different_measuring_starts_afresh(changed, word, caplog, monkeypatch):
    options = {"backend": sleepy(0.02), "warmup_steps": 1, "pair_every_n_steps": 2}
    before = stopped(CompileProfiler(**options, verbose=False))
    if changed == "threads":
        torch.set_num_threads(2)
    if changed == "min_speedup":
        options["min_speedup"] = 1.5
    after = CompileProfiler(**options)
    if changed == "module":  # its schedulers are not those of the checkpoint either
        torch.save({**torch.load("stopped.ckpt", weights_only=True), "lr_schedulers": []}, "stopped.ckpt")
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "handlers", [caplog.handler])
    resumed(Wider if changed == "module" else Regression, [after], "stopped.ckpt", max_steps=66)

    assert before.verdict.reason == "no_gain"
    assert f"measurements are of another {word};" in caplog.text
    assert after.report.verdict.reason == "pending"
    assert after.report.speedup.num_pairs < before.speedup.num_pairs
    assert after.report.compiles.graphs == 1


def broken(graph, example_inputs):
    """A backend that fails."""
    raise RuntimeError("no compiler here")


@pytest.mark.filterwarnings("ignore:CompileProfiler. Compiling failed.*")
def test_an_error_decides_about_its_own_run_alone():
    """The compiler may work by the time the run is resumed."""
    before = stopped(CompileProfiler(backend=broken, verbose=False))
    broken.__code__, kept = (lambda graph, example_inputs: graph.forward).__code__, broken.__code__
    try:
        after = CompileProfiler(backend=broken, verbose=False)
        resumed(Regression, [after], "stopped.ckpt", max_steps=66)
    finally:
        broken.__code__ = kept

    assert before.verdict.reason == "compile_error"
    assert after.report.verdict.reason == "pending"
    assert after.report.compiles.graphs == 1


# -- again and afterwards ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("same_trainer", [True, False])
def test_a_second_fit_is_that_of_a_plain_run(same_trainer):
    def two_fits(callbacks):
        module, trainer = train(Regression, callbacks, max_steps=20)
        if not same_trainer:
            return module, fit(module, callbacks, max_steps=20)
        trainer.fit_loop.epoch_loop.max_steps = 40
        trainer.fit(module, *loaders())
        return module, trainer

    profiler = CompileProfiler(**KEPT)
    plain, measured = (left_behind(*two_fits(callbacks)) for callbacks in ([], [profiler]))

    assert differences(plain, measured) == []
    assert 0 < profiler.report.speedup.num_pairs <= 10
    assert profiler.report.compiles.graphs == 1


def test_after_fit_the_module_validates_tests_and_predicts_in_eager():
    class Whole(Regression):
        modes = []  # noqa: RUF012, shared on purpose

        def validation_step(self, batch, batch_idx):
            self.modes.append(torch.compiler.is_compiling())
            super().validation_step(batch, batch_idx)

        test_step = validation_step

        def predict_step(self, batch, batch_idx):
            return self(batch[0])

    profiler = CompileProfiler(**KEPT, stages=("train", "validate"))
    module, trainer = train(Whole, [profiler], max_steps=20)
    report, written = profiler.report, Path("compile_profile.json").stat().st_mtime_ns
    Whole.modes.clear()
    metrics = trainer.validate(module, loaders()[1], verbose=False), trainer.test(module, loaders()[1], verbose=False)
    outputs = trainer.predict(module, loaders()[1])

    assert all("val_loss" in found[0] for found in metrics)
    assert len(outputs) == 10
    assert set(Whole.modes) == {False}
    assert profiler.report == report
    assert Path("compile_profile.json").stat().st_mtime_ns == written


# -- what the user has compiled ---------------------------------------------------------------------------------------

compiled_by_user = []


def theirs(graph, example_inputs):
    """The user's own backend."""
    compiled_by_user.append(graph)

    def run(*inputs):
        compiled_by_user.append("ran")
        return graph.forward(*inputs)

    return run


class Block(torch.nn.Module):
    """A class of the user's: ``compile()`` of torch's own containers compiles nothing."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        return self.inside(x)


class CompiledInPlace(Regression):
    def __init__(self):
        super().__init__()
        self.net = Block(self.net)
        self.net.compile(backend=theirs)


class CompiledByAssignment(Regression):
    def __init__(self):
        super().__init__()
        self.net = torch.compile(self.net, backend=theirs)


class CompiledFunction(Regression):
    @torch.compile(backend=theirs)
    def squared(self, difference):
        return (difference**2).mean()

    def loss(self, batch):
        return self.squared(self(batch[0]) - batch[1])


class CompiledItself(Regression):
    """``self.compile()`` serves ``self(x)``, not the step."""

    def __init__(self):
        super().__init__()
        self.compile(backend=theirs)


@pytest.mark.parametrize("target", ["step", ["net"]])
@pytest.mark.parametrize("kind", [CompiledInPlace, CompiledByAssignment, CompiledFunction, CompiledItself])
@pytest.mark.filterwarnings("ignore:.*(torch.compile|is not a leaf|Dynamo).*")
def test_what_the_user_has_compiled_stays_theirs(kind, target):
    """Eager is the module as the user made it; their compile serves real steps and both arms, and is theirs later."""
    compiled_by_user.clear()
    plain = left_behind(*train(kind, max_steps=20))
    assert "ran" in compiled_by_user
    profiler = CompileProfiler(target=target, **KEPT)
    compiled_by_user.clear()
    module, trainer = train(kind, [profiler], max_steps=20)
    measured, num_ran = left_behind(module, trainer), compiled_by_user.count("ran")
    compiled_by_user.clear()
    module(torch.randn(8, 8))
    if kind is CompiledFunction:
        module.loss((torch.randn(8, 8), torch.randn(8, 1)))

    assert differences(plain, measured) == []
    assert profiler.report.verdict.reason not in ("compile_error", "runtime_error", "unsupported")
    assert num_ran >= 20
    assert "ran" in compiled_by_user


# -- interrupted ------------------------------------------------------------------------------------------------------


class Stops(pl.Callback):
    """Somebody presses Ctrl-C, or the cluster wants its machine back."""

    def __init__(self, signal_number):
        self.signal_number = signal_number

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 20 and trainer.state.fn == "fit":
            os.kill(os.getpid(), self.signal_number)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupted_run_ends_clean_with_its_report(name):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    torch.manual_seed(7)
    module, profiler = Regression(), CompileProfiler(**KEPT)
    try:
        with pytest.raises(BaseException) as raised:  # noqa: PT011, SystemExit or Lightning's SIGTERMException
            fit(module, [profiler, Stops(getattr(signal, name))])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

    assert type(raised.value).__name__ in ("SystemExit", "SIGTERMException")
    assert not {"training_step", "log", "log_dict", "__getstate__"} & set(vars(module))
    assert not torch._dynamo.callback.callback_handler.start_callbacks
    assert Report.from_dict(json.loads(Path("compile_profile.json").read_text())) == profiler.report
    assert profiler.report.speedup.num_pairs > 0


# -- other ways to start a run ----------------------------------------------------------------------------------------


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return loaders()[0]


YAML = """
trainer:
  max_steps: 20
  accelerator: cpu
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  enable_checkpointing: false
  callbacks:
    - class_path: compile_profiler.CompileProfiler
      init_args:
        target: [net]
        backend: eager
        options: null
        stages: [train]
        warmup_steps: 1
        pair_every_n_steps: 2
        fallback: false
        verbose: false
"""


@pytest.mark.filterwarnings("ignore:.*(is not a leaf|No seed found).*")
def test_lightning_cli_makes_the_callback_from_yaml(monkeypatch):
    Path("config.yaml").write_text(YAML)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    cli = LightningCLI(Regression, Data, args=["fit", "--config", "config.yaml"], save_config_callback=None)
    (profiler,) = (callback for callback in cli.trainer.callbacks if isinstance(callback, CompileProfiler))

    assert profiler.report.verdict.config["target"] == ["net"]
    assert profiler.report.speedup.num_pairs > 0


CELL = """
import lightning.pytorch as pl, torch

class Typed(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        loss = ((self.net(batch[0]) - batch[1]) ** 2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

module = Typed()
"""


def test_a_module_typed_into_a_notebook_is_compiled_and_measured():
    """Its source is in no file, its class in ``__main__``, and a cell may be run again."""
    profiler = CompileProfiler(**KEPT)
    for number in range(2):
        cell = {"__name__": "__main__"}
        exec(compile(CELL, f"<ipython-input-{number}-abc>", "exec"), cell)
        fit(cell["module"], [profiler], max_steps=20, validate=False)

        assert profiler.report.compiles.graphs == 1
        assert profiler.report.speedup.num_pairs > 0


def test_an_unused_callback_travels_to_other_processes():
    profiler = pickle.loads(pickle.dumps(CompileProfiler(**KEPT)))
    train(Regression, [profiler], max_steps=20)

    assert profiler.report.speedup.num_pairs > 0


class Stream(IterableDataset):
    def __iter__(self):
        for _ in range(60):
            yield torch.randn(8), torch.randn(1)


class Named(Regression):
    """Batches of two loaders at once."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch["a"]) + self.loss(batch["b"])
        self.log("loss", loss, batch_size=8)
        return loss

    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append(float(batch["a"][0].sum() + batch["b"][0].sum()))


@pytest.mark.parametrize("kind", ["stream", "combined"])
def test_loaders_without_a_length_and_several_at_once(kind):
    def run(callbacks):
        torch.manual_seed(7)
        module = Named() if kind == "combined" else Regression()
        loader = DataLoader(Stream(), 8)
        if kind == "combined":
            loader = CombinedLoader({"a": loader, "b": loaders()[0]}, "min_size")
        trainer = pl.Trainer(callbacks=callbacks, **{**QUIET, "max_steps": 20, "log_every_n_steps": 1})
        trainer.fit(module, loader)
        return left_behind(module, trainer)

    profiler = CompileProfiler(**KEPT)

    assert differences(run([]), run([profiler])) == []
    assert profiler.report.speedup.num_pairs > 0
