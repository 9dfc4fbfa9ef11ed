"""The arithmetic of evidence against independent oracles: integration, simulation, a Markov chain."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import integrate

from compile_profiler.records import Sample
from compile_profiler.stats import (
    NET_LOSSES,
    Interval,
    break_even_step,
    decide,
    e_value,
    end_to_end,
    end_to_end_bracket,
    first_outcome,
    independence,
    log_e_value,
    lost,
    median_interval,
    saved_s,
    speedup,
)

ASKED = {"min_speedup": 1.02, "confidence": 0.95, "max_pairs": 40}


@pytest.mark.parametrize("trials", [0, 1, 7, 8, 40, 300, 700])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.8, 1.0])
def test_e_value_is_the_mixture_it_says(trials, share):
    """The closed form equals the mixture integrated numerically, for hundreds of trials too."""
    wins = round(share * trials)

    def log_ratio(p):
        up = wins * math.log(2 * p) if wins else 0.0
        down = (trials - wins) * math.log(2 * (1 - p)) if trials - wins else 0.0
        return up + down

    peak = min(max(wins / trials if trials else 0.5, 0.5), 1.0)
    top = log_ratio(peak)
    # The peak is narrow where trials are many: integrate either side of it, scaled by its height.
    edges = sorted({0.5, max(peak - 0.05, 0.5), peak, min(peak + 0.05, 1.0), 1.0})
    area = sum(
        integrate.quad(lambda p: 2 * math.exp(log_ratio(p) - top), low, high, limit=200)[0]
        for low, high in itertools.pairwise(edges)
    )
    assert log_e_value(wins, trials) == pytest.approx(top + math.log(area), rel=1e-8, abs=1e-8)


def test_eight_unanimous_pairs_decide_and_seven_do_not():
    """At a confidence of 0.95 the bar of 2/alpha lies between seven and eight wins without a loss."""
    assert e_value(7, 7) < 2 / 0.05 < e_value(8, 8)
    assert decide([0.3] * 7, **ASKED) == "pending"
    assert decide([0.3] * 8, **ASKED) == "gain"
    assert decide([0.0] * 8, **ASKED) == "no_gain"


def test_a_fair_coin_is_no_evidence():
    """Under the null the expected e-value is 1 at most, at every number of trials: the bound rests on it."""
    for trials in (1, 10, 40, 200):
        wins = np.arange(trials + 1)
        chance = np.array([math.comb(trials, int(k)) / 2**trials for k in wins])
        assert chance @ np.exp(log_e_value(wins, trials)) == pytest.approx(1.0)
        unfair = np.array([math.comb(trials, int(k)) * 0.4**k * 0.6 ** (trials - k) for k in wins])
        assert unfair @ np.exp(log_e_value(wins, trials)) < 1


def test_extreme_counts_give_a_number_without_a_warning():
    """Counts far outside the range of a float neither raise nor turn into evidence for the wrong side."""
    assert e_value(5000, 5000) == math.inf
    assert e_value(0, 5000) == 0.0


def test_an_outlier_weighs_no_more_than_its_sign():
    """One pair a thousand times off changes the decision no more than one that barely lost."""
    steady = [0.3, 0.31] * 8
    for at in range(len(steady)):
        mild, wild = list(steady), list(steady)
        mild[at], wild[at] = -0.1, -7.0
        assert first_outcome(mild, **ASKED)[0] == first_outcome(wild, **ASKED)[0] == "gain"


def test_ties_are_skipped_but_use_up_the_budget():
    """A pair exactly at the margin is no evidence; a clock too coarse to see a difference ends inconclusive."""
    margin = math.log(1.02)
    assert decide([margin] * 5 + [0.3] * 7, **ASKED) == "pending"
    assert decide([margin] * 5 + [0.3] * 8, **ASKED) == "gain"
    assert decide([margin] * 39, **ASKED) == "pending"
    assert decide([margin] * 40, **ASKED) == "inconclusive"


def test_what_has_been_decided_stays_decided():
    """Pairs after the deciding one leave the outcome as it is: asking again cannot spend alpha twice."""
    assert first_outcome([0.3] * 8 + [-0.3] * 30, **ASKED) == ("gain", 8)
    assert first_outcome([0.3, -0.3] * 20 + [0.3] * 40, **ASKED) == ("inconclusive", 40)
    assert first_outcome([], **ASKED) == ("pending", 0)
    assert first_outcome([], **{**ASKED, "max_pairs": 0}) == ("inconclusive", 0)


def test_a_slow_wander_is_not_taken_for_many_pairs():
    """Wins out of one slow wave near the margin decide nothing, the same values in a mixed order do."""
    wave = [0.08 + 0.055 * math.sin(n / 2) for n in range(12)]
    assert min(wave) > math.log(1.02)
    assert decide(wave, **ASKED) == "pending"
    assert decide([wave[n * 5 % 12] for n in range(12)], **ASKED) == "gain"


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.6])
def test_independence_finds_the_planted_correlation(correlation):
    """On a long series it is what the correlation of the signs leaves, and 3 % of spikes change little."""
    rng = np.random.default_rng(5)
    values = np.zeros(20_000)
    for at in range(1, len(values)):
        values[at] = correlation * values[at - 1] + math.sqrt(1 - correlation**2) * rng.standard_normal()
    spiky = np.where(rng.random(len(values)) < 0.03, 100 * rng.standard_normal(len(values)), values)
    of_signs = np.corrcoef(np.sign(values[1:]), np.sign(values[:-1]))[0, 1]  # measured, not derived
    planted = (1 - of_signs) / (1 + of_signs)
    assert independence(values) == pytest.approx(planted, abs=0.03)
    assert independence(spiky) == pytest.approx(planted, abs=0.1)


def test_independence_where_there_is_little_to_go_by():
    """Few values, values mostly the same, or none but ties give a share without a division by zero."""
    assert 0 < independence([-1.0, 2.0]) < 1
    assert independence([1.0] * 7 + [2.0]) == 1.0  # clear of zero
    assert 0 < independence([0.0] * 7 + [2.0]) < 1
    assert 0 < independence([0.0] * 8) < 1


@pytest.mark.parametrize(("num", "confidence"), [(6, 0.95), (15, 0.95), (40, 0.95), (12, 0.8)])
def test_the_interval_holds_the_median_as_often_as_stated(num, confidence):
    """Over skewed, heavy-tailed values the share of intervals that hold the true median is at least the stated one."""
    rng = np.random.default_rng(num)
    runs = rng.lognormal(sigma=2.0, size=(3000, num)).tolist()  # true median: 1
    found = [median_interval(run, confidence) for run in runs]
    covered = np.mean([one.low <= 1.0 <= one.high for one in found])
    assert covered > confidence - 3 * math.sqrt(confidence * (1 - confidence) / len(runs))
    assert covered < 1.0 or num == 6


def test_an_interval_that_cannot_be_had_is_none():
    """Below six values, and where six are too few for the confidence, low and high are unknown, not invented."""
    assert median_interval([], 0.95) == Interval()
    assert median_interval([3.0, 1.0, 2.0, 5.0, 4.0], 0.5) == Interval(median=3.0, num=5)
    assert median_interval([1.0] * 6, 0.99).low is None
    assert median_interval([2.0] * 6, 0.95) == Interval(median=2.0, low=2.0, high=2.0, num=6)


def test_speedup_counts_what_it_did_not_use():
    """Void pairs leave the figures alone and are counted by reason; shapes are those of the used pairs."""
    used = [Sample(step=n, eager_s=1.5, compiled_s=1.0, shape=f"{n % 2}x8") for n in range(6)]
    void = [
        Sample(step=9, eager_s=0.0, compiled_s=0.0, shape="9", void=why) for why in ("compiled", "compiled", "busy")
    ]
    seen = speedup(iter(used + void), 0.95)
    assert (seen.num_pairs, seen.num_void, seen.void, seen.num_shapes) == (6, 3, {"compiled": 2, "busy": 1}, 2)
    assert [seen.median, seen.low, seen.high] == pytest.approx([1.5] * 3)
    assert speedup(void, 0.95).median is None


def test_the_monitor_forgives_scattered_losses_and_sees_a_run_of_them():
    """Losses among wins raise no alarm; eight net losses do, also when a win interrupts them; a tie is no loss."""
    assert not lost([])
    assert not lost([-0.1, 0.1] * 200)
    assert not lost([0.0] * 200)
    assert not lost([-0.1] * (NET_LOSSES - 1))
    assert lost([-0.1] * 4 + [0.1] + [-0.1] * 5)
    assert lost([0.01] * NET_LOSSES, margin=0.02)
    assert lost([-0.1] * NET_LOSSES + [0.1] * 100)  # an alarm is not taken back


def test_end_to_end_dilutes_the_speedup_of_the_pass():
    """The pass counts by its share of the step, and a step shorter than its pass gives the pass's own speedup."""
    assert end_to_end(step_s=100.0, eager_s=15.0, compiled_s=10.0) == pytest.approx(1.05)
    assert end_to_end(step_s=10.0, eager_s=5.0, compiled_s=10.0) == pytest.approx(0.5)
    assert end_to_end(step_s=9.0, eager_s=20.0, compiled_s=10.0) == pytest.approx(2.0)
    assert end_to_end(step_s=10.0, eager_s=8.0, compiled_s=4.0, own_s=1.0) == pytest.approx(1.3)


