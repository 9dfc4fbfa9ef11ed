"""The benchmarks run, and their own clock finds a truth that was planted."""

import json
import time

import lightning as L
import pytest
import torch
from rich.table import Table

from benchmarks import common, drift, jobs, log_size, overhead, regret, truth

TINY = ["--jobs", "mlp", "--quick", "--steps", "320", "--backend", "eager"]


class Sleep(L.Callback):
    """Every step takes so much longer."""

    def __init__(self, seconds):
        self.seconds = seconds

    def on_train_batch_start(self, *_):
        time.sleep(self.seconds)


@pytest.mark.parametrize("name", jobs.JOBS)
def test_a_job_learns_on_its_small_size(name):
    """Every parameter of every job has a gradient after its training step, and the loss is a number."""
    job = jobs.JOBS[name](False)
    module = job.module()
    module.log = lambda *_: None  # there is no Trainer in this test

    loss = module.training_step(next(iter(job.loader(1, pinned=False))), 0)
    loss.backward()

    assert torch.isfinite(loss)
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_fits_that_take_turns_are_timed_apart():
    """A fit whose steps sleep 4 ms longer is found 4 ms slower, although the other runs in between."""
    order = []

    def fit(name, seconds, timer):
        class Notes(L.Callback):
            def on_train_batch_end(self, *_):
                order.append(name)

        common.fit(jobs.mlp(False), steps=3 * common.BLOCK_STEPS, callbacks=[Sleep(seconds), Notes(), timer])

    steps_s = common.interleaved({"slow": lambda t: fit("slow", 0.011, t), "quick": lambda t: fit("quick", 0.001, t)})

    extra_s = min(steps_s["slow"]) - min(steps_s["quick"])
    assert 0.005 < extra_s < 0.03
    assert order == [name for _ in range(3) for name in ("slow", "quick") for _ in range(common.BLOCK_STEPS)]


def test_an_error_in_one_of_the_fits_arrives():
    """Neither does the other wait for ever, nor is the error lost."""

    def fails(timer):
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        common.interleaved({"fails": fails, "works": lambda t: common.fit(jobs.mlp(False), steps=20, callbacks=[t])})


def test_truth_and_report_stand_side_by_side(tmp_path, capsys):
    """Raw blocks of both arms and three whole reports are in the file, the job in the table."""
    truth.main([*TINY, "--out", str(tmp_path / "truth.json")])

    result = json.loads((tmp_path / "truth.json").read_text())["jobs"]["mlp"]
    assert len(result["truth"]["eager_steps_s"]) == len(result["truth"]["compiled_steps_s"]) == 2 * 3
    assert result["truth"]["low"] <= result["truth"]["high"]
    assert [report["speedup"]["num_pairs"] > 0 for report in result["reports"].values()] == [True] * 3
    assert "mlp" in capsys.readouterr().out


def test_overhead_counts_pairs_and_ordinary_steps_apart(tmp_path):
    """What measuring takes is seen from outside too; an ordinary step costs a small part of it."""
    overhead.main([*TINY, "--out", str(tmp_path / "overhead.json")])

    result = json.loads((tmp_path / "overhead.json").read_text())["jobs"]["mlp"]
    measuring_s = result["whole_fit"]["callback"][0]["report"]["time"]["probe_s"]
    assert result["whole_fit"]["outside_pct"] > 0
    assert result["ordinary_step"]["extra_s"][1] < 0.01 * measuring_s


def test_regret_knows_all_three_runs(tmp_path):
    """Each arm was run as often as the others, and only the callback's run has measured."""
    regret.main([*TINY, "--out", str(tmp_path / "regret.json")])

    runs = json.loads((tmp_path / "regret.json").read_text())["jobs"]["mlp"]["runs"]
    assert {arm: len(found) for arm, found in runs.items()} == dict.fromkeys(regret.ARMS, regret.ALTERNATIONS)
    assert all(run["report"]["speedup"]["num_pairs"] == 0 for run in runs["compiled"])
    assert all(run["report"]["speedup"]["num_pairs"] > 0 for run in runs["callback"])


def test_drift_finds_what_is_planted_and_nothing_in_a_clean_run(tmp_path, capsys):
    """A gradient that is a tenth too large, found under its name; the table has a row for each part."""
    parts = ["--jobs", "mlp", "--steps", "60", "--fault-steps", "45", "--parameters", "1", "--backend", "aot_eager"]
    drift.main([*parts, "--out", str(tmp_path / "drift.json")])

    result = json.loads((tmp_path / "drift.json").read_text())["jobs"]["mlp"]
    assert (result["clean"]["beyond"], result["clean"]["alarm"]) == (0, False)
    assert result["clean"]["judged"] > 5
    assert result["floor"]["pairs"] > 5
    assert {fault: (found["found"], found["named"], found["early"]) for fault, found in result["faults"].items()} == {
        "x 1.001": (1, 1, 0),
        "x 1.01": (1, 1, 0),
        "x 1.1": (1, 1, 0),
        "NaN": (1, 1, 0),
    }
    assert "Planted faults" in capsys.readouterr().out


def test_an_unknown_job_is_refused_by_name():
    """The message is argparse's, the program ends before anything was trained."""
    with pytest.raises(SystemExit):
        truth.main(["--jobs", "mlp,unheard"])


def test_a_job_that_fails_does_not_take_the_others_along(tmp_path, monkeypatch, capsys):
    """The next job is still measured and shown, and the program says which one failed."""
    broken = jobs.Job(net=lambda: torch.nn.Linear(1, 1), batch=lambda: (torch.ones(2, 3), torch.ones(2, 1)))
    monkeypatch.setitem(jobs.JOBS, "broken", lambda big: broken)

    args = common.arguments(None, ["--jobs", "broken,mlp", "--out", str(tmp_path / "out.json")], steps=20)
    with pytest.raises(SystemExit, match="failed: broken"):
        common.run_all(args, lambda job: {"step_s": common.step_seconds(job)}, lambda results: Table(*results))

    assert list(json.loads((tmp_path / "out.json").read_text())["jobs"]) == ["mlp"]
    assert "mlp: " in capsys.readouterr().out


def test_the_size_of_a_log_is_told_with_and_without_the_callback():
    """The same run twice; what the callback adds is there, and is small."""
    found = log_size.main(steps=300, log_every_n_steps=10)

    assert found["num_pairs"] >= 8
    assert found["plain_bytes"] > 1000
    assert 10_000 < found["profiled_bytes"] - found["plain_bytes"] < 300_000
