"""The examples are real training jobs, and the demo shows what was found about them."""

from __future__ import annotations

import io
import json
import runpy
from pathlib import Path

import lightning as L
import pytest
import torch
from rich.console import Console

from compile_profiler import CompileProfiler
from compile_profiler.records import Report, Speedup, Time, Verdict
from examples import cli, demo, digits_cnn, mlp_benchmark, recurrent_filter

EXAMPLES = Path(cli.__file__).parent


def test_the_filter_takes_a_mode_from_the_command_line(monkeypatch, tmp_path):
    """A search, in a run that is too short for one."""
    monkeypatch.setattr("sys.argv", ["recurrent_filter", "--mode", "auto", "--max-steps", "20", "--root-dir", "runs"])
    runpy.run_path(recurrent_filter.__file__, run_name="__main__")
    (file,) = tmp_path.rglob("compile_profile.json")
    report = Report.from_dict(json.loads(file.read_text()))

    assert "too short" in report.verdict.message
    assert {one.status for one in report.search.candidates} == {"skipped"}


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_file_for_the_command_line_trains_with_the_profiler_that_it_describes(monkeypatch):
    """Everything in examples/config.yaml is taken, with another backend, for which there need be no C++ compiler."""
    monkeypatch.setattr("sys.argv", ["examples.cli"])
    backend = ["--trainer.callbacks.init_args.backend", "eager", "--trainer.max_steps", "60"]
    trainer = cli.main(["fit", "--config", str(EXAMPLES / "config.yaml"), *backend])
    (profiler,) = (callback for callback in trainer.callbacks if isinstance(callback, CompileProfiler))

    assert trainer.global_step == 60
    assert profiler.report.verdict.config["backend"] == "eager"
    assert (profiler._settings.limits.min_speedup, profiler._settings.limits.drift) == (1.05, "warn")
    assert (Path("runs") / "digits_cli" / "version_0" / "compile_profile.json").exists()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's, while it traces a graph break
def test_the_notebook_runs_from_top_to_bottom():
    """Cell by cell in one namespace, as a kernel does it, with a backend for which there need be no C++ compiler."""
    cells = json.loads((EXAMPLES / "first_hour.ipynb").read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert 'backend = "inductor"' in sources[0]
    names = {"__name__": "notebook"}
    for number, source in enumerate(sources):
        code = source.replace('backend = "inductor"', 'backend = "eager"')
        exec(compile(code, f"cell_{number}.py", "exec"), names)

    breaks = [event for event in names["first"].compiles.events if event.kind == "graph_break"]
    assert ("data_dependent", "cell_1.py") in [(event.cause, Path(event.file).name) for event in breaks]
    assert names["second"].compiles.graphs == 1
    assert not [cell for cell in cells if cell.get("outputs")]  # what a run found on one machine is not kept


def test_each_script_says_what_to_look_at_and_how_to_run_it():
    """The first thing that somebody reads in an example."""
    for script in EXAMPLES.glob("[!_]*.py"):
        source = script.read_text(encoding="utf-8")
        if script.name != "demo.py":
            assert "Look at " in source.split('"""')[1], script
            assert f"python -m examples.{script.stem}" in source.split('"""')[1], script
        assert len(source.splitlines()) < 100, script
