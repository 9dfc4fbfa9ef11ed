"""What one rank knows and says at a meeting."""

from __future__ import annotations

from dataclasses import replace

from compile_profiler.account import Account
from compile_profiler.arguments import Settings
from compile_profiler.clock import profiler_is_on
from compile_profiler.explainer import Explainer
from compile_profiler.judgement import Judgement, packed
from compile_profiler.ledger import Ledger
from compile_profiler.meeting import Finding, OfEach, Own
from compile_profiler.records import Ranks, Verdict
from compile_profiler.rig import Rig
from compile_profiler.watch import Alarm
from compile_profiler.windows import StepTimes

_ALARMS: tuple[Alarm | None, ...] = (None, "loss", "skip")


class Seat:
    """This rank's place among the others; to the meeting it is what ``Knows`` describes.

    Attributes:
        rig: what is on the module, while the run is compiled.
        failed: the compiled step failed here, and that is not everybody's verdict yet.
        is_over: training has ended, so that no pair can be had any more.
        common: what all have found, as of the last meeting.

    Args:
        settings: the callback's arguments.
        ledger: what has been seen.
        explainer: what the compiler has done.
        times: of real steps.
        account: of the steps so far.
        judgement: the verdict in force.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        explainer: Explainer,
        times: StepTimes,
        account: Account,
        judgement: Judgement,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._explainer = explainer
        self._times = times
        self._account = account
        self._judgement = judgement
        self._of_each: OfEach | None = None
        self._asks_at = 0.0  # steps since the last pair at which to ask whether the next one is due
        self.rig: Rig | None = None
        self.failed: Verdict | None = None
        self.is_over = False
        self.common = Finding()

    @property
    def takes_pairs(self) -> bool:
        """Whether pairs can be had in this run."""
        return self.rig is not None and self.rig.pairs is not None and not self.rig.pairs.stopped

    @property
    def is_ready(self) -> bool:
        """Whether a pair could be had here now."""
        return (
            self.rig is not None
            and self._times.between
            and self.rig.door.at_boundary()
            and self.rig.door.last_call is not None  # a closure that was not called, behind a change of arms
            and not self.is_over
            and not profiler_is_on()  # it slows eager down more than compiled, and the pair would be in its record
        )

    @property
    def steps_per_pair(self) -> float:
        """Optimizer steps from one pair to the next."""
        return self._judgement.steps_per_pair(self._settings.pair_every_n_steps, self._settings.overhead_budget)

    def has_something_to_say(self, num_since_pair: int) -> bool:
        """Whether there is news, or a pair could be had so many steps after the last."""
        if self._account.news:
            return True
        rig = self.rig
        if rig is None or rig.pairs is None or rig.pairs.stopped:
            return False
        if rig.watch.alarm is None and not (
            self._account.is_warm and num_since_pair >= self._asks_at and self._is_scheduled(num_since_pair)
        ):
            return False
        return self.is_ready

    def _is_scheduled(self, num_since_pair: int) -> bool:
        """Whether a pair is due so many steps after the last.

        How many steps the budget asks for takes medians to say, and hardly changes from one step to the next: asked
        again half-way, and at once after each meeting, where all else changes that it depends on.
        """
        left = self.steps_per_pair - num_since_pair
        self._asks_at = num_since_pair + max(0.0, left / 2)
        return left <= 0

    def finding(self) -> Finding:
        """What this rank knows now."""
        compiles, couple = self._explainer.compiles(), self._times.couple
        return Finding(
            unready=not self.is_ready,
            cold=not self._account.is_warm,
            alarm=0 if self.rig is None else _ALARMS.index(self.rig.watch.alarm),
            failed=self.failed is not None,
            news=self._account.news or couple is not None,
            compiled_again=self._account.compiled_again,
            num_recent_compiling=self._ledger.num_recent_compiling,
            without_graph=bool(self._ledger.num_compiled_steps) and compiles.graphs == 0,
            left_out=self._explainer.observer.left_out is not None,
            limit_hits=compiles.limit_hits or 0,
            steps_per_pair=self.steps_per_pair,
            window_void=couple is not None and couple.void is not None,
            window_eager_s=None if couple is None else couple.eager_s,
            window_compiled_s=None if couple is None else couple.compiled_s,
        )

    def own(self) -> Own:
        """This rank's seconds."""
        pairs = None if self.rig is None else self.rig.pairs
        return Own(
            compile_s=self._account.compile_s,
            step_s=self._ledger.ordinary_step_s,
            pass_s=None if pairs is None else pairs.pass_s,
        )

    def failure(self) -> str:
        """What has failed on this rank."""
        assert self.failed is not None
        return packed(self.failed)

    def hear(self, common: Finding, of_each: OfEach) -> None:
        """What all ranks know now."""
        self._asks_at = 0.0
        self.common, self._of_each = common, of_each
        self._account.news = self._account.compiled_again = False
        if self.rig is not None and common.alarm:
            self.rig.watch.alarm = _ALARMS[common.alarm]
        self._times.may_alternate |= not (common.unready or common.cold)
        couple, self._times.couple = self._times.couple, None
        if couple is None or common.window_eager_s is None or common.window_compiled_s is None:
            return
        if common.window_void:
            self._ledger.void_couples.append(couple)
        else:
            eager_s, compiled_s = common.window_eager_s, common.window_compiled_s
            self._ledger.window_samples.append(replace(couple, eager_s=eager_s, compiled_s=compiled_s, void=None))
        if self._judgement.verdict.decision != "undecided":
            self._times.rest(self._ledger.steps_per_couple(self._settings.overhead_budget))

    @property
    def ranks(self) -> Ranks | None:
        """How far apart the ranks are; ``None`` for one alone."""
        return None if self._of_each is None or self._of_each.world_size == 1 else self._of_each.ranks()
