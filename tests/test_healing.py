"""heal=True mends what can be mended in the compiled target, shows it, and says whether it has helped."""

import pytest
import torch
import torch._dynamo

import compile_cases as cases
from compile_cases import line_of
from compile_profiler import CompileProfiler
from compile_profiler.healing import HEAL_AFTER
from runs import differences, left_behind, train
from test_explain import console, fitted  # noqa: F401  (a fixture)

pytestmark = pytest.mark.filterwarnings("ignore:CompileProfiler.* torch stops compiling it")
HEAL = {"heal": True, "backend": "eager", "run": {"max_steps": 24}}
FEW = HEAL_AFTER + 3


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("module_class", "change", "options", "run"),
    [
        (cases.VaryingLength, "dynamic=True", {"dynamic": False}, {"max_steps": 24}),
        (cases.CountsItself, "self.n as a symbolic integer", {}, {"max_steps": 24}),
        (cases.CountsInAHelper, "self.n as a symbolic integer", {"dynamic": False}, {"max_steps": 24}),
        (cases.ReadsGlobalStep, "self.global_step as a symbolic integer", {}, {"max_steps": 24}),
        (
            cases.ReadsCurrentEpoch,
            "self.current_epoch as a symbolic integer",
            {},
            {"max_epochs": 24, "max_steps": -1, "limit_train_batches": 1},
        ),
    ],
)
def test_what_varies_on_every_step_heals_to_a_few_graphs(module_class, change, options, run):
    """Twenty lengths, a counter of the module's, Lightning's own: neither a storm nor the limit."""
    report, messages = fitted(module_class, **{**HEAL, "run": run}, **options)
    (remedy,) = report.compiles.remedies

    assert report.verdict.decision == "compiled"
    assert report.compiles.graphs <= FEW
    assert report.compiles.limit_hits == 0
    assert messages == []
    assert (remedy.change, remedy.helped) == (change, True)
    assert (remedy.steps_before, remedy.recompiles_before) == (HEAL_AFTER + 1, HEAL_AFTER)
    assert remedy.recompiles_after <= 2
    assert remedy.steps_after >= 16
    assert report.verdict.config["healed"] == [change]


def test_healing_is_told_with_place_reason_and_result(console):  # noqa: F811
    fitted(cases.CountsItself, **HEAL, verbose=True)
    lines = [line for line in console.all if "healing" in line]

    assert [line.partition(": ")[2] for line in lines] == [
        f"healing at step 5: training_step (compile_cases.py:{line_of(cases.CountsItself)}) is compiled anew with "
        "self.n as a symbolic integer, after 5 recompiles in 6 steps.",
        "healing with self.n as a symbolic integer has helped: 0 recompiles in 16 steps, after 5 in 6 before.",
    ]


def test_where_healing_does_not_help_it_says_so_and_ends_as_without():
    report, (warning,) = fitted(cases.UnrollsTheLength, **HEAL, dynamic=False)
    (remedy,) = report.compiles.remedies
    torch._dynamo.reset()
    without, _ = fitted(cases.UnrollsTheLength, backend="eager", dynamic=False)

    assert (remedy.change, remedy.helped) == ("dynamic=True", False)
    assert "heal=True cannot mend this" in warning
    assert (report.verdict.decision, report.verdict.reason) == (without.verdict.decision, without.verdict.reason)
    assert (report.verdict.decision, report.verdict.reason) == ("eager", "recompile_limit")
    assert "although it was healed with dynamic=True" in report.verdict.message


@pytest.mark.parametrize("module_class", [cases.GrowsAList, cases.FreshClass])
def test_what_cannot_be_mended_without_touching_user_code_is_left_alone(module_class):
    report, (warning,) = fitted(module_class, **HEAL)

    assert report.compiles.remedies == ()
    assert "heal=True cannot mend this" in warning
    assert report.verdict.reason == "recompile_limit"


@pytest.mark.parametrize("module_class", [cases.EveryThirdBatch, cases.RaggedTail, cases.AnnealsFloat])
def test_what_settles_by_itself_is_not_healed(module_class):
    report, _ = fitted(module_class, **HEAL)

    assert report.compiles.remedies == ()
    assert report.verdict.decision == "compiled"


def test_healing_is_measured_by_pairs_of_the_healed_target_alone():
    options = {**HEAL, "run": {"max_steps": 40}, "max_pairs": 10, "pair_every_n_steps": 1, "fallback": False}
    report, _ = fitted(cases.CountsItself, **options)

    assert report.compiles.remedies[0].helped
    assert report.speedup.num_pairs >= 5
    assert report.verdict.reason in ("gain", "no_gain", "inconclusive", "pending")


def test_healing_computes_the_same_and_leaves_nothing_switched_on():
    config = torch._dynamo.config
    before = config.save_config()
    plain = left_behind(*train(cases.CountsItself, max_steps=24, validate=False))
    profiler = CompileProfiler(backend="eager", heal=True, max_pairs=0, verbose=False)
    healed = left_behind(*train(cases.CountsItself, [profiler], max_steps=24, validate=False))

    assert profiler.report.compiles.remedies[0].helped
    assert differences(plain, healed) == []
    assert config.save_config() == before
