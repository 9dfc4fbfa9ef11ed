"""Real gloo processes, set up once, in which one run after the other is made; run by ``test_distributed.py``.

``python -m world FOLDER NAME...`` runs the named cases as one rank; torchrun's environment variables say which. What a
rank has seen goes into ``FOLDER/NAME.RANK.pt``.
"""

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.utils.data import DataLoader, TensorDataset

from compile_profiler import CompileProfiler
from runs import InMemoryLogger, Regression, differences, left_behind, sleepy

CASES = {}


def case(run):
    """A run by the name of its function."""
    CASES[run.__name__] = run
    return run


def rank():
    return int(os.environ["RANK"])


class OneOfTwo(Regression):
    """One branch is used in even batches, the other in odd ones."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 1) for _ in range(2))

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + self.branches[batch_idx % 2](batch[0]).square().mean()


class Deep(Regression):
    """Enough layers for several buckets."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)], nn.Linear(8, 1))


def fit(module_class, callbacks=(), *, strategy=None, max_steps=24, **options):
    """Train on this rank's share of the data."""
    torch.manual_seed(7)
    module = module_class()
    torch.manual_seed(1 + rank())
    trainer = pl.Trainer(
        callbacks=list(callbacks),
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy or DDPStrategy(process_group_backend="gloo"),
        plugins=[TorchElasticEnvironment()],
        max_steps=max_steps,
        logger=InMemoryLogger(),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        deterministic=True,
        use_distributed_sampler=False,
        **options,
    )
    data = TensorDataset(torch.randn(320, 8), torch.randn(320, 1))
    trainer.fit(module, DataLoader(data, 8))
    return module, trainer


def both(module_class, *, strategy=dict, profiler=None, **options):
    """The same run without the callback and with it; what differs on this rank, and what is left."""
    callback = CompileProfiler(
        **{"backend": "eager", "fallback": False, "pair_every_n_steps": 2, "verbose": False, **(profiler or {})}
    )

    def made():
        return DDPStrategy(process_group_backend="gloo", **strategy())

    plain = left_behind(*fit(module_class, strategy=made(), **options))
    module, trainer = fit(module_class, [callback], strategy=made(), **options)
    measured = left_behind(module, trainer)
    gradients = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    return {
        "differs": differences(plain, measured),
        "weights": {name: value for name, value in measured.items() if name.startswith("weights/net")},
        "gradients": gradients,
        "report": callback.report.to_dict(),
    }


@case
def plain():
    return both(Regression)


@case
def bucket_view():
    return both(Deep, strategy=lambda: {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0002})


@case
def find_unused():
    return both(OneOfTwo, strategy=lambda: {"find_unused_parameters": True})


@case
def static_graph():
    return both(Regression, strategy=lambda: {"static_graph": True})


@case
def accumulate():
    return both(Regression, accumulate_grad_batches=3, max_steps=20, profiler={"pair_every_n_steps": 1})


@case
def power_sgd():
    def hook():
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=4)
        return {"ddp_comm_state": state, "ddp_comm_hook": powerSGD_hook.powerSGD_hook}

    return both(Deep, strategy=hook)


class Accident:
    """A backend that has an accident on rank 1 when its graph has been called so many times, forward or backward."""

    def __init__(self, what, after=0):
        self.what, self.after, self.num = what, after, 0

    def __call__(self, graph, example_inputs):
        if self.what == "compile" and rank() == 1:
            raise RuntimeError("no such operator")

        def run(*inputs):
            self.num += 1
            if rank() == 1 and self.num > self.after:
                if self.what == "memory":
                    raise torch.OutOfMemoryError("planted")
                if self.what == "slow":
                    time.sleep(0.02)
                if self.what == "nan":
                    return [out * float("nan") if out.is_floating_point() else out for out in graph.forward(*inputs)]
                if self.what == "run":
                    raise ValueError("planted")
            return graph.forward(*inputs)

        return run


class Told(pl.Callback):
    """The decision after each batch."""

    def __init__(self, profiler):
        self.profiler, self.seen = profiler, []

    def on_train_batch_end(self, trainer, *_):
        self.seen.append(self.profiler.report.verdict.decision)


def accident(what, after=0, **options):
    profiler = CompileProfiler(backend=Accident(what, after), pair_every_n_steps=3, verbose=False, drift="warn")
    told = Told(profiler)
    module, _ = fit(Regression, [profiler, told], max_steps=40, **options)
    return {
        "report": profiler.report.to_dict(),
        "seen": told.seen,
        "weights": {name: value for name, value in module.state_dict().items() if "running" not in name},
    }


@case
def cannot_compile():
    return accident("compile")


@case
def runs_out_of_memory():
    return accident("memory", after=12)


@case
def fails_later():
    return accident("run", after=12)


@case
def slow_rank():
    return accident("slow")


@case
def nan_rank():
    return accident("nan", after=8)


@case
def gain():
    class Slow(Regression):
        def training_step(self, batch, batch_idx):
            if not torch.compiler.is_compiling():
                time.sleep(0.01)
            return super().training_step(batch, batch_idx)

    profiler = CompileProfiler(backend=sleepy(0.001), pair_every_n_steps=2, verbose=False)
    fit(Slow, [profiler], max_steps=40)
    return {"report": profiler.report.to_dict()}


def launch(folder, names, world_size=2, timeout_s=240):
    """Run the cases in real processes; what each rank has seen, by case."""
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(20000 + os.getpid() % 20000),
        "WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "LOCAL_WORLD_SIZE": str(world_size),
        "TORCHELASTIC_RUN_ID": "test",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "world", str(folder), *names],
            env={**environment, "RANK": str(n), "LOCAL_RANK": str(n)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
        )
        for n in range(world_size)
    ]
    ends_s = time.monotonic() + timeout_s
    try:
        texts = [process.communicate(timeout=max(1.0, ends_s - time.monotonic()))[0] for process in processes]
    except subprocess.TimeoutExpired:
        texts = ["" for _ in processes]
        raise
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, texts, strict=True):
        assert process.returncode == 0, text[-5000:]
    return {
        name: [torch.load(folder / f"{name}.{n}.pt", weights_only=False) for n in range(world_size)] for name in names
    }


def main(folder, *names):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in names:
        began_s = time.monotonic()
        result = CASES[name]()
        result["seconds"] = time.monotonic() - began_s
        torch.save(result, Path(folder) / f"{name}.{rank()}.pt")
        print(f"rank {rank()}: {name} {result['seconds']:.1f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
