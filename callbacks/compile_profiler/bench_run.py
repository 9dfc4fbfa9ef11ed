"""One configuration of a benchmark, measured in this process: real training steps on a sample batch."""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import json
import logging
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader

from compile_profiler import host
from compile_profiler.callback import CompileProfiler
from compile_profiler.lookup import RequestError, named
from compile_profiler.parts import submodules
from compile_profiler.wording import one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure, in values that JSON can carry.

    Attributes:
        module: name of a LightningModule class, or of a function that returns a LightningModule.
        init: arguments of either.
        batch: name of a batch, a loader, or a function that returns one of them; ``None`` asks the module.
        num_batches: how many batches of a loader are trained in turn.
        steps: training steps.
        device: what Lightning calls the accelerator.
        precision: as Lightning's.
        options: arguments of ``CompileProfiler``.
        folder: where the report goes.
    """

    module: str
    folder: str
    init: dict[str, Any] = field(default_factory=dict)
    batch: str | None = None
    num_batches: int = 1
    steps: int = 100
    device: str = "auto"
    precision: str = "32-true"
    options: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    """Carry out the plan on standard input; exit code 2 with one line if it cannot be, 1 if the user's code fails."""
    warnings.filterwarnings("ignore")  # about a training run that this is not
    warnings.filterwarnings("default", message="CompileProfiler: ")
    plan = Plan(**json.load(sys.stdin))
    try:
        run(plan)
    except (Exception, SystemExit) as error:
        # The other is Lightning's word for a trainer that cannot work.
        if isinstance(error, RequestError) or type(error).__name__ == "MisconfigurationException":
            print(f"compile-profiler: {one_line(str(error))}", file=sys.stderr)
            sys.exit(2)
        traceback.print_exc()
        sys.exit(1)


def run(plan: Plan) -> None:
    """Train ``plan.steps`` steps with pairs all along; the report is in ``plan.folder`` afterwards.

    The run stays compiled whatever is found, and measures as often as it can, because measuring is what it is for.

    Raises:
        RequestError: the plan cannot be carried out.
        Exception: whatever the user's code raises.
    """
    try:
        profiler = CompileProfiler(**plan.options, fallback=False, overhead_budget=1.0, verbose=False)
    except (TypeError, ValueError) as error:
        raise RequestError(str(error)) from None
    maker = _maker(plan)
    # Every configuration starts from the same weights.
    importlib.import_module(host.package_of(CompileProfiler)).seed_everything(0, verbose=False)
    module = maker(**plan.init)
    if not host.is_module_class(type(module)):
        raise RequestError(f"{plan.module} gave a {type(module).__name__}, expected a LightningModule.")
    package = importlib.import_module(host.package_of(module))
    if isinstance(plan.options.get("target"), list):
        try:
            submodules(module, plan.options["target"])
        except ValueError as error:
            raise RequestError(str(error)) from None
    trainer = _trainer(package, plan, profiler)
    trainer.fit(module, datamodule=_repeated(package, module, plan))


def _maker(plan: Plan) -> Any:
    """What makes the module, checked as far as it can be without calling it."""
    maker = named(plan.module)
    if not callable(maker) or (isinstance(maker, type) and not host.is_module_class(maker)):
        kind = f"a class of {maker.__mro__[1].__name__}" if isinstance(maker, type) else f"a {type(maker).__name__}"
        raise RequestError(f"{plan.module} is {kind}, expected a LightningModule class or a function that returns one.")
    try:
        inspect.signature(maker).bind(**plan.init)
    except TypeError as error:
        raise RequestError(f"{plan.module}: {error}; its arguments are given with --init KEY=VALUE.") from None
    return maker


def _trainer(package: Any, plan: Plan, profiler: CompileProfiler) -> host.Trainer:
    logging.getLogger(package.__name__).setLevel(logging.ERROR)
    try:
        return package.Trainer(
            max_epochs=1,
            accelerator=plan.device,
            devices=1,
            precision=plan.precision,
            callbacks=[profiler],
            default_root_dir=plan.folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            num_sanity_val_steps=0,
        )
    except Exception as error:  # of Lightning's own: no code of the user's runs here
        raise RequestError(f"device={plan.device!r}, precision={plan.precision!r}: {error}") from None


def _repeated(package: Any, module: host.LightningModule, plan: Plan) -> Any:
    """A data module that asks for the batches when a Trainer has set the user's module up, as it may need."""

    class Repeated(package.LightningDataModule):  # type: ignore[misc]  # of whichever package the module comes from
        def train_dataloader(self) -> DataLoader[Any]:
            batches = _batches(package, module, plan)
            steps = list(itertools.islice(itertools.cycle(batches), plan.steps))
            # A copy for each step, because a step may write into its batch.
            return DataLoader(steps, batch_size=None, collate_fn=copy.deepcopy)  # type: ignore[arg-type]

    return Repeated()


def _batches(package: Any, module: host.LightningModule, plan: Plan) -> list[Any]:
    loaders = importlib.import_module(f"{package.__name__}.utilities.combined_loader")
    overridden = importlib.import_module(f"{package.__name__}.utilities.model_helpers").is_overridden
    if plan.batch is not None:
        found, source = named(plan.batch), plan.batch
        found = found() if callable(found) else found
        if not isinstance(found, (DataLoader, Iterator)):
            return [found]
    elif overridden("train_dataloader", module):
        found, source = module.train_dataloader(), "train_dataloader()"
    elif module.example_input_array is not None:
        return [module.example_input_array]
    else:
        raise RequestError(
            f"{plan.module} has neither a train_dataloader nor an example_input_array. "
            "Give a batch, or a function that returns one: --batch FILE.py:NAME."
        )
    if isinstance(found, Iterator):
        batches = list(itertools.islice(found, plan.num_batches))
    else:  # one loader or, as Lightning allows, several
        combined = loaders.CombinedLoader(found, "max_size_cycle")
        batches = [batch for batch, *_ in itertools.islice(iter(combined), plan.num_batches)]
    if not batches:
        raise RequestError(f"{source} gave no batch.")
    return batches