def test_what_python_does_takes_longer_in_a_real_step():
    """By as many seconds in each arm or by as many times; where the device sets the pace, what it does does not."""
    pair = {"step": 1, "step_s": 20.0, "coldness": 1.5}
    at_python = Sample(eager_s=8.0, compiled_s=4.0, eager_host_s=8.0, compiled_host_s=4.0, **pair)
    at_device = Sample(eager_s=8.0, compiled_s=4.0, eager_host_s=2.0, compiled_host_s=2.0, **pair)

    assert end_to_end_bracket(at_python) == pytest.approx((1.2, 1.3))
    assert end_to_end_bracket(at_device) == pytest.approx((1.0, 1.2))
    assert end_to_end_bracket(replace(at_python, coldness=0.5)) == pytest.approx((1.2, 1.2))


def test_break_even_is_where_the_saving_turns_positive():
    """One step before the break-even step the net saving is negative, at it no longer."""
    spent = {"compile_s": 31.0, "probe_s": 2.3, "saved_per_step_s": 0.07}
    step = break_even_step(first_compiled_step=100, **spent)
    assert step is not None
    assert saved_s(num_compiled_steps=step - 100, **spent) >= 0 > saved_s(num_compiled_steps=step - 101, **spent)
    assert break_even_step(first_compiled_step=0, **{**spent, "saved_per_step_s": 0.0}) is None
