"""Loggers that keep runs side by side: scalars, texts as files, and what a run is compiled with.

mlflow and wandb bring some fifty packages; `pip install mlflow-skinny wandb` makes these tests run.
"""

import json
from pathlib import Path

import lightning.pytorch as pl
import pytest

from compile_profiler import CompileProfiler
from compile_profiler.scalars import EVENTS_TAG, SCALARS, VERDICT_TAG, described
from runs import Regression, sleepy, train

TAGS = {scalar.tag for scalar in SCALARS} - {"compile/candidate"}  # that of a search


def profiled(logger):
    """A run that goes back to eager, so that its verdict changes once."""
    profiler = CompileProfiler(backend=sleepy(0.02), verbose=False)
    train(Regression, [profiler], logger=logger)
    return profiler


@pytest.mark.filterwarnings("ignore::Warning")
def test_mlflow_gets_scalars_texts_as_artifacts_and_the_configuration(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="needs mlflow-skinny, which is too large for every run of the tests")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow 3 asks for it
    logger = pl.loggers.MLFlowLogger(tracking_uri=f"file:{tmp_path}/runs")
    report = profiled(logger).report
    run = logger.experiment.get_run(logger.run_id)
    kept = Path(run.info.artifact_uri.removeprefix("file:"))

    assert run.data.metrics.keys() >= TAGS
    assert run.data.metrics["compile/speedup"] == pytest.approx(report.speedup.median)
    assert described(report.verdict.config).items() <= run.data.params.items()
    assert (kept / f"{VERDICT_TAG}.md").read_text().startswith("### eager: no\\_gain")
    assert "graph" in (kept / f"{EVENTS_TAG}.md").read_text()


@pytest.mark.filterwarnings("ignore::Warning")
def test_wandb_offline_gets_scalars_texts_as_tables_and_the_configuration(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs wandb, which is too large for every run of the tests")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = pl.loggers.WandbLogger(save_dir=tmp_path, offline=True)
    report = profiled(logger).report
    summary = {key: logger.experiment.summary[key] for key in TAGS}
    config = dict(logger.experiment.config)
    logger.experiment.finish()
    tables = {path.name.partition("_")[0]: json.loads(path.read_text()) for path in tmp_path.rglob("*.table.json")}

    assert summary["compile/speedup"] == pytest.approx(report.speedup.median)
    assert described(report.verdict.config).items() <= config.items()
    assert tables["verdict"]["data"][0][0].startswith("### ")
    assert "graph" in tables["events"]["data"][0][0]
    assert len(list(tmp_path.rglob("verdict_*.table.json"))) <= 3  # at the start, the decision, the end
