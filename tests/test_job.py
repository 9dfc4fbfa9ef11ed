"""The key of a job: the same for the same job wherever it runs, another for each thing that its speed depends on."""

import copy
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from compile_profiler import CompileProfiler
from compile_profiler.job import Job, job_of
from compile_profiler.records import Environment
from runs import Regression, train

ENVIRONMENT = Environment(
    torch="2.13.0", lightning="2.6.6", device="cpu", precision="32-true", strategy="Single", world_size=1
)
CONFIGURATION = {"mode": "auto", "candidates": [{"target": "step", "mode": None}, {"target": ["net"], "mode": None}]}
BATCH = [torch.ones(4, 1, 8), torch.ones(4, 1)]

SOURCE = """
import torch
from torch import nn

SCALE = 2
RUNS = {}

def penalty(y):
    return y.abs().mean() if RUNS.get("kind") in {"one", "two", "three", "four"} else y.mean()

def doubled(function):
    def wrapper(*args):
        return function(*args) * 2
    return wrapper

class Schedule:
    def at(self, step):
        return 1 / (1 + step)

class Block(nn.Module):
    def __init__(self, stride=1):
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, stride)
        self.act = lambda x: x.relu()

    def forward(self, x):
        return self.act(self.conv(x)) * SCALE

class Base(nn.Module):
    @property
    def extra(self):
        return 1.0

class Model(Base):
    def __init__(self):
        super().__init__()
        self.net = Block(1)
        self.norm = nn.BatchNorm1d(1)
        self.schedule = Schedule()
        self.num_heads = 2
        self.lr = 0.1
        self.name = "first"

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.schedule.at(batch_idx) + self.extra

    @doubled
    def loss(self, batch):
        x, y = batch
        return penalty(self.norm(self.net(x)).mean(-1) - y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)
"""


def made(source=SOURCE, *edit):
    """A model whose code can be found in no file, with an edit."""
    assert not edit or edit[0] in source
    namespace = {"__name__": "typed_in"}
    exec(compile(source.replace(*edit) if edit else source, "<string>", "exec"), namespace)
    return namespace["Model"]()


def job(module=None, batch=None, environment=ENVIRONMENT, configuration=CONFIGURATION):
    return job_of(
        made() if module is None else module,
        BATCH if batch is None else batch,
        environment=environment,
        configuration=configuration,
    )


SAME = job()


@pytest.mark.parametrize(
    "edit",
    [
        ("y.abs()", "y.square()"),  # a function of the file
        ("SCALE = 2", "SCALE = 3"),  # a number of the file
        ("(*args) * 2", "(*args) * 3"),  # a decorator
        ("@doubled", ""),
        ("x.relu()", "x.tanh()"),  # a function on an object
        ("1 / (1 + step)", "1 / (2 + step)"),  # an object that is no module
        ("return 1.0", "return 2.0"),  # a property of a base class
        ("* SCALE", "* SCALE * 1.0"),  # a submodule
        ("self.loss(batch) *", "2 * self.loss(batch) *"),  # the step itself
        ("Block(1)", "Block(2)"),  # a setting of a layer that changes no shape
        ("num_heads = 2", "num_heads = 4"),
        ("nn.BatchNorm1d(1)", "nn.BatchNorm1d(1, affine=False)"),
        ("nn.BatchNorm1d(1)", "nn.BatchNorm1d(1, track_running_stats=False)"),
        ("self.norm =", "self.layer = self.norm ="),  # another name
        ('"four"', '"five"'),  # in a set
    ],
)
def test_an_edit_that_changes_what_runs_changes_the_key(edit):
    other = job(made(SOURCE, *edit))

    assert isinstance(other, Job)
    assert other.key != SAME.key
    assert other.key_any_size != SAME.key_any_size


@pytest.mark.parametrize(
    "edit",
    [
        ("    def training_step", "    # a comment\n\n\n    def training_step"),
        ("lr = 0.1", "lr = 0.2"),
        ('"first"', '"second"'),
        ("torch.optim.SGD", "torch.optim.Adam"),
        ("RUNS = {}", "RUNS = {'id': 7}"),
    ],
)
def test_an_edit_that_does_not_keeps_the_key(edit):
    assert job(made(SOURCE, *edit)) == SAME


def frozen():
    module = made()
    module.net.conv.weight.requires_grad_(False)
    return module


def patched():
    module = made()
    module.net.forward = lambda x: x
    return module


@pytest.mark.parametrize(
    "change",
    [
        {"module": made().double()},
        {"module": made().to("meta")},
        {"module": frozen()},
        {"module": patched()},
        {"batch": [torch.ones(5, 1, 8), torch.ones(5, 1)]},
        {"batch": [torch.ones(4, 1, 8), torch.ones(4, 1, dtype=torch.int64)]},
        {"batch": tuple(BATCH)},
        {"batch": {"x": BATCH[0], "y": BATCH[1]}},
        {"batch": [*BATCH, "a name"]},
        {"environment": replace(ENVIRONMENT, torch="2.11.0")},
        {"environment": replace(ENVIRONMENT, lightning="2.5.0")},
        {"environment": replace(ENVIRONMENT, device="NVIDIA H200")},
        {"environment": replace(ENVIRONMENT, precision="bf16-mixed")},
        {"environment": replace(ENVIRONMENT, strategy="DDPStrategy")},
        {"environment": replace(ENVIRONMENT, world_size=2)},
        {"configuration": {**CONFIGURATION, "mode": None}},
        {"configuration": {**CONFIGURATION, "candidates": CONFIGURATION["candidates"][:1]}},
        {"configuration": {**CONFIGURATION, "backend": made}},
    ],
    ids=lambda change: "-".join(change),
)
def test_whatever_the_speed_depends_on_is_in_the_key(change):
    other = job(**change)

    assert isinstance(other, Job)
    assert other.key != SAME.key


