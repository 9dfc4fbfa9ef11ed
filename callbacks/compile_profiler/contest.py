"""Carries a search out on the live run: candidates come onto the rig and leave it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from compile_profiler import host
from compile_profiler.arguments import Settings
from compile_profiler.candidates import Candidate
from compile_profiler.duel import Try, Windows
from compile_profiler.explainer import Explainer
from compile_profiler.ledger import Ledger
from compile_profiler.lookout import Lookout
from compile_profiler.meeting import Finding
from compile_profiler.notices import first_line
from compile_profiler.observe import Subject
from compile_profiler.outlook import Now
from compile_profiler.records import Memory, Reason, Sample, Verdict
from compile_profiler.results import SearchReport
from compile_profiler.rig import Rig, Stand
from compile_profiler.search import Search, Settle
from compile_profiler.stats import speedup
from compile_profiler.verdict import judge
from compile_profiler.windows import StepTimes
from compile_profiler.workshop import RefusedError, Workshop

_BROKEN: dict[str, Reason] = {
    "error": "runtime_error",
    "out_of_memory": "out_of_memory",
    "state_too_large": "unsupported",
}
"""Void pairs after which a candidate is out, and the reason of that."""


@dataclass(slots=True)
class _Entrant:
    """A candidate that has been put onto the rig."""

    stand: Stand
    subject: Subject
    settings: Settings
    samples: list[Sample] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    is_released: bool = False


class Contest:
    """Carries out what a ``Search`` decides. Training runs in eager until a candidate has shown that it is faster.

    Args:
        settings: the callback's arguments.
        trainer: the Trainer.
        module: its LightningModule.
        rig: what is on the module; its own arm is never run.
        workshop: makes the arms.
        ledger: shows the pairs of what is being measured.
        explainer: tells what is compiled.
        times: of real steps.
        tell: prints a line.
        lookout: watches the first steps.
    """

    def __init__(
        self,
        settings: Settings,
        trainer: host.Trainer,
        module: host.LightningModule,
        *,
        rig: Rig,
        workshop: Workshop,
        ledger: Ledger,
        explainer: Explainer,
        times: StepTimes,
        tell: Callable[[str], None],
        lookout: Lookout,
    ) -> None:
        self._settings = settings
        self._trainer = trainer
        self._module = module
        self._rig = rig
        self._workshop = workshop
        self._ledger = ledger
        self._explainer = explainer
        self._times = times
        self._tell = tell
        self._lookout = lookout
        self._began_s = time.perf_counter()
        self._step_s: float | None = None
        self._home, self._home_subject = rig.active, explainer.observer.subject
        self._entrants: dict[Candidate, _Entrant] = {}
        self._told: Candidate | None = None
        self._asked: Candidate | None = None  # whose pairs are taken
        self._search: Search | None = None
        self.settled: Settle | None = None
        rig.enable(False)
        rig.pairs = None
        rig.door.passes = lookout.passes

    # -- looking before trying ---------------------------------------------------------------------------------------

    def on_step(self, *, boundary: bool) -> bool:
        """A training step has ended; whether the search begins with it."""
        if self._search is not None:
            return False
        if self._rig.door.passes is not None and self._lookout.passes.is_over:
            self._rig.door.passes = None
            self._times.after_pair()  # the device was waited for: what an ordinary step takes is seen from here on
        call = self._rig.door.last_call
        if not self._lookout.see(call) or not boundary:
            return False
        ordinary = self._times.before_pair()
        self._times.after_pair()
        self._step_s = None if ordinary is None else ordinary.step_s - ordinary.own_s
        self._search = self._lookout.search(call, seconds_left=self._seconds_left())
        return True

    def _seconds_left(self) -> float | None:
        left_s = host.seconds_left(self._trainer, self._step_s or self._ledger.ordinary_s)
        return left_s if math.isfinite(left_s) else None

    # -- what pairs and windows show -----------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """Whether the search is still going on."""
        return self.settled is None

    @contextmanager
    def pair(self) -> Iterator[None]:
        """What is compiled inside is that of the candidate whose pair it is."""
        entrant = None if self._asked is None else self._entrants.get(self._asked)
        if entrant is None:
            yield
            return
        self._follow(entrant)
        try:
            yield
        finally:
            self._follow(self._active)

    def saw_pair(self, sample: Sample, seconds: float, compile_s: float) -> None:
        """The pair that was asked for: seconds in all, and of these what compiling took."""
        search, candidate = self._search, self._asked
        if search is None or candidate is None or search.challenger is None:
            return
        entrant = self._entrants[candidate]
        if compile_s:
            search.compiled(candidate, compile_s)
        if sample.step_s is not None:
            self._step_s = sample.step_s - sample.own_s
        search.saw_pair(sample, max(0.0, seconds - compile_s))
        entrant.samples.append(sample)
        memory = None if entrant.stand.pairs is None else entrant.stand.pairs.memory
        if memory is not None:
            entrant.memory = memory
            if memory.compiled_peak_bytes is not None:
                search.saw_memory(candidate, memory.compiled_peak_bytes)
        compiles = entrant.subject.tally.compiles()
        if sample.void in _BROKEN:
            self._fail(candidate, *self._why_broken(sample.void, entrant))
        elif candidate in search.alive and compiles.limit_hits:
            self._fail(candidate, "recompile_limit", "the recompile limit was reached")
        elif candidate in search.alive and sample.void is None and compiles.graphs == 0:
            self._fail(candidate, "nothing_compiled", "the compiler made no graph")

    def _why_broken(self, void: str, entrant: _Entrant) -> tuple[Reason, str]:
        error = None if entrant.stand.pairs is None else entrant.stand.pairs.error
        if error is None:
            return _BROKEN[void], void.replace("_", " ")
        reason = _BROKEN[void]
        if void == "error" and self._explainer.observer.failed(error):
            reason = "compile_error"
        return reason, first_line(error)

    def _fail(self, candidate: Candidate, reason: Reason, message: str) -> None:
        assert self._search is not None
        self._search.failed(candidate, reason, message)
        self._tell(f"{candidate.name} is out ({reason}): {message}")

    def failed(self, verdict: Verdict) -> None:
        """What training runs on cannot be used any more, or has been found not worth it: the search goes on."""
        self.settled, running = None, self._running
        if running is not None:
            self._fail(running, verdict.reason, verdict.message)
            self._rig.enable(False)  # in the midst of a step: what is on the module changes after it

    # -- what follows --------------------------------------------------------------------------------------------------

    def judge(self, step: int, common: Finding) -> Verdict:
        """Carry out what the search wants next; the verdict so far."""
        search = self._search
        if search is None:
            return self._so_far(step, "looking at the first steps")
        if self._lookout.knows_eager_wins:
            told = "In an earlier run of this job no configuration gained (compile-profiler cache clear forgets that)"
            return self._settle(Settle(None, "no_gain", f"{told}; training goes on in eager."), step)
        self._hear_windows(search)
        self._judge_running(step, common)
        eager = self._lookout.passes.found
        now = Now(
            step=step,
            elapsed_s=time.perf_counter() - self._began_s,
            seconds_left=self._seconds_left(),
            step_s=self._step_s,
            pass_s=None if eager is None else eager.pass_s,
            host_s=None if eager is None else eager.host_s,
        )
        action = search.next(now)
        while isinstance(action, Try) and not self._enter(action.candidate):
            action = search.next(now)
        if isinstance(action, Windows) and self._times.alternates:
            self.switch(self._times.arm)  # a look in the midst of a window does not end it
        else:
            self._stop_windows()
            self._run_on(search.incumbent)
        if self._active is not None:
            self._ledger.show(self._active.samples, self._active.memory)
        if isinstance(action, Settle):
            return self._settle(action, step)
        self._asked = action.challenger if isinstance(action, Windows) else action.candidate
        self._rig.measure(self._entrants[self._asked].stand)
        if isinstance(action, Windows):
            self._rig.pairs = None  # nothing but windows
            self._times.alternate(eager_is_free=action.incumbent is None)
        self._release_others()
        return self._so_far(step, self._progress(search))

    def _enter(self, candidate: Candidate) -> bool:
        """Make the candidate's arm, if it has none; whether that was possible."""
        earlier = self._entrants.get(candidate)
        if earlier is not None and not earlier.is_released:
            return True
        settings = self._settings.of(candidate)
        try:
            obstacle = self._workshop.obstacle(settings)
            if obstacle is not None:
                raise RefusedError(*obstacle)
            arm = self._workshop.arm(settings)
        except RefusedError as refused:
            self._fail(candidate, refused.reason, str(refused))
            return False
        stand = self._rig.stand(arm, self._workshop.matching(settings), quietly=True)
        target = host.target_for(self._module, settings.target)
        self._entrants[candidate] = _Entrant(stand, self._explainer.new_subject(target), settings)
        if earlier is not None:  # tried again, because what it had lost to cannot be used
            self._entrants[candidate].samples += earlier.samples
        self._tell(f"trying {candidate.name}; training goes on meanwhile.")
        return True

    def _hear_windows(self, search: Search) -> None:
        for couples in (self._ledger.window_samples, self._ledger.void_couples):
            for couple in couples:
                if search.challenger is not None:
                    search.saw_couple(couple)
            couples.clear()

    def _judge_running(self, step: int, common: Finding) -> None:
        """Whether what the last steps ran on still compiles without end, or no longer at all."""
        running = self._running
        if running is None or self._search is None or running not in self._search.alive:
            return
        verdict = judge(
            [],
            self._entrants[running].subject.tally.compiles(),
            limits=self._settings.limits,
            step=step,
            config={},
            num_compiled_steps=self._ledger.num_compiled_steps,
            num_steps_seen=self._ledger.num_steps,
            num_recent_compiling=max(self._ledger.num_recent_compiling, common.num_recent_compiling),
            recent_compile_s=self._ledger.recent_compile_s,
        )
        if verdict.decision == "eager":
            self._fail(running, verdict.reason, verdict.message)

    def _run_on(self, candidate: Candidate | None) -> None:
        """What training runs on from the next step on."""
        if candidate != self._told:
            self._tell(f"training goes on with {'eager' if candidate is None else candidate.name}.")
        self._told = candidate
        self._put_on(self._active)

    def switch(self, arm: str) -> None:
        """In windows: train on the challenger (``compiled``) or on what it is compared with (``eager``)."""
        assert self._search is not None
        entrant = self._challenger
        is_its_window = arm == "compiled" and not self._times.between
        self._put_on(entrant if is_its_window and entrant is not None else self._active)

    def _put_on(self, entrant: _Entrant | None) -> None:
        stand = self._home if entrant is None else entrant.stand
        if stand is not self._rig.active:
            self._ledger.forget_recent_compiling()  # which was the other one's
        self._rig.run_on(stand)
        self._rig.enable(entrant is not None)
        self._follow(entrant)

    def _stop_windows(self) -> None:
        if self._times.alternates:
            self._times.stop_alternating()

    def _settle(self, action: Settle, step: int) -> Verdict:
        self.settled = action
        if not self._lookout.knows_eager_wins:
            self._lookout.remember(action, self.report())
        if action.candidate is None:
            tried = [one for one in self._entrants.values() if any(sample.void is None for sample in one.samples)]
            if tried:  # what came closest
                best = max(tried, key=lambda one: speedup(one.samples, 0.95).median or 0.0)
                self._ledger.show(best.samples, best.memory)
            return Verdict(
                decision="eager", reason=action.reason, message=action.message, step=step, config=self._settings.config
            )
        entrant = self._entrants[action.candidate]
        self._rig.measure(entrant.stand)
        if entrant.stand.pairs is not None:
            entrant.stand.pairs.tell = host.warn
        if self._settings.end_to_end == "windows":
            self._times.alternate()
        self._release_others()
        config = entrant.settings.config
        if any(entrant.stand.arm.compiled_names):
            config["modules"] = list(entrant.stand.arm.compiled_names)
        return Verdict(decision="compiled", reason=action.reason, message=action.message, step=step, config=config)

    def _so_far(self, step: int, what: str) -> Verdict:
        return Verdict(message=f"Searching: {what}.", step=step, config=self._settings.config)

    def _progress(self, search: Search) -> str:
        rows = [row for row in search.report().candidates if row.speedup is not None]
        figures = ", ".join(f"{row.name} {row.speedup:.2f}x ({row.num_pairs} pairs)" for row in rows)
        trying = "" if search.challenger is None else f"{search.challenger.name} is being tried"
        return "; ".join(part for part in (trying, figures) if part) or "nothing tried yet"

    # -- housekeeping --------------------------------------------------------------------------------------------------

    @property
    def _challenger(self) -> _Entrant | None:
        challenger = None if self._search is None else self._search.challenger
        return None if challenger is None else self._entrants.get(challenger)

    @property
    def _active(self) -> _Entrant | None:
        incumbent = None if self._search is None else self._search.incumbent
        return None if incumbent is None else self._entrants[incumbent]

    @property
    def _running(self) -> Candidate | None:
        """What steps run on; in windows, that may be the challenger."""
        return next((one for one, entrant in self._entrants.items() if entrant.stand is self._rig.active), None)

    def _follow(self, entrant: _Entrant | None) -> None:
        if entrant is None:
            self._explainer.follow(self._home.arm, self._settings.target, self._home_subject)
        else:
            target = host.target_for(self._module, entrant.settings.target)
            self._explainer.follow(entrant.stand.arm, target, entrant.subject)

    def _release_others(self) -> None:
        """Compiled code that nobody needs any more; freed by torch once nothing refers to it."""
        assert self._search is not None
        for candidate, entrant in self._entrants.items():
            if candidate not in self._search.alive and not entrant.is_released:
                entrant.stand.release()
                entrant.stand.forget()
                entrant.is_released = True

    def release(self) -> None:
        """All compiled code; may be called twice."""
        for entrant in self._entrants.values():
            entrant.stand.release()
        self._entrants.clear()
        self._rig.measure(self._home)

    def report(self) -> SearchReport:
        """Every candidate: tried, skipped or not looked at yet, with what is known of it."""
        found = SearchReport() if self._search is None else self._search.report()
        return replace(found, settled=self.settled is not None)  # also where an earlier run's verdict has ended it
