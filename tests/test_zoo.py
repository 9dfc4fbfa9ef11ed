"""No module of the zoo can tell that it was measured."""

import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest

from compile_profiler import CompileProfiler
from runs import Regression, differences, left_behind, train
from zoo import COMPILED_DIFFERS, ZOO

OPTIONS = {"backend": "eager", "fallback": False, "verbose": False, "warmup_steps": 1, "pair_every_n_steps": 2}
RUN = {"max_steps": 24, "limit_val_batches": 2}


@pytest.mark.parametrize("module_class", ZOO, ids=lambda kind: kind.__name__)
def test_a_module_with_a_hazard_trains_as_without_the_callback(module_class):
    """Everything that a run leaves behind is bit-identical, and pairs have been made."""
    profiler = CompileProfiler(**OPTIONS)
    unmeasured = [CompileProfiler(**OPTIONS, max_pairs=0)] if module_class in COMPILED_DIFFERS else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about what it does not trace
        plain = left_behind(*train(module_class, unmeasured, **RUN))
        measured = left_behind(*train(module_class, [profiler], **RUN))
    report = profiler.report

    assert differences(plain, measured) == []
    assert report.verdict.reason not in ("compile_error", "runtime_error", "unsupported")
    assert report.speedup.num_pairs > 0
    assert "error" not in report.speedup.void


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 7, "max_steps": -1, "max_epochs": 2},
        {"limit_train_batches": 9, "max_steps": -1, "max_epochs": 3, "accumulate_grad_batches": 2},
        {"inference_mode": False},
        {"val_check_interval": 5},
    ],
    ids=str,
)
def test_the_usual_trainer_arguments_change_nothing(options):
    """Clipping, accumulation with a last window that is not full, validation in mid-epoch."""
    profiler = CompileProfiler(**OPTIONS)
    plain = left_behind(*train(ZOO[0], **{**RUN, **options}))
    measured = left_behind(*train(ZOO[0], [profiler], **{**RUN, **options}))

    assert differences(plain, measured) == []
    assert profiler.report.speedup.num_pairs > 0
    assert "error" not in profiler.report.speedup.void


class TakesTheIterator(Regression):
    """The step takes its batches itself."""

    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)

    on_train_batch_start = pl.LightningModule.on_train_batch_start


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`.*experimental.*")
def test_a_step_that_takes_the_iterator_trains_on_plainly():
    """It cannot be run twice on one batch, and says so once."""
    profiler = CompileProfiler(**OPTIONS)
    plain = left_behind(*train(TakesTheIterator, **RUN))
    with pytest.warns(UserWarning, match="does not measure a training_step that takes the dataloader_iter"):
        measured = left_behind(*train(TakesTheIterator, [profiler], **RUN))

    assert (profiler.report.verdict.decision, profiler.report.verdict.reason) == ("eager", "unsupported")
    assert differences(plain, measured) == []


def test_the_page_of_limits_lists_the_zoo():
    """What is promised there is what is tested here."""
    page = (Path(__file__).parents[1] / "docs" / "limits.md").read_text(encoding="utf-8")
    rows = [f"| `{kind.__name__}` | {kind.__doc__.splitlines()[0]} |" for kind in ZOO]

    assert "\n".join(rows) in page


def test_the_comparison_can_fail():
    """Another seed shows."""
    first, second = (left_behind(*train(ZOO[0], seed=seed, **RUN)) for seed in (1, 2))

    assert "weights/net.0.weight" in differences(first, second)
    assert "batches" in differences(first, second)
