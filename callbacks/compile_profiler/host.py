"""The door to Lightning: what a Trainer is, what it is asked to show.

Names checked on lightning 2.5 to 2.6; ``lightning.pytorch`` and the separate ``pytorch_lightning`` are told apart by
what the trainer at hand is, never by an import.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from tqdm import tqdm

from compile_profiler.arms import patched
from compile_profiler.records import Environment, Stage

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule
else:
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError:  # only the separate package is installed
        from pytorch_lightning import Callback

    LightningModule = Any

Trainer = Any
"""A Trainer of either package; its private parts are this file's business, so no type checker can help."""

__all__ = ["Callback", "LightningModule", "Trainer"]

_STAGES: dict[str, Stage] = {
    "train": "train",
    "sanity_check": "sanity",
    "validate": "validate",
    "test": "test",
    "predict": "predict",
}


def x_axis(trainer: Trainer) -> int:
    """The number at which Lightning plots what the module logs in the training step at hand."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def logs_this_step(trainer: Trainer) -> bool:
    """Whether Lightning sends the module's own values of this training step to the loggers."""
    return bool(trainer.log_every_n_steps and trainer._logger_connector.should_update_logs) or trainer.fast_dev_run


def last_step(trainer: Trainer) -> int | None:
    """The x-axis number at which training is expected to end, ``None`` where nobody knows it.

    Asking before the loaders are there would make Lightning set them up.
    """
    if trainer.train_dataloader is None or not trainer.lightning_module.automatic_optimization:
        return None
    num_steps = trainer.estimated_stepping_batches
    # -1: epochs of a data set without a length, and no limit in steps.
    return int(num_steps) if math.isfinite(num_steps) and num_steps >= 0 else None


def autocast_dtype(trainer: Trainer) -> torch.dtype | None:
    """What the trainer's mixed precision computes in, or ``None``."""
    precision = str(trainer.precision)
    return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)


def stage_of(trainer: Trainer) -> Stage:
    """The stage that the trainer is in; training where it is in none."""
    stage = trainer.state.stage
    return _STAGES.get(str(stage.value) if stage is not None else "train", "train")


def loss_in(outputs: Any) -> Tensor | None:
    """The loss in what the end of a training batch is told, if there is one."""
    # A dict first: to ask for any mapping takes ten times as long, on every step.
    loss = outputs.get("loss") if isinstance(outputs, (dict, Mapping)) else outputs
    return loss if isinstance(loss, Tensor) else None


def seconds_left(trainer: Trainer, step_s: float) -> float:
    """Seconds until this fit ends, by its limits in steps, epochs and time; ``inf`` where it has none.

    Args:
        trainer: the Trainer.
        step_s: seconds of one batch.
    """
    loop, num_steps = trainer.fit_loop.epoch_loop, int(trainer.global_step)
    left_s = [math.inf]
    if trainer.max_steps >= 0 and num_steps:  # as the loop counts: each optimizer's, and none of raw optimizers
        num_batches = int(loop.total_batch_idx) + 1
        left_s.append((trainer.max_steps - num_steps) / num_steps * num_batches * step_s)
    if (trainer.max_epochs or -1) >= 0 and math.isfinite(trainer.num_training_batches):
        epochs_left = trainer.max_epochs - trainer.current_epoch
        num_left = epochs_left * trainer.num_training_batches - loop.batch_progress.current.ready
        left_s.append(num_left * step_s)
    for callback in trainer.callbacks:  # max_time is a callback
        remaining = getattr(callback, "time_remaining", None)
        if callable(remaining) and (seconds := remaining()) is not None:
            left_s.append(float(seconds))
    return max(0.0, min(left_s))


def unsupported(trainer: Trainer, module: LightningModule, target: str | Sequence[str]) -> str | None:
    """Why this run cannot be measured fairly, or ``None``."""
    way = parallelism(trainer)
    if way is None:
        return f"the strategy {type(trainer.strategy).__name__} on {trainer.world_size} process(es)"
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        return "a training_step that takes the dataloader_iter, so a batch cannot be run twice"
    if way == "fsdp" and target in ("step", "forward"):
        return f"target={target!r} under {type(trainer.strategy).__name__}; use target='blocks' or a list of submodules"
    if way == "none" or (way == "ddp" and trainer.world_size == 1):
        return None
    if not module.automatic_optimization:
        return "manual optimization under a distributed strategy, where no rank can run its step again by itself"
    if not torch.distributed.is_gloo_available():
        return "more than one process with a torch that lacks gloo, by which they meet"
    return None


