"""What the compiler did is told right: kind, owner, cause, place and count of every case, in real fits."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch._dynamo import callback as dynamo_callback
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.callback import callback_handler

import compile_cases as cases
from compile_cases import line_of
from compile_expectations import EPOCHS, LIMIT, OLD, SETTLED, STEP, STORMS, markdown_table
from compile_profiler import CompileProfiler
from compile_profiler.causes import detail_of, explain_break, explain_recompile
from compile_profiler.compiler import Sources
from compile_profiler.observe import Observer
from runs import Regression, train

# torch's own, at a graph break; as errors they would fail the compiling.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin"),
    pytest.mark.filterwarnings("ignore:CompileProfiler.* torch stops compiling it"),  # tests/test_explain.py has these
]

FILE = cases.__file__


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """torch remembers by code which sizes varied in an earlier fit."""
    torch._dynamo.reset()


def observed(module_class, backend="aot_eager", target="step", stages=("train",), **options):
    """What the report of a real fit says about compiling."""
    profiler = CompileProfiler(
        target, backend=backend, stages=stages, fallback=False, max_pairs=0, verbose=False, log=False
    )
    train(module_class, [profiler], **{"max_steps": 25, **options})
    return profiler.report.compiles


def not_zero(compiles):
    return {name: getattr(compiles, name) for name in COUNTS if getattr(compiles, name)}


BATCH, TAIL = "(8, 8):float32 (8, 1):float32", "(3, 8):float32 (3, 1):float32"


def told(event):
    return event.kind, event.owner, event.cause, event.line, event.function, event.count


@pytest.mark.parametrize("module_class", SETTLED, ids=lambda module_class: module_class.__name__)
def test_each_case_has_its_kind_owner_cause_place_and_count(module_class):
    counts, expected = SETTLED[module_class]

    compiles = observed(module_class)
    found = [event for event in compiles.events if event.kind != "graph"]

    assert not_zero(compiles) == counts
    assert sorted(map(told, found)) == sorted((*e[:3], e[3](module_class), *e[4:]) for e in expected)
    assert {event.file for event in found} <= {FILE}
    assert all(event.hint and event.detail for event in found)


@pytest.mark.parametrize("module_class", STORMS, ids=lambda module_class: module_class.__name__)
def test_a_value_that_changes_on_every_step_meets_the_limit_and_is_named(module_class):
    cause, function, named = STORMS[module_class]

    compiles = observed(module_class, **(EPOCHS if module_class is cases.ReadsCurrentEpoch else {}))
    recompile, limit_hit = (event for event in compiles.events if event.kind != "graph")

    assert not_zero(compiles) == {"graphs": LIMIT, "recompiles": LIMIT, "limit_hits": 1}
    place = (line_of(module_class), function)
    assert told(recompile) == ("recompile", "user", cause, *place, LIMIT)
    assert told(limit_hit) == ("limit_hit", "user", cause, *place, 1)
    assert (recompile.file, limit_hit.file) == (FILE, FILE)
    assert (recompile.step, limit_hit.step) == (1, LIMIT)
    assert named in recompile.hint
    assert named in limit_hit.hint


@pytest.mark.skipif(OLD, reason="the table is that of torch 2.13")
def test_the_docs_show_every_case_and_what_is_told_of_it():
    docs = (Path(FILE).parents[1] / "docs" / "explain.md").read_text(encoding="utf-8")

    assert markdown_table() in docs


@pytest.mark.parametrize("module_class", [cases.RaggedTail, cases.Prints])
def test_an_event_carries_step_epoch_stage_and_the_shapes_of_its_batch(module_class):
    events = observed(module_class, max_steps=8).events
    graph, other = events[0], next(event for event in events if event.kind != "graph")
    tail = module_class is cases.RaggedTail

    assert (graph.step, graph.epoch, graph.stage, graph.shapes) == (0, 0, "train", BATCH)
    assert (other.step, other.shapes) == ((5, TAIL) if tail else (0, BATCH))


def test_what_is_compiled_in_validation_has_the_shapes_of_its_batch():
    (graph,) = [event for event in observed(Regression, stages=("train", "validate")).events if event.stage == "sanity"]

    assert graph.shapes == "(32, 8):float32 (32, 1):float32"


def test_a_healthy_module_that_logs_has_one_graph_and_nothing_else():
    compiles = observed(Regression)

    assert not_zero(compiles) == {"graphs": 1}
    assert [(event.kind, event.function) for event in compiles.events] == [("graph", STEP)]


def test_stages_are_counted_apart():
    compiles = observed(Regression, stages=("train", "validate"), max_epochs=2, max_steps=-1)

    assert compiles.by_stage == {"sanity": {"graph": 1}, "train": {"graph": 1}}
    assert not_zero(compiles) == {"graphs": 1}


class CompilesInValidation(Regression):
    def on_validation_epoch_start(self):
        torch.compile(lambda x: print(x.shape), backend="eager")(torch.ones(3))


def test_what_the_user_compiles_between_steps_is_not_counted():
    compiles = observed(CompilesInValidation, max_epochs=2, max_steps=-1)

    assert compiles.by_stage == {"train": {"graph": 1}}


def test_a_target_that_the_step_never_calls_compiles_nothing():
    compiles = observed(cases.Case, target="forward")

    assert not_zero(compiles) == {}
    assert compiles.events == ()


def test_a_compiled_submodule_is_placed_where_the_user_calls_it():
    (graph,) = observed(cases.Prints, target=["net"]).events

    assert told(graph) == ("graph", "user", None, line_of(cases.Prints) - 1, STEP, 1)


def test_a_limit_hit_carries_the_step_at_which_it_happened_and_no_time():
    (limit_hit,) = (event for event in observed(cases.CountsItself).events if event.kind == "limit_hit")

    assert limit_hit.seconds is None
    assert limit_hit.detail == f"self.n == {LIMIT - 1}"
    assert limit_hit.hint.startswith("From now on this function runs in eager.")


def test_counts_are_those_of_torchs_own_logs():
    """Lines and places that TORCH_LOGS prints for the very same fits, of every case that is not merely one graph."""
    names = [case.__name__ for case in (*SETTLED, *STORMS) if case in STORMS or SETTLED[case][1]]
    script = f"""if True:
        import json, sys
        import compile_cases, test_observe
        for name in {names}:
            print("#", name, file=sys.stderr, flush=True)
            test_observe.torch._dynamo.reset()
            run = test_observe.EPOCHS if name == "ReadsCurrentEpoch" else {{"max_steps": 10}}
            found = test_observe.observed(getattr(compile_cases, name), backend="eager", **run)
            # What stopped a function that is left in eager as a whole is a graph break to that log too.
            breaks = found.graph_breaks or found.eager_frames
            print(json.dumps([name, found.recompiles, breaks]), file=sys.stderr, flush=True)
    """
    paths = [str(Path(FILE).parent), str(Path(FILE).parents[1] / "callbacks")]
    env = {**os.environ, "TORCH_LOGS": "recompiles,graph_breaks", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr[-2000:]

    ours = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("[")]
    theirs = []
    for name, log in zip(names, re.split("^# .*$", done.stderr, flags=re.MULTILINE)[1:], strict=True):
        places = re.findall(r"Graph break in user code at (\S+:\d+)", log)
        theirs.append([name, log.count("Recompiling function"), len(set(places))])

    assert ours == theirs
    assert sum(recompiles + breaks for _, recompiles, breaks in ours) > LIMIT


# -- texts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guard", "cause", "named"),
    [
        ("0/0: tensor 'L['batch'][0]' size mismatch at index 1. expected 3, actual 4", "shape", "batch[0] went"),
        ("0/0: 2 <= x.size()[0]  # x.view(-1)  # mine/train.py:3 in forward", "shape", "dynamic=True"),
        ("0/0: tensor 'x' requires_grad mismatch. expected requires_grad=1", "stage", "train/eval"),
        ("0/0: GLOBAL_STATE changed: grad_mode", "stage", "train/eval"),
        ("0/0: not self.training", "stage", "train/eval"),
        ("0/0: L['self'].n == 3  # y = x.reshape(x.shape[0]) * self.n", "python_scalar", "register_buffer('n'"),
        ("0/0: self.beta == 0.5", "python_scalar", "torch.tensor(0.)"),
        ("0/0: (k % 4) != 0", "python_scalar", "k changes"),
        ("0/0: self.metric._update_count == 7", "python_scalar", "a metric's update counter"),
        ("0/0: ___stack0 == 1.5  # if loss.item() > 1:", "data_dependent", "torch.where"),
        ("0/0: ___check_obj_id(self.act, 94117212199760)", "object_identity", "self.act"),
        ("0/0: something torch may say one day", "other", ""),
    ],
)
def test_a_guard_is_judged_by_itself_and_not_by_the_source_line_behind_it(guard, cause, named):
    explained = explain_recompile(guard)

    assert explained.cause == cause
    assert named in explained.hint


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("Failed to trace builtin operator\n  Explanation: builtin operator `print`", "side_effect"),
        ("Failed to trace builtin operator\n  Explanation: operator `vars`\n  Hint: logging `print`", "unsupported"),
        ("Data-dependent branching\n  Explanation: (e.g. `if my_tensor.sum() > 0:`)", "data_dependent"),
        ("generic_jump TensorVariable()", "data_dependent"),
        ("Attempted to call function marked as skipped\n  Explanation: (e.g. _warnings.warn)", "unsupported"),
        ("Skip calling `torch.compiler.disable()`d function `<function Metric.update>`", "side_effect"),
    ],
)
def test_a_graph_break_is_judged_by_what_happened_and_not_by_torchs_hints(reason, cause):
    explained = explain_break(reason)

    assert explained.cause == cause
    assert explained.hint
    assert "Hint" not in detail_of(reason)


# -- listening -------------------------------------------------------------------------------------------------------


class Raises(cases.Case):
    def on_train_batch_start(self, batch, batch_idx):
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx == 3:
            raise ValueError("the user's own")


def test_listeners_are_gone_after_fit_and_after_an_exception():
    before = list(callback_handler.start_callbacks), list(callback_handler.end_callbacks)
    observed(cases.Case)
    after_fit = list(callback_handler.start_callbacks), list(callback_handler.end_callbacks)
    with pytest.raises(ValueError, match="the user's own"):
        observed(Raises)
    after_error = list(callback_handler.start_callbacks), list(callback_handler.end_callbacks)

    assert before == after_fit == after_error


class ResetsTheCompiler(cases.Prints):
    def on_train_batch_start(self, batch, batch_idx):
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx in (5, 10):
            torch._dynamo.reset()
            dynamo_utils.counters.clear()


def test_a_reset_in_mid_run_is_survived_and_what_follows_is_counted():
    compiles = observed(ResetsTheCompiler)
    (found,) = (event for event in compiles.events if event.kind == "graph_break")

    assert not_zero(compiles) == {"graphs": 6, "graph_breaks": 1}
    assert (found.line, found.count) == (line_of(cases.Prints), 3)


def doubled(x):
    return x * 2


def copies(function, num):
    """The same function so many times, each with a compile cache of its own."""
    return [types.FunctionType(function.__code__.replace(), function.__globals__) for _ in range(num)]


@pytest.fixture
def observer():
    watching = Observer()
    watching.start()
    watching.skip()
    yield watching
    watching.stop()


def test_more_compilations_than_torch_keeps_records_of_are_all_seen(observer):
    for function in copies(doubled, 70):
        torch.compile(function, backend="eager")(torch.ones(2))
    observer.poll("train", step=0, epoch=0)
    compiles = observer.compiles()

    assert len(dynamo_utils.get_compilation_metrics()) < 70
    assert compiles.graphs == 70
    assert sum(event.count for event in compiles.events) == 70


COUNTS = ("graphs", "recompiles", "graph_breaks", "eager_frames", "limit_hits", "cudagraph_skips")


def printing(x):
    y = x + 1
    print("between")
    return y * 2


@pytest.mark.parametrize(
    ("missing", "unknown"),
    [
        (["listeners"], []),
        (["records"], ["recompiles", "eager_frames", "limit_hits"]),
        (["break_reasons"], ["graph_breaks"]),
        (["counters"], ["cudagraph_skips"]),
        (["records", "counters"], ["graphs", "recompiles", "eager_frames", "limit_hits", "cudagraph_skips"]),
        (["listeners", "records", "break_reasons"], ["recompiles", "graph_breaks", "eager_frames", "limit_hits"]),
        (["listeners", "records", "break_reasons", "counters"], COUNTS),
    ],
    ids=", ".join,
)
def test_a_source_that_torch_lacks_costs_its_own_figures_alone(missing, unknown):
    """They are null; the others are those of a complete torch."""
    sources = dataclasses.replace(Sources.of_torch(), **dict.fromkeys(missing))
    watching = Observer(sources)
    watching.start()
    watching.skip()

    for size in (3, 4, 5):
        torch.compile(printing, backend="eager")(torch.ones(size))
    found = watching.poll("train", step=0, epoch=0)
    watching.stop()
    compiles = watching.compiles()

    complete = {"graphs": 4, "recompiles": 2, "graph_breaks": 1, "eager_frames": 0, "limit_hits": 0}
    assert found == sources.sees_compiling
    assert {name for name in COUNTS if getattr(compiles, name) is None} == set(unknown)
    assert {name: number for name, number in complete.items() if name not in unknown} == {
        name: getattr(compiles, name) for name in complete if name not in unknown
    }


@pytest.mark.parametrize(
    ("lost", "name", "unknown"),
    [
        (dynamo_utils, "get_compilation_metrics", {"recompiles", "eager_frames", "limit_hits"}),
        (dynamo_callback, "callback_handler", set()),
    ],
    ids=["records", "listeners"],
)
def test_a_fit_under_a_torch_that_tells_less_reports_null_and_never_zero(lost, name, unknown, monkeypatch, tmp_path):
    monkeypatch.delattr(lost, name)
    compiles = observed(cases.CountsItself, backend="eager", default_root_dir=tmp_path, logger=False)
    written = json.loads((tmp_path / "compile_profile.json").read_text())["compiles"]

    assert {name for name in COUNTS if getattr(compiles, name) is None} == unknown
    assert {name for name in COUNTS if written[name] is None} == unknown
    assert (compiles.graphs, compiles.graph_breaks) == (LIMIT, 0)
    assert compiles.limit_hits in (None, 1)
