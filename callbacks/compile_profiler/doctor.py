"""Whether this machine can compile, found out by compiling."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import torch

from compile_profiler import machine
from compile_profiler.advice import advice
from compile_profiler.machine import Finding, cache_folder, disabled, system

SETTINGS = (
    "CXX",
    "TORCH_COMPILE_DISABLE",
    "TORCHDYNAMO_DISABLE",
    "TORCHDYNAMO_SUPPRESS_ERRORS",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES",
)
_CACHE = "compile cache"
_TRIED = "compiling for"
# The function adds 1 only where the compiler has traced it: torch may fall back to eager without a word.
_TRIAL = """
import sys, torch

def traced(x):
    return x.sin() + int(torch.compiler.is_compiling())

x = torch.zeros(64, device=sys.argv[1])
if torch.compile(traced)(x).sum().item() != 64:
    sys.exit("torch.compile ran the function in eager.")
"""


def examine(*, max_seconds: float) -> Iterator[Finding]:
    """What compiling depends on, the trial itself last.

    Cost: imports torch and compiles one tiny function in a process of its own, with an empty cache, so that a compiler
    that has gone missing is not hidden by an earlier result; 10 to 30 seconds. Nothing else is written or changed.

    Args:
        max_seconds: time limit of the trial.
    """
    yield Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for packages in (("torch",), ("lightning", "pytorch-lightning"), ("triton", "pytorch-triton", "triton-windows")):
        yield Finding(packages[0], _version(packages))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    yield _gpu()
    yield _cxx()
    yield machine.headers()
    yield machine.openmp()
    yield _cache(cache_folder())
    settings = [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    yield Finding("settings", ", ".join(settings) or "none in the environment")
    yield trial(device, max_seconds=max_seconds, environment=os.environ)


def obstacle(findings: Sequence[Finding]) -> str | None:
    """Why this machine cannot compile and what to do, ``None`` where it can.

    A missing part that the trial did without is none; the cache is one, because the trial has its own.

    >>> obstacle([Finding("OpenMP", "no omp.h", False), Finding("compiling for cpu", "works", True)])
    >>> obstacle([Finding("compiling for cpu", "There is no C++ compiler.", False)])
    'There is no C++ compiler.'
    """
    blocking = [finding for finding in findings if finding.what == _CACHE or finding.what.startswith(_TRIED)]
    return next((finding.found for finding in reversed(blocking) if not finding.fine), None)


def trial(device: str, *, max_seconds: float, environment: Mapping[str, str]) -> Finding:
    """Compile a tiny function for ``device`` in a process of its own.

    Args:
        device: as torch names it.
        max_seconds: time limit.
        environment: variables of that process; its caches are replaced by an empty folder.
    """
    what = f"{_TRIED} {device}"
    off = disabled()
    if off is not None:
        return Finding(what, f"{off}: unset it.", False)
    with tempfile.TemporaryDirectory(prefix="compile-profiler-") as empty:
        own = {"TORCHINDUCTOR_CACHE_DIR": empty, "TRITON_CACHE_DIR": empty, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        try:
            done = subprocess.run(
                [sys.executable, "-c", _TRIAL, device],
                env={**environment, **own},
                cwd=empty,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=max_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Finding(what, f"The trial was not done after {max_seconds:g} s; --timeout gives it longer.", False)
    if done.returncode == 0:
        return Finding(what, "works", True)
    last_line = (done.stderr.strip() or f"ended with {done.returncode}").splitlines()[-1]
    return Finding(what, advice(RuntimeError(done.stderr), system()) or last_line, False)


def _version(packages: tuple[str, ...]) -> str:
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding("GPU", "none")
    found = machine.gpu(torch.cuda.get_device_capability(), rocm=torch.version.hip is not None)
    return found._replace(found=f"{torch.cuda.get_device_name()}, {found.found}")


def _cxx() -> Finding:
    """With its version, as only running it gives."""
    compiler = machine.cxx()
    if not compiler.fine:
        return compiler
    command = compiler.found
    version = _output([command] if sys.platform == "win32" else [command, "--version"])
    return compiler._replace(found=f"{command}: {version or 'does not start'}", fine=version is not None)


def _cache(folder: Path) -> Finding:
    """The folder, its size, and whether a file can be made there."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    num_bytes = sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())
    told = f"{folder}, {num_bytes / 2**20:.1f} MiB" if folder.is_dir() else f"{folder}, not there yet"
    try:
        with tempfile.TemporaryFile(dir=there):
            return Finding(_CACHE, told, True)
    except OSError as error:
        return Finding(_CACHE, f"{told}. {advice(error, system()) or error}", False)


def _output(command: list[str]) -> str | None:
    """First line of what ``command`` prints, ``None`` if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return (done.stdout.strip() or "").partition("\n")[0]
