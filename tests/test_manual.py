"""A step that moves its optimizers itself: its networks are compiled, it is measured, and trains as without that."""

import time
import warnings
from collections import Counter

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.optim import optimizer as torch_optimizer

from compile_profiler import CompileProfiler
from runs import InMemoryLogger, Regression, differences, left_behind, sleepy, train

OPTIONS = {"backend": "eager", "fallback": False, "verbose": False, "warmup_steps": 1, "pair_every_n_steps": 2}
RUN = {"max_steps": 24, "limit_val_batches": 2}


class Manual(Regression):
    """One optimizer, stepped by the step itself, which returns nothing."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Adversarial(Regression):
    """Two networks, two optimizers, toggled in turn; the loss comes back in a dict."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = None
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.critics = nn.ModuleDict({"one": nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))})

    def training_step(self, batch, batch_idx):
        for_generator, for_critic = self.optimizers()
        critic = self.critics["one"]
        made = self.generator(torch.randn(len(batch[0]), 4, device=self.device))

        self.toggle_optimizer(for_generator)
        loss = -critic(made).mean()
        for_generator.zero_grad()
        self.manual_backward(loss)
        for_generator.step()
        self.untoggle_optimizer(for_generator)

        with for_critic.toggle_model():
            critic_loss = critic(made.detach()).mean() - critic(batch[0]).mean()
            for_critic.zero_grad()
            self.manual_backward(critic_loss)
            for_critic.step()
        self.log_dict({"generator": loss, "critic": critic_loss})
        return {"loss": loss + critic_loss}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.critics["one"](batch[0]).mean())

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.generator.parameters(), lr=0.01),
            torch.optim.SGD(self.critics.parameters(), lr=0.01, momentum=0.9),
        ]


class Accumulates(Manual):
    """Adds gradients up over three batches, clips them, steps a scheduler, zeroes in place."""

    set_to_none = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.loss(batch) / 3
        self.manual_backward(loss)
        if (batch_idx + 1) % 3 == 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            self.lr_schedulers().step()
            optimizer.zero_grad(set_to_none=self.set_to_none)
        return loss


class AccumulatesAndDrops(Accumulates):
    """The same with gradients set to None."""

    set_to_none = True


class RawOptimizer(Manual):
    """An optimizer, a scheduler and a scaler of torch that Lightning has never seen."""

    def __init__(self):
        super().__init__()
        self.held = {}

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        self.held["scheduler"] = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
        self.held["scaler"] = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        self.step_with = lambda: optimizer
        return []

    def training_step(self, batch, batch_idx):
        optimizer, scaler = self.step_with(), self.held["scaler"]
        loss = self.loss(batch)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        self.held["scheduler"].step(loss.detach())
        return loss

    def left(self):
        state = self.step_with().state_dict()
        scaler = self.held["scaler"].state_dict()
        return [state["param_groups"], state["state"], self.held["scheduler"].state_dict(), scaler]


class StepsUnseen(Manual):
    """An optimizer that nobody has seen before: it steps in pairs only."""

    def configure_optimizers(self):
        halves = list(self.net[0].parameters()), list(self.net[1:].parameters())
        first, second = (torch.optim.SGD(half, lr=0.01, momentum=0.9) for half in halves)
        self.unseen = lambda: second
        return first

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        if self._current_fx_name != "training_step":
            self.unseen().step()

    def left(self):
        return [self.unseen().state_dict()["state"]]


