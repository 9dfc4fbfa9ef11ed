"""What the documentation tells people to copy works as it stands there."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo

from compile_profiler.advice import advice, to_install

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The code of docs/ci-assertion.md, as the file that a reader makes of it."""
    torch._dynamo.reset()
    (code,) = re.findall(r"^```python\n(.*?)^```$", (DOCS / "ci-assertion.md").read_text(), re.MULTILINE | re.DOTALL)
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


def tables(page):
    """The rows of all tables of a page, as lists of cells."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
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
