"""Processes that Lightning itself starts: spawned, where the callback is pickled on its way, and forked."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

SCRIPT = """
import sys
import lightning.pytorch as pl
import torch
from compile_profiler import CompileProfiler
from runs import Regression, loaders


def weights_of(callbacks):
    torch.manual_seed(0)
    module = Regression()
    trainer = pl.Trainer(
        strategy=sys.argv[1], devices=2, accelerator="cpu", max_steps=12, callbacks=callbacks, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, default_root_dir=".",
        deterministic=True, limit_val_batches=0, log_every_n_steps=4, use_distributed_sampler=False,
    )
    trainer.fit(module, loaders()[0])
    return module.state_dict()


if __name__ == "__main__":
    profiler = CompileProfiler(backend="eager", fallback=False, verbose=False, warmup_steps=1, pair_every_n_steps=2)
    measured = weights_of([profiler])
    if sys.argv[1] == "ddp_fork":  # spawned processes import everything anew, which takes most of a minute
        plain = weights_of([])
        assert all(torch.equal(measured[name], plain[name]) for name in plain)
"""


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork"])
def test_ranks_that_lightning_starts_take_pairs_and_leave_one_report(strategy, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    paths = os.pathsep.join([str(HERE.parent / "callbacks"), str(HERE)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), strategy],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((tmp_path / "compile_profile.json").read_text())

    assert report["environment"]["world_size"] == report["ranks"]["num"] == 2
    assert report["speedup"]["num_pairs"] > 0
    assert report["verdict"]["decision"] != "eager"
