"""One command, a user's module and a batch: what compiling does to them, configuration by configuration."""

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from compile_profiler import Report, bench_run
from compile_profiler.bench import configurations
from compile_profiler.bench_run import Plan, run
from compile_profiler.cli import main
from compile_profiler.lookup import RequestError

CASES = str(Path(__file__).with_name("bench_cases.py"))
EAGER = {"backend": "eager"}


def measured(folder, module, options=EAGER, **plan):
    """The report of one configuration, measured in this process."""
    run(Plan(module=f"{CASES}:{module}", folder=str(folder), device="cpu", options=options, **plan))
    return Report.from_dict(json.loads((folder / "compile_profile.json").read_text()))


def called(*arguments):
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


def test_every_configuration_has_a_column_a_report_and_its_place_in_one_file(tmp_path):
    shown = called(
        f"{CASES}:Net", "--init", "fault=print", "--backend", "eager", "--backend", "aot_eager", "--steps", 60,
        "--device", "cpu", "-o", tmp_path / "out",
    )  # fmt: skip
    written = json.loads((tmp_path / "out" / "bench.json").read_text())
    rows = {line[:20].strip(): line[20:].split() for line in shown.stdout.splitlines() if line.strip()}

    assert shown.exit_code == 0, shown.stderr
    assert [each["name"] for each in written["configurations"]] == ["step-eager", "step-aot_eager"]
    for each in written["configurations"]:
        report = Report.from_dict(each["report"])
        alone = json.loads((tmp_path / "out" / each["name"] / "compile_profile.json").read_text())
        assert each["report"] == alone
        assert report.speedup.num_pairs >= 8
        assert f"{report.speedup.median:.2f}x ({report.speedup.low:.2f}x to" in shown.stdout
        assert report.compiles.graphs == 1
    assert rows["graph breaks"] == ["1", "1"]
    assert rows["recompiles"] == ["0", "0"]
    assert {"compiling", "gradient drift", "peak memory"} <= rows.keys()
    assert "What stood in the compiler's way" in shown.stdout
    assert "bench_cases.py:" in shown.stdout
    assert "a step of the user's" in shown.stderr
    assert "a step of the user's" not in shown.stdout


def test_a_process_that_dies_is_a_failure_of_its_own(tmp_path):
    shown = called(f"{CASES}:Net", "--init", "fault=crash", "--backend", "eager", "-o", tmp_path)

    assert (shown.exit_code, shown.stdout) == (1, "")
    assert "step-eager: the process ended with exit code 7." in shown.stderr
    assert json.loads((tmp_path / "bench.json").read_text())["configurations"][0]["report"] is None


def test_what_cannot_be_measured_costs_one_line_and_exit_code_2(tmp_path):
    shown = called(f"{CASES}:Nett", "-o", tmp_path)

    assert (shown.exit_code, shown.stdout, shown.stderr.count("\n")) == (2, "", 1)
    assert shown.stderr.startswith("compile-profiler: ")
    assert "has no 'Nett'; it defines Net, Autoencoder" in shown.stderr


def ended(monkeypatch, **plan):
    """The exit code of what the process of one configuration runs."""
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(plan)))
    with pytest.raises(SystemExit) as raised:
        bench_run.main()
    return raised.value.code


@pytest.mark.parametrize(
    ("fault", "told"), [("raise", 'KeyError: "the user\'s own mistake"'), ("exit", "SystemExit: 0")]
)
def test_an_error_of_the_users_is_shown_with_its_place_and_ends_with_1(fault, told, tmp_path, monkeypatch, capsys):
    plan = {"module": f"{CASES}:Net", "folder": str(tmp_path), "init": {"fault": fault}, "options": EAGER}

    assert ended(monkeypatch, **plan) == 1
    shown = capsys.readouterr().err
    assert shown.endswith(f"{told}\n")
    assert "bench_cases.py" in shown


def test_what_lightning_cannot_train_costs_its_line_and_exit_code_2(tmp_path, monkeypatch, capsys):
    plan = {"module": f"{CASES}:NoStep", "folder": str(tmp_path), "batch": f"{CASES}:ready", "options": EAGER}

    assert ended(monkeypatch, **plan) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("compile-profiler: No `training_step()` method defined")
    assert shown.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--init", "width"], ["-o", "/dev/null/folder"]])
