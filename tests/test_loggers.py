"""Every tag reaches every logger, at the step at which the user's own values stand."""

import csv
from pathlib import Path

import lightning.pytorch as pl
import pytest

from compile_profiler import CompileProfiler, Report
from compile_profiler.export import Export
from compile_profiler.records import Compiles, Event, Speedup, Time, Verdict
from compile_profiler.results import CandidateResult, SearchReport, Switch
from compile_profiler.scalars import CHARTS, EVENTS_TAG, SCALARS, SEARCH_CHART, SEARCH_TAG, VERDICT_TAG
from runs import Files, InMemoryLogger, Regression, fit, sleepy, train

TAGS = {scalar.tag for scalar in SCALARS} - {"compile/candidate"}  # that of a search


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
    profiler = CompileProfiler(backend=sleepy(0.02), verbose=False)
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
    profiler = CompileProfiler(backend=sleepy(0.02), verbose=False)
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


def exported(folder, **trainer_options):
    """An export of reports into an event file, and the trainer whose logger writes it."""
    logger = pl.loggers.TensorBoardLogger(folder, version=0)
    trainer = fit(Regression(), logger=logger, max_steps=1, **trainer_options)
    return Export(trainer, folder, log=True, verbose=False), logger


def written(logger):
    """Bytes of the event files of ``logger``."""
    logger.experiment.flush()
    return sum(file.stat().st_size for file in Path(logger.log_dir).glob("*tfevents*"))


def pair_number(number, num_places):
    """The report after so many pairs of a run in which the compiler was busy in so many places."""
    events = tuple(
        Event(step=n, epoch=0, stage="train", kind="recompile", file=f"model_{n}.py", line=n, detail="x" * 200)
        for n in range(num_places)
    )
    spread = 1 / (1 + number)
    return Report(
        verdict=Verdict(decision="compiled", reason="gain", message="It pays.", step=40),
        speedup=Speedup(median=2.0, low=2 - spread, high=2 + spread, num_pairs=number),
        time=Time(eager_s=0.2, compiled_s=0.1, compile_s=9.0, saved_s=0.1 * number - 9, overhead_pct=spread),
        compiles=Compiles(graphs=1, events=events),
    )


