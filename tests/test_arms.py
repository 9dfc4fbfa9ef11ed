"""The user's module stays the user's module: compiled for a call, and nothing of it left."""

import copy
import pickle

import pytest
import torch
from torch import nn

from compile_profiler import CompileProfiler
from runs import Regression, differences, fit, left_behind, train
from zoo import LogsEverything, Metrics

OPTIONS = {"backend": "eager", "verbose": False, "max_pairs": 0}
RUN = {"max_steps": 6, "limit_val_batches": 2}

# torch's own, when compiled code is handed an activation: tracing looks at its .grad.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Block(nn.Module):
    """A residual block."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class Blocks(Regression):
    """Three equal blocks, between two different ones."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def wear(module):
    """The names that each submodule carries."""
    return {name: sorted(vars(submodule)) for name, submodule in module.named_modules()}


class Looks(Blocks):
    """Remembers what it and its submodules carry in every hook."""

    looks: list[dict] = []  # noqa: RUF012, outside the module's own attributes on purpose

    def on_train_batch_start(self, batch, batch_idx):
        self.looks.append(wear(self))

    def on_before_backward(self, loss):
        self.looks.append(wear(self))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.looks.append(wear(self))


@pytest.mark.parametrize("target", ["step", "forward", "blocks", ["blocks.0", "head"]])
def test_every_target_trains_as_eager_does_and_leaves_nothing_behind(target):
    """In hooks and after fit each submodule carries what it carried before."""
    Looks.looks.clear()
    torch.manual_seed(7)
    module = Looks()
    before = wear(module)
    profiler = CompileProfiler(target, **OPTIONS)
    measured = left_behind(module, fit(module, [profiler], **RUN))
    looks = [*Looks.looks, wear(module)]
    Looks.looks.clear()

    assert profiler.report.compiles.graphs > 0
    assert differences(left_behind(*train(Looks, **RUN)), measured) == []
    assert len(looks) == 3 * RUN["max_steps"] + 1
    assert all(set(look[name]) == set(looks[-1][name]) for look in looks for name in look)
    assert all(set(looks[-1][name]) == set(before[name]) for name in before if name)


def test_equal_blocks_share_one_compile():
    """The input of the first needs no gradient, that of all others does: two graphs, however many blocks."""
    profiler = CompileProfiler("blocks", **OPTIONS)
    train(Blocks, [profiler], validate=False, **RUN)

    assert profiler.report.compiles.graphs == 2
    assert profiler.report.verdict.config["modules"] == ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize(
    ("target", "message"), [(["nets"], "'nets'.*Expected names.*net"), ("blocks", "found no block")]
)
def test_a_target_that_is_not_there_raises_in_fit(target, message):
    with pytest.raises(ValueError, match=message):
        train(Regression, [CompileProfiler(target, **OPTIONS)], **RUN)


class Copies(Regression):
    """Makes a teacher of itself, by copy and by pickle, where it is told to."""

    where = "step"
    copies: list["Copies"] = []  # noqa: RUF012, a copy must not hold the others

    def make(self, where, batch_idx):
        if where == self.where and batch_idx == 4:
            self.copies.extend([copy.deepcopy(self), pickle.loads(pickle.dumps(self))])

    def training_step(self, batch, batch_idx):
        self.make("step", batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch, batch_idx):
        self.make("hook", batch_idx)


@pytest.mark.filterwarnings("ignore:CompileProfiler.* torch stops compiling it")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize("target", ["step", "forward", ["net"]])
@pytest.mark.parametrize("where", ["step", "hook"])
def test_a_copy_made_in_mid_fit_computes_with_its_own_weights_in_eager(monkeypatch, where, target):
    monkeypatch.setattr(Copies, "where", where)
    Copies.copies.clear()
    calls = []

    def backend(graph, example_inputs):
        return lambda *inputs: (calls.append(1), graph.forward(*inputs))[1]

    profiler = CompileProfiler(target, **{**OPTIONS, "backend": backend})
    module, _ = train(Copies, [profiler], validate=False, **RUN)
    calls.clear()
    x = torch.ones(2, 8)

    assert len(Copies.copies) == 2
    assert profiler.report.verdict.reason == "disabled"
    for copied in Copies.copies:
        assert set(vars(copied)) == set(vars(module))
        assert all(vars(sub).get("_compiled_call_impl") is None for sub in copied.modules())
        copied.eval()
        expected = copied.net(x)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.add_(1)
        assert not torch.equal(copied(x), expected)
        assert not torch.equal(copied.net[0].weight, module.net[0].weight)
    assert calls == []


def test_ten_fits_in_one_process_report_the_same():
    """No model uses up the recompile budget of another of its class."""
    counts = []
    for _ in range(10):
        profiler = CompileProfiler(**OPTIONS)
        train(Regression, [profiler], max_steps=2, validate=False)
        counts.append((profiler.report.compiles.graphs, profiler.report.compiles.limit_hits))

    assert counts == [(1, 0)] * 10


def own_backend(calls):
    def backend(graph, example_inputs):
        return lambda *inputs: (calls.append(1), graph.forward(*inputs))[1]

    return backend


@pytest.mark.filterwarnings("ignore:CompileProfiler.* torch stops compiling it")
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
@pytest.mark.parametrize("target", ["step", "forward", ["head"]])
@pytest.mark.parametrize("way", ["module", "submodule", "wrapper"])
def test_what_the_user_has_compiled_keeps_its_own_compile(way, target):
    """Their backend serves every step, during the fit and after it."""
    calls = []

    class Compiled(Blocks):
        def __init__(self):
            super().__init__()
            if way == "module":
                self.compile(backend=own_backend(calls))
            elif way == "submodule":
                self.blocks[1].compile(backend=own_backend(calls))
            else:
                self.blocks[1] = torch.compile(self.blocks[1], backend=own_backend(calls))

    module, _ = train(Compiled, [CompileProfiler(target, **OPTIONS)], validate=False, **RUN)
    num_in_fit = len(calls)
    module(torch.ones(2, 8))

    assert num_in_fit == RUN["max_steps"]
    assert len(calls) == num_in_fit + 1


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
def test_metrics_in_the_step_cause_no_recompile_storm():
    """Updated, called, logged as objects, in collections; that their values are eager's is the zoo's business."""
    profiler = CompileProfiler(**OPTIONS)
    train(Metrics, [profiler], max_steps=20, validate=False)
    compiles = profiler.report.compiles

    assert compiles.graphs > 0
    assert compiles.limit_hits == 0
    assert compiles.recompiles <= 2


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
@pytest.mark.parametrize("target", ["step", "forward", ["net"]])
def test_what_is_logged_arrives_as_in_eager(target):
    """NumPy and Python scalars, dicts, tensors changed after logging, also from inside forward."""
    plain = left_behind(*train(LogsEverything, **RUN))
    measured = left_behind(*train(LogsEverything, [CompileProfiler(target, **OPTIONS)], **RUN))

    assert differences(plain, measured) == []
    assert measured["metric/changing"] < 50