Parallelism = Literal["none", "ddp", "fsdp"]


def parallelism(trainer: Trainer) -> Parallelism | None:
    """How the trainer spreads its work over processes, ``None`` for ways that cannot be measured.

    ``fsdp`` is that of ``ModelParallelStrategy`` with data parallelism alone: ``fully_shard`` (FSDP2).
    """
    strategy = trainer.strategy
    kinds = {kind.__name__ for kind in type(strategy).__mro__}
    if kinds & {
        "DeepSpeedStrategy",
        "XLAStrategy",
        "SingleDeviceXLAStrategy",
    }:  # which call themselves one of the known
        return None
    if "ModelParallelStrategy" in kinds:
        return "fsdp" if strategy.device_mesh["tensor_parallel"].size() == 1 else None
    known: dict[str, Parallelism] = {"SingleDeviceStrategy": "none", "DDPStrategy": "ddp"}
    return next((known[name] for name in known if name in kinds), None)


def target_for(module: LightningModule, target: str | Sequence[str]) -> str | Sequence[str]:
    """What to compile: a step that moves optimizers itself is no graph, the networks that it calls are."""
    return "networks" if target == "step" and not module.automatic_optimization else target


@contextmanager
def step_context(trainer: Trainer) -> Iterator[None]:
    """Grad mode and precision as a training step has them."""
    with torch.enable_grad(), trainer.strategy.precision_plugin.train_step_context():
        yield


def warn(message: str) -> None:
    """One warning on rank 0."""
    with tqdm.external_write_mode():
        rank_zero_warn(f"CompileProfiler: {message}", stacklevel=5)


def inform(trainer: Trainer, message: str) -> None:
    """One line on the console of rank 0, where Lightning prints its own."""
    package = package_of(trainer)
    with _beside_progress_bars(logging.getLogger(package)):
        importlib.import_module(f"{package}.utilities.rank_zero").rank_zero_info(f"CompileProfiler: {message}")


@contextmanager
def _beside_progress_bars(log: logging.Logger) -> Iterator[None]:
    """Let what ``log`` prints stand on a line of its own: tqdm's bars step aside, rich's catch ``sys.stderr``.

    Lightning's handler keeps the stream that was there when it was made, which a bar of rich cannot see.
    """
    handlers = [handler for handler in log.handlers if getattr(handler, "stream", None) is sys.__stderr__]
    with tqdm.external_write_mode(), patched([(handler, "stream", sys.stderr) for handler in handlers]):
        yield


def logged_hyperparameters(trainer: Trainer) -> dict[str, Any] | None:
    """What Lightning is about to log as the user's hyperparameters at the start of a fit, ``None`` if it logs none."""
    owners = [owner for owner in (trainer.lightning_module, trainer.datamodule) if owner is not None]
    saved = [owner.hparams_initial for owner in owners if getattr(owner, "_log_hyperparams", False)]
    # The key is LightningCLI's own, which Lightning leaves out too.
    return {key: value for each in saved for key, value in each.items() if key != "_class_path"} if saved else None


def environment(trainer: Trainer) -> Environment:
    """Versions, device and settings that the numbers depend on."""
    device = trainer.strategy.root_device
    package = package_of(trainer).partition(".")[0]
    return Environment(
        torch=torch.__version__,
        lightning=getattr(importlib.import_module(package), "__version__", None),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        precision=str(trainer.precision),
        strategy=type(trainer.strategy).__name__,
        world_size=trainer.world_size,
        tf32=torch.get_float32_matmul_precision() != "highest" if device.type == "cuda" else None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def package_of(thing: Any) -> str:
    """The package that a trainer, a module or a class of theirs comes from, also where the class is the user's own."""
    kind = thing if isinstance(thing, type) else type(thing)
    names = [base.__module__ for base in kind.__mro__]
    return "lightning.pytorch" if any(name.startswith("lightning.") for name in names) else "pytorch_lightning"


def is_module_class(kind: type) -> bool:
    """Whether ``kind`` is a LightningModule of either package."""
    ours = ("lightning", "pytorch_lightning")
    return any(base.__name__ == "LightningModule" and base.__module__.split(".")[0] in ours for base in kind.__mro__)


def silent_logger(trainer: Trainer) -> Any:
    """A logger that swallows everything."""
    return importlib.import_module(f"{package_of(trainer)}.loggers.logger").DummyLogger()
