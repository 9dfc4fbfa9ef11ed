"""Other people's callbacks, profilers and hooks in the same Trainer: nobody can tell that the run was measured."""

import copy
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as neighbours
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, TensorDataset

from compile_profiler import CompileProfiler
from runs import Regression, differences, left_behind, train

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
    return [
        (flat(other.state_dict()), getattr(other, "kept", None)) for other in others if isinstance(other, pl.Callback)
    ]


class Thawed(Regression):
    """Its first layer joins the optimizer later."""

    def configure_optimizers(self):
        return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=0.01, momentum=0.9)


class EpochScheduler(Regression):
    """As stochastic weight averaging wants it."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


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


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf.*")  # from inside dynamo
def test_stochastic_weight_averaging_averages_the_same_weights():
    def swa():
        return [neighbours.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)]

    (plain, measured), report = both(EpochScheduler, swa, max_epochs=4, max_steps=-1)

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

    (plain, measured), report = both(Regression, others)

    assert [name for name in differences(plain, measured) if name not in ("told", "logged")] == []
    assert report.speedup.num_pairs > 0


# -- tuners -----------------------------------------------------------------------------------------------------------


class Tunable(Regression):
    """With a learning rate and a batch size to be found."""

    def __init__(self):
        super().__init__()
        self.lr, self.batch_size = 0.01, 4
        self.eager_steps = []

    def training_step(self, batch, batch_idx):
        if not torch.compiler.is_compiling():  # a constant of the compiled step
            self.eager_steps.append(len(self.seen))
        return super().training_step(batch, batch_idx)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(320, 8), torch.randn(320, 1)), self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(32, 8), torch.randn(32, 1)), 8)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def left(self):
        return [self.lr, self.batch_size]


class TunesLater(neighbours.LearningRateFinder):
    """As Lightning's documentation shows it: when an epoch starts, in the middle of fit."""

    def on_fit_start(self, trainer, pl_module):
        pass

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 0 and self.optimal_lr is None:
            self.lr_find(trainer, pl_module)


TUNERS = {
    "BatchSizeFinder": (lambda: neighbours.BatchSizeFinder(max_trials=3, steps_per_trial=2), range(6)),
    "LearningRateFinder": (lambda: neighbours.LearningRateFinder(num_training_steps=20), range(20)),
    "in mid-fit": (lambda: TunesLater(num_training_steps=20), range(20)),
}


@pytest.mark.parametrize("name", TUNERS)
def test_trial_steps_of_a_tuner_run_in_eager_and_the_fit_itself_compiled(name):
    make, expected = TUNERS[name]
    options = {**RUN, "validate": False, "max_steps": -1, "max_epochs": 3}
    profiler = CompileProfiler(**KEPT)
    plain = left_behind(*train(Tunable, [make()], **options))
    module, trainer = train(Tunable, [profiler, make()], **options)

    assert [step - 1 for step in module.eager_steps] == list(expected)
    assert len(module.seen) == len(expected) + 24
    assert differences(plain, left_behind(module, trainer)) == []
    assert profiler.report.speedup.num_pairs > 0


def test_a_tuner_without_a_fit_leaves_no_session_and_no_report():
    profiler, module = CompileProfiler(**KEPT), Tunable()
    trainer = pl.Trainer(
        callbacks=[profiler],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        accelerator="cpu",
        max_epochs=1,
    )
    Tuner(trainer).lr_find(module, num_training=10)

    assert len(module.eager_steps) == 10
    assert profiler.report == CompileProfiler().report
    assert list(Path.cwd().rglob("compile_profile.json")) == []


# -- profilers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profiler_class", [SimpleProfiler, AdvancedProfiler])
def test_profilers_of_python_see_the_pair_as_time_of_the_callback(profiler_class):
    used = [profiler_class(dirpath=".", filename=name) for name in ("plain", "measured")]
    mine = CompileProfiler(**KEPT)
    plain = left_behind(*train(Regression, profiler=used[0], **RUN))
    measured = left_behind(*train(Regression, [mine], profiler=used[1], **RUN))

    assert differences(plain, measured) == []
    assert mine.report.speedup.num_pairs > 0
    if profiler_class is SimpleProfiler:
        counts = [
            {action: len(times) for action, times in one.recorded_durations.items() if "CompileProfiler" not in action}
            for one in used
        ]
        assert counts[0] == counts[1]


@pytest.mark.filterwarnings("ignore:.*(Profiler|profiler|Incorrect schedule).*")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf.*")  # from inside dynamo
def compare_records():
    """Operations in a record of torch's profiler, without and with the callback."""

    def operations(name, callbacks):
        profiler = PyTorchProfiler(
            dirpath=".",
            filename=name,
            export_to_chrome=False,
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=11, repeat=1),
        )
        left = left_behind(*train(Regression, callbacks, profiler=profiler, **RUN))
        return left, sum(event.name == "aten::addmm" for event in profiler.function_events)

    mine = CompileProfiler(**KEPT)
    plain, num_plain = operations("plain", [])
    measured, num_measured = operations("measured", [mine])

    assert differences(plain, measured) == []
    assert num_plain == num_measured > 0
    assert mine.report.speedup.num_pairs > 0  # of the steps after those that were recorded


