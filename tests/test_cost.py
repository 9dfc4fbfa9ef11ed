"""What an ordinary step costs: calls of Python, counted, because a count is the same on every machine."""

import collections
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import compile_profiler
from compile_profiler import CompileProfiler
from compile_profiler.observe import Observer
from runs import MovesItsOptimizer, fit

PACKAGE = str(Path(compile_profiler.__file__).parent)
MAX_CALLS = 95
"""Of an ordinary step, its logged value included: each of the package's functions that is entered, and each function
that one of these calls. About 0.3 microseconds a call where Python is warm, up to 1 between two real steps."""
MAX_OWN_CALLS = 140
"""The same of a step that moves its optimizer itself, whose state is kept too."""
QUIET = {
    "backend": "eager",
    "max_pairs": 2,
    "pair_every_n_steps": 1,
    "overhead_budget": 1e-9,
    "fallback": False,
    "log": False,
    "verbose": False,
}
LEARNED, COUNTED = 24, 12  # steps after which all is learned, steps that are counted then


class Small(pl.LightningModule):
    """One linear layer in use, and as many submodules beside it as one likes."""

    def __init__(self, num_others=0):
        super().__init__()
        self.net = nn.Linear(8, 1)
        self.others = nn.ModuleList(nn.Sequential(nn.Identity(), nn.Identity()) for _ in range(num_others // 3))

    def loss(self, batch):
        return ((self.net(batch[0]) - batch[1]) ** 2).mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class SmallManual(MovesItsOptimizer, Small):
    """Moves its optimizer itself."""


class Counter(pl.Callback):
    """Looks at ordinary steps, in the middle of an epoch, from the end of one to the end of another."""

    def __init__(self, watching):
        self._watching = watching
        self._num_steps = 0

    def on_train_batch_end(self, *_):
        self._num_steps += 1
        if self._num_steps == LEARNED:
            self._watching.__enter__()
        if self._num_steps == LEARNED + COUNTED:
            self._watching.__exit__(None, None, None)


class Calls:
    """Calls that the package makes or takes part in, while entered."""

    def __init__(self):
        self.found = collections.Counter()

    def __enter__(self):
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _see(self, frame, event, arg):
        if event == "c_call" and _is_ours(frame):
            self.found[frame.f_code.co_name, getattr(arg, "__name__", "")] += 1
        elif event == "call" and (_is_ours(frame) or (frame.f_back is not None and _is_ours(frame.f_back))):
            self.found[frame.f_code.co_name, ""] += 1

    @property
    def per_step(self):
        return self.found.total() / COUNTED


def _is_ours(frame):
    return frame.f_code.co_filename.startswith(PACKAGE)


class Reads(TorchDispatchMode):
    """Numbers that Python reads out of tensors, while entered: each would wait for a device."""

    def __init__(self):
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        return func(*args, **(kwargs or {}))


def run(module, watching, *, profiled=True, stages=("train",), **options):
    """A fit of one epoch in which ``watching`` sees ordinary steps."""
    profiler = CompileProfiler(stages=stages, **QUIET)
    callbacks = [*([profiler] if profiled else []), Counter(watching)]
    fit(module, callbacks, max_steps=-1, max_epochs=1, log_every_n_steps=1000, **options)
    if profiled:
        assert profiler.report.verdict.decision == "compiled"
        assert profiler.report.speedup.num_pairs == 2  # and so all that is learned has been
    return watching


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}, {"stages": ("train", "validate")}], ids=str)
def test_an_ordinary_step_makes_few_calls_and_waits_for_nothing(options):
    calls = run(Small(), Calls(), **options)

    assert 20 < calls.per_step < MAX_CALLS, calls.found.most_common()
    assert not {name for names in calls.found for name in names if name in ("synchronize", "item", "cpu")}


def test_a_step_that_moves_its_optimizer_itself_makes_few_calls():
    calls = run(SmallManual(), Calls())

    assert 20 < calls.per_step < MAX_OWN_CALLS, calls.found.most_common()


def test_the_number_of_submodules_does_not_matter():
    few, many = run(Small(), Calls()), run(Small(num_others=300), Calls())

    assert few.found == many.found


@pytest.mark.parametrize("module_class", [Small, SmallManual])
def test_no_number_is_read_out_of_a_tensor_that_would_not_be_without_the_callback(module_class):
    """But that of the loss, which on a CPU is there already and is read past torch's dispatcher."""
    alone, profiled = run(module_class(), Reads(), profiled=False), run(module_class(), Reads())

    assert profiled.num == alone.num


def test_a_read_out_of_a_tensor_is_seen():
    with Reads() as reads:
        torch.ones(()).item()
        bool(torch.ones(()))
        torch.equal(torch.ones(1), torch.ones(1))

    assert reads.num == 3


def test_a_look_at_the_compiler_makes_hardly_a_call_while_nothing_compiles():
    observer, calls = Observer(), Calls()
    observer.start()
    try:
        observer.skip()
        with calls:
            for step in range(COUNTED):
                observer.poll("train", step=step, epoch=0)
    finally:
        observer.stop()

    assert 2 <= calls.per_step < 5, calls.found  # ``poll`` and ``compiling``; some versions of torch copy their records
