"""The command line on real runs: what it shows, what it says of files that are no runs, how it ends."""

import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from click.testing import CliRunner
from torch.utils.tensorboard import SummaryWriter

from compile_profiler import CompileProfiler, Report
from compile_profiler.cli import main
from compile_profiler.recall import Entry, Tried, VerdictCache, default_folder
from compile_profiler.records import Compiles, Drift, EndToEnd, Environment, Memory, Speedup, Time, Verdict
from compile_profiler.render import verdict_markdown
from compile_profiler.runs_on_disk import read_run, report_from_scalars
from compile_profiler.scalars import scalars
from runs import Regression, as_module, sleepy, train

FULL = Report(
    verdict=Verdict(decision="eager", reason="no_gain", message="0.50x, `a|b` <slower>.", step=1234),
    speedup=Speedup(median=0.5, low=0.25, high=0.75, num_pairs=12, num_void=3, void={"compiled in it": 3}),
    end_to_end=EndToEnd(speedup=0.875, step_s=0.5),
    time=Time(eager_s=0.125, compiled_s=0.25, compile_s=17.0, saved_s=-4.0, overhead_pct=1.5),
    compiles=Compiles(graphs=5, recompiles=3, graph_breaks=2),
    drift=Drift(
        loss_rel=1e-7, grad_rel=2e-7, grad_cosine=0.75, noise_floor=3e-8, tolerance=1e-4, within_tolerance=True
    ),
    memory=Memory(eager_peak_bytes=3 * 2**20, compiled_peak_bytes=2**19),
    environment=Environment(torch="2.13.0", lightning="2.6.6", device="H200"),
)


def called(*arguments):
    """Run a command in this process."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def unwrapped(text):
    """``text`` without the line breaks and padding of its columns."""
    return " ".join(text.split())


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Two real runs, logged to TensorBoard: one that a sleeping backend slows down, one that is not measured."""
    folder = tmp_path_factory.mktemp("runs")
    torch.set_num_threads(1)  # as conftest.py does for each test
    for name, options in {"slow": {"backend": sleepy(0.02)}, "watched": {"backend": "eager", "max_pairs": 0}}.items():
        logger = pl.loggers.TensorBoardLogger(folder, name=name)
        train(Regression, [CompileProfiler(verbose=False, **options)], logger=logger, max_steps=80)
    return folder


def test_show_prints_the_table_of_a_report_wherever_it_lies_in_the_folder(logs):
    shown = called("show", logs / "slow")

    assert shown.exit_code == 0
    assert "eager: no_gain" in shown.output
    assert shown.output == called("show", logs / "slow" / "version_0" / "compile_profile.json").output


def test_show_takes_the_newest_of_several_and_says_which(logs):
    newest = logs / "slow" / "version_0" / "compile_profile.json"
    os.utime(newest, ns=(2**62, 2**62))
    shown = called("show", logs)

    assert shown.output.startswith(f"{newest} is the newest of 2.\n")
    assert "no_gain" in shown.output


def test_show_rebuilds_from_an_event_file_what_its_tags_say(logs, tmp_path):
    (events,) = (logs / "slow").rglob("*tfevents*")
    shutil.copy(events, tmp_path)
    report = Report.from_dict(json.loads((events.parent / "compile_profile.json").read_text()))
    for path in (events, tmp_path):
        shown = unwrapped(called("show", path).output)

        assert f"Rebuilt from the tags of {events.name}" in shown
        assert f"eager: no_gain step {report.verdict.step}: Compiling gains nothing here" in shown
        assert f"{report.speedup.median:.2f}x" in shown
        assert f"{report.speedup.num_pairs} pairs, 0 void" in shown
        assert f"torch {report.environment.torch}" in shown


