"""What the ranks of one fit tell each other, so that all of them measure and decide the same at the same step.

Nothing here sends anything. A conversation is a generator: it yields what this rank has to say and is sent what the
ranks know together. Whoever runs it brings the way to the others: none for a single process, ``torch.distributed`` for
several, a simulation in the tests.

Ranks meet at fixed optimizer steps, in this order; what one of them is asked is decided by what all have heard before,
so either every rank takes part or none does:

1. *findings*: the largest of each number (``Finding``), which says whether a rank has failed and whether all can have
   a pair now.
2. *a pair*, if all can: one exchange when every rank has run its passes for itself, which settles how many passes they
   make together; one of the times.
3. *the verdict*, if there is news: rank 0 judges what all have found, or the rank that has failed says why; the text is
   everybody's.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from compile_profiler.records import Ranks, Skew

MEET_EVERY_N_STEPS = 50
"""Optimizer steps between two meetings at most: the longest that a rank which has failed trains in eager alone."""


@dataclass(frozen=True, slots=True)
class Most:
    """This rank's numbers, for each of which it is to be told the largest of all ranks.

    Attributes:
        values: as many on every rank; minus infinity where nothing is known.
        patient: whether the others may be compiling, which takes minutes.
    """

    values: tuple[float, ...]
    patient: bool = False


@dataclass(frozen=True, slots=True)
class Told:
    """A text that the rank ``source`` has for all; the others' is not heard."""

    text: str
    source: int


T = TypeVar("T")
Exchange = Generator["Most | Told", Any, T]
"""A conversation that ends in a ``T``; it is sent a tuple of numbers for ``Most``, a text for ``Told``."""


def alone(exchange: Exchange[T]) -> T:
    """Run a conversation with nobody: the largest of one's own numbers are these numbers.

    >>> alone(largest({"a": 2, "b": None}))
    {'a': 2.0, 'b': None}
    """
    answer: Any = None
    try:
        while True:
            wish = exchange.send(answer)
            answer = wish.values if isinstance(wish, Most) else wish.text
    except StopIteration as stop:
        return cast("T", stop.value)


