"""A compiled step that fails costs nothing: its batch is trained in eager, once, and so is the rest."""

import re
import time
import traceback

import pytest
import torch
import torchmetrics
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

from compile_profiler import CompileProfiler, arms
from compile_profiler.guard import Guard
from runs import Regression, differences, fit, left_behind, train

QUIET = {"verbose": False, "fallback": False, "pair_every_n_steps": 1000}
RUN = {"max_steps": 20, "limit_val_batches": 2}


def failing_call(at, error=RuntimeError, message="planted: mat1 and mat2 shapes cannot be multiplied"):
    """A backend whose compiled code runs well until its call number ``at``."""
    calls = []

    def backend(graph, example_inputs):
        def run(*inputs):
            outputs = graph.forward(*inputs)  # writes buffers, draws random numbers, then fails
            calls.append(1)
            if len(calls) == at:
                raise error(message)
            return outputs

        return run

    return backend


def failing_compile(graph, example_inputs):
    """A backend that cannot compile."""
    raise RuntimeError("planted: no C++ compiler found")


def failing_backward(at):
    """A backend that fails in its call number ``at`` of backward."""
    calls = []

    def compile_backward(graph, example_inputs):
        if at == "compile":
            raise RuntimeError("planted: backward does not compile")

        def run(*inputs):
            calls.append(1)
            if len(calls) == at:
                raise RuntimeError("planted: backward fails")
            return graph.forward(*inputs)

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=compile_backward)


class Watched(Regression):
    """Counts its hooks, updates a metric, keeps the last loss, writes a buffer."""

    def __init__(self):
        super().__init__()
        self.counts, self.history, self.last = {}, [], torch.zeros(())
        self.metric = torchmetrics.MeanMetric()
        self.register_buffer("mean", torch.zeros(1))

    def count(self, hook):
        self.counts[hook] = self.counts.get(hook, 0) + 1

    def training_step(self, batch, batch_idx):
        self.mean.mul_(0.9).add_(batch[0].mean() * 0.1)
        loss = super().training_step(batch, batch_idx)
        self.last = loss.detach()
        self.metric.update(self.last)
        self.log("metric", self.metric, on_step=True, on_epoch=True)
        return loss

    def on_before_zero_grad(self, optimizer):
        self.count("on_before_zero_grad")
        self.num_zeroed = self.counts["on_before_zero_grad"]

    def on_before_backward(self, loss):
        self.count("on_before_backward")
        self.history.append("backward")

    def on_after_backward(self):
        self.count("on_after_backward")

    def on_before_optimizer_step(self, optimizer):
        self.count("on_before_optimizer_step")

    def left(self):
        return [self.counts, self.history, self.last, self.num_zeroed, self.metric._update_count]


BACKENDS = {
    # In a step that compiles nobody can tell whose fault it was: no reason is asked for.
    "compiling": (lambda: failing_compile, "compile_error"),
    "call 1": (lambda: failing_call(1), None),
    "call 3": (lambda: failing_call(3), None),
    "call 11": (lambda: failing_call(11), "runtime_error"),
    "memory": (lambda: failing_call(3, torch.OutOfMemoryError, "CUDA out of memory"), "out_of_memory"),
    "compiling backward": (lambda: failing_backward("compile"), "compile_error"),
    "backward 1": (lambda: failing_backward(1), None),
    "backward 3": (lambda: failing_backward(3), None),
    "backward 11": (lambda: failing_backward(11), "runtime_error"),
}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("case", BACKENDS)
def test_a_failing_backend_leaves_the_run_as_eager_makes_it(case, accumulate):
    """Weights, optimizer, random numbers, buffers, metrics, attributes, logs and hook counts, bit for bit."""
    make, reason = BACKENDS[case]
    plain = left_behind(*train(Watched, accumulate_grad_batches=accumulate, **RUN))
    profiler = CompileProfiler(backend=make(), **QUIET)
    with pytest.warns(UserWarning, match="CompileProfiler: ") as caught:
        failed = left_behind(*train(Watched, [profiler], accumulate_grad_batches=accumulate, **RUN))
    ours = [str(warning.message) for warning in caught if "CompileProfiler" in str(warning.message)]

    assert differences(plain, failed) == []
    assert len(ours) == 1
    assert re.search("planted|out of memory|failing_compile", ours[0])
    assert profiler.report.verdict.decision == "eager"
    assert profiler.report.verdict.reason in ([reason] if reason else ["compile_error", "runtime_error"])


