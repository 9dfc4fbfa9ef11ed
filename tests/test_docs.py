"""What the documentation tells people to copy works as it stands there."""

import contextlib
import dataclasses
import importlib.util
import io
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch._dynamo
from click.testing import CliRunner

from compile_profiler import CompileProfiler, Report
from compile_profiler.advice import advice, to_install
from compile_profiler.cli import main
from compile_profiler.drift import NOISE_FACTOR
from compile_profiler.records import Cause, Decision, Kind, Owner, Reason, Rng, Stage
from compile_profiler.tolerances import tolerance_for, unit_roundoff_for
from examples import digits_cnn, recurrent_filter
from pages import PAGES, ROOT, blocks, commands
from runs import Regression, loaders

# Commands that are not run here, and what runs them instead.
RUN_ELSEWHERE = {
    r"pip install ": "the environment of these tests is made by it",
    r"git clone ": "takes a network",
    r"cd ": "a clone's folder",
    r"tensorboard --logdir ": "tests/test_browser.py starts it",
    r"compile-profiler bench ": "tests/test_bench.py runs it; it takes a minute",
    r"compile-profiler doctor": "tests/test_doctor.py runs it; it takes half a minute",
    r"(\.venv/bin/)?python -m examples\.\w+": "tests/test_examples.py trains them",
    r"(\.venv/bin/)?python -m benchmarks\.\w+": "tests/test_benchmarks.py runs them, smaller",
    r"python3? -m venv ": "the environment of these tests is made by it",
    r"\. \.venv/bin/activate": "the environment of these tests is made by it",
    r"export \w+=": "the tests have it set",
    r"\.ci/run": "runs these tests",
}


class Reader:
    """Somebody who pastes a page's commands one after the other, in one folder.

    ``python FILE`` and ``compile-profiler`` run in this process: starting torch anew would take seconds each.
    """

    def __init__(self):
        self.said = ""

    def paste(self, command: str) -> None:
        self.said = ""
        head, _, body = command.partition("\n")
        if file := re.fullmatch(r"cat > (\S+) <<'EOF'", head):
            Path(file[1]).write_text(body)
        elif head.startswith("make "):
            done = subprocess.run(["make", "-n", *head.split()[1:]], cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        elif any(re.match(pattern, head) for pattern in RUN_ELSEWHERE):
            if module := re.search(r"-m ((examples|benchmarks)\.\w+)", head):
                assert importlib.util.find_spec(module[1]), head
        elif head.startswith("compile-profiler "):
            done = CliRunner().invoke(main, shlex.split(head)[1:])
            assert done.exit_code == 0, done.output
            self.said = done.output
        elif script := re.fullmatch(r"python (\w+\.py)", head):
            torch._dynamo.reset()  # as in a process of its own
            with contextlib.redirect_stdout(io.StringIO()) as said:
                runpy.run_path(script[1], run_name="__main__")
            self.said = said.getvalue()
        elif head.startswith("python -c "):
            with contextlib.redirect_stdout(io.StringIO()) as said:
                exec(shlex.split(head)[2], {})
            self.said = said.getvalue()
        else:
            done = subprocess.run(["bash", "-c", head], capture_output=True, text=True)
            assert done.returncode == 0, f"{head}: {done.stderr}"

    def compare(self, shown: str) -> None:
        """Every row that a page shows as output is one of the output's, whatever its figures are."""
        assert labels(shown) <= labels(self.said), labels(shown) - labels(self.said)


def labels(output: str) -> set[str]:
    """The first columns of a table."""
    return {match[1] for match in re.finditer(r"^ {2,4}([a-z][\w ]*?)(?: {2,}|$)", output, re.MULTILINE)}


@pytest.fixture(scope="module")
def finished_runs(tmp_path_factory):
    """``runs``, as `make demo` leaves it behind, after fewer steps."""
    folder = tmp_path_factory.mktemp("demo") / "runs"
    torch.set_num_threads(1)
    for example in (digits_cnn, recurrent_filter):
        example.main(
            callbacks=[CompileProfiler(backend="aot_eager", verbose=False)], max_steps=10, root_dir=str(folder)
        )
    return folder


@pytest.fixture
def page_module(monkeypatch):
    """Where the Python blocks of a page live; `module` and `train_dataloader` are "yours"."""
    torch._dynamo.reset()
    module = types.ModuleType("page")
    vars(module).update(module=Regression(), train_dataloader=loaders()[0])
    monkeypatch.setitem(sys.modules, "page", module)  # the compiler looks it up there
    monkeypatch.syspath_prepend(Path.cwd())  # scripts that a page writes import each other
    monkeypatch.delitem(sys.modules, "train", raising=False)
    # Inductor would take a minute, and find the same graphs; the first steps of a run are enough.
    monkeypatch.setitem(CompileProfiler.__init__.__kwdefaults__, "backend", "aot_eager")
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "1")
    monkeypatch.setenv("PL_TRAINER_LIMIT_TRAIN_BATCHES", "60")
    monkeypatch.setenv("PL_TRAINER_ENABLE_PROGRESS_BAR", "False")
    return module


