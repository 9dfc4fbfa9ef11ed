"""Doctor compiles for real: what it says where that works, where it does not, where it never ends."""

import os
import sys

import pytest
from click.testing import CliRunner

from compile_profiler import doctor
from compile_profiler.cli import main
from runs import as_module


def called(*arguments):
    """Run doctor in this process; its trial has one of its own."""
    return CliRunner().invoke(main, ["doctor", *arguments])


@pytest.fixture(scope="module")
def trials():
    """The findings of trials that were done: each takes half a minute and has an empty cache, so it is done once."""
    return {}


@pytest.fixture
def one_trial(trials, monkeypatch):
    """Let doctor remember what trial has come out how."""
    real = doctor.trial

    def trial(device, **options):
        if device not in trials:
            trials[device] = real(device, **options)
        return trials[device]

    monkeypatch.setattr(doctor, "trial", trial)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder that not even root can write to")
def test_doctor_finds_a_cache_that_cannot_be_written(one_trial, monkeypatch):
    """The trial has a cache of its own and passes; the next real run would not."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc/sys/kernel")
    done = called()
    *rows, last = done.stdout.splitlines()

    assert (done.exit_code, done.stderr) == (1, "")
    assert last.startswith("This machine cannot compile. /proc/sys/kernel, 0.0 MiB.")
    assert [row.split()[-2:] for row in rows if "compiling for" in row] == [["works", "ok"]]


@pytest.mark.slow
def test_doctor_compiles_and_says_so(one_trial):
    done = called()

    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.endswith("This machine can compile.\n")
    assert "compiling for" in done.stdout


WITHOUT_COMPILER = {"CUDA_VISIBLE_DEVICES": "", "CXX": "/no/such/compiler"}


@pytest.mark.slow
def test_doctor_names_the_missing_compiler():
    found = doctor.trial("cpu", max_seconds=300, environment={**os.environ, **WITHOUT_COMPILER})

    assert found.fine is False
    assert doctor.obstacle([found]).startswith("There is no C++ compiler: install")


@pytest.mark.slow
def test_doctor_names_the_missing_compiler_even_where_torch_would_go_on_in_eager():
    """With errors suppressed torch runs the function in eager without a word: that is not compiling."""
    done = as_module("doctor", **WITHOUT_COMPILER, TORCHDYNAMO_SUPPRESS_ERRORS="1")

    assert (done.returncode, done.stderr) == (1, "")
    assert "/no/such/compiler not found" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("This machine cannot compile. There is no C++ compiler: install")


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        # tests/test_disabled.py has the other variable, which torch reads only once in a process.
        ({"TORCHDYNAMO_DISABLE": "1"}, "TORCHDYNAMO_DISABLE=1 switches torch.compile off"),
        ({}, "The trial was not done after 0.1 s; --timeout gives it longer."),
    ],
)
def test_doctor_says_what_stands_in_the_way(environment, why, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = called("--timeout", "0.1")

    assert (done.exit_code, done.stderr) == (1, "")
    assert why in done.stdout.splitlines()[-1]
