"""The protocol of several ranks, run for up to 1,024 of them at once: nobody waits for ever, nobody disagrees."""

import random
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from compile_profiler.clock import BlockTime
from compile_profiler.judgement import packed, unpacked
from compile_profiler.meeting import (
    MEET_EVERY_N_STEPS,
    Finding,
    Meeting,
    Most,
    Own,
    alone,
    first_compile,
    first_voice,
    largest,
)
from compile_profiler.pairs import Pairs
from compile_profiler.records import Compiles, Drift, Verdict
from compile_profiler.verdict import Limits, judge

pytestmark = pytest.mark.filterwarnings("ignore:CompileProfiler.*")


class DeadlockError(AssertionError):
    """Some ranks wait for others that do something else."""


def converse(exchanges):
    """Run one conversation of each rank to its end, all at once; returns their results and the collectives made."""
    answers, num = [None] * len(exchanges), 0
    while True:
        wishes, ended = [], {}
        for rank, exchange in enumerate(exchanges):
            try:
                wishes.append(exchange.send(answers[rank]))
            except StopIteration as stop:
                ended[rank] = stop.value
        if ended:
            if wishes:
                raise DeadlockError(f"{len(wishes)} ranks wait for {len(ended)} that have gone on")
            return [ended[rank] for rank in range(len(exchanges))], num
        num += 1
        forms = {(type(w), len(w.values), w.patient) if isinstance(w, Most) else (type(w), w.source) for w in wishes}
        if len(forms) > 1:
            raise DeadlockError(f"ranks make different collectives: {sorted(map(str, forms))}")
        if isinstance(wishes[0], Most):
            answer = tuple(np.max(np.array([wish.values for wish in wishes]), axis=0).tolist())
        else:
            answer = wishes[wishes[0].source].text
        answers = [answer] * len(exchanges)


class SimulatedRank:
    """One rank with accidents of its own; it is measured, and judges, by the package's own code."""

    def __init__(self, rank, world_size, *, seed, fails_at=None, accidents=0.0, gain=1.3, slow=1.0, warm_at=3):
        self.rank = rank
        self.meeting = Meeting(rank=rank, world_size=world_size, pair_every_n_steps=5)
        self.coin = random.Random(f"{seed}/{rank}")
        self.fails_at, self.accidents, self.gain, self.slow, self.warm_at = fails_at, accidents, gain, slow, warm_at
        self.pairs = Pairs(
            self,
            eager=None,
            compiled=None,
            compiled_something=lambda: self.happens(0.3),
            compares=True,
            together=self.together,
        )
        self.memory = None
        self.step = 0
        self.verdict = Verdict()
        self.samples, self.history, self.num_passes = [], [], []
        self.known = self.seconds = None

    def happens(self, share=1.0):
        return self.coin.random() < self.accidents * share

    # -- what a Probe and a door are to Pairs ---------------------------------------------------------------------

    @contextmanager
    def pair(self, *_args, **_kwargs):
        if self.happens():
            raise self.coin.choice([RuntimeError("of this rank alone"), MemoryError()])
        drift = Drift(
            loss_rel=self.coin.random(),
            grad_rel=self.coin.random(),
            within_tolerance=not self.happens(0.2),
            eager_finite=True,
            compiled_finite=not self.happens(0.1),
        )
        num_passes = self.coin.randint(1, 9)
        yield SimpleNamespace(drift=drift, num_passes=num_passes, drafts_s=(0.1, 0.1), shape=str(self.rank))

    def times(self, _draft, num_passes):
        self.num_passes.append(2 * num_passes)
        wait_s = self.coin.random() * 1e-3
        eager_s, compiled_s = 0.013 * self.slow + wait_s, 0.013 * self.slow / self.gain + wait_s
        return {"eager": BlockTime(eager_s, eager_s), "compiled": BlockTime(compiled_s, compiled_s)}

    def peaks(self, _draft):
        self.num_passes.append(2)
        self.memory = self.memory or "known"

    @contextmanager
    def together(self):
        failed = RuntimeError("in the middle of a pass") if self.happens(0.5) else None
        yield lambda: failed

    # -- what a Session is to the meeting -------------------------------------------------------------------------

    @property
    def takes_pairs(self):
        return not self.pairs.stopped

    @property
    def has_failed(self):
        return self.fails_at is not None and self.step >= self.fails_at

    def finding(self):
        return Finding(
            unready=self.happens(),
            cold=self.step < self.warm_at,
            alarm=2 * self.happens(0.2),
            failed=self.has_failed,
            news=self.happens(0.5),
            steps_per_pair=5,
            num_recent_compiling=int(self.happens(0.5)),
        )

    def own(self):
        return Own(compile_s=float(self.rank), step_s=0.02 * self.slow, pass_s=None)

    def hear(self, common, of_each):
        self.known, self.seconds = common, of_each

    def pair_with_all(self, *, scheduled):
        sample = yield from self.pairs.take(((), {}), step=self.step)
        self.samples.append(sample)
        return scheduled

    def failure(self):
        return packed(Verdict(decision="eager", reason="runtime_error", message=f"rank {self.rank}", step=self.step))

    def judge(self):
        return packed(
            judge(
                self.samples,
                Compiles(graphs=1),
                limits=Limits(),
                step=self.step,
                config={},
                num_compiled_steps=self.step,
                num_steps_seen=self.step,
            )
        )

    def obey(self, text):
        self.verdict = unpacked(text, {})
        self.history.append((self.step, self.verdict))