@pytest.mark.filterwarnings("ignore")  # a reader's module may do what Lightning warns of
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_a_page_can_be_pasted(page, page_module, request, tmp_path):
    reader, last = Reader(), None
    if page.stem == "auto":  # modes are inductor's; a search compiles nothing in so short a run
        request.getfixturevalue("monkeypatch").setitem(CompileProfiler.__init__.__kwdefaults__, "backend", "inductor")
    if "compile-profiler" in page.read_text() and "cat > " not in page.read_text():
        shutil.copytree(request.getfixturevalue("finished_runs"), tmp_path / "runs")
        for short, long in (("a", "digits_cnn"), ("b", "recurrent_filter")):
            shutil.copytree(tmp_path / "runs" / long, tmp_path / "runs" / short)
    for block in blocks(page):
        if block.why_not is None:
            if block.language == "python":
                code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
                exec(code, vars(page_module))
            elif block.language == "shell":
                for command in commands(block.text):
                    reader.paste(command)
            elif block.language == "text" and last == "shell" and reader.said:
                reader.compare(block.text)
            else:
                known = re.fullmatch(r"|text|yaml|{.*}", block.language)  # {...}: a directive of Sphinx
                assert known, f"{page.name}:{block.line}: who runs {block.language}?"
        last = block.language


KINDS = {int: "integer", float: "number", str: "text", Literal: "text", bool: "true or false", tuple: "list"}


def kinds(record, where=""):
    """Field and kind, as docs/report.md has them, of every figure in a record and in the records that it holds."""
    for name, hint in typing.get_type_hints(record).items():
        nullable = type(None) in typing.get_args(hint)
        (hint, *_) = typing.get_args(hint) if nullable else (hint,)
        origin = typing.get_origin(hint) or hint
        if dataclasses.is_dataclass(hint):
            yield from kinds(hint, f"{where}{name}.")
        else:
            kind = KINDS.get(origin, "object")
            yield f"{where}{name}", f"{kind.replace(' or', ',')} or null" if nullable else kind
        if origin is tuple:
            yield from kinds(typing.get_args(hint)[0], f"{where}{name}[].")


def test_the_page_of_the_report_has_every_field_and_every_word():
    page = (ROOT / "docs" / "report.md").read_text()
    rows = re.findall(r"^\| `([\w.\[\]]+)` \| ([^|]+) \| [^|]+ \|$", page, re.MULTILINE)
    reasons = re.findall(r"^\| `(\w+)` \| [^|]+ \|$", page, re.MULTILINE)
    words = {word for choice in (Kind, Owner, Cause, Stage, Rng, Decision) for word in typing.get_args(choice)}

    assert rows == list(kinds(Report))
    assert reasons == list(typing.get_args(Reason))
    assert words <= set(re.findall(r"`(\w+)`", page))


