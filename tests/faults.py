"""Errors planted at the call boundaries of the package: each Python function of it fails in turn, as it is entered.

    PYTHONPATH=callbacks:tests python -m tests.faults              the first crossing of every boundary, minutes
    PYTHONPATH=callbacks:tests python -m tests.faults --all        its second and its last one, too
    PYTHONPATH=callbacks:tests python -m tests.faults measured     of one kind of run

prints what did not end as it should; the suite takes a sample of it.
"""

from __future__ import annotations

import collections
import contextlib
import io
import logging
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import compile_profiler
from auto_runs import StopAt
from compile_profiler import CompileProfiler, probe
from compile_profiler.recall import FOLDER_VARIABLE
from runs import InMemoryLogger, MovesItsOptimizer, differences, left_behind

ROOT = str(Path(compile_profiler.__file__).parent)
GENERATOR = 0x20
DOORS = {
    # Where Lightning, torch or the user enters the package: around everything these call stands a ``try``, around
    # their own first line nothing can.
    "_guarded.<locals>.run": "each hook of the callback",
    "CompileProfiler.__init__": "raises at construction",
    "CompileProfiler.report": "called by the user",
    "CompileProfiler._give_up": "called once something has failed",
    "StepDoor._entry.<locals>.enter": "the strategy's step",
    "StepDoor._exit.<locals>.backward": "the precision plugin's backward",
    "called_once": "likewise, on its way",
    "called_once.<locals>.stand_in": "the module's step",
    "Guard.forward": "likewise",
    "Guard.backward": "of the loss",
    "DeferredLogs.__init__.<locals>.remember.<locals>.stand_in": "self.log in a step",
    "_schedulers_asked.<locals>.asking.<locals>.stand_in": "a scheduler's, likewise",
    "OwnSteps._replaced.<locals>.standing_in.<locals>.stand_in": "an optimizer's step, where steps are left out",
    "Counted.__call__": "Lightning's hook around a backward of the step's own",
    "OwnSteps._before_step": "torch's hook before any optimizer's step",
    "OwnSteps._after_step": "and after it",
    "Observer._on_start": "torch's hook before any compile",
    "Observer._on_end": "and after it",
}


class Boundary(NamedTuple):
    """A function of the package, by where it stands and what it is called."""

    module: str
    name: str
    line: int


def boundary_of(code):
    """The function that a code object is of, ``None`` if it is not of the package."""
    if not code.co_filename.startswith(ROOT):
        return None
    name = getattr(code, "co_qualname", None) or NAMES.get((code.co_filename, code.co_firstlineno, code.co_name))
    return Boundary(Path(code.co_filename).stem, name or code.co_name, code.co_firstlineno)


def _names():
    """Qualified names by place, which code objects know since Python 3.11."""

    def within(code, prefix):
        for constant in code.co_consts:
            if hasattr(constant, "co_code"):
                name = f"{prefix}{constant.co_name}"
                yield (constant.co_filename, constant.co_firstlineno, constant.co_name), name
                inside = f"{name}.<locals>." if constant.co_flags & 2 else f"{name}."
                yield from within(constant, inside)

    found = {}
    for path in Path(ROOT).glob("*.py"):
        found.update(within(compile(path.read_text(encoding="utf-8"), str(path), "exec"), ""))
    return found


NAMES = _names()


def place_of(code):
    """The same for the copies of a function's code that each arm has of its own."""
    return code.co_filename, code.co_firstlineno, code.co_name


