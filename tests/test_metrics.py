"""Drift metrics: whatever the gradients are, and over ranks as over one process."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from compile_profiler.drift import Outcome, compare
from compile_profiler.metrics import GradientCosine, GradientDrift, LossDrift


def batches(num=4):
    """Losses and gradients of both arms: complex, half, empty, zero and missing ones among them."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(num):
        eager = {
            "real": torch.randn(5, generator=generator),
            "complex": torch.randn(3, generator=generator, dtype=torch.complex64),
            "half": torch.randn(4, generator=generator).half(),
            "empty": torch.empty(0, 2),
            "zero": torch.zeros(3),
            "unused": None,
            "lost": torch.randn(2, generator=generator),
        }
        compiled = {name: None if g is None else g * 1.01 for name, g in eager.items() if name != "lost"}
        yield torch.rand((), generator=generator), torch.rand((), generator=generator), eager, compiled


def updated(which):
    loss, drift, cosine = LossDrift(), GradientDrift(), GradientCosine()
    for eager_loss, compiled_loss, eager, compiled in which:
        loss.update(eager_loss, compiled_loss)
        drift.update(eager, compiled)
        cosine.update(eager, compiled)
    return loss, drift, cosine


def test_one_batch_is_what_the_function_says():
    eager_loss, compiled_loss, eager, compiled = next(iter(batches()))
    expected = compare(
        Outcome(loss=eager_loss, gradients=eager),
        Outcome(loss=compiled_loss, gradients=compiled),
        noise_floor=None,
        rng="none",
        tolerance=None,
    )

    found = [float(metric.compute()) for metric in updated(list(batches())[:1])]

    assert found == pytest.approx([expected.loss_rel, expected.grad_rel, expected.grad_cosine], rel=1e-12)


def test_several_batches_are_one_long_vector():
    """As if all gradients of all batches stood in one row; and a reset forgets them."""
    every = list(batches())
    eager, compiled = (
        torch.cat(
            [
                torch.view_as_real(g).flatten().double() if g.is_complex() else g.flatten().double()
                for batch in every
                for name in batch[2]
                if batch[2][name] is not None
                for g in [batch[side].get(name, torch.zeros_like(batch[2][name]))]
            ]
        )
        for side in (2, 3)
    )
    _, drift, cosine = updated(every)

    assert float(drift.compute()) == pytest.approx(float((compiled - eager).norm() / eager.norm()), rel=1e-12)
    assert float(cosine.compute()) == pytest.approx(float(torch.cosine_similarity(eager, compiled, dim=0)), rel=1e-9)
    drift.reset()
    drift.update({"w": torch.zeros(2)}, {"w": torch.zeros(2)})
    assert float(drift.compute()) == 0.0
    drift.update({"w": torch.zeros(2)}, {"w": torch.ones(2)})
    assert float(drift.compute()) == float("inf")


def on_one_rank(rank, port, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        mine = list(batches())[rank::2]
        results.put((rank, [float(metric.compute()) for metric in updated(mine)]))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def test_two_ranks_give_what_one_process_gives():
    """Each sees half of the batches; both give the same, which is that of all batches."""
    context = mp.get_context("spawn")
    results = context.Queue()
    mp.spawn(on_one_rank, args=(free_port(), results), nprocs=2)
    found = dict(results.get(timeout=30) for _ in range(2))
    expected = [float(metric.compute()) for metric in updated(batches())]

    assert found[0] == found[1]
    assert found[0] == pytest.approx(expected, rel=1e-12)


def free_port():
    import socket

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]
