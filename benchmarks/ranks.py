"""What the benchmarks of several processes share: one fit of a job under a strategy, and what its ranks agree on."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from benchmarks.common import on_gpu
from benchmarks.jobs import Job, Step


def world_size() -> int:
    """Processes of this run: as many as torchrun has started, or one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The number of this process."""
    return int(os.environ.get("RANK", "0"))


def uses_gpu() -> bool:
    """Whether every process has a CUDA device of its own; on the CPU otherwise."""
    return on_gpu() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def backend() -> str:
    """The way of training's own collectives."""
    return "nccl" if uses_gpu() else "gloo"


class ShardedStep(Step):
    """The training step of a job whose network is sharded block by block (FSDP2)."""

    def configure_model(self) -> None:
        """Shard each repeated block and the rest."""
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        blocks = getattr(self.net, "blocks", self.net)
        for block in blocks.children():
            if any(True for _ in block.parameters()):
                fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


def ddp(**options: Any) -> Callable[[], Strategy]:
    """Makes a DDP strategy."""
    return lambda: DDPStrategy(process_group_backend=backend(), **options)


def fsdp2() -> Strategy:
    """FSDP2 over all processes."""
    return ModelParallelStrategy(
        data_parallel_size=world_size(), tensor_parallel_size=1, process_group_backend=backend()
    )


def fit(
    job: Job, strategy: Strategy, callbacks: Sequence[L.Callback], *, steps: int, precision: Any = None, **options: Any
) -> nn.Module:
    """Train a fresh module of the job on this rank's own batches; returns it."""
    sharded = isinstance(strategy, ModelParallelStrategy)
    L.seed_everything(0, verbose=False)
    module = (ShardedStep if sharded else Step)(job.net(), job.loss)
    torch.manual_seed(1 + rank())
    with tempfile.TemporaryDirectory() as root_dir:
        trainer = L.Trainer(
            max_steps=steps,
            accelerator="gpu" if uses_gpu() else "cpu",
            devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            num_nodes=max(1, world_size() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
            strategy=strategy,
            precision=precision or job.precision,
            callbacks=list(callbacks),
            logger=False,
            default_root_dir=root_dir,
            deterministic="warn",
            use_distributed_sampler=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        trainer.fit(module, job.loader(steps * trainer.accumulate_grad_batches, pinned=uses_gpu()))
    return module


def digest(module: nn.Module) -> str:
    """A name for all weights of a module, that two modules share only if every bit is the same."""
    found = hashlib.sha256()
    for value in module.parameters():
        whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
        found.update(whole.detach().float().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def of_all(value: Any) -> list[Any]:
    """The value of each rank, on every rank."""
    if world_size() == 1:
        return [value]
    found: list[Any] = [None] * world_size()
    dist.all_gather_object(found, value)
    return found
