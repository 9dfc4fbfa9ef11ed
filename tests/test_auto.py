"""``mode="auto"`` on real runs: candidates whose truth is planted by what a backend sees of them."""

import time

import pytest
import torch
from lightning.pytorch import Callback

from compile_profiler import CompileProfiler
from runs import Regression, fit, left_behind, differences

PAUSE_S = 0.02


class Pausing(Regression):
    """Eager pauses; compiled code does what its backend says."""

    def training_step(self, batch, batch_idx):
        if not torch.compiler.is_compiling():
            time.sleep(PAUSE_S)
        return super().training_step(batch, batch_idx)


def by_target(step_s, forward_s):
    """A backend that takes the loss for a sign that the whole step is compiled."""

    def backend(graph, example_inputs):
        whole = any("mse" in str(node.target) or "pow" in str(node.target) or "mean" in str(node.target) for node in graph.graph.nodes)

        def run(*inputs):
            time.sleep(step_s if whole else forward_s)
            return graph.forward(*inputs)

        return run

    return backend


class StopAt(Callback):
    """Ends a run that would be long, so that a search is worth it."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step >= self.step


def test_it_settles_on_the_fastest():
    profiler = CompileProfiler(mode="auto", backend=by_target(0.010, 0.002), candidates=["step", "forward"])
    fit(Pausing(), [profiler, StopAt(400)], max_steps=100_000, validate=False)
    report = profiler.report
    import json
    print(json.dumps(report.to_dict()["search"], indent=1), report.verdict, report.compiles.by_stage)
    assert 0