class MemberOf:
    """A simulated rank by the names that the meeting knows: ``pair`` is a context to Pairs, a conversation here."""

    def __init__(self, rank):
        self._rank = rank
        self.pair = rank.pair_with_all

    def __getattr__(self, name):
        return getattr(self._rank, name)


def simulate(ranks, num_steps=60):
    """Train; returns for each meeting its step, whether it had a pair, and its collectives."""
    meetings = []
    for step in range(1, num_steps + 1):
        due = set()
        for rank in ranks:
            rank.step = step
            rank.meeting.count(boundary=True)
            due.add(rank.meeting.is_due(boundary=True, urgent=rank.happens()))
        if len(due) > 1:
            raise DeadlockError("some ranks meet, others train")
        if due == {True}:
            num_pairs = len(ranks[0].samples)
            _, num = converse([rank.meeting.hold(rank, MemberOf(rank)) for rank in ranks])
            meetings.append((step, len(ranks[0].samples) - num_pairs, num))
            if ranks[0].verdict.decision == "eager":
                break
    return meetings


def agree(ranks):
    """Everything that must be the same on every rank."""
    first = ranks[0]
    return all(
        (rank.history, rank.samples_without_names(), rank.num_passes, rank.known, rank.pairs.stopped)
        == (first.history, first.samples_without_names(), first.num_passes, first.known, first.pairs.stopped)
        for rank in ranks
    )


def _samples_without_names(self):
    """The pairs, less the shape of each rank's own batch."""
    return [(s.step, s.eager_s, s.compiled_s, s.num_passes, s.void) for s in self.samples]


SimulatedRank.samples_without_names = _samples_without_names


@pytest.mark.parametrize(("world_size", "num_seeds"), [(2, 20), (3, 10), (16, 6), (128, 2), (1024, 1)])
def test_any_number_of_ranks_with_any_accidents_agrees(world_size, num_seeds):
    kinds = set()
    for seed in range(num_seeds):
        plan = random.Random(seed)
        unlucky = plan.randrange(world_size)
        ranks = [
            SimulatedRank(
                rank,
                world_size,
                seed=seed,
                fails_at=plan.randint(1, 60) if rank == unlucky and seed % 3 == 1 else None,
                accidents=[0.0, 0.3, 1.0][seed % 3] / world_size,
                slow=3.0 if rank == unlucky else 1.0,
            )
            for rank in range(world_size)
        ]
        meetings = simulate(ranks, num_steps=60 if world_size < 1024 else 20)

        assert agree(ranks)
        # Findings, passes, times, verdict; no times where a rank has no pair; no verdict where there is no news.
        assert {num for _, num_pairs, num in meetings if num_pairs} <= {3, 4}
        assert {num for _, num_pairs, num in meetings if not num_pairs} <= {1, 2}
        if seed % 3 == 0:
            assert {num for _, num_pairs, num in meetings if num_pairs} == {4}
        # The pass of a pair is as long as the slowest rank's.
        assert all(s.eager_s >= 0.013 * 3 for rank in ranks for s in rank.samples if s.void is None)
        assert ranks[0].seconds.ranks().step_s.slowest_rank == unlucky
        kinds |= {rank.verdict.reason for rank in ranks}
    if num_seeds > 2:
        assert {"gain", "runtime_error"} <= kinds


def test_a_failure_is_everybodys_at_the_next_meeting():
    ranks = [SimulatedRank(rank, 64, seed=0, fails_at=33 if rank in (40, 50) else None) for rank in range(64)]

    simulate(ranks)

    assert agree(ranks)
    assert ranks[0].verdict.reason == "runtime_error"
    assert ranks[0].verdict.message == "rank 40"
    assert ranks[7].history[-1][0] == 35
    assert MEET_EVERY_N_STEPS >= 5


def test_one_rank_that_finds_nan_is_enough():
    ranks = [SimulatedRank(rank, 8, seed=0) for rank in range(8)]
    ranks[5].happens = lambda share=1.0: share == 0.1  # the draw for compiled_finite

    simulate(ranks)

    assert agree(ranks)
    assert ranks[0].verdict.reason == "non_finite"


def test_the_simulation_sees_a_rank_that_decides_for_itself():
    ranks = [SimulatedRank(rank, 4, seed=0) for rank in range(4)]
    ranks[2].pairs.stopped = True  # known to this rank alone

    with pytest.raises(DeadlockError):
        simulate(ranks)


def test_leading_ranks_compile_before_the_others_and_everybody_waits():
    order = []

    class Compiler:
        def __init__(self, rank):
            self.rank = rank

        def compile_first(self):
            order.append(self.rank)

    _, num = converse([first_compile(Compiler(rank), leads=rank % 4 == 0) for rank in range(8)])

    assert (order, num) == ([0, 4, 1, 2, 3, 5, 6, 7], 2)


def test_the_lowest_voice_is_heard():
    said = [None, None, "two", "three"]

    results, num = converse([first_voice(text, rank=rank, world_size=4) for rank, text in enumerate(said)])

    assert (set(results), num) == ({"two"}, 2)
    assert converse([first_voice(None, rank=rank, world_size=4) for rank in range(4)]) == ([None] * 4, 1)


def test_alone_there_is_nobody_to_wait_for():
    meeting = Meeting(rank=0, world_size=1, pair_every_n_steps=5)
    meeting.count(boundary=False)

    assert not meeting.is_due(boundary=False, urgent=False)
    assert meeting.is_due(boundary=False, urgent=True)
    assert alone(largest({"nothing": None, "one": 1})) == {"nothing": None, "one": 1.0}