def test_an_event_file_loses_nothing_that_is_logged():
    """Whatever has a tag, or stands on the card, is read back into the field it came from."""
    rebuilt = report_from_scalars(scalars(FULL), verdict_markdown(FULL))

    assert scalars(rebuilt) == pytest.approx(scalars(FULL))
    assert rebuilt.verdict == FULL.verdict
    assert rebuilt.drift.within_tolerance is True
    assert (rebuilt.speedup.num_pairs, rebuilt.speedup.num_void) == (12, 3)
    assert rebuilt.environment == FULL.environment


def test_an_event_file_without_a_card_leaves_the_decision_open():
    rebuilt = report_from_scalars({"compile/speedup": 2.0, "compile/active": 1.0})

    assert (rebuilt.verdict.decision, rebuilt.verdict.message) == (
        "undecided",
        "The event file does not tell the decision.",
    )
    assert scalars(rebuilt)["compile/speedup"] == 2.0
    assert rebuilt.environment == Environment()


def test_compare_shows_a_column_for_each_run(logs):
    shown = called("compare", logs / "slow", logs / "watched")
    rows = {line[:20].strip(): line[20:].split() for line in shown.output.splitlines() if line.strip()}
    slow, watched = (read_run(logs / name).report for name in ("slow", "watched"))

    assert shown.exit_code == 0
    assert shown.output.splitlines()[2].split() == ["slow/version_0", "watched/version_0"]
    assert rows["decision"] == [slow.verdict.decision, watched.verdict.decision] == ["eager", "compiled"]
    assert f"{slow.speedup.median:.2f}x ({slow.speedup.low:.2f}x to {slow.speedup.high:.2f}x)" in shown.output
    assert rows["pairs"] == [f"{slow.speedup.num_pairs}", "0"]
    assert rows["device"] == ["cpu", "cpu"]
    assert "cannot be compared" not in shown.output


def test_show_prints_the_candidates_of_a_search(search_on_disk):
    shown = called("show", search_on_disk.folder).output
    table = shown[shown.index("Candidates") :]

    assert "2 of 3 tried" in unwrapped(shown)
    assert table.index("forward/default") < table.index("step/default ") < table.index("step/default/dynamic")
    assert "\x1b" not in shown


def test_compare_says_what_a_search_has_found(search_on_disk, logs):
    both = unwrapped(called("compare", search_on_disk.folder, logs / "watched").output)
    without = called("compare", logs / "slow", logs / "watched").output

    assert "search forward/default, 2 of 3 tried \N{EN DASH}" in both
    assert "search" not in without


def test_compare_warns_where_times_are_of_different_machines(logs, tmp_path):
    there = tmp_path / "there" / "compile_profile.json"
    there.parent.mkdir()
    there.write_text(json.dumps(FULL.to_dict()))
    shown = unwrapped(called("compare", logs / "slow", there).output)

    assert "The runs differ in device, torch: their times cannot be compared, only their ratios." in shown
    assert "Not every run tells its precision, strategy, world size: compare ratios, not times." in shown