class Recorder:
    """A profile function that counts how often each boundary is crossed."""

    def __init__(self):
        self.counts = collections.Counter()

    def __call__(self, frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(ROOT) and not _resumed(frame):
            self.counts[frame.f_code] += 1


class Fault:
    """A profile function that lets a boundary fail the ``number``-th time it is crossed."""

    def __init__(self, code, number=1):
        self._place, self._left, self.happened = place_of(code), number, False

    def __call__(self, frame, event, arg):
        if event == "call" and place_of(frame.f_code) == self._place and not _resumed(frame):
            self._left -= 1
            if not self._left:
                self.happened = True
                raise RuntimeError("planted fault")


def _resumed(frame):
    """Whether a generator goes on after a ``yield``, which is no call."""
    return bool(frame.f_code.co_flags & GENERATOR) and frame.f_lasti > 4


class Tiny(pl.LightningModule):
    """Random numbers, a buffer, momentum, a logged value, a list of what was trained."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.1), nn.Linear(3, 1))
        self.seen = []

    def loss(self, batch):
        return ((self.net(batch[0]) - batch[1]) ** 2).mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append(float(batch[0].sum()))

    def on_train_end(self):
        # Into the file, so that saving is among what can fail.
        self.trainer.save_checkpoint("tiny.ckpt")


class TinyManual(MovesItsOptimizer, Tiny):
    """Moves its optimizer itself, a scheduler after it."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [lr_scheduler.StepLR(optimizer, 2)]


def failing(graph, example_inputs):
    """A backend whose compiled code fails at its second call."""
    calls = []

    def run(*inputs):
        outputs = graph.forward(*inputs)
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("planted failure of compiled code")
        return outputs

    return run


KEPT = {"backend": "eager", "fallback": False, "verbose": True, "warmup_steps": 1, "pair_every_n_steps": 3}
AUTO = {"mode": "auto", "candidates": ["step", "forward"], "backend": "eager", "verbose": True, "warmup_steps": 1}


class Kind(NamedTuple):
    """A kind of run: the module, the callback's arguments, after how many steps it ends, how long it seems to be."""

    module_class: type
    arguments: dict
    steps: int = 4
    max_steps: int = 4
    repeats: bool = True  # whether it crosses the same boundaries each time; a search goes by seconds


RUNS = {
    "measured": Kind(Tiny, KEPT),
    "windows": Kind(Tiny, {**KEPT, "end_to_end": "windows", "stages": ("train", "validate")}),
    "failing": Kind(Tiny, {**KEPT, "backend": failing}),
    "manual": Kind(TinyManual, KEPT),
    "manual, failing": Kind(TinyManual, {**KEPT, "backend": failing}),
    # A search is worth it where many steps remain.
    "auto": Kind(Tiny, AUTO, steps=40, max_steps=1_000_000, repeats=False),
    "auto, failing": Kind(Tiny, {**AUTO, "backend": failing}, steps=40, max_steps=1_000_000, repeats=False),
}


def run(kind, profiler, watch=None):
    """A short fit under a profile function; what it leaves behind."""
    shutil.rmtree(os.environ[FOLDER_VARIABLE], ignore_errors=True)  # what one search finds, the next must not know
    torch.manual_seed(7)
    random.seed(1)
    np.random.seed(1)
    module = kind.module_class()
    data = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
    trainer = pl.Trainer(
        callbacks=[StopAt(kind.steps), *([] if profiler is None else [profiler])],
        max_steps=kind.max_steps,
        logger=InMemoryLogger(),
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        limit_val_batches=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        accelerator="cpu",
    )
    strategy = sorted(vars(trainer.strategy))
    train, val = DataLoader(data, 4, shuffle=True), DataLoader(data, 8)
    with contextlib.redirect_stdout(io.StringIO()):  # the table at the end
        sys.setprofile(watch)
        try:
            trainer.fit(module, train, val)
        finally:
            sys.setprofile(None)
    left = left_behind(module, trainer)
    left["strategy"] = [name for name in vars(trainer.strategy) if name not in strategy and name != "_lightning_module"]
    left["plugin"] = sorted(vars(trainer.strategy.precision_plugin))
    handler = torch._dynamo.callback.callback_handler
    left["listeners"] = [handler.start_callbacks[:], handler.end_callbacks[:]]
    left["schedulers"] = lr_scheduler.StepLR.step
    left["submodules"] = [sorted(vars(submodule)) for submodule in module.modules()]
    handler.start_callbacks.clear()  # so that one run does not fail for another
    handler.end_callbacks.clear()
    return left


def recorded(kind):
    """The boundaries that a run crosses, each with how often, in the order in which it meets them."""
    recorder = Recorder()
    run(RUNS[kind], CompileProfiler(**RUNS[kind].arguments), recorder)
    return dict(recorder.counts)


def complaints(kind, code, number, plain):
    """What is wrong with a run in which the boundary fails."""
    Path("compile_profile.json").unlink(missing_ok=True)
    profiler, fault = CompileProfiler(**RUNS[kind].arguments), Fault(code, number)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            left = run(RUNS[kind], profiler, fault)
        except Exception as error:
            return [f"ended in {type(error).__name__}: {error}"]
    said = [str(warning.message) for warning in caught if "CompileProfiler" in str(warning.message)]
    said = [line for line in said if "planted failure" not in line]  # that is what these runs are about
    found = [f"left {name}" for name in differences(plain, left)]
    if not fault.happened and RUNS[kind].repeats:
        found.append("did not happen")
    if len(said) > 1:
        found.append(f"{len(said)} warnings: {[line[:90] for line in said]}")
    if profiler.report.verdict.reason == "disabled" and not said and boundary_of(code).name != "warn":
        found.append("silent")
    if not Path("compile_profile.json").exists() and not said:
        found.append("neither report nor warning")
    return found


def crossings(kind):
    """What can fail in a kind of run: its boundaries but the doors, each with the number of its crossings."""
    recorded(kind)  # what is imported or made once, is by now
    return {code: count for code, count in recorded(kind).items() if boundary_of(code).name not in DOORS}


@contextlib.contextmanager
def short_blocks():
    """Pairs that do not wait until their times mean something."""
    before, probe.MIN_BLOCK_S = probe.MIN_BLOCK_S, 1e-4
    try:
        yield
    finally:
        probe.MIN_BLOCK_S = before


def main():
    """Let every boundary of the kinds of runs on the command line fail in turn."""
    kinds = [word for word in sys.argv[1:] if word != "--all"] or list(RUNS)
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    for kind in kinds:
        plain, counts = run(RUNS[kind], None), crossings(kind)
        began_s, num_runs, num_wrong = time.perf_counter(), 0, 0
        for code, count in counts.items():
            numbers = {1, 2, count} if "--all" in sys.argv else {1}
            for number in sorted(numbers & set(range(1, count + 1))):
                num_runs += 1
                found = complaints(kind, code, number, plain)
                if found:
                    num_wrong += 1
                    where = f"{boundary_of(code).module}.{boundary_of(code).name}"
                    print(f"{kind}: {where}, crossing {number} of {count}: {'; '.join(found)}", flush=True)
        seconds = time.perf_counter() - began_s
        print(f"{kind}: {len(counts)} boundaries, {num_runs} runs, {num_wrong} wrong, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, short_blocks():
        os.chdir(folder)
        os.environ[FOLDER_VARIABLE] = str(Path(folder) / "verdicts")
        main()
