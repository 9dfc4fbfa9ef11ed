"""What to do about an error of compiling, in one sentence."""

from __future__ import annotations

import re

# Text of the error, what is wrong and what to do about it. First match wins; texts are those of torch 2.11 to 2.13,
# triton, compilers and linkers.
_ADVICE: tuple[tuple[str, str], ...] = (
    (
        r"Python\.h",
        "The headers of Python are missing: install python3-dev (Debian, Ubuntu) or python3-devel (Fedora, RHEL).",
    ),
    (
        r"\bomp\.h|-lomp\b|-lgomp\b|-fopenmp|libomp",
        "OpenMP is missing: install libomp-dev (Debian, Ubuntu), libomp-devel (Fedora), or libomp (Homebrew).",
    ),
    (
        r"\bcl(\.exe)? is not found|Compiler: cl\b",
        "The C++ compiler of Windows is missing: install Visual Studio's build tools and start from their prompt.",
    ),
    (
        r"InvalidCxxCompiler|[Nn]o working C\+\+ compiler|Failed to find C compiler|g\+\+: (command )?not found",
        "There is no C++ compiler: install g++ (Debian, Ubuntu), gcc-c++ (Fedora, RHEL) or Xcode's command line tools.",
    ),
    (
        r"too old to be supported by the triton|CUDA [Cc]apability.{0,40}less than|GPUTooOldForTriton",
        "This GPU is too old for triton, which needs CUDA capability 7.0; it can only be used in eager.",
    ),
    (
        r"TritonMissing|[Cc]annot find a working triton|No module named 'triton'",
        "Triton is missing, which inductor needs on a GPU: install the triton package that matches this torch.",
    ),
    (
        r"libcuda\.so",
        "The CUDA driver's libcuda.so is not where the linker looks: run ldconfig, or set LD_LIBRARY_PATH.",
    ),
    (
        r"stance is 'fail_on_recompile'",
        "torch.compiler.set_stance('fail_on_recompile') forbids a second graph: leave it out, or make shapes fixed.",
    ),
    (
        r"CUDAGraphs that has been overwritten",
        "A tensor that a CUDA graph writes was kept beyond its step: clone it, or leave mode='reduce-overhead' out.",
    ),
    (
        r"out of memory|OutOfMemory",
        "The compiled step needs more memory than there is: use smaller batches, or mode='default' for fewer buffers.",
    ),
    (
        r"No space left on device",
        "The compile cache's disk is full: set TORCHINDUCTOR_CACHE_DIR to a folder with room.",
    ),
    (
        r"Permission denied.*(torchinductor|triton)|(torchinductor|triton).*Permission denied",
        "The compile cache cannot be written: set TORCHINDUCTOR_CACHE_DIR to a folder of your own.",
    ),
    (
        r"not supported on Python|Python version.{0,20}not supported",
        "This torch cannot compile under this Python version: use an older Python or a newer torch.",
    ),
    (
        r"expected size .* stride|assert_size_stride|Failed to run autotuning",
        "The compiled code was given a tensor laid out otherwise than traced: try dynamic=True or another target.",
    ),
)


def advice(error: BaseException) -> str | None:
    """What to do about ``error`` or one of the errors behind it, ``None`` where nothing is known.

    >>> advice(RuntimeError("fatal error: Python.h: No such file or directory")).partition(":")[0]
    'The headers of Python are missing'
    >>> advice(ValueError("something else")) is None
    True
    """
    link: BaseException | None = error
    seen = []
    while link is not None and link not in seen:
        seen.append(link)
        link = link.__cause__ or link.__context__
    text = "\n".join(f"{type(link).__name__}: {link}" for link in seen)
    return next((sentence for pattern, sentence in _ADVICE if re.search(pattern, text, re.DOTALL)), None)