DAMAGED = {
    "empty": b"",
    "half": json.dumps(FULL.to_dict()).encode()[:200],
    "binary": bytes(range(256)),
    "of a later schema": json.dumps({**FULL.to_dict(), "schema": 99}).encode(),
    "a list": b"[1, 2]",
    "not a number": json.dumps({"schema": 1, "speedup": {"median": float("nan")}}).encode(),
    "an impossible verdict": json.dumps({"schema": 1, "verdict": {"decision": "eager", "reason": "pending"}}).encode(),
    "bottomless": b"[" * 100_000,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("command", ["show", "compare", "html"])
def test_a_damaged_report_costs_one_line_and_exit_code_2(command, content, tmp_path):
    file = tmp_path / "compile_profile.json"
    file.write_bytes(content)
    options = ["-o", tmp_path / "page.html"] if command == "html" else []
    shown = called(command, tmp_path, *options)

    assert (shown.exit_code, shown.stdout, shown.stderr.count("\n")) == (2, "", 1)
    assert shown.stderr.startswith("compile-profiler: ")
    assert str(file) in shown.stderr
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nowhere", "No such file or directory"),
        ("an\x1b[31m\nodd\udcffname", "No such file or directory"),
        ("empty", "holds neither a compile_profile.json nor a TensorBoard event file"),
        ("events.out.tfevents.1", "holds no compile/... tags that can be read"),
    ],
)
def test_what_is_no_run_costs_one_line_and_exit_code_2(name, complaint, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "events.out.tfevents.1").write_bytes(b"no record of TensorBoard's at all")
    shown = called("show", tmp_path / name)

    assert (shown.exit_code, shown.stdout, shown.stderr.count("\n")) == (2, "", 1)
    assert complaint in shown.stderr
    assert "\x1b" not in shown.stderr


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_event_file_of_somebody_elses_making_costs_one_line_and_exit_code_2(value, tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("compile/graphs", value, 0)
    shown = called("show", tmp_path)

    assert (shown.exit_code, shown.stdout, shown.stderr.count("\n")) == (2, "", 1)
    assert "holds no run of this package" in shown.stderr


def test_a_cut_off_event_file_shows_what_was_written_until_then(logs, tmp_path):
    """A run that was killed leaves half a record at the end of its file."""
    (events,) = (logs / "slow").rglob("*tfevents*")
    (tmp_path / events.name).write_bytes(events.read_bytes()[:-7])
    shown = called("show", tmp_path)

    assert (shown.exit_code, shown.stderr) == (0, "")
    assert "speedup of a pass" in shown.output


def test_a_page_that_cannot_be_written_costs_one_line_and_exit_code_2(logs, tmp_path):
    shown = called("html", logs / "slow", "-o", tmp_path / "no" / "such" / "folder" / "page.html")

    assert (shown.exit_code, shown.stdout, shown.stderr.count("\n")) == (2, "", 1)
    assert "No such file or directory" in shown.stderr


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib", "tensorboard"])
def test_a_missing_package_is_named_with_the_command_that_brings_it(missing, logs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)  # how Python itself marks a module that cannot be imported
    for name in [name for name in sys.modules if name.startswith(f"{missing}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    shown = called("html", logs / "slow", "-o", tmp_path / "page.html")

    assert (shown.exit_code, shown.stdout, shown.stderr.count("\n")) == (2, "", 1)
    assert missing in shown.stderr.lower()
    assert "pip install" in shown.stderr


KEYS = [digits * 8 for digits in ("0123abcd", "0123cdef", "fedc9876")]


@pytest.fixture
def verdicts():
    """Three verdicts where the command looks for them, the last one forty days old."""
    kept = VerdictCache(default_folder())
    graphs = {"target": "step", "mode": "reduce-overhead", "dynamic": None, "fullgraph": False}
    for key, job, age_days in zip(
        KEYS, ("ResNet", "an\x1b[31m\n[red]odd\ud800job", "GPT"), (0.125, 1.5, 40), strict=True
    ):
        written_s = time.time() - age_days * 86_400
        tried = Tried(candidate=graphs, compile_s=30.0, speedup=1.875)
        kept.put(Entry(key=key, job=job, device="H200", winner=graphs, tried=(tried,), when_s=written_s))
        os.utime(kept.folder / f"{key}.json", (written_s, written_s))
    return kept


def test_cache_list_shows_what_is_kept_the_newest_first(verdicts):
    shown = called("cache", "list")
    newest, odd, oldest = [
        line.split() for line in shown.output.splitlines() if line.strip().startswith(("0123", "fedc"))
    ]

    assert shown.exit_code == 0
    assert newest[:3] == ["0123abcd", "ResNet", "H200"]
    assert newest[-5:-2] == ["1.88x", "3.00", "h"]
    assert float(newest[-2]) < 1
    assert odd[:4] == ["0123cdef", "an", "[31m", "[red]odd"]
    assert oldest[-4:-2] == ["40", "d"]
    assert shown.output.count("target=step, ") == shown.output.count("mode=reduce-overhead") == 3
    assert shown.output.endswith(f"3 verdicts in {verdicts.folder}.\n")
    assert "\x1b" not in shown.output


def test_cache_list_says_how_many_files_it_leaves_out(verdicts):
    (verdicts.folder / f"{KEYS[0]}.json").write_text("damaged")
    shown = called("cache", "list").output.splitlines()

    assert shown[-2].startswith("2 verdicts in ")
    assert shown[-1].startswith("1 file there with a verdict's name cannot be used: damaged")


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        ([], []),
        (["0123"], KEYS[2:]),
        (["0123c"], [KEYS[0], KEYS[2]]),
        ([KEYS[2]], KEYS[:2]),
        (["--older-than", "1"], KEYS[:1]),
        (["--older-than", "30.5"], KEYS[:2]),
        (["0123", "--older-than", "1"], [KEYS[0], KEYS[2]]),
        (["--older-than", "1000"], KEYS),
    ],
)
def test_cache_clear_removes_what_it_is_told_to(arguments, left, verdicts):
    done = called("cache", "clear", *arguments)
    num_removed = len(KEYS) - len(left)

    assert (done.exit_code, done.stderr) == (0, "")
    assert [file.stem for file in verdicts.files()] == left
    assert done.output == f"{num_removed} verdict{'' if num_removed == 1 else 's'} removed from {verdicts.folder}.\n"


def test_an_empty_cache_is_listed_and_cleared():
    shown, done = called("cache", "list"), called("cache", "clear")

    assert (shown.exit_code, shown.output) == (0, f"0 verdicts in {default_folder()}.\n")
    assert (done.exit_code, done.output) == (0, f"0 verdicts removed from {default_folder()}.\n")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["clear", "xyz"], "KEY must be the beginning of a key as in cache list, got 'xyz'."),
        (["clear", "../0123"], "KEY must be the beginning of a key"),
        (["clear", "9999"], "no verdict whose key begins with 9999; cache list shows them."),
        (["clear", "--older-than", "a week"], "--older-than must be a number of days, 0 or more, got 'a week'."),
        (["clear", "--older-than", "-1"], "got '-1'"),
        (["clear", "--older-than", "nan"], "got 'nan'"),
        (["clear", "--older-than", "inf"], "got 'inf'"),
    ],
)
def test_a_bad_argument_of_cache_costs_one_line_and_exit_code_2(arguments, complaint, verdicts):
    done = called("cache", *arguments)

    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert complaint in done.stderr
    assert len(verdicts.files()) == 3