class InnerLoop(Manual):
    """Adapts a copy of its network with an optimizer made for the occasion."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        fast = nn.Linear(8, 1)
        inner = torch.optim.SGD(fast.parameters(), lr=0.1)
        for _ in range(2):
            inner.zero_grad()
            ((fast(x) - y) ** 2).mean().backward()
            inner.step()
        optimizer = self.optimizers()
        loss = ((self(x) - fast(x).detach()) ** 2).mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Closures(Manual):
    """Hands the optimizer a closure, as LBFGS needs it."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=3)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class SkipsSteps(Manual):
    """Leaves some batches out."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx % 3 == 0 else super().training_step(batch, batch_idx)


class Hooks(Adversarial):
    """Counts the hooks of backward and of optimizer steps on the module."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def on_before_backward(self, loss):
        self.counts["on_before_backward"] += 1

    def on_after_backward(self):
        self.counts["on_after_backward"] += 1

    def on_before_optimizer_step(self, optimizer):
        self.counts["on_before_optimizer_step"] += 1

    def on_before_zero_grad(self, optimizer):
        self.counts["on_before_zero_grad"] += 1

    def left(self):
        return dict(self.counts)


class HookCounter(pl.Callback):
    """Counts the same hooks from a callback."""

    def __init__(self):
        self.counts = Counter()

    def on_before_backward(self, trainer, module, loss):
        self.counts["on_before_backward"] += 1

    def on_after_backward(self, trainer, module):
        self.counts["on_after_backward"] += 1

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.counts["on_before_optimizer_step"] += 1


KINDS = [
    Manual,
    Adversarial,
    Accumulates,
    AccumulatesAndDrops,
    RawOptimizer,
    StepsUnseen,
    InnerLoop,
    Closures,
    SkipsSteps,
    Hooks,
]


