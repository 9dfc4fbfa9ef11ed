"""The callback inside every kind of Trainer: it works, and leaves everything as it was."""

import copy
import json
import pickle
from pathlib import Path

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch

from compile_profiler import CompileProfiler, Report
from runs import Regression, differences, fit, left_behind, loaders, train


def configs():
    """Settings of torch's compiler that a run could leave changed."""
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    found = (torch._dynamo.config, torch._functorch.config, torch._inductor.config)
    return [config.save_config() for config in found]


def hidden(module):
    """Names and values on the module and its submodules, to be compared by identity."""
    return {(name, key): id(value) for name, sub in module.named_modules() for key, value in vars(sub).items()}


def ours(trainer):
    """Instance attributes of the strategy and its precision plugin."""
    return sorted(vars(trainer.strategy)), sorted(vars(trainer.strategy.precision_plugin))


class Watcher(pl.Callback):
    """Looks at the module from outside, in the middle of a batch and between two."""

    def __init__(self):
        self.seen = []

    def look(self, trainer, module):
        fresh = {key for key in vars(module) if key in ("training_step", "log", "log_dict", "forward")}
        self.seen.append((type(module), isinstance(module, Regression), list(module.state_dict()), fresh))

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.look(trainer, module)

    def on_before_backward(self, trainer, module, loss):
        self.look(trainer, module)

    def on_before_zero_grad(self, trainer, module, optimizer):
        self.look(trainer, module)

    def on_train_batch_end(self, trainer, module, *args):
        self.look(trainer, module)


def test_the_step_is_one_graph_without_a_break_although_it_logs():
    profiler = CompileProfiler(backend="aot_eager", fallback=False, verbose=False)
    train(Regression, [profiler], max_steps=20)
    compiles = profiler.report.compiles

    assert (compiles.graphs, compiles.recompiles, compiles.graph_breaks) == (1, 0, 0)
    assert [event.kind for event in compiles.events if event.stage == "train"] == ["graph"]


def test_the_module_stays_the_users_module_in_the_middle_of_fit():
    watcher = Watcher()
    torch.manual_seed(7)
    module = Regression()
    keys = list(module.state_dict())
    fit(module, [CompileProfiler(backend="eager", fallback=False, verbose=False), watcher])

    assert len(watcher.seen) == 4 * 60
    assert all(look == (Regression, True, keys, set()) for look in watcher.seen)


@pytest.mark.parametrize("target", ["step", "forward", ["net"], ["net.0", "net.4"]])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf.*")  # from inside dynamo
def test_nothing_is_left_after_fit(target):
    torch.manual_seed(7)
    module = Regression()
    trainer = fit(module, max_steps=3)
    expected, expected_configs, expected_trainer = hidden(module).keys(), configs(), ours(trainer)
    handlers = torch._dynamo.callback.callback_handler
    listeners = len(handlers.start_callbacks), len(handlers.end_callbacks)

    torch.manual_seed(7)
    module = Regression()
    trainer = fit(module, [CompileProfiler(target=target, backend="eager", fallback=False, verbose=False)])
    assert hidden(module).keys() == expected
    assert configs() == expected_configs
    assert ours(trainer) == expected_trainer
    assert (len(handlers.start_callbacks), len(handlers.end_callbacks)) == listeners


