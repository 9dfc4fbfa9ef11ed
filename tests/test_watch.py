"""The watch between pairs: what it notices, how often, and that it costs next to nothing."""

import time

import pytest
import torch

from compile_profiler.scaling import LossScale
from compile_profiler.watch import Watch

FINE, BAD = torch.tensor(1.0), torch.tensor(float("nan"))


def alarms(watch, losses):
    found = []
    for n, loss in enumerate(losses):
        watch.see(loss)
        if watch.alarm is not None:
            found.append(n)
            watch.rest()
    return found


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_every_kind_of_loss_that_is_not_finite_is_noticed(bad, dtype):
    losses = [torch.tensor(value, dtype=dtype) for value in (1.0, 0.0, bad, 1.0)]

    assert alarms(Watch(LossScale(None), rest_steps=1), losses) == [2]


def test_after_an_alarm_it_rests_and_longer_each_time():
    assert alarms(Watch(LossScale(None), rest_steps=3), [BAD] * 30) == [0, 3, 9, 21]


def test_a_scale_that_has_fallen_is_a_step_that_was_skipped():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(FINE)
    watch = Watch(LossScale(scaler), rest_steps=1)
    watch.see(FINE)
    scaler.update(4.0)
    watch.see(FINE)

    assert (watch.alarm, watch.scale_before) == ("skip", 8.0)
    watch.rest()
    scaler.update(16.0)
    watch.see(FINE)
    watch.see(FINE)
    assert watch.alarm is None


def test_a_step_without_a_loss_is_no_alarm():
    watch = Watch(LossScale(None), rest_steps=1)

    assert alarms(watch, [None, torch.tensor([torch.nan, 1.0]), torch.empty(0)]) == []


def test_a_look_costs_little_more_than_reading_a_number():
    """Not a synchronisation, an allocation or a kernel: a few times what ``item`` takes."""
    watch, num = Watch(LossScale(None), rest_steps=1), 2000
    looks_s, reads_s = [], []
    for _ in range(7):
        for seconds, call in ((looks_s, watch.see), (reads_s, torch.Tensor.item)):
            began_s = time.perf_counter()
            for _ in range(num):
                call(FINE)
            seconds.append(time.perf_counter() - began_s)

    assert min(looks_s) < 10 * min(reads_s)
