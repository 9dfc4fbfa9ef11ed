"""What to do about an error of compiling, in one sentence."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Part = Literal["compiler", "c compiler", "headers", "openmp", "triton", "gpu"]
"""What compiling needs of a machine."""


class _Lack(NamedTuple):
    wrong: str
    anywhere: str
    """What to install, for whoever does not say on which system."""
    packages: dict[str, str] = {}  # noqa: RUF012, never written
    """What to install by family of system: of Linux's distributions, or ``sys.platform``."""


_LACKS: dict[Part, _Lack] = {
    "compiler": _Lack(
        "There is no C++ compiler",
        "g++ (Debian, Ubuntu), gcc-c++ (Fedora, RHEL) or Xcode's command line tools",
        {
            "debian": "g++",
            "fedora": "gcc-c++",
            "suse": "gcc-c++",
            "arch": "gcc",
            "darwin": "Xcode's command line tools (xcode-select --install)",
            "win32": "Visual Studio's build tools and start from their prompt",
        },
    ),
    "c compiler": _Lack(
        "There is no C compiler, which triton calls",
        "gcc",
        {"win32": "Visual Studio's build tools and start from their prompt"},
    ),
    "headers": _Lack(
        "The headers of Python are missing",
        "python3-dev (Debian, Ubuntu) or python3-devel (Fedora, RHEL)",
        {"debian": "python3-dev", "fedora": "python3-devel", "suse": "python3-devel", "arch": "python"},
    ),
    "openmp": _Lack(
        "OpenMP is missing",
        "libomp-dev (Debian, Ubuntu), libomp-devel (Fedora), or libomp (Homebrew)",
        {
            "debian": "libomp-dev",
            "fedora": "libomp-devel",
            "suse": "libomp-devel",
            "arch": "openmp",
            "darwin": "libomp",
        },
    ),
    "triton": _Lack(
        "Triton is missing, which inductor needs on a GPU",
        "the triton package that matches this torch",
        {"win32": "triton-windows, in the version that matches this torch"},
    ),
}
_TOO_OLD = "This GPU is too old for triton, which needs CUDA capability 7.0; it can only be used in eager."

# Text of the error, and the part that is missing; of "cl" nobody speaks but Windows. First match wins, of this table
# before the next; texts are those of torch 2.11 to 2.13, triton, compilers and linkers.
_MISSING: tuple[tuple[str, Part, str | None], ...] = (
    (r"Python\.h", "headers", None),
    (r"\bomp\.h|-lomp\b|-lgomp\b|-fopenmp|libomp", "openmp", None),
    (r"\bcl(\.exe)? is not found|Compiler: cl\b", "compiler", "win32"),
    (r"Failed to find C compiler", "c compiler", None),
    (r"InvalidCxxCompiler|[Nn]o working C\+\+ compiler|g\+\+: (command )?not found", "compiler", None),
    (r"too old to be supported by the triton|CUDA [Cc]apability.{0,40}less than|GPUTooOldForTriton", "gpu", None),
    (r"TritonMissing|[Cc]annot find a working triton|No module named 'triton'", "triton", None),
)
_OVERWRITTEN = r"CUDAGraphs that has been overwritten"
# Text of the error, what is wrong and what to do about it.
_ADVICE: tuple[tuple[str, str], ...] = (
    (
        r"libcuda\.so",
        "The CUDA driver's libcuda.so is not where the linker looks: run ldconfig, or set LD_LIBRARY_PATH.",
    ),
    (
        r"stance is 'fail_on_recompile'",
        "torch.compiler.set_stance('fail_on_recompile') forbids a second graph: leave it out, or make shapes fixed.",
    ),
    (
        _OVERWRITTEN,
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


def to_install(part: Part, system: str | None = None) -> str:
    """What is wrong without this part, and what to install.

    Args:
        part: what is missing.
        system: a family of Linux distributions (``"debian"``, ``"fedora"``, ``"suse"``, ``"arch"``) or
            ``sys.platform``; ``None`` if unknown.

    >>> to_install("compiler", "fedora")
    'There is no C++ compiler: install gcc-c++.'
    >>> to_install("headers")
    'The headers of Python are missing: install python3-dev (Debian, Ubuntu) or python3-devel (Fedora, RHEL).'
    """
    if part == "gpu":
        return _TOO_OLD
    lack = _LACKS[part]
    return f"{lack.wrong}: install {lack.packages.get(system or '', lack.anywhere)}."


def reads_overwritten(error: BaseException) -> bool:
    """Whether somebody has read what a CUDA graph had written, after its next replay."""
    return re.search(_OVERWRITTEN, str(error)) is not None


def without_command(text: str) -> str:
    r"""The text of an error of compiling, without the compiler's command line before what the compiler said.

    It is long, and names what is there beside what is missing. torch 2.13 writes it in ``CppCompileError``.

    >>> without_command("C++ compile error\n\nCommand:\ng++ x.cpp -fopenmp\n\nOutput:\nx.cpp:1:1: error: no")
    'C++ compile error\n\nx.cpp:1:1: error: no'
    """
    return re.sub(r"\bCommand:\s+\S[^\n]*\n\s*Output:\s*", "", text)


def advice(error: BaseException, system: str | None = None) -> str | None:
    """What to do about ``error`` or one of the errors behind it, ``None`` where nothing is known.

    Args:
        error: the error.
        system: as for ``to_install``.

    >>> advice(RuntimeError("fatal error: Python.h: No such file or directory"), "debian")
    'The headers of Python are missing: install python3-dev.'
    >>> advice(ValueError("something else")) is None
    True
    """
    link: BaseException | None = error
    seen = []
    while link is not None and link not in seen:
        seen.append(link)
        link = link.__cause__ or link.__context__
    text = "\n".join(f"{type(link).__name__}: {without_command(str(link))}" for link in seen)
    for pattern, part, known_system in _MISSING:
        if re.search(pattern, text, re.DOTALL):
            return to_install(part, known_system or system)
    return next((sentence for pattern, sentence in _ADVICE if re.search(pattern, text, re.DOTALL)), None)