def test_batches_of_other_sizes_share_the_second_key_alone():
    longer = [torch.ones(4, 1, 9), torch.ones(4, 1)]
    flat = [torch.ones(4, 8), torch.ones(4, 1)]
    targets, more = ({"boxes": [torch.ones(n, 4) for n in sizes]} for sizes in ((1, 2), (5, 5, 5)))

    assert job(batch=longer).key != SAME.key
    assert job(batch=longer).key_any_size == SAME.key_any_size
    assert job(batch=flat).key_any_size != SAME.key_any_size
    assert job(batch=targets).key != job(batch=more).key
    assert job(batch=targets).key_any_size == job(batch=more).key_any_size


def test_instances_copies_and_pickled_modules_have_the_same_key():
    module = made()
    again = copy.deepcopy(module)
    with torch.no_grad():
        again.net.conv.weight.zero_()  # weights do not count

    assert job(module) == job(again.eval()) == SAME


def test_another_process_finds_the_same_key(tmp_path):
    """As a script, whose module is ``__main__``, with other hashes of texts, and so another order of sets."""
    script = tmp_path / "train.py"
    script.write_text(
        f"{SOURCE}\n"
        "import test_job\n"
        "from compile_profiler.job import job_of\n"
        "torch.set_num_threads(1)\n"
        "options = dict(environment=test_job.ENVIRONMENT, configuration=test_job.CONFIGURATION)\n"
        "print(job_of(Model(), test_job.BATCH, **options).key)\n"
    )
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent / "callbacks")])
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout.strip()) == (0, SAME.key), done.stderr


def test_a_run_changes_neither_the_key_nor_does_the_key_change_the_run():
    """Python rewrites code that runs often, and a fit leaves much on a module."""
    torch.manual_seed(0)
    module = Regression()
    before = job(module, [torch.ones(2, 8), torch.ones(2, 1)])
    state, random_state, attributes = torch.get_rng_state(), random.getstate(), copy.deepcopy(vars(module))
    assert job(module, [torch.ones(2, 8), torch.ones(2, 1)]) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == random_state
    assert vars(module).keys() == attributes.keys()

    trained, _ = train(Regression, max_steps=40)

    assert job(trained, [torch.ones(2, 8), torch.ones(2, 1)]) == before


class Recognises(pl.Callback):
    """Asks for the key in the midst of a run, whose batch is what its module gets."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.found = job(pl_module, batch)


@pytest.mark.parametrize("target", ["step", "forward", ["net"]])
def test_what_the_callback_puts_on_a_module_does_not_change_the_key(target):
    """The first batch, which is part of the key, comes when the compiled step is already there."""
    alone, watched = Recognises(), Recognises()
    train(Regression, [alone], max_steps=4)
    profiler = CompileProfiler(target=target, backend="eager", verbose=False)

    train(Regression, [profiler, watched], max_steps=4)

    assert profiler.report.compiles.graphs > 0
    assert isinstance(alone.found, Job)
    assert watched.found == alone.found


def test_a_module_that_the_user_compiled_is_another_job():
    module = made()
    module.net = torch.compile(module.net, backend="eager")

    assert job(module).key not in (SAME.key, SAME.key_any_size)


def test_code_that_torch_generates_is_told_apart():
    """torch.fx writes the forward of a class of its own."""
    graphs = [torch.fx.symbolic_trace(layer) for layer in (nn.ReLU(), nn.Sequential(nn.ReLU(), nn.ReLU()), nn.ReLU())]
    keys = [job(Holder(graph)).key for graph in graphs]

    assert keys[0] == keys[2] != keys[1]


class Holder(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def training_step(self, batch, batch_idx):
        return self.inner(batch[0]).sum()


class Talkative(nn.ReLU):
    """Says where it is in memory, or fails to."""

    def __init__(self, fails):
        super().__init__()
        self.fails = fails
        self.thing = object()

    def extra_repr(self):
        if self.fails:
            raise RuntimeError("nothing to say")
        return f"thing={self.thing}"


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_module_says_of_itself_may_hold_addresses_or_fail(fails):
    kept = Talkative(fails), Talkative(fails)  # at two addresses

    first, second = (job(Holder(each)) for each in kept)

    assert isinstance(first, Job)
    assert first == second


class Native(nn.Module):
    forward = torch.relu


class Shy:
    """Of no known type: it raises whatever it is asked."""

    def __getattribute__(self, name):
        raise RuntimeError("do not look at me")


def ragged():
    return [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])]


def entangled():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n == 1 or even(n - 1)

    return even


def test_functions_that_hold_each_other_are_read_once():
    module = Holder(nn.ReLU())
    module.entangled = entangled()

    assert isinstance(job(module), Job)
    assert job(module) != job(Holder(nn.ReLU()))


def looped():
    batch = []
    batch.append(batch)
    return batch


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype.*")
@pytest.mark.parametrize(
    ("module", "batch", "why"),
    [
        (lambda: Holder(torch.jit.script(nn.ReLU())), lambda: BATCH, "TorchScript, whose code cannot be read"),
        (lambda: Holder(Native()), lambda: BATCH, "Native.forward is not written in Python"),
        (lambda: Holder(nn.ReLU()), Shy, "do not look at me"),
        (lambda: Holder(nn.ReLU()), looped, "recursion"),
        (
            lambda: Holder(nn.ReLU()),
            lambda: [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])],
            "NestedTensor",
        ),
    ],
)
def test_a_job_that_cannot_be_recognised_says_why(module, batch, why):
    found = job(module(), batch())

    assert isinstance(found, str)
    assert found.startswith("Holder cannot be recognised: ")
    assert why in found
    assert found.endswith(".")
