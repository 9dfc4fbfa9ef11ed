"""The benchmarks run, and their own clock finds a truth that was planted."""

import json
import time
from pathlib import Path

import lightning as L
import pytest
import torch
import torch._dynamo
from rich.table import Table

from benchmarks import auto, auto_table, common, drift, jobs, log_size, overhead, regret, truth

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
    assert result["ordinary_step"]["extra_s"] < 0.01 * measuring_s


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

    args = common.arguments(None, ["--jobs", "broken,mlp", "--out", str(tmp_path / "out.json")], steps=20, run_s=6.0)
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


COMPILED_PAUSE_S = 0.02
SINGLES = ["step/default", "forward/default"]


class PausesCompiled(torch.nn.Module):
    """Compiled it takes longer by so much, and nothing else differs."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(_paused(x) if torch.compiler.is_compiling() else x)


@torch.library.custom_op("benchmarks::paused", mutates_args=())
def _paused(x: torch.Tensor) -> torch.Tensor:
    time.sleep(COMPILED_PAUSE_S)
    return x.clone()


_paused.register_fake(torch.empty_like)


def here(plan, environment):
    """A run of ``benchmarks.auto`` without a process of its own."""
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COMPILE_PROFILER_CACHE_DIR", environment["COMPILE_PROFILER_CACHE_DIR"])
        return auto.carry_out(plan)


def test_the_best_configuration_is_the_one_that_was_planted(tmp_path, monkeypatch, capsys):
    """Compiled pauses in every step: eager is the best, each other run has its own place, the table says so."""
    batch = (torch.ones(2, 4), torch.ones(2, 4))
    monkeypatch.setitem(auto.JOBS, "planted", lambda big: jobs.Job(net=PausesCompiled, batch=lambda: batch))
    file = tmp_path / "auto.jsonl"
    asked = ["--jobs", "planted", "--steps", "50", "--repeats", "1", "--backend", "eager", "--out", str(file)]

    auto.main(asked, here)

    found = auto_table.figures(auto.read(file), 50)
    typical_s = found["seconds"]
    assert found["num"] == {"eager": 2, **dict.fromkeys(["callback", *auto.AUTO_RUNS, *SINGLES], 1)}
    assert found["best"] == "eager"
    assert min(typical_s[single] for single in SINGLES) > typical_s["eager"] + 0.9 * 50 * COMPILED_PAUSE_S
    assert found["chosen"] == dict.fromkeys(auto.AUTO_RUNS, "eager")
    assert found["over_best"]["auto/cold"] == typical_s["auto/cold"] / typical_s["eager"]
    assert typical_s["auto/cold"] < min(typical_s[single] for single in SINGLES)
    assert found["noise_pct"] > 0
    shown = capsys.readouterr().out
    auto.main(["--table", str(file)])
    assert "planted" in (again := capsys.readouterr().out)
    assert again in shown


def test_runs_are_shuffled_and_nothing_is_run_twice(tmp_path):
    """A program that was cut short goes on where it was; a failure is a row; a search knows its own cold run alone."""
    order, folders, cut_after = [], {}, 5

    def launch(plan, environment):
        if len(order) == cut_after:
            raise KeyboardInterrupt
        order.append((plan.job, plan.run))
        place = environment["COMPILE_PROFILER_CACHE_DIR"]
        assert not list(Path(environment["TORCHINDUCTOR_CACHE_DIR"]).iterdir())
        if plan.run in auto.AUTO_RUNS:
            folders.setdefault(place, []).append(plan.run)
        if plan.run == "forward/default":
            return {"error": "planted"}
        return {"marks_s": {str(mark): 1.0 for mark in plan.marks}, "report": {"search": None}}

    args = ["--jobs", "resnet,mlp", "--steps", "20", "--repeats", "2", "--out", str(tmp_path / "auto.jsonl")]
    auto.main([*args, "--budget-s", "0"], launch)
    assert order == []
    with pytest.raises(KeyboardInterrupt):
        auto.main(args, launch)
    cut_after = None
    auto.main(args, launch)

    per_job = ["eager", "eager", "callback", "auto/cold", "auto/warm", "step/default", "forward/default"]
    whole = 2 * sorted([("resnet", run) for run in [*per_job, "blocks/default"]] + [("mlp", run) for run in per_job])
    assert sorted(order) in (sorted(whole), sorted([*whole, ("resnet", "auto/cold")]))  # cut between cold and warm
    assert [job for job, _ in order] == sorted((job for job, _ in order), key=["resnet", "mlp"].index)
    assert all(runs in (list(auto.AUTO_RUNS), ["auto/cold"]) for runs in folders.values())
    halves = [[run for job, run in order if job == "mlp"][:7], [run for job, run in order if job == "mlp"][7:]]
    assert halves[0] != halves[1]
    assert sum("error" in row for row in auto.read(tmp_path / "auto.jsonl")) == 4
    auto.main(args, launch=None)  # nothing is left to run


def test_warm_caches_are_filled_by_a_round_that_does_not_count(tmp_path, capsys):
    """All runs share one folder; the first round is in the file, not among the figures. What fails is told."""
    folders = []

    def launch(plan, environment):
        folders.append(environment["TORCHINDUCTOR_CACHE_DIR"])
        if plan.run == "callback":
            return {"error": "planted"}
        seconds = 100.0 if len(folders) <= 3 else 2.0
        return {"marks_s": {"20": seconds}, "report": None}

    args = ["--jobs", "mlp", "--steps", "20", "--repeats", "1", "--out", str(tmp_path / "auto.jsonl")]
    with pytest.raises(SystemExit, match="failed: callback"):
        auto.main([*args, "--warm-inductor", "--configurations", "eager,callback"], launch)

    assert [row["fills"] for row in auto.read(tmp_path / "auto.jsonl")] == [True] * 3 + [False] * 3
    assert len(set(folders)) == 1
    shown = capsys.readouterr().out
    assert "2.00" in shown
    assert "100.00" not in shown


def test_a_run_has_a_process_of_its_own(tmp_path):
    """One that succeeds and reads its clock on the way, one that dies, one that lasts too long."""
    plan = auto.Plan(job="mlp", run="eager", steps=20, marks=(10, 20), big=False, backend="eager")

    found = auto.in_a_process(plan, {}, run_s=120.0)

    assert 0 < found["marks_s"]["10"] < found["marks_s"]["20"]
    assert auto.in_a_process(plan, {"PYTHONHOME": str(tmp_path)}, run_s=120.0)["error"].startswith("exit code 1: ")
    assert auto.in_a_process(plan, {}, run_s=0.1) == {"error": "took longer than 0.1 s"}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch looks for it at a block's input
@pytest.mark.parametrize(("target", "graphs_a_step"), [("step", 1), ("forward", 1), ("blocks", 2)])
def test_each_target_is_compiled_by_hand(target, graphs_a_step):
    """The whole step, the module and each of its two blocks; the loss is that of eager."""
    runs = []

    def counting(graph, example_inputs):
        return lambda *inputs: runs.append(1) or graph.forward(*inputs)

    torch._dynamo.reset()
    job = jobs.gpt(False)
    losses, batch = [], next(iter(job.loader(1, pinned=False)))
    for by_hand in (None, {"backend": counting}):
        torch.manual_seed(0)
        module = job.module(by_hand=by_hand, target=target)
        module.log = lambda *_: None  # there is no Trainer in this test
        losses += [module.training_step(batch, 0)]

    assert len(runs) == graphs_a_step
    torch.testing.assert_close(*losses)


def test_every_job_has_its_rank():
    """A new job is measured too."""
    assert sorted(auto.RANKED) == sorted(jobs.JOBS)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--jobs", "unheard"], "--jobs must name some of"),
        (["--steps", "many"], "--steps must be whole numbers"),
        (["--repeats", "0"], "must be at least 1"),
        (["--configurations", "step/unheard"], "--configurations must name some of"),
    ],
)
def test_what_cannot_be_measured_is_refused(wrong, told, capsys):
    """Before anything is trained, with what was expected."""
    with pytest.raises(SystemExit):
        auto.main(wrong)
    assert told in capsys.readouterr().err
