"""Other people's callbacks, profilers and hooks in the same Trainer: nobody can tell that the run was measured."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as neighbours
from runs import Regression, differences, left_behind, train

from torch.utils.data import DataLoader, TensorDataset

from compile_profiler import CompileProfiler

KEPT = {"backend": "eager", "fallback": False, "verbose": False, "warmup_steps": 1, "pair_every_n_steps": 2}
RUN = {"max_steps": 24, "limit_val_batches": 2, "limit_train_batches": 8, "max_epochs": -1}


def both(module_class, neighbour=lambda: (), **options):
    """The same run without and with the callback: what each left behind, and the profiler's report.

    Args:
        neighbour: makes the other callbacks, anew for each run.
    """
    profiler = CompileProfiler(**KEPT)
    plain, measured = (
        (*train(module_class, [*ours, *(others := list(neighbour()))], **{**RUN, **options}), others)
        for ours in ([], [profiler])
    )
    return [{**left_behind(*run[:2]), "told": told(run[2])} for run in (plain, measured)], profiler.report


def told(others):
    """What the neighbours say of themselves."""
    return [(other.state_dict(), getattr(other, "kept", None)) for other in others if isinstance(other, pl.Callback)]


class Thawed(Regression):
    """Its first layer joins the optimizer later."""

    def configure_optimizers(self):
        return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=0.01, momentum=0.9)


class Copies(pl.Callback):
    """A moving average by hand, and copies of the module from every hook that people use."""

    def setup(self, trainer, pl_module, stage):
        self.average = copy.deepcopy(pl_module)
        self.kept = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.kept.append(copy.deepcopy(pl_module)(batch[0]).mean().item())

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        copy.deepcopy(pl_module)

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        now = copy.deepcopy(pl_module)
        for mine, theirs in zip(self.average.parameters(), now.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)
        self.kept.append(self.average.eval()(batch[0]).mean().item())


class Thaw(neighbours.BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


NEIGHBOURS = {
    "EarlyStopping": lambda: [neighbours.EarlyStopping("val_loss", patience=0, min_delta=10.0)],
    "EMAWeightAveraging": lambda: [neighbours.EMAWeightAveraging(decay=0.9)],
    "WeightAveraging": lambda: [neighbours.WeightAveraging()],
    "copies": lambda: [Copies()],
    "GradientAccumulationScheduler": lambda: [neighbours.GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})],
    "BaseFinetuning": lambda: [Thaw()],
    "ModelSummary": lambda: [neighbours.ModelSummary(max_depth=2)],
    "LearningRateMonitor": lambda: [neighbours.LearningRateMonitor("step")],
    "TQDMProgressBar": lambda: [neighbours.TQDMProgressBar()],
    "RichProgressBar": lambda: [neighbours.RichProgressBar()],
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_a_run_with_a_neighbour_is_the_same_with_pairs(name):
    module_class = Thawed if name == "BaseFinetuning" else Regression
    options = {"enable_progress_bar": "ProgressBar" in name, "enable_model_summary": name == "ModelSummary"}
    (plain, measured), report = both(module_class, NEIGHBOURS[name], **options)

    assert differences(plain, measured) == []
    assert report.speedup.num_pairs > 0
    assert "error" not in report.speedup.void


@pytest.mark.filterwarnings("ignore:.*`lr_scheduler.step.*")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf.*")  # from inside dynamo
def test_stochastic_weight_averaging_averages_the_same_weights():
    def swa():
        return [neighbours.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)]

    (plain, measured), report = both(Regression, swa, max_epochs=4, max_steps=-1)

    assert differences(plain, measured) == []
    assert report.speedup.num_pairs > 0
    assert report.verdict.reason not in ("compile_error", "runtime_error")


def test_checkpoints_of_a_measured_run_are_those_of_a_plain_one_with_one_key_more():
    runs = {name: neighbours.ModelCheckpoint(name, every_n_train_steps=6, save_top_k=-1) for name in ("plain", "with")}
    options = {**RUN, "enable_checkpointing": True}
    train(Regression, [runs["plain"]], **options)
    train(Regression, [CompileProfiler(**KEPT), runs["with"]], **options)
    files = sorted(path.name for path in Path("plain").iterdir())

    assert len(files) == 4
    assert files == sorted(path.name for path in Path("with").iterdir())
    for file in files:
        plain, measured = (torch.load(Path(name) / file, weights_only=True) for name in runs)
        assert measured.keys() - plain.keys() == {"compile_profiler"}
        assert json.loads(json.dumps(measured["compile_profiler"])) == measured["compile_profiler"]
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step", "epoch"):
            assert flat(measured[key]) == flat(plain[key])


def flat(item):
    """Nested values, tensors as lists, to be compared with ``==``."""
    if isinstance(item, torch.Tensor):
        return item.tolist()
    if isinstance(item, dict):
        return {key: flat(value) for key, value in item.items()}
    return list(map(flat, item)) if isinstance(item, (list, tuple)) else item


def test_device_stats_and_a_timer_work_beside_it():
    """What they measure is not reproducible, the rest of the run is."""

    def others():
        return [neighbours.DeviceStatsMonitor(cpu_stats=True), neighbours.Timer("00:01:00:00")]

    try:
        (plain, measured), report = both(Regression, others)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    assert [name for name in differences(plain, measured) if name not in ("told", "logged")] == []
    assert report.speedup.num_pairs > 0


# -- tuners -------------------------------------------------------------------------------------------------------------


class Tunable(Regression):
    """With a learning rate and a batch size to be found."""

    def __init__(self):
        super().__init__()
        self.lr, self.batch_size = 0.01, 4
        self.stand_ins = []

    def training_step(self, batch, batch_idx):
        self.stand_ins.append(torch.compiler.is_compiling())
        return super().training_step(batch, batch_idx)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(320, 8), torch.randn(320, 1)), self.batch_size, shuffle=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def left(self):
        return [self.lr, self.batch_size]


class TunesLater(neighbours.LearningRateFinder):
    """As Lightning's documentation shows it: again at some epochs."""

    def on_fit_start(self, trainer, pl_module):
        pass

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            self.lr_find(trainer, pl_module)


TUNERS = {
    "BatchSizeFinder": lambda: neighbours.BatchSizeFinder(max_trials=3, steps_per_trial=2),
    "LearningRateFinder": lambda: neighbours.LearningRateFinder(num_training_steps=20),
    "a tuner in mid-fit": lambda: TunesLater(num_training_steps=20),
}


@pytest.mark.parametrize("name", TUNERS)
@pytest.mark.filterwarnings("ignore:.*(max_trials|lr_find|Field).*")
def test_while_a_tuner_runs_nothing_is_compiled_or_measured(name):
    options = {"validate": False}
    (plain, measured), report = both(Tunable, lambda: [TUNERS[name]()], **options)

    print(report.speedup, report.compiles.by_stage)
    assert [key for key in differences(plain, measured) if key != "told"] == []
    assert report.speedup.num_pairs > 0
    assert all(sample > 0 for sample in [report.speedup.num_pairs])
