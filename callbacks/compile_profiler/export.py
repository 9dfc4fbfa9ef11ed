"""Where a report goes during the fit: loggers, file, a line on the console."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from compile_profiler import host, loggers
from compile_profiler.candidates_table import candidates_markdown
from compile_profiler.records import Report
from compile_profiler.render import events_markdown, verdict_markdown
from compile_profiler.scalars import (
    CHARTS,
    EVENTS_TAG,
    SCALARS,
    SEARCH_TAG,
    VERDICT_TAG,
    described,
    layout,
    scalars,
    whole_bands,
)

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
        self._sent: dict[tuple[Callable[..., None], str], str] = {}  # texts by door and tag
        self._milestone: tuple[str, str] | None = None
        self._stages: tuple[str, ...] | None = None  # of a search
        self._verbose = verbose and trainer.is_global_zero
        self._writes = bool(trainer.is_global_zero)

    def describe(self, config: Mapping[str, Any]) -> None:
        """Before Lightning logs the user's hyperparameters: what is compiled how, where runs are compared by it."""
        theirs = host.logged_hyperparameters(self._trainer)
        tags = [scalar.tag for scalar in SCALARS]
        self._deliver(lambda to: loggers.describe(to, described(config), tags, theirs), "the configuration")

    def describe_late(self, config: Mapping[str, Any], report: Report) -> None:
        """After the fit: the same for a run that nobody has described."""
        if self._laid_out:
            self._deliver(lambda to: loggers.describe_late(to, described(config), scalars(report)), "the configuration")

    def log(self, report: Report, step: int, *, last: bool = False) -> None:
        """Scalars to every logger at the x-axis number ``step``, and the texts that have changed.

        Args:
            report: what is known.
            step: where.
            last: whether nothing follows in this fit: one too short for a band gets the curve in its middle.
        """
        self._logs = self._deliver(lambda to: self._send(to, report, step, last), "the scalars, nothing more is logged")

    def _send(self, to: loggers.Loggers, report: Report, step: int, last: bool) -> None:
        if not self._laid_out:
            loggers.lay_out(to, layout(searches=report.search is not None))
            self._laid_out = True
        figures = scalars(report)
        whole = whole_bands(figures)
        self._has_bands = self._has_bands or any(chart.band and chart.tags[0] in whole for chart in CHARTS)
        loggers.send_scalars(to, figures if last and not self._has_bands else whole, step)
        milestone = (report.verdict.decision, report.verdict.reason)
        doors = [loggers.show_text]
        if last or milestone != self._milestone:
            doors.append(loggers.file_text)
        self._milestone = milestone
        texts = {VERDICT_TAG: verdict_markdown(report), EVENTS_TAG: events_markdown(report)}
        if report.search is not None and report.search.candidates:
            # Its figures change with every pair: they wait for a candidate to get further.
            if last or report.search.stages() != self._stages:
                texts[SEARCH_TAG] = candidates_markdown(report.search)
            self._stages = report.search.stages()
        for tag, text in texts.items():
            for door in doors:
                if self._sent.get((door, tag)) != text:
                    door(to, tag, text, step)
                    self._sent[door, tag] = text

    def _deliver(self, send: Callable[[loggers.Loggers], None], what: str) -> bool:
        """Whether the loggers took it; a refusal costs a warning."""
        if not self._logs:
            return False
        try:
            send(self._trainer.loggers)
        except Exception as error:
            host.warn(f"a logger refused {what}: {type(error).__name__}: {error}")
            return False
        return True

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