def test_while_a_profiler_of_torch_records_no_pair_gets_into_its_record():
    """In a process of its own: that profiler often ends it by a segmentation fault (torch 2.13), also without us."""
    script = "import torch; torch.set_num_threads(1); import test_neighbours; test_neighbours.compare_records()"
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "callbacks")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    for _ in range(8):
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        if done.returncode != -signal.SIGSEGV:
            break

    assert done.returncode == 0, done.stderr[-2000:]


def test_a_run_that_is_recorded_throughout_stays_undecided():
    """The row of docs/limits.md: a recorder of torch makes eager slower than compiled."""
    mine = CompileProfiler(**{**KEPT, "fallback": True})
    with torch.autograd.profiler.profile(use_kineto=False):
        train(Regression, [mine], **RUN)

    assert (mine.report.verdict.reason, mine.report.speedup.num_pairs) == ("pending", 0)


# -- hooks ------------------------------------------------------------------------------------------------------------

calls = 0
shapes = []


class Hooks(pl.Callback):
    """Watchers of gradients and activations, as people and experiment trackers register them.

    Args:
        when: the hook of Lightning in which to register.
    """

    def __init__(self, when):
        self.when = when
        self.norms, self.outputs, self.steps = [], [], 0

    def watch(self, module):
        global calls
        calls = 0
        shapes.clear()
        counted, means, num_outputs = [], {}, 0

        def by_closure(submodule, args, output):
            nonlocal num_outputs
            num_outputs += 1
            means[num_outputs] = output.detach().mean()
            self.outputs.append(output.shape)

        def by_globals(submodule, args):
            global calls
            calls += 1
            shapes.append(args[0].shape)

        first, last = module.net[0], module.net[4]
        first.weight.register_hook(lambda gradient: self.norms.append(gradient.norm().item()))
        last.weight.register_post_accumulate_grad_hook(lambda weight: counted.append(weight.grad.sum().item()))
        first.register_forward_hook(by_closure)
        first.register_forward_pre_hook(by_globals)
        last.register_forward_hook(self.by_method)
        last.register_full_backward_hook(functools.partial(self.by_partial, counted))
        self.kept = [self.norms, counted, means, self.outputs, by_closure]

    def by_method(self, submodule, args, output):
        self.steps += 1

    @staticmethod
    def by_partial(counted, submodule, grad_input, grad_output):
        counted.append("backward")

    def said(self):
        *rest, by_closure = self.kept
        num_outputs = by_closure.__closure__[by_closure.__code__.co_freevars.index("num_outputs")].cell_contents
        return [*map(flat, rest), self.steps, calls, list(shapes), num_outputs]

    def setup(self, trainer, pl_module, stage):
        if self.when == "before":
            self.watch(pl_module)

    def on_train_epoch_start(self, trainer, pl_module):
        if self.when == "in mid-fit" and trainer.current_epoch == 1:
            self.watch(pl_module)


@pytest.mark.filterwarnings("ignore:CompileProfiler.* torch stops compiling it")
@pytest.mark.parametrize("when", ["before", "in mid-fit"])
@pytest.mark.filterwarnings("ignore:.*(backward hook|Backward hook|is not a leaf|torch.compile).*")
def test_hooks_of_others_are_called_for_real_steps_only(when):
    plain, others, profiler = Hooks(when), Hooks(when), CompileProfiler(**KEPT)
    expected = left_behind(*train(Regression, [plain], **RUN))
    expected_words = plain.said()
    measured = left_behind(*train(Regression, [profiler, others], **RUN))

    print(profiler.report.verdict, profiler.report.speedup, profiler.report.compiles)
    assert differences(expected, measured) == []
    assert others.said() == expected_words
    assert profiler.report.speedup.num_pairs > 0
    assert len(others.norms) == (24 if when == "before" else 16)


class InBackward(Regression):
    """The optimizer steps in a hook of each parameter, while backward runs."""

    def __init__(self):
        super().__init__()
        self.own = {p: torch.optim.SGD([p], lr=0.01, momentum=0.9) for p in self.parameters()}
        for p in self.parameters():
            p.register_post_accumulate_grad_hook(self.move)

    def move(self, parameter):
        self.own[parameter].step()
        parameter.grad = None

    def configure_optimizers(self):
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)

    def left(self):
        return [flat(list(optimizer.state_dict()["state"].values())) for optimizer in self.own.values()]


def test_an_optimizer_in_the_backward_pass_does_not_step_in_a_pair():
    (plain, measured), report = both(InBackward)

    assert differences(plain, measured) == []
    assert report.speedup.num_pairs > 0


kept_by_nobody = []


class HooksInTheStep(Regression):
    """The step itself hooks a tensor; what the hook writes belongs to nothing that a pair could restore."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(kept_by_nobody.append)
        return loss


@pytest.mark.filterwarnings("ignore:CompileProfiler.* torch stops compiling it")
@pytest.mark.filterwarnings("ignore:.*(is not a leaf|torch.compile).*")
def test_a_hook_registered_in_the_step_writes_in_pairs_too():
    """The row of docs/limits.md: the run is the same, the hook's own list is longer."""
    kept_by_nobody.clear()
    (plain, measured), report = both(HooksInTheStep)

    assert differences(plain, measured) == []
    assert report.speedup.num_pairs > 0
    assert len(kept_by_nobody) > 2 * 24