@pytest.mark.parametrize("target", ["forward", ["net"]])
def test_a_target_inside_the_step_is_guarded_too(target):
    plain = left_behind(*train(Watched, **RUN))
    with pytest.warns(UserWarning, match="planted"):
        failed = left_behind(*train(Watched, [CompileProfiler(target, backend=failing_call(5), **QUIET)], **RUN))

    assert differences(plain, failed) == []


class TwoGraphs(Regression):
    """Graph breaks: backward runs through three compiled functions; when the third runs, the second has gathered."""

    def forward(self, x):
        z = self.net[0](x)
        torch._dynamo.graph_break()
        return self.net[4](F.gelu(z))


@pytest.mark.parametrize("at", [3, 6, 24])
def test_a_backward_that_fails_half_way_adds_no_gradient_twice(at):
    """In an accumulation window some gradients of the batch are in, others are not."""
    plain = left_behind(*train(TwoGraphs, accumulate_grad_batches=3, **RUN))
    profiler = CompileProfiler(backend=failing_backward(at), **QUIET)
    with pytest.warns(UserWarning, match="planted: backward fails"):
        failed = left_behind(*train(TwoGraphs, [profiler], accumulate_grad_batches=3, **RUN))

    assert differences(plain, failed) == []


@pytest.mark.filterwarnings("ignore:CompileProfiler.* torch stops compiling it")
def test_a_buffer_that_changes_its_size_after_learning_is_no_trouble():
    class Growing(Regression):
        def __init__(self):
            super().__init__()
            self.register_buffer("queue", torch.ones(1, 8))

        def training_step(self, batch, batch_idx):
            self.queue.mul_(1.01)
            return super().training_step(batch, batch_idx)

        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx > 5:
                self.queue.data = torch.cat([self.queue, batch[0][:1]])

    plain = left_behind(*train(Growing, **RUN))
    measured = left_behind(*train(Growing, [CompileProfiler(backend="eager", **QUIET)], **RUN))

    assert differences(plain, measured) == []


REPLAYED = "accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run."
MISFITS = "mat1 and mat2 shapes cannot be multiplied (8x8 and 16x1)"


def late_recompile(graph, example_inputs):
    """A backend that compiles once and never again."""
    late_recompile.num_graphs += 1
    if late_recompile.num_graphs > 1:
        raise RuntimeError("planted: no second graph")
    return graph.forward


class RaggedLater(Regression):
    """Its batches are of another size from the ninth on, so that the step is compiled anew in mid-run."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [part[:5] for part in batch] if len(self.seen) > 8 else batch


LATER = {
    "a replayed CUDA graph": (Watched, lambda: failing_call(7, message=REPLAYED), "clone it"),
    "a shape that does not fit": (Watched, lambda: failing_call(7, message=MISFITS), "mat1 and mat2"),
    "a late recompile": (RaggedLater, lambda: late_recompile, "no second graph"),
}


@pytest.mark.parametrize("case", LATER)
def test_a_step_that_fails_long_after_compiling_well_is_trained_in_eager(case):
    module_class, make, words = LATER[case]
    late_recompile.num_graphs = 0
    plain = left_behind(*train(module_class, **RUN))
    profiler = CompileProfiler(backend=make(), dynamic=False, **QUIET)
    with pytest.warns(UserWarning, match=words) as caught:
        failed = left_behind(*train(module_class, [profiler], **RUN))

    assert differences(plain, failed) == []
    assert len([w for w in caught if "CompileProfiler" in str(w.message)]) == 1
    assert profiler.report.verdict.reason == ("compile_error" if "recompile" in case else "runtime_error")
    assert profiler.report.verdict.step >= 6


# -- the user's own errors -------------------------------------------------------------------------------------------


class OwnError(Exception):
    """Of the user's."""


class RaisesInStep(Regression):
    def training_step(self, batch, batch_idx):
        if batch_idx == 6:
            raise OwnError("mine")  # the user's line
        return super().training_step(batch, batch_idx)


class RaisesInHook(Regression):
    def on_before_backward(self, loss):
        raise OwnError("mine")  # the user's line


