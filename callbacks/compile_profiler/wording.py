"""One figure or one text as people read it."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

UNKNOWN = "\N{EN DASH}"
MAX_TEXT = 240  # characters of one cell: guards and configurations can be pages long


def known(value: T | None, form: Callable[[T], str]) -> str:
    """``form(value)``, or a dash for what is not known: never a zero.

    >>> known(0.5, ratio), known(None, ratio) == UNKNOWN
    ('0.50x', True)
    """
    return UNKNOWN if value is None else form(value)


def told(template: str, value: T | None, form: Callable[[T], object] = lambda value: value) -> str:
    """``template`` about a known figure, nothing about an unknown one.

    >>> told("{} a step", 0.5, seconds), told("{} a step", None, seconds)
    ('500 ms a step', '')
    """
    return "" if value is None else template.format(form(value))


def joined(*parts: str | None, by: str = ", ") -> str:
    """The parts that say something.

    >>> joined("a", None, "", "b")
    'a, b'
    """
    return by.join(part for part in parts if part)


def interval(low: float | None, high: float | None) -> str | None:
    """Both ends of an interval, ``None`` where it is not known.

    >>> interval(1.25, 1.4)
    '1.25x to 1.40x'
    """
    return None if low is None or high is None else f"{ratio(low)} to {ratio(high)}"


def ratio(value: float) -> str:
    """A speedup.

    >>> ratio(1.3249)
    '1.32x'
    """
    return f"{value:.2f}x"


def seconds(value: float) -> str:
    """A duration with its unit.

    >>> seconds(0.0225), seconds(-17), seconds(5400), seconds(0)
    ('22.5 ms', '-17.0 s', '1.50 h', '0.00 s')
    """
    units = ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
    scale, unit = next((pair for pair in units if abs(value) >= pair[0]), (1.0, "s"))
    return f"{_three_digits(value / scale)} {unit}"


def size(num_bytes: int) -> str:
    """An amount of memory with its unit.

    >>> size(3 * 2**29), size(2**19)
    ('1.50 GiB', '0.50 MiB')
    """
    scale, unit = (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")
    return f"{_three_digits(num_bytes / scale)} {unit}"


def small(value: float) -> str:
    """A number of which the order of magnitude matters.

    >>> small(1.23e-7), small(0.0)
    ('1.2e-07', '0')
    """
    return f"{value:.1e}" if value else "0"


def count(number: int | None, noun: str) -> str:
    """A number of things, a dash for one that is not known.

    >>> count(1, "pair"), count(2000, "pair"), count(None, "pair") == f"{UNKNOWN} pairs"
    ('1 pair', '2,000 pairs', True)
    """
    return f"{known(number, '{:,}'.format)} {noun}{'' if number == 1 else 's'}"


def place(file: str, line: int | None) -> str:
    """``file:line`` with the last two parts of the path, enough to find it in one's own project.

    >>> place("/home/user/project/models/gpt.py", 41)
    'models/gpt.py:41'
    """
    return "/".join(re.split(r"[\\/]", file)[-2:]) + told(":{}", line)


def one_line(text: str, *, max_text: int = MAX_TEXT) -> str:
    """``text`` without line breaks and control characters, cut at ``max_text`` characters.

    >>> one_line("a" + chr(10) + "  b" + chr(27) + "[0m")
    'a b [0m'
    """
    # Neither are lone surrogates, found in the names of files that are not UTF-8, printable.
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= max_text else line[: max_text - 3] + "..."


def escape(text: str) -> str:
    r"""``one_line(text)`` as Markdown that shows it literally, in a table cell too.

    >>> print(escape("<lambda> a|b __init__"))
    &lt;lambda&gt; a\|b \_\_init\_\_
    """
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", html.escape(one_line(text), quote=False))


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    r"""A Markdown table that shows its cells literally.

    >>> print(markdown(["a", "b"], [["1", "x|y"]]))
    | a | b |
    | --- | --- |
    | 1 | x\|y |
    """
    lines = [header, ["---"] * len(header), *([escape(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _three_digits(value: float) -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"
