"""A fit on a terminal: what people see beside a progress bar, read off a screen."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from compile_profiler.records import Report, Verdict
from compile_profiler.render import print_table

pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")

COLUMNS = 200
FIT = """
import sys, time, warnings
import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from compile_profiler import CompileProfiler
from runs import Regression, loaders, sleepy

warnings.filterwarnings("ignore")
class LetsTheBarDraw(pl.Callback):
    def on_train_epoch_end(self, *_):
        time.sleep(1.0)  # rich draws ten times a second at most, on a busy machine less often

bar = {"rich": RichProgressBar, "tqdm": TQDMProgressBar}[sys.argv[1]]()
profiler = CompileProfiler(backend=sleepy(0.02), warmup_steps=1, pair_every_n_steps=2)
options = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "accelerator": "cpu"}
pl.Trainer(max_epochs=1, callbacks=[profiler, LetsTheBarDraw(), bar], **options).fit(Regression(), loaders()[0])
"""


def on_a_terminal(code, *arguments):
    """All that a process writes to its terminal."""
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 80, COLUMNS, 0, 0))
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root / "callbacks"), str(root / "tests"), os.environ.get("PYTHONPATH", "")])
    surroundings = {**os.environ, "PYTHONPATH": path, "TERM": "xterm-256color", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    surroundings |= {"COLUMNS": str(COLUMNS)}  # of two test processes each is told that its terminal is narrow
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=surroundings
    ) as child:
        os.close(theirs)
        written = b""
        try:
            while chunk := os.read(ours, 65536):
                written += chunk
        except OSError:  # how Linux says that nobody holds the other end any more
            pass
        os.close(ours)
    assert child.returncode == 0, written.decode(errors="replace")
    return written.decode("utf-8", "replace")


def screen(written):
    """The lines that a person sees in the end: a cursor that moves, text that is overwritten and erased."""
    lines, row, column = [""], 0, 0
    for sign in re.finditer(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b.|[\r\n]|[^\x1b\r\n]+", written):
        text, number, command = sign.group(), sign.group(1), sign.group(2)
        if command == "A":
            row = max(0, row - int(number or 1))
        elif command == "K":
            lines[row] = "" if number == "2" else lines[row][:column]
        elif text == "\r":
            column = 0
        elif text == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif not text.startswith("\x1b"):
            line = lines[row].ljust(column)
            lines[row] = line[:column] + text + line[column + len(text) :]
            column += len(text)
    return [line.rstrip() for line in lines]


def test_the_screen_of_these_tests_overwrites_and_erases():
    assert screen("one\r\ntwo\rT\x1b[1A\x1b[2K\rthree\r\n\x1b[31mF\x1b[0m") == ["three", "Fwo"]


@pytest.mark.parametrize("bar", ["tqdm", "rich"])
def test_lines_of_ours_stand_alone_and_the_bar_stays_whole(bar):
    written = on_a_terminal(FIT, bar)
    lines = screen(written)
    ours = [line for line in lines if "CompileProfiler: " in line]
    bars = [n for n, line in enumerate(lines) if line.startswith("Epoch 0")]
    title = next(n for n, line in enumerate(lines) if line.strip() == "CompileProfiler")

    assert [line.partition(" ")[0] for line in ours] == ["CompileProfiler:"] * 2  # the start, the decision
    assert "compiling training_step" in ours[0]
    assert "Compiling gains nothing here" in ours[1]
    assert re.search(r"\b(39|40)/40\b", lines[bars[0]])  # the last step may come after rich's last drawing
    assert not [line for line in lines if "/40" in line and "CompileProfiler" in line]
    assert "eager: no_gain" in "".join(lines[title + 1 : title + 4])
    assert re.search(r"\x1b\[33m[^\x1b]*eager: no_gain", written)  # in colour
    if bar == "tqdm":  # rich draws its bar below whatever is printed, until the end
        assert max(bars) < title


SHOW = """
import json, sys
from pathlib import Path
from compile_profiler import Report
from compile_profiler.render import print_table
print_table(Report.from_dict(json.loads(Path(sys.argv[1]).read_text())))
"""


def test_the_candidates_of_a_search_stand_below_the_table(search_on_disk):
    written = on_a_terminal(SHOW, str(search_on_disk.events / "compile_profile.json"))
    lines = [line.strip() for line in screen(written)]
    winner = next(n for n, line in enumerate(lines) if line.startswith("forward/default"))

    assert lines.index("CompileProfiler") < lines.index("Candidates") < winner
    assert lines[winner + 1].startswith("chosen")
    assert re.search(r"\x1b\[32mforward/default", written)  # in colour
    assert "<script>alert(1)</script>" in written
    assert "\x1b[31m" not in written  # what the error says is not obeyed: nothing of ours is red


def test_where_there_is_no_terminal_the_table_is_plain_text(capsys):
    print_table(Report(verdict=Verdict(decision="eager", reason="no_gain")))
    shown = capsys.readouterr().out

    assert "eager: no_gain" in shown
    assert "\x1b" not in shown
