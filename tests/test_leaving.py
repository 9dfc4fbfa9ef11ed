"""However a fit ends, what was there before is there again, and what was compiled is released."""

import contextlib
import gc
import logging
import signal
import threading
import warnings
import weakref

import lightning.pytorch as pl
import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import LRScheduler

from compile_profiler import CompileProfiler
from runs import Regression, fit, sleepy
from test_manual import Adversarial

OPTIONS = {"verbose": False, "warmup_steps": 1, "pair_every_n_steps": 2}


def surroundings():
    """Settings and listeners of this process that a run could leave changed."""
    configs = (torch._dynamo.config, torch._functorch.config, torch._inductor.config)
    found = {config.__name__: config.save_config() for config in configs}
    for name, logger in [("", logging.root), *logging.root.manager.loggerDict.items()]:
        if isinstance(logger, logging.Logger):
            found[f"logger {name}"] = (logger.level, list(logger.handlers), logger.disabled, logger.propagate)
    handler = torch._dynamo.callback.callback_handler
    found["listeners"] = (list(handler.start_callbacks), list(handler.end_callbacks))
    found["optimizer hooks"] = (
        list(torch_optimizer._global_optimizer_pre_hooks),
        list(torch_optimizer._global_optimizer_post_hooks),
    )
    found["scheduler"] = LRScheduler.step
    found["signals"] = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    found["warnings"] = list(warnings.filters)
    found["threads"] = threading.active_count()
    found["gradients"] = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    found["stance"] = torch._dynamo.eval_frame._stance
    return found


def attributes(module):
    """Names of the attributes of all its submodules."""
    return {name: set(vars(submodule)) for name, submodule in module.named_modules()}


class Ends(pl.Callback):
    """Ends the run by an error on the ninth batch, once pairs have been measured."""

    def __init__(self, error):
        self.error = error

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 9:
            raise self.error


def fails(graph, example_inputs):
    """A backend that cannot compile."""
    raise RuntimeError("planted")


ENDINGS = {
    "normal": ({"backend": "eager", "fallback": False}, []),
    "eager by decision": ({"backend": sleepy(0.003)}, []),
    "eager by failure": ({"backend": fails}, []),
    "an error of the user's": ({"backend": "eager"}, [Ends(KeyError("mine"))]),
    "Ctrl-C": ({"backend": "eager"}, [Ends(KeyboardInterrupt())]),
}


@pytest.mark.parametrize("module_class", [Regression, Adversarial])
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.filterwarnings("ignore:CompileProfiler. Compiling failed", "ignore:The .grad attribute of a Tensor.*")
def test_the_process_is_as_it_was(ending, module_class):
    options, others = ENDINGS[ending]
    plain = module_class()
    fit(plain, max_steps=2)
    torch.compile(torch.nn.Linear(1, 1), backend="eager")(torch.ones(1))  # torch sets up its own logger only now
    profiler = CompileProfiler(**OPTIONS, **options)
    module = module_class()
    before = surroundings()
    with contextlib.suppress(KeyError, SystemExit):
        fit(module, [profiler, *others], max_steps=30)
    after = surroundings()

    assert [name for name in before if before[name] != after.get(name)] == []
    assert attributes(module) == attributes(plain)
    assert profiler.report.speedup.num_pairs > 0 or ending == "eager by failure"


def test_teardown_may_come_twice_and_without_a_fit():
    profiler, module = CompileProfiler(backend="eager", **OPTIONS), Regression()
    trainer = fit(module, [profiler], max_steps=10)
    report = profiler.report
    for _ in range(2):
        profiler.on_exception(trainer, module, RuntimeError())
        profiler.teardown(trainer, module, "fit")

    assert profiler.report == report
    CompileProfiler().teardown(trainer, module, "fit")


class Alive(pl.Callback):
    """How many of the compiled graphs are alive, after each batch and its decision."""

    def __init__(self, fails_at):
        self.fails_at, self.graphs, self.counts = fails_at, [], []

    def backend(self, graph, example_inputs):
        """Compiles nothing; what it gives fails at its call number ``fails_at``."""
        calls = []

        def run(*inputs):
            calls.append(1)
            if len(calls) == self.fails_at:
                raise RuntimeError("planted")
            return graph.forward(*inputs)

        self.graphs.append(weakref.ref(graph))
        self.graphs.append(weakref.ref(run))
        return run

    def count(self):
        gc.collect()
        return sum(reference() is not None for reference in self.graphs)

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step in (3, trainer.max_steps):  # to collect takes a while
            self.counts.append(self.count())


@pytest.mark.parametrize("target", ["step", "forward", ["net"]])
@pytest.mark.parametrize("falls_back", [True, False])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf.*", "ignore:CompileProfiler.*")
def test_compiled_graphs_are_freed_when_the_run_goes_back_to_eager_or_ends(target, falls_back):
    alive = Alive(fails_at=5 if falls_back else None)
    profiler = CompileProfiler(target, backend=alive.backend, max_pairs=0, **OPTIONS)
    trainer = fit(Regression(), [profiler, alive], max_steps=8, validate=False)

    assert profiler.report.verdict.reason == ("runtime_error" if falls_back else "disabled")
    assert alive.counts[0] > 0  # they can be seen to live
    assert (alive.counts[-1] == 0) is falls_back
    assert alive.count() == 0
    assert trainer.global_step == 8