def run(module_class, callbacks=(), **options):
    """What a run leaves behind, with the step counters of Lightning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about what it does not trace
        module, trainer = train(module_class, callbacks, **{**RUN, **options})
    left = left_behind(module, trainer)
    left["flags"] = [p.requires_grad for p in module.parameters()]
    left["gradients"] = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    left["progress"] = repr(trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress)
    left["schedulers"] = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    return left


@pytest.mark.parametrize("module_class", KINDS, ids=lambda kind: kind.__name__)
def test_a_step_that_moves_its_optimizers_trains_as_without_the_callback(module_class):
    """Everything that a run leaves behind is bit-identical, and pairs have been made."""
    steps = {"max_epochs": 1, "max_steps": -1} if module_class is RawOptimizer else {}
    profiler = CompileProfiler(**OPTIONS)
    plain, measured = run(module_class, **steps), run(module_class, [profiler], **steps)
    report = profiler.report

    assert differences(plain, measured) == []
    assert report.verdict.reason not in ("compile_error", "runtime_error", "unsupported", "nothing_compiled")
    assert report.speedup.num_pairs > 0
    assert "error" not in report.speedup.void
    assert report.drift.grad_rel == 0


@pytest.mark.parametrize(
    ("module_class", "names"),
    [(Manual, ["net"]), (Adversarial, ["generator", "critics.one"])],
)
def test_the_verdict_names_the_networks_that_are_compiled(module_class, names):
    profiler = CompileProfiler(**OPTIONS)
    run(module_class, [profiler])

    assert profiler.report.verdict.config["modules"] == names
    assert profiler.report.verdict.config["target"] == "step"
    assert profiler.report.compiles.graphs >= len(names)


def test_a_module_without_networks_trains_on_plainly_and_says_so():
    class Bare(Manual):
        def __init__(self):
            super().__init__()
            self.net = None
            self.weight = nn.Parameter(torch.zeros(8, 1))

        def forward(self, x):
            return x @ self.weight

    profiler = CompileProfiler(**OPTIONS)
    plain = run(Bare)
    with pytest.warns(UserWarning, match="no child module owns parameters"):
        module, _ = train(Bare, [profiler], **RUN)

    assert (profiler.report.verdict.decision, profiler.report.verdict.reason) == ("eager", "nothing_compiled")
    assert torch.equal(plain["weights/weight"], module.weight)


@pytest.mark.parametrize("target", ["forward", ["net.0", "net.4"]])
def test_other_targets_work_as_ever(target):
    profiler = CompileProfiler(target=target, **OPTIONS)
    plain, measured = run(Manual), run(Manual, [profiler])

    assert differences(plain, measured) == []
    assert profiler.report.speedup.num_pairs > 0


@pytest.mark.parametrize("module_class", [Adversarial, AccumulatesAndDrops])
def test_both_arms_are_compared_with_a_run_in_float64(module_class):
    profiler = CompileProfiler(**OPTIONS, drift_reference="float64")
    plain, measured = run(module_class), run(module_class, [profiler])

    assert differences(plain, measured) == []
    assert profiler.report.speedup.num_pairs > 0


def test_validation_is_compiled_too_when_asked_for():
    profiler = CompileProfiler(**OPTIONS, stages=("train", "validate"))
    plain, measured = run(Adversarial), run(Adversarial, [profiler])

    assert profiler.report.compiles.by_stage["sanity"]["graph"] > 0
    assert differences(plain, measured) == []


def test_windows_of_real_steps_end_where_an_optimizer_has_stepped():
    profiler = CompileProfiler(**{**OPTIONS, "backend": sleepy(0.02)}, end_to_end="windows")
    run(AccumulatesAndDrops, [profiler], max_steps=100)

    assert profiler.report.end_to_end.method == "windows"
    assert profiler.report.end_to_end.speedup < 1


def test_hooks_of_callbacks_run_as_often_as_without_pairs():
    counts = []
    for max_pairs in (0, 40):
        counter = HookCounter()
        run(Adversarial, [CompileProfiler(**OPTIONS, max_pairs=max_pairs), counter])
        counts.append(counter.counts)

    assert counts[0] == counts[1]
    assert set(counts[0].values()) == {24}  # twelve batches of two optimizers: global_step counts both


def test_the_x_axis_is_the_one_on_which_lightning_plots_the_modules_values():
    logger = InMemoryLogger()
    profiler = CompileProfiler(**OPTIONS)
    run(Adversarial, [profiler], logger=logger)

    assert logger.steps_of("generator") == list(range(12))
    assert set(logger.steps_of("compile/speedup")) <= set(logger.steps_of("generator"))
    assert profiler.report.verdict.step <= 12


def test_a_pair_is_made_only_where_an_optimizer_has_just_stepped():
    logger = InMemoryLogger()
    profiler = CompileProfiler(**{**OPTIONS, "pair_every_n_steps": 1})
    run(AccumulatesAndDrops, [profiler], logger=logger, max_steps=10)
    pairs = [step for step, row in logger.rows if "compile/step_ms/eager" in row]

    assert pairs
    assert pairs[0] % 3 == 2  # the third batch of a window
    assert profiler.report.speedup.num_pairs <= 10


def test_a_backend_that_sleeps_is_called_no_gain_and_the_run_ends_in_eager():
    profiler = CompileProfiler(backend=sleepy(0.02), verbose=False)
    module, _ = train(Manual, [profiler], max_steps=60)
    report = profiler.report

    assert (report.verdict.decision, report.verdict.reason) == ("eager", "no_gain")
    assert 0.015 < report.time.compiled_s - report.time.eager_s < 0.1
    assert not {"training_step", "log", "_compiled_call_impl"} & set(vars(module))


class SlowInEager(nn.Linear):
    """Sleeps in eager only: the branch is gone from what is traced."""

    def forward(self, x):
        if not torch.compiler.is_compiling():
            time.sleep(0.05)
        return super().forward(x)


class ManualSlowInEager(Manual):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(SlowInEager(8, 1))


def test_a_planted_gain_is_kept():
    profiler = CompileProfiler(backend=sleepy(0.02), verbose=False, pair_every_n_steps=2)
    train(ManualSlowInEager, [profiler], max_steps=40)
    report = profiler.report

    assert (report.verdict.decision, report.verdict.reason) == ("compiled", "gain")
    assert 1.5 < report.speedup.median < 1.1 * 0.05 / 0.02


def test_wrong_gradients_of_a_compiled_network_are_drift_although_the_step_zeroes_them():
    def wrong(graph, example_inputs):
        def run(*inputs):
            return tuple(value * 1.5 for value in graph(*inputs))

        return run

    profiler = CompileProfiler(backend=wrong, verbose=False, pair_every_n_steps=2)
    run(AccumulatesAndDrops, [profiler], max_steps=20)

    assert profiler.report.verdict.reason == "drift"
    assert profiler.report.drift.grad_rel > 0.1
    assert profiler.report.drift.loss_rel > 0.1


# -- failures ---------------------------------------------------------------------------------------------------------


def fails_to_compile(graph, example_inputs):
    raise RuntimeError("planted")


def fails_from_call(number, *, backward):
    """A backend whose graphs run until the given call of their forward or backward passes."""
    calls = Counter()

    def compiler(is_faulty):
        def compile_graph(graph, example_inputs):
            def call(*inputs):
                calls["all"] += is_faulty
                if is_faulty and calls["all"] >= number:
                    raise RuntimeError("planted")
                return graph(*inputs)

            call._boxed_call = False
            return call

        return compile_graph

    return aot_autograd(fw_compiler=compiler(not backward), bw_compiler=compiler(backward))


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (fails_to_compile, "compile_error"),
        (fails_from_call(1, backward=False), "runtime_error"),
        (fails_from_call(7, backward=False), "runtime_error"),
        (fails_from_call(1, backward=True), "runtime_error"),
        (fails_from_call(7, backward=True), "runtime_error"),
    ],
    ids=["compiling", "first forward", "later forward", "first backward", "later backward"],
)
@pytest.mark.parametrize("module_class", [Manual, Accumulates])
def test_a_failure_before_an_optimizer_has_stepped_costs_nothing(module_class, backend, reason):
    """The batch is trained in eager, once, bit for bit, and no hook runs twice."""
    profiler, counters = CompileProfiler(backend=backend, verbose=False, max_pairs=0), [HookCounter(), HookCounter()]
    plain = run(module_class, counters[:1])
    measured = run(module_class, [profiler, *counters[1:]])

    assert (profiler.report.verdict.decision, profiler.report.verdict.reason) == ("eager", reason)
    assert differences(plain, measured) == []
    assert counters[0].counts == counters[1].counts


@pytest.mark.parametrize(
    "backend",
    [fails_to_compile, fails_from_call(1, backward=False), fails_from_call(1, backward=True)],
    ids=["compiling", "forward", "backward"],
)
def test_a_failure_while_an_optimizer_is_toggled_leaves_no_parameter_frozen(backend):
    profiler = CompileProfiler(backend=backend, verbose=False, max_pairs=0)
    plain, measured = run(Adversarial), run(Adversarial, [profiler])

    assert profiler.report.verdict.decision == "eager"
    assert differences(plain, measured) == []


class TwoInARow(Accumulates):
    """Two networks, one behind the other: backward reaches the second first."""

    set_to_none = True

    def __init__(self):
        super().__init__()
        self.net = nn.ModuleList([nn.Linear(8, 4), nn.Linear(4, 1)])

    def forward(self, x):
        return self.net[1](self.net[0](x).tanh())


@pytest.mark.parametrize("number", [2, 4, 6, 8])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_failure_half_way_through_backward_gives_gradients_back_that_are_being_added_up(number, set_to_none):
    class Case(TwoInARow):
        pass

    Case.set_to_none = set_to_none
    profiler = CompileProfiler(backend=fails_from_call(number, backward=True), verbose=False, max_pairs=0)
    plain, measured = run(Case), run(Case, [profiler])

    assert profiler.report.verdict.reason == "runtime_error"
    assert differences(plain, measured) == []


class OneAfterTheOther(Adversarial):
    """The critic's turn does not use what the generator's has computed, nor do any statistics."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))

    def training_step(self, batch, batch_idx):
        optimizers = self.optimizers()
        nets = self.generator, self.critics["one"]
        for net, optimizer, x in zip(nets, optimizers, (batch[0][:, :4], batch[0]), strict=True):
            optimizer.zero_grad()
            self.manual_backward((net(x) ** 2).mean())
            optimizer.step()
        self.log("one", 1.0, on_epoch=True, reduce_fx="sum")


