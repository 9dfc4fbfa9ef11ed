"""Real runs of ``mode="auto"``: candidates whose truth is planted by what a backend sees of them."""

import time
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from compile_profiler import CompileProfiler
from compile_profiler.records import Report
from runs import Files, Regression, differences, left_behind, train

PAUSE_S = 0.015
FOR_LONG = 1_000_000  # steps of a run that a search is worth; StopAt ends it


class Pausing(Regression):
    """Eager pauses in the network; compiled code does what its backend says."""

    def forward(self, x):
        if not torch.compiler.is_compiling():
            time.sleep(PAUSE_S)
        return super().forward(x)


class StopAt(Callback):
    """Ends a long run early."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step >= self.step


class StopAfterSearch(StopAt):
    """Ends it so many steps after its search has settled, at ``step`` at the latest."""

    def __init__(self, profiler, more, step):
        super().__init__(step)
        self.profiler, self.more = profiler, more

    def on_train_batch_end(self, trainer, *_):
        search = self.profiler.report.search
        if search is not None and search.settled:
            self.step = min(self.step, trainer.global_step + self.more)
        super().on_train_batch_end(trainer)


class Backend:
    """Does to the graph of a whole step, which has the loss in it, what ``step`` says, to others what ``forward`` says.

    Each is a function of the graph and its inputs; ``calls`` are the names of the graphs run, in order.
    """

    def __init__(self, **does):
        self.does = does
        self.calls = []
        self.__qualname__ = "planted"

    def __call__(self, graph, example_inputs):
        name = (
            "step"
            if any(node.target == "pow" or "pow" in str(node.target) for node in graph.graph.nodes)
            else "forward"
        )

        def run(*inputs):
            self.calls.append(name)
            return self.does.get(name, as_it_is)(graph, inputs)

        return run


def as_it_is(graph, inputs):
    return graph.forward(*inputs)


def halfway(graph, inputs):
    time.sleep(PAUSE_S / 2)
    return graph.forward(*inputs)


def slowly(graph, inputs):
    time.sleep(2 * PAUSE_S)
    return graph.forward(*inputs)


def scaled(graph, inputs):
    return [3 * output for output in graph.forward(*inputs)]


def not_finite(graph, inputs):
    return [float("nan") * output for output in graph.forward(*inputs)]


def failing(graph, inputs):
    raise RuntimeError("planted failure")


def out_of_memory(graph, inputs):
    raise torch.OutOfMemoryError("planted")


def searched(
    module_class=Pausing, *, more=20, step=900, callbacks=(), max_steps=FOR_LONG, backend=None, logger=None, **arguments
):
    """Report, module and trainer of a run with a search; candidates are the step and ``forward`` unless named."""
    arguments = {"candidates": ["step", "forward"], "backend": backend or Backend(), **arguments}
    profiler = CompileProfiler(mode="auto", verbose=False, **arguments)
    callbacks = [profiler, StopAfterSearch(profiler, more, step), *callbacks]
    loggers = {} if logger is None else {"logger": logger}
    module, trainer = train(module_class, callbacks, max_steps=max_steps, validate=False, **loggers)
    report = profiler.report
    assert Report.from_dict(report.to_dict()) == report
    return report, module, trainer


def assert_trained_as_in_eager(module, trainer):
    """What is left behind is what a run of as many steps without the callback leaves."""
    plain, other = train(type(module), [StopAt(trainer.global_step)], max_steps=FOR_LONG, validate=False)
    assert not differences(left_behind(module, trainer), left_behind(plain, other))


def row(report, name):
    """What is known of one candidate."""
    return next(one for one in report.search.candidates if one.name == name)


HOSTILE = (
    "</td><script>alert(1)</script> [red]a|b `x` __init__ ![x](http://x.test/y.png) "
    "$\\frac{ {{ 7 * 7 }} \x1b[31m \udcff"
)
"""What a user's own error says, and what a search then shows as the reason why a candidate is out."""


class LoggedSearch(NamedTuple):
    """A run with a search, and where it was logged.

    Its first candidate fails with a hostile error, its second is skipped for that, its third is chosen.
    """

    report: Report
    folder: Path
    events: Path
    files: Files


def logged_search(folder):
    """Such a run, with its files in ``folder``."""

    def hostile(graph, inputs):
        raise RuntimeError(HOSTILE)

    board, files = TensorBoardLogger(folder, name="searched"), Files()
    candidates = ["step", "step/default/dynamic", "forward"]
    report, _, _ = searched(backend=Backend(step=hostile), candidates=candidates, logger=[board, files], remember=False)
    return LoggedSearch(report, Path(folder), Path(board.log_dir), files)
