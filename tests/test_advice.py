"""Real messages of torch, triton, compilers and linkers lead to one sentence that says what to do."""

import re

import pytest
import torch
from torch._inductor.exc import CppCompileError

from compile_profiler import CompileProfiler
from compile_profiler.advice import advice
from compile_profiler.judgement import after_trouble
from compile_profiler.notices import first_line
from runs import Regression, differences, left_behind, train

MESSAGES = {
    "compiler": (
        "InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')",
        r"There is no C\+\+ compiler: install",
    ),
    "header": (
        "main.cpp:1:10: fatal error: Python.h: No such file or directory",
        "headers of Python are missing: install",
    ),
    "openmp": ("fatal error: 'omp.h' file not found", "OpenMP is missing: install"),
    "linker": ("ld: library not found for -lomp", "OpenMP is missing: install"),
    "windows": ("RuntimeError: Compiler: cl is not found.", "Visual Studio"),
    "old gpu": (
        "Found Tesla P100-PCIE-16GB which is too old to be supported by the triton GPU compiler, which is used as the "
        "backend. Triton only supports devices of CUDA Capability >= 7.0, but your device is of CUDA capability 6.0",
        "too old for triton",
    ),
    "triton": (
        "Cannot find a working triton installation. Either the package is not installed or it is too old.",
        "Triton is missing",
    ),
    "driver": ("AssertionError: libcuda.so cannot found!", "ldconfig"),
    "overwritten": (
        "Error: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run.",
        "clone it",
    ),
    "memory": ("CUDA out of memory. Tried to allocate 2.00 GiB.", "smaller batches"),
    "disk": ("OSError: [Errno 28] No space left on device", "TORCHINDUCTOR_CACHE_DIR"),
    "layout": ("AssertionError: expected size 4==4, stride 16==1 at dim=0", "dynamic=True"),
}


def test_what_a_cuda_graph_has_overwritten_is_no_error_of_ours():
    """Wherever it is read: what the module holds is read to be kept, too."""
    verdict = after_trouble(RuntimeError(MESSAGES["overwritten"][0]))

    assert (verdict.decision, verdict.reason) == ("eager", "runtime_error")
    assert "clone it" in verdict.message
    assert after_trouble(RuntimeError("something else")).reason == "disabled"


def test_what_is_on_the_compilers_command_line_is_not_missing():
    """It names OpenMP in each run: the error is in what the compiler said, and that is what is told."""
    command = ["g++", "kernel.cpp", "-fopenmp", "-I/usr/include/python3.11/Python.h", "-lgomp"]
    error = CppCompileError(command, "kernel.cpp:3:7: error: 'nothing' was not declared in this scope")
    lacking = CppCompileError(command, "/usr/bin/ld: cannot find -lgomp: No such file or directory")

    assert advice(error) is None
    assert "error: 'nothing' was not declared" in first_line(RuntimeError(f"backend='inductor' raised:\n{error}"))
    assert advice(lacking).startswith("OpenMP is missing: install")


@pytest.mark.parametrize("case", MESSAGES)
def test_a_known_message_is_answered(case):
    message, answer = MESSAGES[case]

    assert re.search(answer, advice(RuntimeError(message)))


def test_the_cause_behind_an_error_is_looked_at_and_the_unknown_is_not_guessed():
    error = RuntimeError("backend='inductor' raised:")
    error.__cause__ = OSError("fatal error: Python.h: No such file or directory")

    assert "python3-dev" in advice(error)
    assert advice(error, "fedora") == "The headers of Python are missing: install python3-devel."
    assert advice(KeyError("x")) is None


@pytest.mark.parametrize("case", MESSAGES)
def test_a_run_that_meets_the_message_trains_on_in_eager_bit_for_bit(case):
    message, answer = MESSAGES[case]

    def backend(graph, example_inputs):
        raise RuntimeError(message)

    profiler = CompileProfiler(backend=backend, verbose=False)
    plain = left_behind(*train(Regression, max_steps=8, validate=False))
    with pytest.warns(UserWarning, match=answer) as warned:
        failed = left_behind(*train(Regression, [profiler], max_steps=8, validate=False))

    assert differences(plain, failed) == []
    assert len([w for w in warned if "CompileProfiler" in str(w.message)]) == 1
    assert profiler.report.verdict.reason == "compile_error"
    assert torch._dynamo.callback.callback_handler.start_callbacks == []
