"""TensorBoard's HParams tab, asked for what it shows: runs with different modes side by side, the user's own kept."""

from pathlib import Path

import lightning.pytorch as pl
import pytest

from compile_profiler import CompileProfiler
from runs import Regression, train

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Tuned(Regression):
    """With hyperparameters, as most modules have them."""

    def __init__(self, width=3, name="a"):
        super().__init__()
        self.save_hyperparameters()


class ByHand(Regression):
    """Logs its hyperparameters itself, with a metric of its own."""

    def __init__(self, when):
        super().__init__()
        setattr(self, when, self.describe)

    def describe(self, *args, **kwargs):
        self.logger.log_hyperparams({"depth": 7}, {"own/metric": 0.5})


def tab(folder):
    """What TensorBoard answers its HParams page: the columns, and each run's hyperparameters and figures."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.hparams.hparams_plugin import HParamsPlugin
    from werkzeug.test import Client

    provider = MultiplexerDataProvider(EventMultiplexer().AddRunsFromDirectory(str(folder)).Reload(), str(folder))
    routes = HParamsPlugin(TBContext(data_provider=provider, logdir=str(folder))).get_plugin_apps()
    columns = Client(routes["/experiment"]).post(json={"experimentName": "", "includeMetrics": True}).json
    statuses = ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"]
    asked = {"experimentName": "", "allowedStatuses": statuses, "startIndex": 0, "sliceSize": 99, "colParams": []}
    groups = Client(routes["/session_groups"]).post(json=asked).json["sessionGroups"]
    names = {info["name"] for info in columns["hparamInfos"]}, {m["name"]["tag"] for m in columns["metricInfos"]}
    rows = {
        group["sessions"][0]["name"]: (
            group["hparams"],
            {value["name"]["tag"]: value["value"] for value in group["metricValues"]},
        )
        for group in groups
    }
    return names, rows


def fitted(folder, module, version=0, **options):
    """A short profiled fit of ``module``; its profiler and its logger."""
    logger = pl.loggers.TensorBoardLogger(folder, version=version, **options)
    profiler = CompileProfiler(backend=("eager", "aot_eager")[version], fallback=False, verbose=False)
    train(lambda: module, [profiler], logger=logger, max_steps=40)
    return profiler, logger


CONFIGURATION = {f"compile/{name}" for name in ("target", "backend", "mode", "dynamic", "fullgraph", "options")}


def test_runs_are_compared_by_what_was_compiled_how_and_by_their_figures(tmp_path):
    profilers = {f"lightning_logs/version_{n}": fitted(tmp_path, Regression(), n)[0] for n in (0, 1)}
    (hyperparameters, figures), rows = tab(tmp_path)

    assert hyperparameters == CONFIGURATION
    assert {"compile/speedup", "compile/speedup_low", "compile/recompiles", "compile/peak_mb/compiled"} <= figures
    assert [rows[run][0]["compile/backend"] for run in profilers] == ["eager", "aot_eager"]
    for run, profiler in profilers.items():
        assert rows[run][1]["compile/speedup"] == pytest.approx(profiler.report.speedup.median)
        assert rows[run][1]["compile/graphs"] == 1


def test_hyperparameters_of_the_users_own_stand_beside_ours(tmp_path):
    _, logger = fitted(tmp_path, Tuned())
    (hyperparameters, figures), rows = tab(tmp_path)
    (row,) = rows.values()

    assert hyperparameters == {"width", "name"} | CONFIGURATION
    assert (row[0]["width"], row[0]["name"], row[0]["compile/target"]) == (3, "a", "step")
    assert {"hp_metric", "compile/speedup"} <= figures
    assert (Path(logger.log_dir) / "hparams.yaml").read_text() == "name: a\nwidth: 3\n"
    assert dict(logger.hparams) == {"width": 3, "name": "a"}


@pytest.mark.parametrize("when", ["setup", "on_train_start", "on_train_batch_end", "on_train_end"])
def test_what_the_user_logs_by_hand_is_what_is_shown(tmp_path, when):
    fitted(tmp_path, ByHand(when), default_hp_metric=False)
    (hyperparameters, figures), _ = tab(tmp_path)

    assert (hyperparameters, figures) == ({"depth"}, {"own/metric"})


def test_no_scalar_is_made_up_for_the_tab(tmp_path):
    """What is not known has no point, also not the zero that TensorBoard's own function would log."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    profiler, logger = fitted(tmp_path, Tuned())
    events = EventAccumulator(logger.log_dir, size_guidance={"scalars": 0}).Reload()

    assert profiler.report.speedup.num_pairs
    assert min(event.step for event in events.Scalars("compile/speedup")) > 0
    assert len(events.Scalars("hp_metric")) == 1