class RaisesInValidation(Regression):
    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            raise OwnError("mine")  # the user's line
        super().validation_step(batch, batch_idx)


class RaisesInLog(Regression):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 6:
            self.log("bad", "text")  # the user's line
        return loss


class RaisesInBackward(Regression):
    def backward(self, loss):
        raise OwnError("mine")  # the user's line


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
@pytest.mark.parametrize("kind", [RaisesInStep, RaisesInHook, RaisesInValidation, RaisesInLog, RaisesInBackward])
def test_an_error_of_the_users_own_reaches_them_unchanged(kind):
    """Their class and line, no foreign context, nothing left on module or trainer, and the report is there."""
    profiler = CompileProfiler(backend="eager", stages=("train", "validate"), **QUIET)
    module = kind()
    with pytest.raises(Exception) as plain:  # noqa: PT011, whatever it is without the callback
        fit(kind(), val_check_interval=5, **RUN)
    with pytest.raises(type(plain.value), match=re.escape(str(plain.value))) as caught:
        fit(module, [profiler], val_check_interval=5, **RUN)

    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None
    assert any(
        f.line and f.line.endswith("# the user's line") for f in traceback.extract_tb(caught.value.__traceback__)
    )
    assert not {"training_step", "validation_step", "log", "log_dict", "__getstate__"} & set(vars(module))
    assert profiler.report.verdict.reason not in ("compile_error", "runtime_error")


class Misfits(Regression):
    """Its last layer is of another size: the compiler meets that error first, while it traces."""

    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(7, 1)

    def loss(self, batch):
        return self.last(self(batch[0])).mean()  # the user's line


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_error_that_compiling_meets_first_comes_from_the_users_code_all_the_same(backend):
    """Their line stands below ours, the compiler's frames nowhere: not in the traceback, not behind the error."""
    profiler = CompileProfiler(backend=backend, **QUIET)
    with pytest.raises(RuntimeError) as plain:
        fit(Misfits(), validate=False, **RUN)
    with pytest.raises(RuntimeError) as caught:
        fit(Misfits(), [profiler], validate=False, **RUN)
    frames = traceback.extract_tb(caught.value.__traceback__)
    users = [number for number, frame in enumerate(frames) if (frame.line or "").endswith("# the user's line")]
    ours = [number for number, frame in enumerate(frames) if "compile_profiler" in frame.filename]

    assert type(caught.value) is type(plain.value)
    assert str(caught.value) == str(plain.value)
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)
    assert getattr(caught.value, "__notes__", []) == getattr(plain.value, "__notes__", [])
    assert min(users) > max(ours)
    assert [frame.name for frame in frames[users[0] :]] == [
        frame.name for frame in traceback.extract_tb(plain.value.__traceback__)[-len(frames[users[0] :]) :]
    ]
    assert not any("_dynamo" in frame.filename for frame in frames)


def test_torch_compile_itself_may_refuse():
    """An option that does not exist is found by torch.compile, at the call."""
    plain = left_behind(*train(Regression, **RUN))
    profiler = CompileProfiler(options={"no_such_option": 1}, verbose=False)
    with pytest.warns(UserWarning, match="Compiling failed") as caught:
        refused = left_behind(*train(Regression, [profiler], **RUN))

    assert differences(plain, refused) == []
    assert profiler.report.verdict.reason == "compile_error"
    assert len([w for w in caught if "CompileProfiler" in str(w.message)]) == 1


# -- cost ------------------------------------------------------------------------------------------------------------


def test_an_ordinary_step_costs_little():
    """Guard and arm together on a plain module, over the bare compiled call; the bound is loose, machines are busy."""
    module = Regression()
    module.training_step = lambda batch, batch_idx: batch  # nothing to compute: what is left is ours
    arm = arms.CompiledArm(module, target="forward", hooks=["training_step"], options={"backend": "eager"})
    guard = Guard(module, arm, on_failure=pytest.fail, on_trouble=pytest.fail)
    for _ in range(10):
        guard.forward("training_step", [1], 0)
    seconds = []
    for _ in range(20):
        start_s = time.perf_counter()
        for _ in range(50):
            guard.forward("training_step", [1], 0)
        seconds.append((time.perf_counter() - start_s) / 50)

    assert min(seconds) < 100e-6
