"""One Lightning callback that compiles the module, proves that it pays, and goes back to eager when it does not."""

from compile_profiler.callback import CompileProfiler
from compile_profiler.records import Report

__all__ = ["CompileProfiler", "Report"]
