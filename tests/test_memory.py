"""Memory does not grow with the fits of a process, and the check sees it where it does."""

import pytest
import torch

from benchmarks import memory

KIB = 1024
kept = []


def leaking(graph, example_inputs):
    """A backend that keeps a MiB for each graph."""
    kept.append(torch.ones(2**18))
    return graph.forward


@pytest.mark.parametrize(("backend", "leaks"), [("eager", False), (leaking, True)])
@pytest.mark.filterwarnings("ignore")
def test_twenty_fits_in_one_process(backend, leaks):
    kept.clear()
    with memory.quiet():
        sizes = list(memory.sizes("fits", "callback", number=20, options={"backend": backend}, steps=8))
    slope_kib = memory.slope(sizes[5:]) / KIB
    kept.clear()

    assert (slope_kib > 700) is leaks
