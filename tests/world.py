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
from functorch.compile import make_boxed_func
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from compile_profiler import CompileProfiler, group
from compile_profiler.meeting import largest
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
    """Enough weights for several buckets of 1 MB."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 500), *[nn.Linear(500, 500) for _ in range(3)], nn.Linear(500, 1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Sharded(Regression):
    """FSDP2: each block is a unit of its own."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(Block(), Block(), Block(), nn.Linear(8, 1))

    def configure_model(self):
        for unit in [*list(self.net)[:3], self.net]:
            fully_shard(unit, mesh=self.device_mesh["data_parallel"])


class Gathers(Regression):
    """Talks to the other rank in its step."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + 0 * self.all_gather(batch[0].mean()).sum()


def fit(module_class, callbacks=(), *, strategy=None, max_steps=24, num=320, **options):
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
    data = TensorDataset(torch.randn(num, 8), torch.randn(num, 1))
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
    return {
        "differs": differences(plain, measured),
        "weights": dict(module.named_parameters()),
        "report": callback.report.to_dict(),
    }


@case
def plain():
    return both(Regression)


@case
def bucket_view():
    return both(Deep, strategy=lambda: {"gradient_as_bucket_view": True, "bucket_cap_mb": 1})


@case
def sharded():
    def strategy():
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")

    profiler = CompileProfiler(target="blocks", backend="eager", verbose=False)
    options = {"max_steps": 54, "num": 480}
    before, _ = fit(Sharded, strategy=strategy(), **options)
    after, _ = fit(Sharded, [profiler], strategy=strategy(), **options)
    cannot = CompileProfiler(target="blocks", backend=Accident("compile"), verbose=False)
    told = Told(cannot)
    eager, _ = fit(Sharded, [cannot, told], strategy=strategy(), **options)
    asks_too_much = CompileProfiler(verbose=False)
    fit(Sharded, [asks_too_much], strategy=strategy(), max_steps=2)
    return {
        "differs": [n for n, value in before.state_dict().items() if not same(value, after.state_dict()[n])]
        + [n for n, value in before.state_dict().items() if not same(value, eager.state_dict()[n])],
        "report": profiler.report.to_dict(),
        "cannot": cannot.report.to_dict(),
        "seen": told.seen,
        "asks_too_much": asks_too_much.report.to_dict(),
    }


def same(value, other):
    return torch.equal(value.full_tensor(), other.full_tensor())


@case
def own_collectives():
    return both(Gathers, max_steps=54, num=480)


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
                    time.sleep(0.08)
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
    return accident("nan", after=7)  # its next call is the one of the first pair


@case
def fails_in_the_middle_of_backward():
    """The part of backward that is computed first has handed its gradients on when the next one fails on rank 1."""
    num = [0, 0]

    def backward(graph, example_inputs):
        num[0] += 1
        is_second = num[0] == 2

        def run(*inputs):
            num[1] += is_second
            if rank() == 1 and is_second and num[1] == 3:
                raise ValueError("planted")
            return graph.forward(*inputs)

        return make_boxed_func(run)

    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=backward)

    def strategy():
        return DDPStrategy(process_group_backend="gloo", bucket_cap_mb=1)

    profiler = CompileProfiler(backend=backend, verbose=False, max_pairs=0)
    module, _ = fit(Deep, [profiler], strategy=strategy(), max_steps=15)
    eager, _ = fit(Deep, strategy=strategy(), max_steps=15)
    largest = [
        (a - b).abs().max() / b.abs().max() for a, b in zip(module.parameters(), eager.parameters(), strict=True)
    ]
    return {
        "report": profiler.report.to_dict(),
        "weights": dict(module.state_dict()),
        "far": float(max(largest)),
        "num_backward_graphs": num[0],
    }


@case
def one_does_not_come():
    """A meeting to which rank 1 comes late, and a run in which it does."""
    torch.distributed.barrier()
    lone = group.Group(print, meeting_s=1.0)
    time.sleep(3.0 if rank() == 1 else 0.0)
    began_s = time.monotonic()
    try:
        lone.run(largest({"a": 1.0}))
        lost = ""
    except group.LostError as error:
        lost = str(error)
    waited_s = time.monotonic() - began_s
    torch.distributed.barrier()

    class Late(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if rank() == 1 and batch_idx == 14:
                profiler._session._company._meeting._num_steps = -1000  # it never thinks of meeting again

    group.MEETING_S = 2.0
    profiler = CompileProfiler(backend="eager", verbose=False)
    module, _ = fit(Regression, [profiler, Late()], max_steps=40)
    group.MEETING_S = 120.0
    weights = {name: value for name, value in module.state_dict().items() if "running" not in name}
    return {"report": profiler.report.to_dict(), "lost": lost, "waited_s": waited_s, "weights": weights}


@case
def gain():
    class Slow(Regression):
        def training_step(self, batch, batch_idx):
            if not torch.compiler.is_compiling():
                time.sleep(0.08)
            return super().training_step(batch, batch_idx)

    profiler = CompileProfiler(backend=sleepy(0.001), pair_every_n_steps=1, verbose=False)
    fit(Slow, [profiler], max_steps=30)
    return {"report": profiler.report.to_dict()}


@case
def search():
    return both(Regression, profiler={"mode": "auto", "candidates": ["forward", "step"]})


def launch(folder, names, world_size=2, timeout_s=480):
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