def test_a_block_that_does_not_work_is_found(page_module):
    """Each kind of block, broken on purpose."""
    reader = Reader()
    for command in (
        "make nothing",
        "compile-profiler show nowhere",
        "python -c 'import nothing'",
        "no-such-command train.py",
    ):
        with pytest.raises((AssertionError, ImportError)):
            reader.paste(command)
    reader.said = "  verdict   compiled\n"
    with pytest.raises(AssertionError, match="weather"):
        reader.compare("  weather   fine\n")


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The code of docs/ci-assertion.md, as the file that a reader makes of it."""
    torch._dynamo.reset()
    (code,) = (block.text for block in blocks(ROOT / "docs" / "ci-assertion.md") if block.language == "python")
    file = tmp_path / "test_my_model.py"
    file.write_text(code)
    spec = importlib.util.spec_from_file_location("test_my_model", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # the compiler looks it up there
    spec.loader.exec_module(module)
    return module


def test_the_assertion_for_ci_holds_for_the_model_it_shows(example, tmp_path):
    example.test_my_model_has_no_graph_breaks(tmp_path)

    assert (tmp_path / "compile_profile.json").exists()


def test_the_assertion_for_ci_fails_with_the_line_that_breaks_the_graph(example, tmp_path, monkeypatch):
    class Breaks(example.Model):
        def training_step(self, batch, batch_idx):
            print("a step")  # here
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(example, "Model", Breaks)
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# here"))

    with pytest.raises(AssertionError, match=rf"test_docs\.py:{line} graph_break x1: Printing.*on_train_batch_end"):
        example.test_my_model_has_no_graph_breaks(tmp_path)


def test_the_limits_in_the_page_on_drift_are_those_of_the_code():
    """Every row: unit roundoff, growth and limit of one precision, to the digits that are shown."""
    rows = re.findall(
        r"^\| (float64|float32|TF32|bfloat16|float16) \| (\S+) \| (\d+) \| (\S+) \|",
        (ROOT / "docs" / "drift.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) == 5
    for name, roundoff, growth, limit in rows:
        dtype, tf32 = getattr(torch, name, torch.float32), name == "TF32"
        found = unit_roundoff_for(dtype, tf32=tf32), tolerance_for(dtype, tf32=tf32)
        assert (f"{found[0]:.1e}", f"{found[1]:.1e}", round(found[1] / found[0])) == (roundoff, limit, int(growth))


def test_the_page_on_drift_names_every_field_of_the_report():
    named = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "drift.md").read_text().split("## What is allowed")[0]))

    assert {"loss_rel", "grad_rel", "worst_parameter", "effect_rel", "worst_effect", "stage", "rng"} <= named
    assert f"be {NOISE_FACTOR:.0f}\ntimes as far" in (ROOT / "docs" / "drift.md").read_text()


def tables(page):
    """The rows of all tables of a page, as lists of cells."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_the_page_of_failures_says_what_the_code_says():
    """Every message of its tables leads to the sentence beside it, every package is the one that is named."""
    rows = tables("failures.md")
    answers = [(message, row[1]) for row in rows if len(row) == 2 for message in re.findall(r"`([^`]+)`", row[0])]
    parts = {"C++ compiler": "compiler", "Python's headers": "headers", "OpenMP": "openmp"}
    systems = ["debian", "fedora", "suse", "arch", "darwin"]
    packages = [row for row in rows if row[0] in parts]

    assert len(answers) > 12
    assert [message for message, words in answers if words not in (advice(RuntimeError(message)) or "")] == []
    assert len(packages) == len(parts)
    for row in packages:
        for system, package in zip(systems, row[1:], strict=True):
            assert package == "\N{EN DASH}" or f"install {package}" in to_install(parts[row[0]], system)
