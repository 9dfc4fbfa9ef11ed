"""Configurations of ``torch.compile`` on one module, each measured in a process of its own."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compile_profiler.bench_run import Plan
from compile_profiler.export import FILE_NAME
from compile_profiler.records import Report

BENCH_FILE_NAME = "bench.json"
DYNAMIC = {"auto": None, "on": True, "off": False}
_CHILD = "from compile_profiler.bench_run import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one configuration.

    Attributes:
        name: of the configuration, and of its folder.
        report: what was found, ``None`` if its process ended without one.
        exit_code: 0; 2: it cannot be measured as asked; else its code failed.
        options: arguments of ``CompileProfiler``.
    """

    name: str
    report: Report | None
    exit_code: int
    options: dict[str, Any]


def configurations(
    *,
    targets: Sequence[str],
    backends: Sequence[str],
    modes: Sequence[str],
    dynamics: Sequence[str],
    fullgraph: bool = False,
) -> dict[str, dict[str, Any]]:
    """Every combination, as arguments of ``CompileProfiler`` by the name of the configuration.

    Args:
        targets: each ``step``, ``forward``, ``blocks``, or names of submodules with commas between.
        backends: as ``torch.compile`` has them.
        modes: likewise, of inductor; ``default`` for none.
        dynamics: each a key of ``DYNAMIC``.
        fullgraph: as in ``torch.compile``.

    >>> list(configurations(targets=["step"], backends=["inductor"], modes=["default"], dynamics=["on", "off"]))
    ['step-default-dynamic', 'step-default-static']
    """
    found = {}
    for target, backend, mode, dynamic in itertools.product(targets, backends, modes, dynamics):
        shapes = {"auto": "", "on": "dynamic", "off": "static"}[dynamic]
        parts = (target, "" if backend == "inductor" else backend, "" if backend != "inductor" else mode, shapes)
        found[re.sub(r"[^\w.-]+", "+", "-".join(part for part in parts if part))] = {
            "target": target if target in ("step", "forward", "blocks") else target.split(","),
            "backend": backend,
            "mode": None if mode == "default" else mode,
            "dynamic": DYNAMIC[dynamic],
            "fullgraph": fullgraph,
        }
    return found


def measure(
    asked: dict[str, dict[str, Any]], *, folder: Path, tell: Callable[[str], None], **plan: Any
) -> Iterator[Outcome]:
    """Measure one configuration after the other, until one fails by the user's request or code.

    A process of its own for each: what one has compiled, cached, allocated or broken is not there for the next. Its
    compile caches start empty, so that the seconds of compiling are those of a first run.

    Args:
        asked: arguments of ``CompileProfiler`` by the name of the configuration.
        folder: gets a folder for each, with its report.
        tell: gets what the processes print, line by line.
        plan: the rest of ``Plan``.

    Raises:
        OSError: ``folder`` cannot be written.
    """
    for name, options in asked.items():
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        file = place / FILE_NAME
        file.unlink(missing_ok=True)
        code = _run(Plan(folder=str(place), options=options, **plan), tell)
        report = Report.from_dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None
        if code == 0 and report is None:
            code = 1
            tell(f"{name}: the process ended without a report.")
        elif code not in (0, 1, 2):
            tell(f"{name}: the process ended with exit code {code}.")
        yield Outcome(name=name, report=report if code == 0 else None, exit_code=code, options=options)
        if code in (1, 2):
            return


def write(outcomes: Sequence[Outcome], file: Path, *, module: str) -> None:
    """All of it in one JSON file; ``report`` is ``null`` where there is none.

    Raises:
        OSError: ``file`` cannot be written.
    """
    found = [{**asdict(each), "report": each.report and each.report.to_dict()} for each in outcomes]
    text = json.dumps({"schema": 1, "module": module, "configurations": found}, indent=2, allow_nan=False)
    file.write_text(text, encoding="utf-8")


def _run(plan: Plan, tell: Callable[[str], None]) -> int:
    with tempfile.TemporaryDirectory(prefix="compile-profiler-") as empty:
        caches = {"TORCHINDUCTOR_CACHE_DIR": empty, "TRITON_CACHE_DIR": str(Path(empty) / "triton")}
        with subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            env={**os.environ, **caches, "PYTHONPATH": os.pathsep.join([_ours(), os.environ.get("PYTHONPATH", "")])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                with child.stdin as written:
                    json.dump(asdict(plan), written)
                for line in child.stdout:
                    tell(line.rstrip("\n"))
            except BaseException:
                child.kill()
                raise
        return child.returncode


def _ours() -> str:
    """Where this package lies: it may be on the path of this process alone."""
    return str(Path(__file__).parents[1])
