"""Whether this machine has what compiling needs, found out by looking.

A second door to torch's compiler, to its settings alone: where its cache is, which command it will call. Names checked
on torch 2.11 and 2.13.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo
from torch._inductor.runtime import cache_dir_utils

from compile_profiler.advice import Part, to_install

MIN_CAPABILITY = 7, 0
"""CUDA capability of the oldest GPU that triton compiles for."""
_STANCES = {
    "force_eager": "leaves everything in eager",
    "eager_on_recompile": "compiles nothing new",
    "fail_on_recompile": "forbids to compile anything new",
}
_INCLUDE_PATHS = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")


class Finding(NamedTuple):
    """One thing that compiling depends on.

    Attributes:
        what: its name.
        found: what is there, for people.
        fine: ``False`` if nothing can be compiled without it, ``None`` where that cannot be told by looking.
    """

    what: str
    found: str
    fine: bool | None = None


def disabled() -> str | None:
    """Why nothing can be compiled in this process: an environment variable, a setting or a stance; else ``None``."""
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "the environment variable TORCHDYNAMO_DISABLE=1 switches torch.compile off"
    if getattr(torch._dynamo.config, "disable", False):
        if os.environ.get("TORCH_COMPILE_DISABLE") == "1":  # which torch reads when it is imported
            return "the environment variable TORCH_COMPILE_DISABLE=1 switches torch.compile off"
        return "torch._dynamo.config.disable switches torch.compile off"
    stance = getattr(getattr(torch._dynamo.eval_frame, "_stance", None), "stance", None)
    return f"torch.compiler.set_stance('{stance}') {_STANCES[stance]}" if stance in _STANCES else None


def cache_folder() -> Path:
    """Where inductor keeps what it compiled; it need not be there yet."""
    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or cache_dir_utils.default_cache_dir())


def missing(device: torch.device) -> str | None:
    """What inductor needs to compile for ``device`` and this machine lacks, with what to install; ``None`` if nothing.

    ``None`` also where looking cannot tell: trying can.

    Cost: files are looked for, some 100 microseconds. With an empty compile cache the C++ compiler is asked for OpenMP
    too, some 20 ms.
    """
    cold = _is_empty(cache_folder()) and not os.environ.get("TRITON_CACHE_DIR")
    for part, look in _parts(device, cold=cold):
        if look().fine is False:
            return to_install(part, system())
    return None


def _parts(device: torch.device, *, cold: bool) -> Iterator[tuple[Part, Callable[[], Finding]]]:
    """What to look for, the cheapest first; what was compiled before needs neither headers nor OpenMP again."""
    settings = _inductor_settings()
    if device.type == "cpu" and getattr(settings, "cpu_backend", "cpp") == "cpp":
        yield "compiler", cxx
        if cold:
            yield "headers", headers
            yield "openmp", openmp
    if device.type == "cuda" and getattr(settings, "cuda_backend", "triton") == "triton":
        yield "gpu", lambda: gpu(torch.cuda.get_device_capability(device), rocm=torch.version.hip is not None)
        yield "triton", triton
        if cold and sys.platform == "linux":  # on Windows triton brings a compiler along
            yield "c compiler", cc
            yield "headers", headers


def gpu(capability: tuple[int, int], *, rocm: bool = False) -> Finding:
    """Whether triton compiles for a GPU of this CUDA capability; of AMD's, which number otherwise, all are taken.

    >>> gpu((6, 1)).fine, gpu((7, 0)).fine, gpu((6, 1), rocm=True).fine
    (False, True, None)
    """
    told = f"capability {capability[0]}.{capability[1]}"
    return Finding("GPU", told, None if rocm else capability >= MIN_CAPABILITY)


def triton() -> Finding:
    """Whether there is a triton to import."""
    found = util.find_spec("triton") is not None
    return Finding("triton", "installed" if found else "not installed", found)


def cxx() -> Finding:
    """The C++ compiler that inductor calls: its setting, which ``CXX`` sets, and no other that may be there."""
    wanted = _cxx_commands()
    path = next((path for path in map(shutil.which, wanted) if path is not None), None)
    if path is None and os.environ.get("TORCH_INDUCTOR_INSTALL_GXX"):
        return Finding("C++ compiler", "inductor installs one itself")
    return Finding("C++ compiler", path or f"{' or '.join(wanted)} not found", path is not None)


def cc() -> Finding:
    """The C compiler that triton calls."""
    wanted = [os.environ["CC"]] if os.environ.get("CC") else ["clang", "gcc", "cc"]
    path = next((path for path in map(shutil.which, wanted) if path is not None), None)
    return Finding("C compiler", path or f"{' or '.join(wanted)} not found", path is not None)


def headers(folder: Path | None = None) -> Finding:
    """The headers of this Python, looked for in ``folder`` or where this Python says that they are."""
    file = (folder or Path(sysconfig.get_paths()["include"])) / "Python.h"
    if file.exists():
        return Finding("Python headers", str(file), True)
    # The compiler may find them elsewhere.
    told_where = [name for name in _INCLUDE_PATHS if os.environ.get(name)]
    return Finding("Python headers", f"no {file}", None if told_where else False)


def openmp() -> Finding:
    """Whether the C++ compiler finds the header of OpenMP; whether it can be linked shows in compiling."""
    command = cxx()
    if not command.fine or sys.platform != "linux":
        return Finding("OpenMP", "not looked for")
    with tempfile.TemporaryDirectory(prefix="compile-profiler-") as folder:
        source = Path(folder) / "openmp.cpp"
        source.write_text("#include <omp.h>\n")
        compiler = [command.found, "-fopenmp", "-E", "-P", "-o", os.devnull, str(source)]
        try:
            done = subprocess.run(compiler, capture_output=True, text=True, errors="replace", timeout=30, check=False)
        except (OSError, subprocess.SubprocessError):
            return Finding("OpenMP", f"{command.found} does not run")
    if done.returncode == 0:
        return Finding("OpenMP", "omp.h found", True)
    return Finding("OpenMP", "no omp.h", False if "omp.h" in done.stderr else None)


def system() -> str | None:
    """The family of this system, as ``to_install`` names them."""
    if sys.platform != "linux":
        return sys.platform
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        return None
    return family_of(f"{release.get('ID', '')} {release.get('ID_LIKE', '')}")


def family_of(names: str) -> str | None:
    """The family of a Linux distribution from ``ID`` and ``ID_LIKE`` of its os-release.

    >>> family_of("ubuntu debian"), family_of("rocky rhel centos fedora"), family_of("nixos")
    ('debian', 'fedora', None)
    """
    families = {"debian": "debian", "ubuntu": "debian", "fedora": "fedora", "rhel": "fedora", "suse": "suse"}
    known = {**families, "opensuse": "suse", "arch": "arch"}
    return next((known[name] for name in names.split() if name in known), None)


def _is_empty(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is None
    except OSError:
        return True


def _cxx_commands() -> list[str]:
    configured = getattr(getattr(_inductor_settings(), "cpp", None), "cxx", None)
    if sys.platform == "win32":  # where inductor does not read its setting
        configured = os.environ.get("CXX", "cl")
    commands = configured if isinstance(configured, (list, tuple)) else [configured]
    return [command for command in commands if command is not None] or ["g++"]


def _inductor_settings() -> Any:
    return importlib.import_module("torch._inductor.config")  # late: loads the compiler