@pytest.mark.parametrize(
    ("folder", "complaint"),
    [("~nobody-of-this-name/x", "set COMPILE_PROFILER_CACHE_DIR"), ("file", "Not a directory")],
)
@pytest.mark.parametrize("command", ["list", "clear"])
def test_a_cache_that_cannot_be_there_costs_one_line_and_exit_code_2(folder, complaint, command, monkeypatch):
    Path("file").write_text("in the way")
    monkeypatch.setenv("COMPILE_PROFILER_CACHE_DIR", folder)
    done = called("cache", command)

    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert complaint in done.stderr


def test_the_package_runs_as_a_module():
    done = as_module("--help")

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: compile-profiler [OPTIONS] COMMAND")
    assert all(command in done.stdout for command in ("show", "compare", "html", "bench", "doctor", "cache"))


def test_the_docs_show_the_help_and_a_section_for_each_command():
    docs = (Path(__file__).parents[1] / "docs" / "command-line.md").read_text(encoding="utf-8")
    shown = "".join(f"    {line}".rstrip() + "\n" for line in called("--help").output.splitlines())

    assert shown.replace("Usage: main", "Usage: compile-profiler") in docs
    assert set(re.findall(r"^## (\w+)$", docs, re.MULTILINE)) == set(main.commands)
