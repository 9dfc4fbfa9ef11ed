"""Find a finished run on disk: its report, its curves."""

from __future__ import annotations

import html
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compile_profiler.export import FILE_NAME
from compile_profiler.records import Report
from compile_profiler.scalars import VERDICT_TAG
from compile_profiler.wording import UNKNOWN

Curve = tuple[tuple[int, float], ...]  # (x-axis number, value)

EVENT_FILES = "*tfevents*"
_TEXT_SUFFIX = "/text_summary"  # what SummaryWriter.add_text puts behind a tag


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as it was found.

    Attributes:
        file: what was read.
        report: what it says.
        note: what a reader should know about the choice of ``file``, or ``None``.
    """

    file: Path
    report: Report
    note: str | None = None


def read_run(path: Path) -> Run:
    """The run at ``path``: a report, an event file, or a folder that holds one of them at any depth.

    In a folder the newest report is taken; event files are read only where there is no report, because they hold less.

    Raises:
        OSError: ``path`` is not there or cannot be opened.
        ValueError: there is no run, or a damaged one.
        ImportError: there are only event files and TensorBoard is not installed.
    """
    if not path.is_dir():
        path.stat()  # an error that says what is wrong
        return _from_events(path) if path.match(EVENT_FILES) else _from_report(path)
    found, read = _newest_first(path, FILE_NAME), _from_report
    if not found:
        found, read = _newest_first(path, EVENT_FILES), _from_events
    if not found:
        raise ValueError(f"{str(path)!r} holds neither a {FILE_NAME} nor a TensorBoard event file.")
    run = read(found[0])
    if len(found) == 1:
        return run
    note = f"{run.file} is the newest of {len(found)}."
    return Run(file=run.file, report=run.report, note=f"{note} {run.note}" if run.note else note)


def curves_beside(file: Path) -> dict[str, Curve]:
    """The curves of the run that ``file`` belongs to, by tag; none where it was not logged to TensorBoard.

    Raises:
        ImportError: there are event files and TensorBoard is not installed.
    """
    folder = file if file.match(EVENT_FILES) else file.parent
    if folder.is_dir() and not any(folder.glob(EVENT_FILES)):
        return {}
    curves, _ = _logged(folder)
    return curves


def report_from_scalars(last: Mapping[str, float], card: str = "") -> Report:
    """What the last value of each tag and the text of the verdict tell; the rest of the report is unknown.

    Args:
        last: values by tag.
        card: the Markdown of ``compile/verdict``.

    >>> report_from_scalars({"compile/step_ms/eager": 500.0}).time.eager_s
    0.5
    """

    def known(tag: str, per_unit: float = 1.0) -> float | None:
        return last[tag] / per_unit if tag in last else None

    def whole(tag: str, per_unit: float = 1.0) -> int | None:
        value = known(tag, per_unit)
        return None if value is None else round(value)

    told = _told(card)
    drift = ("loss_rel", "grad_rel", "grad_cosine", "noise_floor", "tolerance")
    counts = ("graphs", "recompiles", "graph_breaks", "eager_frames", "limit_hits", "cudagraph_skips")
    return Report.from_dict(
        {
            **Report().to_dict(),
            "verdict": told["verdict"],
            "environment": told.get("environment", {}),
            "speedup": {
                "median": known("compile/speedup"),
                "low": known("compile/speedup_low"),
                "high": known("compile/speedup_high"),
                **told.get("speedup", {}),
            },
            "end_to_end": {
                "speedup": known("compile/end_to_end_speedup"),
                "step_s": known("compile/step_ms/total", 1e3),
            },
            "time": {
                "eager_s": known("compile/step_ms/eager", 1e3),
                "compiled_s": known("compile/step_ms/compiled", 1e3),
                "compile_s": known("compile/compile_s"),
                "saved_s": known("compile/saved_s"),
                "overhead_pct": known("compile/overhead_pct"),
            },
            "compiles": {name: whole(f"compile/{name}") for name in counts},
            "drift": {**{name: known(f"compile/drift/{name}") for name in drift}, **told.get("drift", {})},
            "memory": {
                "eager_peak_bytes": whole("compile/peak_mb/eager", 2**-20),
                "compiled_peak_bytes": whole("compile/peak_mb/compiled", 2**-20),
            },
        }
    )


def _newest_first(folder: Path, pattern: str) -> list[Path]:
    return sorted((file for file in folder.rglob(pattern) if file.is_file()), key=lambda file: -file.stat().st_mtime)


def _from_report(file: Path) -> Run:
    try:
        return Run(file=file, report=Report.from_dict(json.loads(file.read_text(encoding="utf-8"))))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(file)!r} is not a report of this package: {error}") from error


def _from_events(file: Path) -> Run:
    curves, card = _logged(file)
    last = {tag: curve[-1][1] for tag, curve in curves.items() if curve}
    if not last:
        raise ValueError(f"{str(file)!r} holds no compile/... tags that can be read.")
    try:
        report = report_from_scalars(last, card)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{str(file)!r} holds no run of this package: {error}") from error
    note = f"Rebuilt from the tags of {file.name}: what {FILE_NAME} has beyond them is not known."
    return Run(file=file, report=report, note=note)


def _logged(path: Path) -> tuple[dict[str, Curve], str]:
    """Curves by tag, and the last verdict card, of an event file or of all event files in a folder."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ModuleNotFoundError as error:
        raise ImportError(f"{str(path)!r} needs TensorBoard to be read: pip install tensorboard") from error
    log = logging.getLogger("tensorboard")
    level = log.level
    log.setLevel(logging.ERROR)  # of a run that was killed the last record is cut off: nothing to be warned of
    try:
        events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0}).Reload()
        tags = events.Tags()
        curves = {
            tag: tuple((event.step, event.value) for event in events.Scalars(tag))
            for tag in tags["scalars"]
            if tag.startswith("compile/")
        }
        tag = VERDICT_TAG + _TEXT_SUFFIX
        card = events.Tensors(tag)[-1].tensor_proto.string_val[0] if tag in tags["tensors"] else b""
    finally:
        log.setLevel(level)
    return curves, card.decode("utf-8", "replace")


def _told(card: str) -> dict[str, dict[str, Any]]:
    """Fields of a report that stand on the verdict card alone; ``render.verdict_markdown`` writes it."""
    shown = html.unescape(re.sub(r"\\(.)", r"\1", card))
    told: dict[str, dict[str, Any]] = {"verdict": {"message": "The event file does not tell the decision."}}
    if head := re.match(r"### (\w+): (\w+)\n\n(?:step ([\d,]+): )?(.*)\n", shown):
        decision, reason, step, message = head.groups()
        told["verdict"] = {"decision": decision, "reason": reason, "step": _number(step or "0"), "message": message}
    if pairs := re.search(r"([\d,]+) pairs?, ([\d,]+) void", shown):
        told["speedup"] = {"num_pairs": _number(pairs[1]), "num_void": _number(pairs[2])}
    if judged := re.search(r"\b(within|beyond) tolerance", shown):
        told["drift"] = {"within_tolerance": judged[1] == "within"}
    place = re.search(r"^\| measured on \| (.*?) \| (?:torch ([^,|]+), lightning ([^,|]+?)(?:,| \|))?", shown, re.M)
    if place and place[1] != UNKNOWN:
        told["environment"] = {"device": place[1], "torch": place[2], "lightning": place[3]}
    return told


def _number(shown: str) -> int:
    return int(shown.replace(",", ""))
