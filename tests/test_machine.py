"""Before the first step: what this machine lacks is found by looking, and the run trains in eager."""

import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor
from torch._inductor import cpu_vec_isa

from compile_profiler import CompileProfiler, machine
from runs import Regression, differences, left_behind, train

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _vector_instructions():
    """Which there are is asked of the real compiler first: torch keeps the first answer for the process."""
    cpu_vec_isa.valid_vec_isa_list()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty compile cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    return folder


def compiler(folder, script):
    """A C++ compiler of our own that inductor calls: a shell script."""
    path = folder / "g++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return inductor.patch("cpp.cxx", (None, str(path)))


def test_nothing_is_missing_where_the_tests_run(cache):
    assert machine.missing(CPU) is None
    assert machine.headers().fine is True
    assert machine.openmp().fine is (True if sys.platform == "linux" else None)


def test_only_the_compiler_that_torch_will_call_counts(cache):
    with inductor.patch("cpp.cxx", (None, "/nowhere/g++")):
        assert machine.cxx() == ("C++ compiler", "/nowhere/g++ not found", False)
        assert machine.missing(CPU).startswith("There is no C++ compiler: install ")


def test_torch_may_install_a_compiler_itself(cache, monkeypatch):
    monkeypatch.setenv("TORCH_INDUCTOR_INSTALL_GXX", "1")
    with inductor.patch("cpp.cxx", (None, "/nowhere/g++")):
        assert machine.cxx().fine is None
        assert machine.missing(CPU) is None


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere OpenMP is not looked for")
@pytest.mark.parametrize(("words", "fine"), [("omp.h: No such file or directory", False), ("segmentation fault", None)])
def test_a_compiler_without_openmp_is_told_from_one_that_fails_otherwise(cache, tmp_path, words, fine):
    """The second may yet compile: that is found out by compiling."""
    with compiler(tmp_path, f"echo 'fatal error: {words}' >&2; exit 1"):
        assert machine.openmp().fine is fine
        assert (machine.missing(CPU) or "").startswith("OpenMP is missing: install " if fine is False else "")
        cache.mkdir()
        (cache / "compiled").touch()
        assert machine.missing(CPU) is None  # what was compiled before needs it no more


def test_headers_that_the_compiler_may_find_elsewhere_are_not_missing(tmp_path, monkeypatch):
    for name in ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)

    assert machine.headers(tmp_path).fine is False
    monkeypatch.setenv("CPATH", "/opt/include")
    assert machine.headers(tmp_path).fine is None


@pytest.mark.parametrize(
    ("capability", "rocm", "fine"),
    [
        ((6, 1), False, False),
        ((7, 0), False, True),
        ((9, 0), False, True),
        ((10, 0), False, True),
        ((9, 0), True, None),
    ],
)
def test_a_gpu_is_too_old_below_capability_seven(capability, rocm, fine):
    assert machine.gpu(capability, rocm=rocm).fine is fine


@pytest.mark.parametrize(("kind", "parts"), [("cpu", 3), ("cuda", 4), ("mps", 0)])
def test_what_is_looked_for_depends_on_the_device_and_the_cache(kind, parts):
    """With a filled cache the dear part, and what only the first compile needs, is left out."""
    cold, warm = ([part for part, _ in machine._parts(torch.device(kind), cold=cold)] for cold in (True, False))

    assert len(cold) == parts
    assert cold[: len(warm)] == warm
    assert not {"headers", "openmp"} & set(warm)


def test_looking_costs_next_to_nothing_once_something_was_compiled(cache):
    """Some 100 us are seen; a bound that a busy machine keeps and a started process does not."""
    cache.mkdir()
    (cache / "compiled").touch()
    seconds = []
    for _ in range(50):
        began_s = time.perf_counter()
        machine.missing(CPU)
        seconds.append(time.perf_counter() - began_s)

    assert min(seconds) < 0.002


RUN = """
import sys, warnings
sys.path.insert(0, {tests!r})
from runs import Regression, differences, left_behind, train
from compile_profiler import CompileProfiler

plain = left_behind(*train(Regression, max_steps=8, validate=False))
profiler = CompileProfiler(verbose=False)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    here = left_behind(*train(Regression, [profiler], max_steps=8, validate=False))
(said,) = [str(w.message) for w in caught if "CompileProfiler" in str(w.message)]
assert differences(plain, here) == []
assert profiler.report.compiles.by_stage == {{}}, profiler.report.compiles
print(profiler.report.verdict.decision, profiler.report.verdict.reason, said)
"""


def test_a_machine_without_a_compiler_trains_to_the_end(tmp_path):
    """For real: nothing on the path, an empty cache. Nothing is tried that could have spoiled a step."""
    package = Path(__file__).parents[1] / "callbacks"
    environment = {"PATH": "/nowhere", "CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(tests=str(Path(__file__).parent))],
        env={**environment, "PYTHONPATH": str(package), "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("eager compile_error CompileProfiler: Nothing can be compiled here. There is no C++")
    assert done.stdout.strip().endswith("training goes on as without the callback.")


@pytest.mark.slow
def test_a_compiler_that_does_not_compile_is_found_by_the_guard(cache, tmp_path):
    """Looking says nothing against it."""
    plain = left_behind(*train(Regression, max_steps=4, validate=False))
    profiler = CompileProfiler(verbose=False)
    with (
        compiler(tmp_path, 'case "$*" in *version*) echo g++ 12;; *) echo broken >&2; exit 1;; esac'),
        pytest.warns(UserWarning, match="Compiling failed") as warned,
    ):
        failed = left_behind(*train(Regression, [profiler], max_steps=4, validate=False))

    assert differences(plain, failed) == []
    assert len([w for w in warned if "CompileProfiler" in str(w.message)]) == 1
    assert profiler.report.verdict.reason == "compile_error"
