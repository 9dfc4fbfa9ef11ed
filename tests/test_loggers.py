"""Every tag reaches every logger, at the step at which the user's own values stand."""

import csv
from pathlib import Path

import lightning.pytorch as pl
import pytest

from compile_profiler import CompileProfiler
from compile_profiler.scalars import CHARTS, EVENTS_TAG, SCALARS, VERDICT_TAG
from runs import InMemoryLogger, Regression, sleepy, train

TAGS = {scalar.tag for scalar in SCALARS}


@pytest.mark.parametrize("log_every_n_steps", [1, 5])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_event_file_read_back_holds_every_tag_where_the_users_values_stand(tmp_path, log_every_n_steps):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = pl.loggers.TensorBoardLogger(tmp_path)
    profiler = CompileProfiler(backend="eager", fallback=False, verbose=False)
    train(Regression, [profiler], logger=logger, log_every_n_steps=log_every_n_steps, max_steps=60)
    events = EventAccumulator(logger.log_dir, size_guidance={"tensors": 0, "scalars": 0}).Reload()
    own = {event.step for event in events.Scalars("loss_step")}

    assert own == {step for step in range(60) if (step + 1) % log_every_n_steps == 0}
    assert profiler.report.speedup.num_pairs >= 8
    for tag in TAGS:
        assert {event.step for event in events.Scalars(tag)} <= own, tag
    texts = {tag.removesuffix("/text_summary") for tag in events.Tags()["tensors"]}
    assert {VERDICT_TAG, EVENTS_TAG} <= texts


def test_what_is_logged_last_is_what_the_report_says():
    logger = InMemoryLogger()
    profiler = CompileProfiler(backend=sleepy(0.003), verbose=False)
    train(Regression, [profiler], logger=logger, log_every_n_steps=7)
    last = {tag: value for _, row in logger.rows for tag, value in row.items() if tag in TAGS}
    report = profiler.report

    assert last["compile/speedup"] == report.speedup.median
    assert last["compile/speedup_low"] == report.speedup.low
    assert last["compile/step_ms/compiled"] == pytest.approx(1000 * report.time.compiled_s)
    assert last["compile/graphs"] == report.compiles.graphs == 1
    assert last["compile/active"] == 0


def test_the_active_arm_is_one_until_the_run_goes_back_to_eager():
    logger = InMemoryLogger()
    profiler = CompileProfiler(backend=sleepy(0.003), verbose=False)
    train(Regression, [profiler], logger=logger)
    active = [(step, row["compile/active"]) for step, row in logger.rows if "compile/active" in row]
    decided = profiler.report.verdict.step

    assert {value for step, value in active if step < decided} == {1}
    assert {value for step, value in active if step >= decided} == {0}


def test_two_loggers_both_get_everything(tmp_path):
    memory = InMemoryLogger()
    loggers = [memory, pl.loggers.CSVLogger(tmp_path, name="", version="")]
    train(Regression, [CompileProfiler(backend="eager", fallback=False, verbose=False)], logger=loggers)
    with next(Path(tmp_path).rglob("metrics.csv")).open() as file:
        columns = set(csv.DictReader(file).fieldnames)

    assert columns >= TAGS
    assert {tag for _, row in memory.rows for tag in row} >= TAGS


def test_a_logger_that_refuses_costs_a_warning_and_not_the_run():
    class Refuses(InMemoryLogger):
        def log_metrics(self, metrics, step=None):
            if any(tag in TAGS for tag in metrics):
                raise OSError("disk full")

    profiler = CompileProfiler(backend="eager", fallback=False, verbose=False)
    with pytest.warns(UserWarning, match="a logger refused the scalars.*disk full"):
        _, trainer = train(Regression, [profiler], logger=Refuses())

    assert trainer.global_step == 60


def test_log_false_sends_nothing():
    logger = InMemoryLogger()
    train(Regression, [CompileProfiler(backend="eager", verbose=False, log=False)], logger=logger)

    assert not [row for _, row in logger.rows if TAGS & set(row)]


def layouts(folder):
    """The Custom Scalars layouts that TensorBoard reads in a folder, in order."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    found = events.Tensors(metadata.CONFIG_SUMMARY_TAG)
    return [layout_pb2.Layout.FromString(event.tensor_proto.string_val[0]) for event in found]


def fitted_again(logger, module_class=Regression):
    """A short fit that logs into the folder of ``logger``."""
    again = pl.loggers.TensorBoardLogger(logger.save_dir, name=logger.name, version=logger.version)
    profiler = CompileProfiler(backend="eager", fallback=False, verbose=False, pair_every_n_steps=1, warmup_steps=1)
    train(module_class, [profiler], logger=again, max_steps=20)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_a_layout_of_charts_once_for_a_folder(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = pl.loggers.TensorBoardLogger(tmp_path, version=0)
    fitted_again(logger)
    fitted_again(logger)
    (layout,) = layouts(logger.log_dir)
    (category,) = layout.category
    logged = set(EventAccumulator(logger.log_dir).Reload().Tags()["scalars"])
    margin = category.chart[0].margin.series[0]

    assert category.title == "compile"
    assert [chart.title for chart in category.chart] == [chart.title for chart in CHARTS]
    assert (margin.value, margin.lower, margin.upper) == CHARTS[0].tags
    assert {tag for chart in CHARTS for tag in chart.tags} <= logged


@pytest.mark.parametrize("hook", ["setup", "on_train_start", "on_train_batch_end"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_layout_of_the_users_own_is_the_one_that_is_shown(tmp_path, hook):
    """TensorBoard shows a run's last layout, so ours must not come after theirs, and may come before."""

    class HasLayout(Regression):
        pass

    def add(module, *args, **kwargs):
        if not getattr(module, "done", False):
            module.done = True
            module.logger.experiment.add_custom_scalars({"mine": {"loss": ["Multiline", ["loss"]]}})

    setattr(HasLayout, hook, add)
    logger = pl.loggers.TensorBoardLogger(tmp_path, version=0)
    fitted_again(logger, HasLayout)

    assert layouts(logger.log_dir)[-1].category[0].title == "mine"


@pytest.mark.parametrize(("max_steps", "logged"), [(20, 1), (60, 4)])
def test_the_speedup_is_logged_together_with_its_band_or_once_at_the_end(max_steps, logged):
    """TensorBoard draws no band whose curves begin at different steps."""
    logger = InMemoryLogger()
    profiler = CompileProfiler(backend="eager", fallback=False, verbose=False)
    train(Regression, [profiler], logger=logger, max_steps=max_steps)
    middle, low, high = (logger.steps_of(tag) for tag in CHARTS[0].tags)

    assert len(middle) >= logged
    assert middle == low == high or (len(middle), low, high) == (1, [], [])
    assert (profiler.report.speedup.low is None) == (not low)