def largest(numbers: Mapping[str, float | None], *, patient: bool = False) -> Exchange[dict[str, float | None]]:
    """The largest of each number over all ranks; ``None`` where no rank knows it."""
    heard = yield Most(tuple([_word(number) for number in numbers.values()]), patient)
    return {name: _as("float", word) for name, word in zip(numbers, heard, strict=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a rank knows when it comes to a meeting; in common, the largest of each.

    Attributes:
        unready: no pair can be had here now.
        cold: the steps before were no ordinary ones, so that no pair is due.
        alarm: a step went wrong, and a pair is to say why: 1 its loss, 2 a gradient scaler has skipped it.
        failed: the compiled step failed here, and has been replaced by eager since.
        news: there is something to judge.
        compiled_again: something was compiled after the first compiles were over.
        num_recent_compiling: of the last steps, those in which something was compiled.
        without_graph: the compiler has made no graph in compiled steps.
        left_out: the target itself was left in eager, only helpers that it calls were compiled.
        limit_hits: functions that torch has given up because they were compiled too often.
        steps_per_pair: optimizer steps from one pair to the next that the budget allows.
        window_void: something other than ordinary steps happened in one of the two windows that have ended.
        window_eager_s: seconds of a whole step in an eager window, where two windows have ended.
        window_compiled_s: likewise compiled.
    """

    unready: bool = False
    cold: bool = False
    alarm: int = 0
    failed: bool = False
    news: bool = False
    compiled_again: bool = False
    num_recent_compiling: int = 0
    without_graph: bool = False
    left_out: bool = False
    limit_hits: int = 0
    steps_per_pair: float = 1.0
    window_void: bool = False
    window_eager_s: float | None = None
    window_compiled_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """Seconds that each rank has of its own; everybody is to know everybody's.

    Attributes:
        compile_s: spent on compiling.
        step_s: of an ordinary training step, waiting for the others included.
        pass_s: of a compiled forward and backward pass that waits for nobody.
    """

    compile_s: float | None = None
    step_s: float | None = None
    pass_s: float | None = None


class Knows(Protocol):
    """What one rank can tell; none of this may raise."""

    @property
    def takes_pairs(self) -> bool:
        """Whether pairs can be had in this run at all: the same on every rank."""

    def finding(self) -> Finding:
        """What it knows now."""

    def own(self) -> Own:
        """Its seconds."""

    def failure(self) -> str:
        """What has failed here."""

    def hear(self, common: Finding, of_each: OfEach) -> None:
        """What all know now."""


class Does(Protocol):
    """What one rank does at a meeting; none of this may raise."""

    def pair(self, *, scheduled: bool) -> Exchange[bool]:
        """Take a pair, together with all others; whether it counts as one that was ``scheduled``."""

    def judge(self) -> str:
        """What follows from all that has been found; asked of rank 0."""

    def obey(self, text: str) -> None:
        """Act on what rank 0, or the rank that failed, has said."""


class Meeting:
    """When the ranks meet and in which order they speak; every rank's is in the same state after the same step.

    Args:
        rank: this rank.
        world_size: how many there are.
        pair_every_n_steps: optimizer steps from one pair to the next while undecided.
    """

    def __init__(self, *, rank: int, world_size: int, pair_every_n_steps: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._interval = min(pair_every_n_steps, MEET_EVERY_N_STEPS)
        self._num_steps = 0
        self.num_since_pair = 0
        self.is_alone = world_size == 1  # there is nobody to meet

    def count(self, *, boundary: bool) -> None:
        """Count a batch of training; ``boundary``: it ended with an optimizer step."""
        self._num_steps += int(boundary)
        self.num_since_pair += int(boundary)

    def is_due(self, *, boundary: bool, urgent: bool, in_window: bool = False, window_ended: bool = False) -> bool:
        """Whether the ranks meet after the batch just counted.

        Args:
            boundary: it ended with an optimizer step.
            urgent: there is something to say. Others cannot know that and come when it is time; alone it decides.
            in_window: real steps are being timed, on all ranks.
            window_ended: two windows have just ended, on all ranks.
        """
        if self.is_alone:
            return urgent or window_ended
        return boundary and (window_ended or (self._num_steps >= self._interval and not in_window))

    def hold(self, knows: Knows, does: Does) -> Exchange[None]:
        """One meeting, from findings to verdict."""
        self._num_steps = 0
        common, of_each, failed_rank = yield from self._findings(knows.finding(), knows.own())
        self._interval = max(1, min(math.ceil(common.steps_per_pair), MEET_EVERY_N_STEPS))
        knows.hear(common, of_each)
        scheduled = not common.cold and self.num_since_pair >= common.steps_per_pair
        can_have_pair = knows.takes_pairs and not common.unready and not common.failed
        takes_pair = can_have_pair and (scheduled or bool(common.alarm))
        if takes_pair and (yield from does.pair(scheduled=scheduled)):
            self.num_since_pair = 0
        if not (takes_pair or common.failed or common.news):
            return
        source = failed_rank if common.failed else 0
        text = ""
        if source == self._rank:
            text = knows.failure() if common.failed else does.judge()
        text = yield Told(text, source)
        does.obey(text)

    def _findings(self, finding: Finding, own: Own) -> Exchange[tuple[Finding, OfEach, int]]:
        """What all have found, the seconds of each, and the lowest rank that has failed, if one has."""
        words = [_word(value) for value in dataclasses.astuple(finding)]
        # Of several that have failed, the lowest speaks: this number of its is the largest.
        words.append(float(self._world_size - self._rank) if finding.failed else 0.0)
        for seconds in dataclasses.astuple(own):  # each rank's in a place of its own, where the largest is the only one
            row = [-math.inf] * self._world_size
            row[self._rank] = _word(seconds)
            words += row
        heard = yield Most(tuple(words))
        specs = dataclasses.fields(Finding)
        common = Finding(**{spec.name: _as(spec.type, value) for spec, value in zip(specs, heard, strict=False)})
        rows = heard[len(specs) + 1 :]
        return common, OfEach(rows, self._world_size), self._world_size - int(heard[len(specs)])


def _word(value: float | None) -> float:
    return -math.inf if value is None else float(value)


def _as(kind: Any, word: float) -> Any:
    """A word as the value of a field with this annotation."""
    if kind == "bool":
        return bool(word)
    return int(word) if kind == "int" else None if word == -math.inf else word


@dataclass(frozen=True, slots=True)
class OfEach:
    """The seconds of each rank, one field of ``Own`` after the other; added up only when somebody asks."""

    rows: tuple[float, ...]
    world_size: int

    def ranks(self) -> Ranks:
        """How far apart the ranks are."""
        names = [spec.name for spec in dataclasses.fields(Own)]
        size = self.world_size
        return Ranks(num=size, **{name: skew(self.rows[n * size : (n + 1) * size]) for n, name in enumerate(names)})


def skew(seconds: Sequence[float]) -> Skew | None:
    """How far apart the ranks are, whose seconds are minus infinity where they are not known.

    >>> skew([1.0, -math.inf, 3.0, 1.5])
    Skew(median_s=1.5, slowest_s=3.0, slowest_rank=2)
    """
    known = {rank: value for rank, value in enumerate(seconds) if value > -math.inf}
    if not known:
        return None
    slowest = max(known, key=lambda rank: known[rank])
    return Skew(median_s=statistics.median(known.values()), slowest_s=known[slowest], slowest_rank=slowest)


def first_voice(text: str | None, *, rank: int, world_size: int) -> Exchange[str | None]:
    """What the lowest rank that has something to say says, to all; ``None`` where none has.

    >>> alone(first_voice("no", rank=0, world_size=1)), alone(first_voice(None, rank=0, world_size=1))
    ('no', None)
    """
    heard = yield Most((0.0 if text is None else float(world_size - rank),))
    if not heard[0]:
        return None
    return cast("str", (yield Told(text or "", world_size - int(heard[0]))))


class Compiler(Protocol):
    """One rank at its first compile."""

    def compile_first(self) -> None:
        """Compile in a pass that leaves no trace; may not raise."""


def first_compile(compiler: Compiler, *, leads: bool) -> Exchange[None]:
    """Compile while nobody waits in a collective of training: first the leading ranks, then those that they wrote for.

    A leading rank writes the cache on its machine's disk, from which the others read. Between the turns, and at the
    end, everybody waits for everybody, however long it takes.
    """
    for leading in (True, False):
        if leads is leading:
            compiler.compile_first()
        yield Most((0.0,), patient=True)
