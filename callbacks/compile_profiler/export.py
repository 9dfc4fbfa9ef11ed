"""Where a report goes during the fit: loggers, file, a line on the console."""

from __future__ import annotations

import json
from pathlib import Path

from compile_profiler import host
from compile_profiler.records import Report
from compile_profiler.render import events_markdown, verdict_markdown
from compile_profiler.scalars import CHARTS, EVENTS_TAG, VERDICT_TAG, layout, scalars, whole_bands

FILE_NAME = "compile_profile.json"


class Export:
    """Sends reports on their way, on rank 0; what cannot be delivered costs a warning, never the run.

    Args:
        trainer: whose loggers get the scalars and texts.
        directory: where ``compile_profile.json`` goes.
        log: whether to send anything to the loggers.
        verbose: whether to print lines.
    """

    def __init__(self, trainer: host.Trainer, directory: Path, *, log: bool, verbose: bool) -> None:
        self._trainer = trainer
        self._file = directory / FILE_NAME
        self._logs = log and bool(trainer.loggers) and not trainer.barebones
        self._laid_out = False
        self._has_bands = False
        self._verbose = verbose and trainer.is_global_zero
        self._writes = bool(trainer.is_global_zero)

    def log(self, report: Report, step: int, *, last: bool = False) -> None:
        """Scalars and texts to every logger, at the x-axis number ``step``.

        Args:
            report: what is known.
            step: where.
            last: whether nothing follows in this fit: a fit too short for a band gets the curve in its middle.
        """
        if not self._logs:
            return
        try:
            if not self._laid_out:
                host.log_layout(self._trainer, layout())
                self._laid_out = True
            figures = scalars(report)
            whole = whole_bands(figures)
            self._has_bands = self._has_bands or any(chart.band and chart.tags[0] in whole for chart in CHARTS)
            host.log_scalars(self._trainer, figures if last and not self._has_bands else whole, step)
            host.log_text(self._trainer, VERDICT_TAG, verdict_markdown(report), step)
            host.log_text(self._trainer, EVENTS_TAG, events_markdown(report), step)
        except Exception as error:
            self._logs = False
            host.warn(f"a logger refused the scalars, nothing more is logged: {type(error).__name__}: {error}")

    def write(self, report: Report) -> None:
        """The report as JSON; a reader never sees half a file."""
        if not self._writes:
            return
        draft = self._file.with_suffix(".tmp")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            # default=str: the user's compile options may hold functions.
            text = json.dumps(report.to_dict(), indent=2, allow_nan=False, default=str)
            draft.write_text(text, encoding="utf-8")
            draft.replace(self._file)
        except OSError as error:
            self._writes = False
            host.warn(f"the report could not be written to {self._file}: {error}")

    def tell(self, message: str) -> None:
        """One line on the console."""
        if self._verbose:
            host.inform(self._trainer, message)
