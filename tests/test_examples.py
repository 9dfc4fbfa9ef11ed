"""The examples are real training jobs, and the demo shows what was found about them."""

from __future__ import annotations

import io

import lightning as L
import pytest
import torch
from rich.console import Console

from compile_profiler.records import Report, Speedup, Time, Verdict
from examples import demo, digits_cnn, mlp_benchmark, recurrent_filter


@pytest.mark.parametrize("example", [digits_cnn, recurrent_filter, mlp_benchmark])
def test_an_example_trains_without_the_profiler(example, tmp_path):
    """Two steps on the real data move every weight, and the loss is a number."""
    trainer = example.main(max_steps=2, callbacks=[], root_dir=tmp_path)
    L.seed_everything(0, verbose=False)  # as the example does, just before it builds its module
    untrained = type(trainer.lightning_module)()

    moved = {
        name: not torch.equal(before, after)
        for (name, before), after in zip(
            untrained.named_parameters(), trainer.lightning_module.parameters(), strict=True
        )
    }
    assert trainer.global_step == 2
    assert torch.isfinite(trainer.callback_metrics["train_loss"])
    assert all(moved.values()), moved


def test_the_demo_shows_each_report_in_its_own_column():
    """Figures come from the reports, in the reader's units; what is not known is a dash."""
    known = Report(
        verdict=Verdict(decision="compiled", reason="gain", message="It pays.", step=40),
        speedup=Speedup(median=2.5, low=2.25, high=2.75, num_pairs=8),
        time=Time(eager_s=0.005, compiled_s=0.002, compile_s=12.0),
    )
    screen = io.StringIO()

    Console(file=screen, width=120).print(demo.side_by_side({"known": known, "new": Report()}))

    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in screen.getvalue().splitlines()]
    assert ["decision", "compiled", "undecided"] in cells
    assert ["speedup", "2.50x", "-"] in cells
    assert ["interval", "2.25x to 2.75x", "- to -"] in cells
    assert ["eager", "5.00 ms", "-"] in cells
    assert ["compiled", "2.00 ms", "-"] in cells
    assert ["compiling took", "12.00 s", "-"] in cells
    assert ["pairs", "8", "0"] in cells
