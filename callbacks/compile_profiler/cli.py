"""The command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from compile_profiler.comparison import caveats, comparison, short_names
from compile_profiler.doctor import examine, obstacle
from compile_profiler.page import page
from compile_profiler.render import one_line, print_grid, print_table
from compile_profiler.runs_on_disk import Run, curves_beside, read_run

_RUN = click.Path(path_type=Path)  # what is there is read_run's business: one place, one wording


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lightning-compile-profiler")
def main() -> None:
    """Look at runs of CompileProfiler.

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