@pytest.mark.parametrize("number", [2, 8])
@pytest.mark.parametrize("backward", [False, True])
def test_a_failure_after_an_optimizer_has_stepped_leaves_out_its_step_the_second_time(number, backward):
    """Each optimizer steps once, no hook runs twice, nothing is logged twice."""
    counters = [HookCounter(), HookCounter()]
    profiler = CompileProfiler(backend=fails_from_call(number, backward=backward), verbose=False, max_pairs=0)
    plain = run(OneAfterTheOther, counters[:1])
    measured = run(OneAfterTheOther, [profiler, *counters[1:]])

    assert profiler.report.verdict.reason == "runtime_error"
    assert differences(plain, measured) == []
    assert counters[0].counts == counters[1].counts


class Reuses(Adversarial):
    """The critic judges what the generator made before its step; a scheduler steps between the two."""

    def training_step(self, batch, batch_idx):
        result = super().training_step(batch, batch_idx)
        self.lr_schedulers().step()
        if batch_idx == 3:
            self.critics["one"](batch[0])
        return result

    def configure_optimizers(self):
        optimizers = super().configure_optimizers()
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizers[0], 1, gamma=0.9)]


def test_a_failure_after_all_steps_repeats_none_of_them():
    """Steps, schedulers and counters stand where they would: the weights have moved once."""

    def backend(graph, example_inputs):
        def call(*inputs):
            return graph(*inputs)

        return call

    class FailsLate(Reuses):
        def training_step(self, batch, batch_idx):
            result = super().training_step(batch, batch_idx)
            if batch_idx == 3 and "_compiled_call_impl" in vars(self.generator):
                raise RuntimeError("planted")
            return result

    profiler = CompileProfiler(backend=backend, verbose=False, max_pairs=0)
    plain, measured = run(Reuses), run(FailsLate, [profiler])
    names = differences(plain, measured)

    assert profiler.report.verdict.reason == "runtime_error"
    moved = ("weights", "optimizer", "logged", "metric", "gradients")
    assert [name for name in names if not name.startswith(moved)] == []
    for name in names:
        if name.startswith("weights"):
            assert torch.allclose(plain[name].float(), measured[name].float(), atol=0.01)


