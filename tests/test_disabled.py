"""Where torch.compile is switched off, the verdict names the switch and training goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo

import compile_cases as cases
from compile_profiler import CompileProfiler
from runs import differences, left_behind, train

pytestmark = pytest.mark.filterwarnings("ignore:CompileProfiler. Nothing is compiled")
RUN = {"max_steps": 4, "validate": False}


def fitted(module_class=cases.Case):
    profiler = CompileProfiler(backend="eager", verbose=False, log=False)
    return left_behind(*train(module_class, [profiler], **RUN)), profiler.report.verdict


@pytest.fixture
def plain():
    return left_behind(*train(cases.Case, **RUN))


@pytest.mark.parametrize(
    ("stance", "effect"),
    [
        ("force_eager", "leaves everything in eager"),
        ("eager_on_recompile", "compiles nothing new"),
        ("fail_on_recompile", "forbids to compile anything new"),
    ],
)
def test_a_stance_that_compiles_nothing_is_named(stance, effect, plain):
    with torch.compiler.set_stance(stance):
        left, verdict = fitted()

    assert (verdict.decision, verdict.reason) == ("eager", "disabled")
    assert verdict.message == f"Nothing is compiled: torch.compiler.set_stance('{stance}') {effect}."
    assert differences(plain, left) == []


class SetsAStance(cases.Case):
    """Takes the stance when the fit has begun."""

    def on_train_start(self):
        torch.compiler.set_stance("force_eager")

    def on_train_end(self):
        torch.compiler.set_stance("default")


def test_a_stance_taken_after_the_fit_has_begun_is_named():
    _, verdict = fitted(SetsAStance)

    assert (verdict.decision, verdict.reason) == ("eager", "disabled")
    assert "set_stance('force_eager')" in verdict.message


@pytest.mark.parametrize("stance", ["default", "eager_then_compile"])
def test_a_stance_that_compiles_is_no_obstacle(stance):
    with torch.compiler.set_stance(stance):
        _, verdict = fitted()

    assert verdict.reason != "disabled"


def test_the_setting_is_named(plain):
    with torch._dynamo.config.patch(disable=True):
        left, verdict = fitted()

    assert (verdict.decision, verdict.reason) == ("eager", "disabled")
    assert verdict.message == "Nothing is compiled: torch._dynamo.config.disable switches torch.compile off."
    assert differences(plain, left) == []


def disabled_by(variable):
    return f"Nothing is compiled: the environment variable {variable}=1 switches torch.compile off."


def test_the_environment_variable_that_is_read_at_import_is_named():
    script = """if True:
        import json, test_disabled
        _, verdict = test_disabled.fitted()
        print(json.dumps([verdict.decision, verdict.reason, verdict.message]))
    """
    paths = [str(Path(cases.__file__).parent), str(Path(cases.__file__).parents[1] / "callbacks")]
    env = {**os.environ, "TORCH_COMPILE_DISABLE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr[-2000:]

    assert json.loads(done.stdout.splitlines()[-1]) == ["eager", "disabled", disabled_by("TORCH_COMPILE_DISABLE")]


def test_the_environment_variable_that_is_read_at_each_compile_is_named(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")

    assert fitted()[1].message == disabled_by("TORCHDYNAMO_DISABLE")
