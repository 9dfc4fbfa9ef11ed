"""What each kind of logger can take: scalars, texts, a layout of charts, what a run is compiled with.

A logger is told apart by what it can do, never by an import: nothing of TensorBoard, MLflow or Weights & Biases need be
installed. Names checked on lightning 2.6, mlflow 3.17, wandb 0.31.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from compile_profiler.arms import patched

Loggers = Iterable[Any]  # of Lightning's Logger, of either package

_LAYOUT = b"custom_scalars__config__"  # the tag of TensorBoard's Custom Scalars layout
_SESSION = b"_hparams_/session_start_info"  # the tag of TensorBoard's HParams tab


def send_scalars(loggers: Loggers, values: Mapping[str, float], step: int) -> None:
    """Numbers, to every logger."""
    for logger in loggers:
        logger.log_metrics(dict(values), step)


def show_text(loggers: Loggers, tag: str, markdown: str, step: int) -> None:
    """A text that may change often, to the loggers that show the last ones: TensorBoard."""
    for logger in loggers:
        if _can(getattr(logger, "experiment", None), "add_text"):
            logger.experiment.add_text(tag, markdown, step)


def file_text(loggers: Loggers, tag: str, markdown: str, step: int) -> None:
    """A text that is to stay, to the loggers that make a file of each: Weights & Biases a table, MLflow an artifact."""
    for logger in loggers:
        experiment: Any = getattr(logger, "experiment", None)
        if _can(experiment, "add_text"):
            continue
        if _can(logger, "log_text"):
            logger.log_text(tag, columns=["text"], data=[[markdown]], step=step)
        elif hasattr(type(logger), "run_id") and _can(experiment, "log_text"):
            experiment.log_text(logger.run_id, markdown, f"{tag}.md")


def lay_out(loggers: Loggers, layout: Mapping[str, Any]) -> None:
    """Lay out charts in TensorBoard's Custom Scalars, unless the run's folder has a layout already."""
    for logger in loggers:
        if _is_tensorboard(logger) and not _may_hold(logger, _LAYOUT):
            logger.experiment.add_custom_scalars(layout)


def describe(
    loggers: Loggers, config: Mapping[str, Any], tags: Iterable[str], theirs: Mapping[str, Any] | None
) -> None:
    """At the start of a fit: what is compiled how, as hyperparameters, by which runs can be told apart and compared.

    Loggers that save hyperparameters in a file of the user's, from which modules are loaded, get nothing into it.
    In TensorBoard's HParams tab the first description of a run counts: it is written here only if Lightning is about
    to write one of its own, and then names the user's hyperparameters too.

    Args:
        loggers: those of the trainer.
        config: what is compiled how.
        tags: the figures by which runs are to be compared.
        theirs: hyperparameters that Lightning is about to log, ``None`` if it logs none.
    """
    for logger in loggers:
        if _is_tensorboard(logger):
            if theirs is not None and getattr(logger, "_default_hp_metric", False) and not _may_hold(logger, _SESSION):
                _write_session(logger, {**theirs, **config}, ["hp_metric", *tags])
        elif not any(hasattr(each, "NAME_HPARAMS_FILE") for each in (logger, getattr(logger, "experiment", None))):
            logger.log_hyperparams(dict(config))


def describe_late(loggers: Loggers, config: Mapping[str, Any], tags: Iterable[str]) -> None:
    """After a fit: the same in TensorBoard for a run that nobody has described, which is known only now."""
    for logger in loggers:
        if _is_tensorboard(logger) and not _may_hold(logger, _SESSION):
            _write_session(logger, config, tags)


def _write_session(logger: Any, described: Mapping[str, Any], tags: Iterable[str]) -> None:
    """A row of the HParams tab; neither ``hparams.yaml`` nor a scalar is written."""
    with patched([(logger, "hparams", {}), (logger, "log_metrics", lambda *_: None)]):
        logger.log_hyperparams(dict(described), dict.fromkeys(tags, 0.0))


def _is_tensorboard(logger: Any) -> bool:
    experiment = getattr(logger, "experiment", None)
    return _can(experiment, "add_text") and _can(experiment, "add_custom_scalars")


def _can(thing: Any, method: str) -> bool:
    return callable(getattr(type(thing), method, None))  # of the class: a dummy has every attribute


def _may_hold(logger: Any, mark: bytes) -> bool:
    """Whether an event file in or below the logger's folder holds ``mark``, or nobody can say.

    Writers keep no account of what they wrote. The search is for bytes because parsing the file of a long run that is
    resumed would take minutes.
    """
    logger.experiment.flush()
    try:
        files = [file for file in Path(logger.log_dir).rglob("*tfevents*") if file.stat().st_size]
        return not files or any(_holds(file, mark) for file in files)
    except OSError:
        return True


def _holds(file: Path, mark: bytes) -> bool:
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(mark) >= 0
