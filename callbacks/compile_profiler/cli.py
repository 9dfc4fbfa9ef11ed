"""The command line."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from compile_profiler.bench import BENCH_FILE_NAME, DYNAMIC, Outcome, configurations, measure, write
from compile_profiler.comparison import blame, caveats, comparison, short_names
from compile_profiler.doctor import examine, obstacle
from compile_profiler.lookup import RequestError, arguments
from compile_profiler.page import page
from compile_profiler.recall import FOLDER_VARIABLE, Entry, VerdictCache, default_folder
from compile_profiler.render import print_grid, print_table
from compile_profiler.runs_on_disk import Run, curves_beside, read_run
from compile_profiler.wording import count, known, one_line, ratio, seconds

_COLUMNS = 3  # of a table: more do not fit beside each other in 100 characters
_RUN = click.Path(path_type=Path)  # what is there is read_run's business: one place, one wording


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lightning-compile-profiler")
def main() -> None:
    """Look at runs of CompileProfiler, or make one of a module and a batch.

    RUN is a compile_profile.json, a TensorBoard event file, or a folder that holds one at any depth.
    """


@main.command()
@click.argument("run", type=_RUN)
def show(run: Path) -> None:
    """Print the table of a run."""
    found = _read(run)
    _print_notes(found)
    print_table(found.report)


@main.command()
@click.argument("runs", metavar="RUN RUN...", type=_RUN, nargs=-1, required=True)
def compare(runs: tuple[Path, ...]) -> None:
    """Print runs side by side."""
    found = [_read(run) for run in runs]
    for run in found:
        _print_notes(run)
    reports = [run.report for run in found]
    print_grid(comparison(short_names([run.file for run in found]), reports))
    for caveat in caveats(reports):
        click.echo(caveat)


@main.command(name="html")
@click.argument("run", type=_RUN)
@click.option("-o", "--output", type=_RUN, required=True, metavar="FILE", help="Where to write the page.")
def html_page(run: Path, output: Path) -> None:
    """Write one self-contained page about a run."""
    found = _read(run)
    _print_notes(found)
    with _one_line_errors():
        text = page(found.report, curves_beside(found.file), name=str(found.file))
        output.write_text(text, encoding="utf-8")
    click.echo(f"Written: {one_line(str(output))}")


@main.command()
@click.option("--timeout", default=300.0, show_default=True, metavar="SECONDS", help="Limit of the compile trial.")
@click.pass_context
def doctor(context: click.Context, timeout: float) -> None:
    """Say whether this machine can compile; exit code 1 if not."""
    findings = list(examine(max_seconds=timeout))
    grid = Table(title="Can this machine compile?", box=SIMPLE, show_header=False)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_column(no_wrap=True)
    marks = {True: "ok", False: "no", None: ""}
    for finding in findings:
        grid.add_row(finding.what, Text(one_line(finding.found)), marks[finding.fine])
    print_grid(grid)
    why_not = obstacle(findings)
    click.echo("This machine can compile." if why_not is None else f"This machine cannot compile. {why_not}")
    context.exit(0 if why_not is None else 1)


@main.command()
@click.argument("module", metavar="FILE.py:CLASS")
@click.option("--init", multiple=True, metavar="KEY=VALUE", help="An argument of CLASS; may be repeated.")
@click.option("--batch", metavar="FILE.py:NAME", help="A batch, a loader, or a function that returns one of them.")
@click.option("--num-batches", default=1, show_default=True, type=click.IntRange(1), help="Of a loader, in turn.")
@click.option(
    "--target", "targets", multiple=True, default=["step"], help="step, forward, blocks, or names with commas."
)
@click.option("--backend", "backends", multiple=True, default=["inductor"], help="As in torch.compile.")
@click.option("--mode", "modes", multiple=True, default=["default"], help="As in torch.compile.")
@click.option("--dynamic", "dynamics", multiple=True, default=["auto"], type=click.Choice(list(DYNAMIC)))
@click.option("--fullgraph", is_flag=True, help="As in torch.compile.")
@click.option("--steps", default=100, show_default=True, type=click.IntRange(1), help="Training steps of each.")
@click.option("--device", default="auto", show_default=True, help="As Trainer(accelerator=...) has it.")
@click.option("--precision", default="32-true", show_default=True, help="As Trainer(precision=...) has it.")
@click.option("-o", "--output", type=_RUN, default="compile_bench", show_default=True, metavar="FOLDER")
@click.pass_context
def bench(
    context: click.Context,
    /,
    module: str,
    init: tuple[str, ...],
    output: Path,
    targets: tuple[str, ...],
    backends: tuple[str, ...],
    modes: tuple[str, ...],
    dynamics: tuple[str, ...],
    fullgraph: bool,
    **plan: Any,
) -> None:
    """Measure a LightningModule on a sample batch, in every configuration asked for.

    FILE.py:CLASS, or PACKAGE.MODULE:CLASS, is a LightningModule or a function that returns one. Without --batch its own
    train_dataloader is asked, or else its example_input_array is the batch. --target, --backend, --mode and --dynamic
    may be repeated: every combination is measured, each in a process of its own with empty compile caches.
    """
    with _one_line_errors():
        asked = configurations(targets=targets, backends=backends, modes=modes, dynamics=dynamics, fullgraph=fullgraph)
        outcomes = []
        for outcome in measure(asked, folder=output, tell=_tell, module=module, init=arguments(init), **plan):
            outcomes.append(outcome)
            if outcome.report is not None:
                _tell(f"{len(outcomes)}/{len(asked)} {outcome.name}: {one_line(outcome.report.verdict.message)}")
        write(outcomes, output / BENCH_FILE_NAME, module=module)
    _print_bench([outcome for outcome in outcomes if outcome.report is not None], output)
    context.exit(
        next((outcome.exit_code if outcome.exit_code == 2 else 1 for outcome in outcomes if outcome.exit_code), 0)
    )


def _tell(line: str) -> None:
    click.echo(line, err=True)


def _print_bench(outcomes: Sequence[Outcome], folder: Path) -> None:
    names = [outcome.name for outcome in outcomes]
    reports = [outcome.report for outcome in outcomes if outcome.report is not None]
    for first in range(0, len(names), _COLUMNS):
        some = slice(first, first + _COLUMNS)
        print_grid(comparison(names[some], reports[some]))
    hindrances = blame(names, reports)
    if hindrances.row_count:
        print_grid(hindrances)
    if names:
        click.echo(f"Written: {one_line(str(folder / BENCH_FILE_NAME))}, and a report for each in its folder.")


@main.group()
def cache() -> None:
    """List or clear what runs keep for the next run of their job."""


@cache.command(name="list")
def list_cache() -> None:
    """Print the verdicts that are kept, the newest first."""
    kept = _verdicts()
    with _one_line_errors():
        entries, num_files = kept.entries(), len(kept.files())
    if entries:
        print_grid(_cache_table(entries))
    click.echo(f"{count(len(entries), 'verdict')} in {one_line(str(kept.folder))}.")
    if len(entries) < num_files:
        told = count(num_files - len(entries), "file")
        click.echo(f"{told} there with a verdict's name cannot be used: damaged, another version's or another user's.")


@cache.command(name="clear")
@click.argument("prefix", metavar="[KEY]", default="")
@click.option("--older-than", metavar="DAYS", help="Only verdicts that are at least so old.")
def clear_cache(prefix: str, older_than: str | None) -> None:
    """Remove verdicts: all, or those whose key begins with KEY."""
    kept = _verdicts()
    with _one_line_errors():
        if not re.fullmatch("[0-9a-f]{0,64}", prefix):
            raise RequestError(f"KEY must be the beginning of a key as in cache list, got {prefix!r}.")
        older_than_s = None if older_than is None else _days(older_than) * 86_400
        num_removed = kept.clear(prefix=prefix, older_than_s=older_than_s)
        if prefix and not num_removed and older_than is None:
            raise RequestError(f"{kept.folder} has no verdict whose key begins with {prefix}; cache list shows them.")
    click.echo(f"{count(num_removed, 'verdict')} removed from {one_line(str(kept.folder))}.")


def _verdicts() -> VerdictCache:
    with _one_line_errors():
        folder = default_folder()
        if folder is None:
            raise RequestError(f"there is no home folder to keep verdicts in; set {FOLDER_VARIABLE} to a folder.")
        return VerdictCache(folder)


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = math.nan
    if not 0 <= days < math.inf:
        raise RequestError(f"--older-than must be a number of days, 0 or more, got {text!r}.")
    return days


def _cache_table(entries: Sequence[tuple[Entry, int]]) -> Table:
    grid = Table(box=SIMPLE)
    for column in ("key", "job", "device", "winner", "speedup", "age", "size"):
        is_number = column in ("speedup", "age", "size")
        grid.add_column(column, justify="right" if is_number else "left", no_wrap=is_number or column == "key")
    for entry, num_bytes in entries:
        winner = ", ".join(f"{key}={value}" for key, value in entry.winner.items() if value not in (None, False))
        cells = (entry.key[:8], entry.job, known(entry.device, str), winner, known(entry.result.speedup, ratio))
        age = _age(time.time() - entry.when_s)
        grid.add_row(*(Text(one_line(cell)) for cell in (*cells, age, f"{num_bytes / 1024:.1f} KiB")))
    return grid


def _age(age_s: float) -> str:
    return f"{age_s / 86_400:,.0f} d" if age_s >= 86_400 else seconds(max(age_s, 0.0))


def _read(path: Path) -> Run:
    with _one_line_errors():
        return read_run(path)


def _print_notes(run: Run) -> None:
    if run.note is not None:
        click.echo(one_line(run.note))


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """What is wrong with a user's files is a line and exit code 2, not a traceback."""
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        click.echo(f"compile-profiler: {one_line(str(error))}", err=True)
        raise SystemExit(2) from None
