"""One verdict from all findings: their order, their consequences, their sentences."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from compile_profiler.records import Compiles, Drift, Event, Remedy, Sample
from compile_profiler.verdict import Limits, judge, persistent_drift

COMPILED = Compiles(graphs=2)
FAR = Drift(within_tolerance=False, loss_rel=0.02, grad_rel=0.3, tolerance=1e-3, worst_parameter="head.weight")
NEAR = Drift(within_tolerance=True, eager_finite=True, compiled_finite=True)
UNJUDGED = Drift(rng="unmatched")
NAN = Drift(eager_finite=True, compiled_finite=False)


def pairs(*ratios, drift=None, void=None, shape="32"):
    return [
        Sample(step=5 * n, eager_s=0.01 * ratio, compiled_s=0.01, drift=drift, void=void, shape=shape)
        for n, ratio in enumerate(ratios)
    ]


def judged(samples, compiles=COMPILED, *, limits=None, num_compiled_steps=60, num_steps_seen=60, **explained):
    return judge(
        samples,
        compiles,
        limits=limits or Limits(),
        step=77,
        config={"mode": "default"},
        num_compiled_steps=num_compiled_steps,
        num_steps_seen=num_steps_seen,
        **explained,
    )


def said(samples, compiles=COMPILED, **limits):
    verdict = judged(samples, compiles, limits=Limits(**limits))
    return verdict.decision, verdict.reason, verdict.message


FASTER = [1.28, 1.35, 1.32, 1.33, 1.29, 1.36, 1.31, 1.3]
SLOWER = [0.97, 0.95, 0.96, 0.98, 0.94, 0.96, 0.95, 0.97]
UNCLEAR = [1.3, 0.8] * 20


def test_a_gain_keeps_compiled_and_says_by_how_much():
    assert said(pairs(*FASTER)) == ("compiled", "gain", "Compiled is 1.31x faster (1.28x to 1.36x, 8 pairs); kept.")


def test_no_gain_goes_back_to_eager_and_says_what_was_asked_for():
    message = (
        "Compiling gains nothing here: 0.96x (0.94x to 0.98x, 8 pairs), below the 1.02x asked for; "
        "training goes on in eager."
    )
    assert said(pairs(*SLOWER)) == ("eager", "no_gain", message)


def test_without_a_clear_answer_the_median_decides():
    """Out of budget, compiled stays where it is no slower than eager, else eager; both are called inconclusive."""
    kept, left = said(pairs(*UNCLEAR)), said(pairs(*[1.2, 0.8] * 20))
    assert kept[:2] == ("compiled", "inconclusive")
    assert left[:2] == ("eager", "inconclusive")
    assert kept[2].endswith("too close to the 1.02x asked for; kept, being no slower than eager.")
    assert left[2] == (
        "No clear answer: 0.98x (0.80x to 1.20x, 40 pairs), too close to the 1.02x asked for; "
        "training goes on in eager."
    )
    assert said(pairs(*[1.0] * 3, *[1.0] * 3), max_pairs=6)[:2] == ("compiled", "inconclusive")


def test_until_then_the_run_is_undecided():
    assert said([]) == ("undecided", "pending", "No decision yet after 60 steps.")
    assert said(pairs(1.3)) == ("undecided", "pending", "No decision yet after 60 steps: 1.30x (1 pair) so far.")


def test_the_verdict_carries_the_step_and_configuration_handed_in():
    config = {"mode": "default"}
    verdict = judged(pairs(*FASTER))
    assert (verdict.step, verdict.config) == (77, config)


def test_void_pairs_are_no_evidence_of_speed():
    """A pair in which something compiled says nothing about time, however slow it was."""
    void = pairs(*[0.01] * 30, void="compiled")
    assert said(void + pairs(*FASTER)) == said(pairs(*FASTER))
    assert said(void)[1] == "pending"


def test_pairs_of_different_shapes_are_pooled():
    """Each pair compares one batch with itself, so four pairs of each of two shapes decide like eight of one."""
    mixed = pairs(*FASTER[:4], shape="32") + pairs(*FASTER[4:], shape="17")
    assert said(mixed) == said(pairs(*FASTER))


def test_one_result_that_is_not_finite_ends_compiling_at_once():
    """Also in a void pair, and whatever the drift policy; not where eager gave the same."""
    nan = pairs(1.3, drift=NAN, void="compiled")
    message = "Compiled gave NaN or infinity at step 0 where eager gave finite numbers; training goes on in eager."
    assert said(nan + pairs(*FASTER), drift="warn") == ("eager", "non_finite", message)
    both = Drift(eager_finite=False, compiled_finite=False)
    assert said(pairs(*FASTER, drift=both))[1] == "gain"


def test_drift_needs_three_judged_samples_in_a_row():
    """One bad batch, or two, is not drift; samples that could not be judged neither count nor interrupt."""
    far, near, unjudged = (pairs(1.3, drift=drift) for drift in (FAR, NEAR, UNJUDGED))
    assert said(far * 2 + near + far * 2 + pairs(1.3) * 8)[1] == "gain"
    assert said(far + unjudged + far + pairs(1.3) + far)[:2] == ("eager", "drift")
    assert said(pairs(1.3, drift=FAR, void="compiled") * 3)[1] == "drift"
    assert persistent_drift(far * 2) is None


def test_the_drift_message_names_what_differs_and_where():
    message = (
        "Compiled differs from eager in loss by 2.0e-02 and gradients by 3.0e-01 "
        "(tolerance 1.0e-03, most in head.weight), in 3 pairs in a row from step 0 on; training goes on in eager."
    )
    assert said(pairs(*FASTER[:3], drift=FAR))[2] == message
    bare = "Compiled differs from eager in its results, in 3 pairs in a row from step 0 on; training goes on in eager."
    assert said(pairs(*FASTER[:3], drift=Drift(within_tolerance=False)))[2] == bare


@pytest.mark.parametrize("policy", ["warn", "off"])
def test_drift_that_is_only_warned_of_leaves_the_decision_to_speed(policy):
    assert said(pairs(*FASTER, drift=FAR), drift=policy)[:2] == ("compiled", "gain")


def test_a_compiler_that_made_no_graph_is_left_alone():
    """Steps that ran compiled and made no graph are reported; before the first such step there is no finding."""
    message = "The compiler made no graph in 60 steps; training goes on in eager."
    assert said(pairs(*FASTER), Compiles()) == ("eager", "nothing_compiled", message)
    assert judged([], Compiles(), num_compiled_steps=0).reason == "pending"


def test_where_nothing_was_compiled_the_line_and_other_targets_are_named():
    """Also where only helpers were; the events alone do not say that they were no more than that."""
    skip = Event(step=0, epoch=0, stage="train", kind="skipped_frame", file="/my/train.py", line=34)
    helpers = Compiles(graphs=1, eager_frames=1, events=(skip,))

    assert judged(
        [], Compiles(eager_frames=1, events=(skip,)), num_compiled_steps=1, other_targets=["a", "b"]
    ).message == (
        "The compiler made no graph in 1 step, because of train.py:34, try a or b; training goes on in eager."
    )
    assert judged([], Compiles(), never_ran=True).message == (
        "The compiler made no graph in 60 steps, because the step does not call the target; training goes on in eager."
    )
    assert judged([], helpers, left_out=skip).message == (
        "The target was left in eager and only helpers that it calls were compiled, because of train.py:34; "
        "training goes on in eager."
    )
    assert judged([], helpers).reason == "pending"


def test_the_recompile_limit_ends_in_eager_and_names_the_function():
    """The function is that of the hit in training, not one of validation."""
    hits = tuple(
        Event(step=9, epoch=0, stage=stage, kind=kind, function=name)
        for stage, kind, name in [
            ("validate", "limit_hit", "validation_step"),
            ("train", "recompile", "forward"),
            ("train", "limit_hit", "training_step"),
        ]
    )
    why = Event(
        step=1,
        epoch=0,
        stage="train",
        kind="recompile",
        function="training_step",
        hint="self.n changes. Keep it as a tensor: self.register_buffer('n', torch.tensor(0)), changed in place.",
    )
    hit = Compiles(graphs=8, limit_hits=1, events=hits)
    message = (
        "The recompile limit was reached in training_step at step 9, so that code is no longer compiled; "
        "training goes on in eager."
    )
    explained = message.replace(
        "compiled;",
        "compiled (self.n changes; keep it as a tensor: self.register_buffer('n', torch.tensor(0)), changed in place);",
    )
    assert said(pairs(*FASTER), hit) == ("eager", "recompile_limit", message)
    assert said(pairs(*FASTER), dataclasses.replace(hit, events=(why, *hits)))[2] == explained
    assert "reached, so" in said(pairs(*FASTER), Compiles(graphs=8, limit_hits=1))[2]


def test_guards_that_eat_the_gain_are_named_with_their_share():
    slower = [Sample(step=n, eager_s=0.010, compiled_s=0.012) for n in range(8)]

    def message(guard_s, samples=slower):
        return judged(samples, dataclasses.replace(COMPILED, guard_s=guard_s)).message

    assert "below the 1.02x asked for (25 % of a compiled pass go into checking which graph applies);" in message(0.003)
    assert "checking" not in message(0.001)
    assert "checking" not in message(None)
    assert "checking" not in message(0.01, pairs(*FASTER))


def test_compiling_now_and_then_is_a_storm_if_it_costs_more_than_it_saves():
    """Eight of the last 64 steps, past the beginning; a compiled step saves 10 ms."""
    faster = [Sample(step=n, eager_s=0.020, compiled_s=0.010) for n in range(9)]

    def reason(num_recent_compiling=8, recent_compile_s=5.0, num_steps_seen=200):
        verdict = judged(
            faster,
            num_recent_compiling=num_recent_compiling,
            recent_compile_s=recent_compile_s,
            num_steps_seen=num_steps_seen,
        )
        return verdict.reason

    assert reason() == "recompile_storm"
    assert reason(recent_compile_s=0.5) == "gain"  # 64 steps save 0.64 s
    assert reason(num_recent_compiling=7) == "gain"
    assert reason(num_steps_seen=100) == "gain"  # what a run compiles at first is still among the 64


def test_a_remedy_that_did_not_help_is_part_of_the_message():
    remedy = Remedy(step=5, change="dynamic=True")
    hit = Compiles(graphs=8, limit_hits=1, remedies=(remedy,))
    storm = dataclasses.replace(COMPILED, remedies=(remedy,))

    assert "although it was healed with dynamic=True" in judged([], hit).message
    assert "although it was healed with dynamic=True" in judged([], storm, num_recent_compiling=17).message


def test_findings_are_weighed_in_one_order():
    """Each finding is reported only when none before it holds, whatever comes after."""
    nan, far = pairs(1.3, drift=NAN), pairs(1.3, 1.3, 1.3, drift=FAR)
    limit_hit = Compiles(graphs=3, limit_hits=1)
    nothing = Compiles(limit_hits=1)
    slow = pairs(*SLOWER)
    assert said(slow + far + nan, nothing)[1] == "non_finite"
    assert said(slow + far, nothing)[1] == "drift"
    assert said(slow, nothing)[1] == "nothing_compiled"
    assert said(slow, limit_hit)[1] == "recompile_limit"
    assert said(slow)[1] == "no_gain"


@pytest.mark.parametrize(
    ("samples", "compiles"),
    [
        (pairs(1.3, drift=NAN), COMPILED),
        (pairs(1.3, 1.3, 1.3, drift=FAR), COMPILED),
        ([], Compiles()),
        ([], Compiles(graphs=3, limit_hits=1)),
        (pairs(*SLOWER), COMPILED),
        (pairs(*[1.2, 0.8] * 20), COMPILED),
        (pairs(*FASTER, *[0.9] * 8), COMPILED),
    ],
)
def test_without_fallback_the_reason_is_told_and_the_run_stays_compiled(samples, compiles):
    """`fallback=False` changes the decision and the end of the sentence, nothing else."""
    eager, kept = judged(samples, compiles), judged(samples, compiles, limits=Limits(fallback=False))
    assert (eager.decision, kept.decision, kept.reason) == ("eager", "compiled", eager.reason)
    finding = eager.message.removesuffix("; training goes on in eager.")
    assert kept.message == f"{finding}; kept all the same (fallback=False)."


def test_a_gain_that_is_lost_later_ends_in_eager():
    """Single losses after the decision change nothing, eight net losses to eager do; so does an inconclusive keep."""
    message = (
        "Compiled has stopped gaining since it was kept: 0.90x (0.90x to 0.90x, 8 pairs); training goes on in eager."
    )
    kept = said(pairs(*FASTER))
    assert said(pairs(*FASTER, *[1.3, 0.9] * 20)) == kept
    assert said(pairs(*FASTER, *[0.9] * 7)) == kept
    assert said(pairs(*FASTER, *[0.9] * 8)) == ("eager", "no_gain", message)
    assert said(pairs(*UNCLEAR, *[0.9] * 8)) == ("eager", "no_gain", message)
    assert said(pairs(*FASTER, *[1.01] * 50)) == kept  # smaller than asked for, still a gain
    assert said(pairs(*FASTER, *[0.97] * 50), min_speedup=0.95)[1] == "gain"  # slower, but the user allows it


def test_with_no_pairs_allowed_compiling_is_only_observed():
    """`max_pairs=0` measures nothing, so speed is no reason; what the compiler did still is."""
    assert said([], max_pairs=0) == ("compiled", "disabled", "Compiled and observed, not measured (max_pairs=0).")
    assert said([], Compiles(graphs=3, limit_hits=1), max_pairs=0)[1] == "recompile_limit"


def test_every_message_is_one_sentence():
    """It ends in a full stop and holds no other."""
    cases = [pairs(*FASTER), pairs(*SLOWER), pairs(*UNCLEAR), pairs(1.3), pairs(1.3, drift=NAN)]
    for samples, fallback in itertools.product(cases, (True, False)):
        message = judged(samples, limits=Limits(fallback=fallback)).message
        assert message.endswith(".")
        assert ". " not in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_speedup", 0.0),
        ("min_speedup", math.nan),
        ("min_speedup", math.inf),
        ("confidence", 1.0),
        ("confidence", 0.0),
        ("max_pairs", -1),
        ("drift", "ignore"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused_by_name_and_value(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must .*got '?{value}"):
        dataclasses.replace(Limits(), **{name: value})