def test_a_scheduler_has_no_complaint_about_a_step_that_is_run_again():
    profiler = CompileProfiler(backend=fails_to_compile, verbose=False, max_pairs=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(Reuses, [profiler], **RUN)

    assert profiler.report.verdict.reason == "compile_error"
    assert [str(warning.message) for warning in caught if "scheduler" in str(warning.message)] == []


def test_the_users_own_error_is_raised_unchanged():
    class Fails(Manual):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            if batch_idx == 5:
                raise KeyError("the user's own")

    profiler = CompileProfiler(**OPTIONS)
    with pytest.raises(KeyError, match="the user's own") as raised:
        run(Fails, [profiler])

    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None


def test_nothing_listens_after_fit():
    hooks = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    before = [len(found) for found in hooks]
    steps = [vars(kind)["step"] for kind in (torch.optim.SGD, torch.optim.lr_scheduler.LRScheduler)]
    torch.manual_seed(7)
    _, trainer = train(Manual, [CompileProfiler(**OPTIONS)], **RUN)

    assert [len(found) for found in hooks] == before
    assert [vars(kind)["step"] for kind in (torch.optim.SGD, torch.optim.lr_scheduler.LRScheduler)] == steps
    assert not {"pre_backward", "post_backward", "backward"} & set(vars(trainer.strategy.precision_plugin))
