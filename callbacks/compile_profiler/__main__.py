"""The command line, for ``python -m compile_profiler``."""

from __future__ import annotations

from compile_profiler.cli import main

main(prog_name="compile-profiler")