def test_an_event_file_grows_by_little_for_each_pair(tmp_path):
    """400 pairs are those of 20,000 steps at 50 steps apart, ten times as many as the budget allows cheap steps."""
    export, logger = exported(tmp_path)
    before = written(logger)
    for number in range(400):
        export.log(pair_number(number, num_places=200), step=50 * number)

    assert 400 * 500 < written(logger) - before < 400 * 4_000


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_text_is_written_again_only_if_it_has_changed(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    export, logger = exported(tmp_path)
    for step, report in enumerate([pair_number(1, 1), pair_number(1, 1), pair_number(2, 1), pair_number(2, 2)]):
        export.log(report, step)
    logger.experiment.flush()
    events = EventAccumulator(logger.log_dir, size_guidance={"tensors": 0, "scalars": 0}).Reload()

    assert [event.step for event in events.Tensors(f"{VERDICT_TAG}/text_summary")] == [0, 2]
    assert [event.step for event in events.Tensors(f"{EVENTS_TAG}/text_summary")] == [0, 3]
    assert [event.step for event in events.Scalars("compile/speedup")] == [0, 1, 2, 3]
    assert f"{SEARCH_TAG}/text_summary" not in events.Tags()["tensors"]
    assert "compile/candidate" not in events.Tags()["scalars"]


def search_after(num_pairs, *, num_tried, num=24):
    """A search of so many candidates, the last one tried being measured in so many pairs."""
    names = [f"step/mode-{n}" for n in range(num)]
    tried = [
        CandidateResult(name=name, target="step", step=n, status="dropped", why="0.90x eager in a pass")
        for n, name in enumerate(names[: num_tried - 1])
    ]
    now = CandidateResult(
        name=names[num_tried - 1], target="step", step=num_tried, status="tried", num_pairs=num_pairs, speedup=1.5
    )
    left = [CandidateResult(name=name, target="step", why=f"waits for {name}") for name in names[num_tried:]]
    return SearchReport(candidates=(*tried, now, *left), switches=(Switch(step=0, name="eager"),))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_table_of_candidates_is_written_again_only_if_one_gets_further(tmp_path):
    """Its figures change with every pair: a file that kept each of them would have no bounds."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    export, logger = exported(tmp_path)
    before = written(logger)
    for step in range(384):  # 24 candidates with the 16 pairs that one may take
        export.log(Report(search=search_after(step % 16, num_tried=1 + step // 16)), step)
    export.log(Report(search=search_after(16, num_tried=24)), 384, last=True)
    grown = written(logger) - before
    events = EventAccumulator(logger.log_dir, size_guidance={"tensors": 0, "scalars": 0}).Reload()
    texts = events.Tensors(f"{SEARCH_TAG}/text_summary")

    assert [event.step for event in texts] == [*range(0, 384, 16), 384]
    assert b"16 pairs" in texts[-1].tensor_proto.string_val[0]
    assert grown < 384 * 2_500


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_search_is_logged_with_its_table_and_what_training_runs_on(search_on_disk):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    search = search_on_disk.report.search
    events = EventAccumulator(str(search_on_disk.events), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    places = {"eager": 0, **{one.name: place for place, one in enumerate(search.candidates, start=1)}}
    curve = [(event.step, event.value) for event in events.Scalars("compile/candidate")]
    table = events.Tensors(f"{SEARCH_TAG}/text_summary")[-1].tensor_proto.string_val[0].decode()

    assert [switch.name for switch in search.switches] == ["eager", "forward/default"]
    switched_at = search.switches[-1].step
    assert {value for step, value in curve if step < switched_at} == {places["eager"]}
    assert {value for step, value in curve if step >= switched_at} == {places["forward/default"]} == {3}
    assert "| 3 | forward/default | chosen |" in table
    assert SEARCH_CHART.title in [chart.title for chart in layouts(search_on_disk.events)[0].category[0].chart]


def test_a_logger_that_makes_files_gets_the_table_of_candidates_at_the_decision_and_at_the_end(search_on_disk):
    texts = [text for key, text in search_on_disk.files.texts if key == SEARCH_TAG]

    assert 1 <= len(texts) <= 3
    assert "forward/default | chosen" in texts[-1]


def test_a_logger_that_makes_files_gets_a_text_at_changes_of_the_decision_and_what_is_compiled_how():
    logger = Files()
    profiler = CompileProfiler(backend=sleepy(0.02), verbose=False)
    train(Regression, [profiler], logger=logger)
    cards = [text.partition("\n")[0] for key, text in logger.texts if key == VERDICT_TAG]

    assert cards[0] == "### undecided: pending"
    assert set(cards[1:]) == {"### eager: no\\_gain"}
    assert len(cards) <= 3
    assert logger.described["compile/target"] == "step"
    assert logger.described["compile/mode"] == "default"


def test_a_logger_that_refuses_the_configuration_still_gets_the_scalars():
    class Refuses(InMemoryLogger):
        def log_hyperparams(self, params, *args, **kwargs):
            raise ValueError("parameters cannot be changed")

    logger = Refuses()
    with pytest.warns(UserWarning, match="a logger refused the configuration: ValueError: parameters cannot"):
        train(Regression, [CompileProfiler(backend="eager", fallback=False, verbose=False)], logger=logger)

    assert {tag for _, row in logger.rows for tag in row} >= TAGS


def test_the_file_of_hyperparameters_that_csv_keeps_stays_the_users(tmp_path):
    class Tuned(Regression):
        def __init__(self, width=3):
            super().__init__()
            self.save_hyperparameters()

    logger = pl.loggers.CSVLogger(tmp_path)
    train(Tuned, [CompileProfiler(backend="eager", verbose=False)], logger=logger, max_steps=10)

    assert (Path(logger.log_dir) / "hparams.yaml").read_text() == "width: 3\n"