def test_what_is_wrong_on_the_command_line_itself_costs_one_line_too(arguments):
    shown = called(f"{CASES}:Net", *arguments)

    assert (shown.exit_code, shown.stdout, shown.stderr.count("\n")) == (2, "", 1)


@pytest.mark.parametrize(
    ("module", "options", "plan", "complaint"),
    [
        ("number", EAGER, {}, "is a int, expected a LightningModule class"),
        ("nn.Linear", EAGER, {}, "is a class of Module, expected a LightningModule class"),
        ("no_module", EAGER, {}, "gave a Linear, expected a LightningModule"),
        ("NeedsWidth", EAGER, {}, "missing a required argument: 'width'; its arguments are given with --init"),
        ("Net", EAGER, {"init": {"depth": 1}}, "unexpected keyword argument 'depth'"),
        ("NeedsWidth", EAGER, {"init": {"width": 2}}, "neither a train_dataloader nor an example_input_array"),
        ("Net", EAGER, {"batch": f"{CASES}:nothing"}, "nothing gave no batch"),
        ("Net", EAGER, {"batch": f"{CASES}:nobody"}, "has no 'nobody'"),
        ("Net", EAGER, {"batch": "nowhere.py:batch"}, "there is no file 'nowhere.py'"),
        ("Net", {**EAGER, "mode": "max-autotune"}, {}, "mode='max-autotune' is a setting of backend='inductor'"),
        ("Net", {"backend": "gcc"}, {}, "backend must be a callable or one of"),
        ("Net", {**EAGER, "target": ["head"]}, {}, "head"),
        ("Net", EAGER, {"precision": "13-true"}, "precision='13-true'"),
    ],
)
def test_each_mistake_in_what_is_asked_for_is_named(module, options, plan, complaint, tmp_path):
    with pytest.raises(RequestError) as raised:
        measured(tmp_path, module, options, steps=2, **plan)

    assert complaint in str(raised.value)


@pytest.mark.parametrize("name", ["bench_cases", ":Net", "bench_cases:", "no.such.package:Net", "json.nothing:Net"])
def test_a_name_that_leads_nowhere_is_named(name, tmp_path):
    with pytest.raises(RequestError):
        run(Plan(module=name, folder=str(tmp_path)))


def test_what_a_users_module_lacks_itself_is_the_users_own_error(tmp_path):
    (tmp_path / "needy.py").write_text("import not_installed_anywhere")
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        run(Plan(module=f"{tmp_path}/needy.py:Net", folder=str(tmp_path)))


@pytest.mark.parametrize(
    ("module", "plan"),
    [
        ("small", {}),
        ("Net", {"batch": f"{CASES}:a_batch"}),
        ("Net", {"batch": f"{CASES}:ready"}),
        ("Autoencoder", {}),
    ],
)
def test_module_and_batch_come_from_where_users_have_them(module, plan, tmp_path):
    report = measured(tmp_path, module, steps=12, **plan)

    assert (report.compiles.graphs, report.compiles.recompiles) == (1, 0)
    assert report.speedup.num_pairs >= 1


@pytest.mark.parametrize(("dynamic", "graphs"), [(True, 1), (False, 4)])
def test_batches_of_several_lengths_tell_dynamic_shapes_from_static_ones(dynamic, graphs, tmp_path):
    report = measured(tmp_path, "Net", {**EAGER, "dynamic": dynamic}, batch=f"{CASES}:lengths", num_batches=4, steps=8)

    assert report.compiles.graphs == graphs


def test_a_run_of_a_benchmark_stays_compiled_and_says_what_it_found(tmp_path):
    report = measured(tmp_path, "Net", steps=60)

    assert report.verdict.decision != "undecided"
    assert report.verdict.config["backend"] == "eager"
    assert report.environment.device == "cpu"


def test_every_combination_is_a_configuration():
    found = configurations(
        targets=["step", "net,head"], backends=["inductor"], modes=["default", "max-autotune"], dynamics=["auto", "on"]
    )

    assert list(found)[:3] == ["step-default", "step-default-dynamic", "step-max-autotune"]
    assert len(found) == 8
    assert found["net+head-default"]["target"] == ["net", "head"]
