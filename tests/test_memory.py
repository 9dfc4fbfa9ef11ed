"""Memory does not grow with the fits of a process, and the check sees it where it does."""

import pytest
import torch

from benchmarks import memory

KIB = 1024
kept = []


def leaking(graph, example_inputs):
    """A backend that keeps 64 MiB for each graph, far more than a process that ran a thousand tests gives back."""
    kept.append(torch.ones(2**24))
    return graph.forward


@pytest.mark.parametrize(("backend", "number", "leaks"), [("eager", 20, False), (leaking, 10, True)])
@pytest.mark.filterwarnings("ignore")
def test_many_fits_in_one_process(backend, number, leaks):
    kept.clear()
    with memory.quiet():
        sizes = list(memory.sizes("fits", "callback", number=number, options={"backend": backend}, steps=6))
    slope_kib = memory.slope(sizes[5:]) / KIB
    kept.clear()

    assert slope_kib > 2048 if leaks else slope_kib < 700
