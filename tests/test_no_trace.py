"""A run cannot tell that it was measured."""

import pytest

from compile_profiler import CompileProfiler
from runs import Regression, differences, left_behind, train


@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_eager_backend_leaves_the_run_bit_identical_to_one_without_the_callback(accumulate):
    profiler = CompileProfiler(backend="eager", fallback=False, verbose=False, pair_every_n_steps=2)
    options = {"max_steps": 40, "accumulate_grad_batches": accumulate}
    plain = left_behind(*train(Regression, **options))
    measured = left_behind(*train(Regression, [profiler], **options))

    assert profiler.report.speedup.num_pairs > 5
    assert differences(plain, measured) == []


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 3])
def test_inductor_leaves_the_run_bit_identical_to_the_same_run_without_probes(accumulate):
    options = {"max_steps": 30, "accumulate_grad_batches": accumulate, "validate": False}
    kept = {"fallback": False, "verbose": False, "pair_every_n_steps": 2}
    profiler = CompileProfiler(**kept)
    observed = left_behind(*train(Regression, [CompileProfiler(**kept, max_pairs=0)], **options))
    measured = left_behind(*train(Regression, [profiler], **options))

    assert profiler.report.speedup.num_pairs > 3
    assert profiler.report.drift.rng == "unmatched"
    assert differences(observed, measured) == []