class Fails(Regression):
    """The user's own error, on the tenth batch."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 10:
            raise KeyError("the user's own")
        return super().training_step(batch, batch_idx)


def test_nothing_is_left_after_an_exception_and_the_report_is_written():
    expected_configs = configs()
    torch.manual_seed(7)
    module = Fails()
    profiler = CompileProfiler(backend="eager", fallback=False, verbose=False)
    with pytest.raises(KeyError, match="the user's own") as raised:
        fit(module, [profiler])

    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None
    assert not {"training_step", "log", "log_dict"} & set(vars(module))
    assert configs() == expected_configs
    assert not torch._dynamo.callback.callback_handler.start_callbacks
    assert Report.from_dict(json.loads(Path("compile_profile.json").read_text())) == profiler.report


def test_the_report_is_written_where_the_logger_writes(tmp_path):
    logger = pl.loggers.CSVLogger(tmp_path, name="run", version="x")
    profiler = CompileProfiler(backend="eager", verbose=False)
    train(Regression, [profiler], logger=logger)

    written = json.loads((tmp_path / "run" / "x" / "compile_profile.json").read_text())
    assert Report.from_dict(written) == profiler.report
    assert profiler.report.speedup.num_pairs > 0
    assert written["verdict"]["config"]["backend"] == "eager"


@pytest.mark.parametrize(
    "options",
    [
        {"logger": False},
        {"fast_dev_run": True, "logger": None, "max_steps": -1},
        {"fast_dev_run": 12, "logger": None, "max_steps": -1},
        {
            "barebones": True,
            "logger": None,
            "log_every_n_steps": None,
            "enable_progress_bar": None,
            "enable_model_summary": None,
            "enable_checkpointing": None,
        },
        {"logger": True},
        {"log_every_n_steps": 0},
        {"num_sanity_val_steps": 0},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*`self.log\\(\\)` but `Trainer\\(barebones=True\\)`.*")
@pytest.mark.filterwarnings("ignore:`Trainer.fit` stopped.*")
def test_it_works_in_every_kind_of_trainer(options):
    plain, measured = (
        left_behind(*train(Regression, callbacks, **{"max_steps": 30, **options}))
        for callbacks in ([], [CompileProfiler(backend="eager", fallback=False, verbose=False, pair_every_n_steps=2)])
    )

    assert [name for name in differences(plain, measured) if name != "logged"] == []
    assert json.loads(next(Path.cwd().rglob("compile_profile.json")).read_text())["schema"] == 1


def test_a_trainer_of_the_separate_package_takes_the_callback():
    class Module(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(8, 1)

        def training_step(self, batch, batch_idx):
            loss = ((self.net(batch[0]) - batch[1]) ** 2).mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    profiler = CompileProfiler(backend="aot_eager", fallback=False, verbose=False)
    trainer = pytorch_lightning.Trainer(
        max_steps=40,
        callbacks=[profiler],
        logger=pytorch_lightning.loggers.CSVLogger("logs"),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        accelerator="cpu",
        log_every_n_steps=1,
    )
    trainer.fit(Module(), loaders()[0])

    assert profiler.report.compiles.graphs == 1
    assert profiler.report.compiles.graph_breaks == 0
    assert profiler.report.speedup.num_pairs > 0
    assert profiler.report.environment.lightning == pytorch_lightning.__version__


def test_a_second_fit_starts_afresh_and_counts_its_own_graphs():
    profiler = CompileProfiler(backend="aot_eager", fallback=False, verbose=False)
    first, second = ((train(Regression, [profiler], max_steps=20), profiler.report)[1] for _ in range(2))

    assert first.compiles.graphs == second.compiles.graphs == 1
    assert first.speedup.num_pairs == second.speedup.num_pairs > 0


def test_the_callback_can_be_copied_and_pickled_in_the_middle_of_fit():
    class Copies(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 20:
                self.copies = [copy.deepcopy(profiler), pickle.loads(pickle.dumps(profiler)), copy.deepcopy(module)]

    profiler, copies = CompileProfiler(backend="eager", fallback=False, verbose=False), Copies()
    train(Regression, [profiler, copies])

    assert copies.copies[0].report.speedup.num_pairs > 0
    assert copies.copies[1].report.speedup == copies.copies[0].report.speedup
    assert "training_step" not in vars(copies.copies[2])


def test_validation_is_compiled_when_asked_for_and_counted_apart():
    profiler = CompileProfiler(backend="eager", stages=("train", "validate"), fallback=False, verbose=False)
    plain = left_behind(*train(Regression))
    measured = left_behind(*train(Regression, [profiler]))
    by_stage = profiler.report.compiles.by_stage

    assert by_stage["train"]["graph"] == 1
    assert by_stage["sanity"]["graph"] + by_stage.get("validate", {}).get("graph", 0) >= 1
    assert differences(plain, measured) == []


def test_the_table_is_printed_at_the_end_and_only_when_wanted(capsys):
    train(Regression, [CompileProfiler(backend="eager", verbose=False)], max_steps=5)
    assert "CompileProfiler" not in capsys.readouterr().out
    train(Regression, [CompileProfiler(backend="eager")], max_steps=5)
    assert "speedup of a pass" in capsys.readouterr().out


def test_whatever_the_options_hold_the_report_is_written_and_read_back():
    def backend(graph, example_inputs, **options):
        return graph.forward

    options = {"a_pass": backend, "level": 3}
    profiler = CompileProfiler(target=["net"], backend=backend, options=options, verbose=False, fallback=False)
    train(Regression, [profiler], max_steps=5)
    written = json.loads(Path("compile_profile.json").read_text())

    assert profiler.report.compiles.graphs == 1
    assert written["verdict"]["config"]["target"] == ["net"]
    assert "backend" in written["verdict"]["config"]["options"]["a_pass"]
    assert Report.from_dict(written).compiles == profiler.report.compiles
