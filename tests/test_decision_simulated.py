"""How often the decision is wrong and how long it takes, over thousands of simulated runs.

`python tests/test_decision_simulated.py` prints the table.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import signal, stats

from compile_profiler.records import Compiles, Sample
from compile_profiler.stats import NET_LOSSES, first_outcome, log_e_value, lost
from compile_profiler.verdict import Limits, judge

NUM_RUNS = 2000
SD = 0.1  # of one pair's log-ratio: the noisier half of the jobs measured on a GPU
SPIKE_SHARE = 0.03
LIMITS = Limits()
NOISES = ("independent", "spikes", "correlated", "correlated spikes")


def simulated(true_ratio, noise, *, num_runs=NUM_RUNS, num_pairs=LIMITS.max_pairs, sd=SD, seed=0):
    """Log-ratios of ``num_runs`` runs around ``log(true_ratio)``, shape (num_runs, num_pairs)."""
    rng = np.random.default_rng((seed, NOISES.index(noise)))
    if "correlated" in noise:
        white = rng.standard_normal((num_runs, num_pairs + 50))
        values = signal.lfilter([math.sqrt(1 - 0.3**2)], [1, -0.3], white)[:, 50:]
    else:
        values = rng.standard_normal((num_runs, num_pairs))
    if "spikes" in noise:  # five to twenty standard deviations, either way
        spikes = rng.uniform(5, 20, values.shape) * rng.choice([-1, 1], values.shape)
        values = values + spikes * (rng.random(values.shape) < SPIKE_SHARE)
    return math.log(true_ratio) + sd * values


def outcomes(log_ratios, limits=LIMITS):
    """Outcome and number of pairs of each run."""
    asked = {"min_speedup": limits.min_speedup, "confidence": limits.confidence, "max_pairs": limits.max_pairs}
    found = [first_outcome(run, **asked) for run in log_ratios]
    return np.array([outcome for outcome, _ in found]), np.array([num for _, num in found])


def decisions(log_ratios):
    """What becomes of each run: ``compiled`` or ``eager``."""
    return np.array([_decision(run) for run in log_ratios])


def _decision(run):
    pairs = [Sample(step=n, eager_s=math.exp(log_ratio), compiled_s=1.0) for n, log_ratio in enumerate(run)]
    counts = {"num_compiled_steps": 200, "num_steps_seen": 200}
    return judge(pairs, Compiles(graphs=1), limits=LIMITS, step=200, config={}, **counts).decision


@pytest.mark.parametrize("noise", NOISES)
def test_at_the_margin_at_most_five_percent_decide(noise):
    """Where compiled is exactly as fast as asked for, both verdicts are wrong: at most 5 % of runs reach either."""
    found, _ = outcomes(simulated(LIMITS.min_speedup, noise))
    gain, no_gain = np.mean(found == "gain"), np.mean(found == "no_gain")
    assert gain + no_gain <= 0.05
    assert max(gain, no_gain) <= 0.03  # neither side is favoured: half of alpha each, and what 2000 runs scatter
    assert gain + no_gain > 0.001  # the rule can still decide: one that never does would pass for nothing


def test_correlation_would_break_the_bound_if_it_were_ignored():
    """Without the discount the correlated runs exceed 5 %: the simulated harm is real, and the discount repairs it."""
    signs = simulated(LIMITS.min_speedup, "correlated") > math.log(LIMITS.min_speedup)
    wins, trials = np.cumsum(signs, axis=1), np.arange(1, signs.shape[1] + 1)
    evidence = np.maximum(log_e_value(wins, trials), log_e_value(trials - wins, trials))
    assert np.mean(evidence.max(axis=1) >= math.log(2 / (1 - LIMITS.confidence))) > 0.06


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(("true_ratio", "right"), [(0.90, "eager"), (1.15, "compiled")])
def test_a_clear_case_is_decided_rightly(noise, true_ratio, right):
    """A true 0.90 falls back and a true 1.15 is kept in at least 99 % of runs, within 15 pairs in the median."""
    runs = simulated(true_ratio, noise)
    assert np.mean(decisions(runs) == right) >= 0.99
    if noise == "independent":
        found, num_pairs = outcomes(runs)
        assert np.mean(found == ("gain" if right == "compiled" else "no_gain")) >= 0.99
        assert np.median(num_pairs) <= 15


@pytest.mark.parametrize("sd", [0.02, SD])
def test_a_compiler_that_changes_nothing_is_not_called_a_gain(sd):
    """At a true ratio of 1.00, with 1.02 asked for, a gain is claimed in at most half of alpha of the runs."""
    found, _ = outcomes(simulated(1.0, "spikes", sd=sd))
    assert np.mean(found == "gain") <= 0.025
    assert np.mean(np.isin(found, ("no_gain", "inconclusive"))) >= 0.975
    assert np.mean(found == "no_gain") > (0.8 if sd < SD else 0.02)


# The monitor. Measuring may take 2 % of the time and a pair costs four passes at the very least (an untimed and a
# timed one of each arm), so pairs are 200 steps apart or more: 100,000 steps hold at most 500.
PAIRS_IN_100_000_STEPS = 500


def test_the_monitor_returns_to_eager_falsely_at_most_once_in_100_000_steps():
    """At a true 1.10, with spikes, fewer than 1 % of runs of 100,000 steps see one false return to eager."""
    runs = simulated(1.10, "spikes", num_runs=NUM_RUNS, num_pairs=PAIRS_IN_100_000_STEPS)
    assert np.mean([lost(run) for run in runs.tolist()]) < 0.01
    # Measured as densely as before the decision, every 5 steps: 20,000 pairs, still less than one false return.
    dense = simulated(1.10, "spikes", num_runs=20, num_pairs=20_000)
    assert sum(lost(run) for run in dense.tolist()) < 20


@pytest.mark.parametrize(("true_ratio", "expected"), [(0.90, 11.3), (0.95, 18.9), (1.00, 72.0)])
def test_the_monitor_finds_a_loss_as_fast_as_it_says(true_ratio, expected):
    """The mean number of pairs to the alarm is the one in the docstring, which a Markov chain gives."""
    assert mean_pairs_to_alarm(true_ratio) == pytest.approx(expected, rel=0.02)
    runs = simulated(true_ratio, "spikes", num_runs=1000, num_pairs=600).tolist()
    delays = [alarm_after(run) for run in runs]
    assert np.mean(delays) == pytest.approx(expected, rel=0.1)


def test_the_false_alarms_in_the_docstring_are_the_ones_computed():
    """A false alarm at 1.10 comes once in 368,000 pairs."""
    assert mean_pairs_to_alarm(1.10) == pytest.approx(368_000, rel=0.02)


def mean_pairs_to_alarm(true_ratio):
    """The exact mean: the CUSUM is a Markov chain with an absorbing top."""
    loss = (1 - SPIKE_SHARE) * stats.norm.cdf(-math.log(true_ratio) / SD) + SPIKE_SHARE / 2
    move = np.zeros((NET_LOSSES, NET_LOSSES))
    for net in range(NET_LOSSES):
        move[net, max(net - 1, 0)] += 1 - loss
        if net + 1 < NET_LOSSES:
            move[net, net + 1] += loss
    return float(np.linalg.solve(np.eye(NET_LOSSES) - move, np.ones(NET_LOSSES))[0])


def alarm_after(run):
    """Pairs up to the alarm, by bisection: an alarm is not taken back."""
    low, high = 0, len(run)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if lost(run[:middle]) else (middle, high)
    return high


def table():
    """One line per case: wrong or right verdicts in percent, pairs to the decision, what becomes of the run."""
    yield "true ratio  noise              gain %  no_gain %  inconclusive %  median pairs  compiled %"
    for true_ratio in (LIMITS.min_speedup, 1.0, 0.90, 1.15):
        for noise in NOISES:
            runs = simulated(true_ratio, noise)
            found, num_pairs = outcomes(runs)
            shares = [100 * np.mean(found == outcome) for outcome in ("gain", "no_gain", "inconclusive")]
            kept = 100 * np.mean(decisions(runs) == "compiled")
            figures = (
                f"{shares[0]:6.2f}  {shares[1]:9.2f}  {shares[2]:14.2f}  {np.median(num_pairs):12.0f}  {kept:10.2f}"
            )
            yield f"{true_ratio:10.2f}  {noise:17s}  {figures}"


if __name__ == "__main__":
    for line in table():
        print(line)
