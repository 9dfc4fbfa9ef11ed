"""Which submodules a step calls, so that the user can be told which target to name instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from compile_profiler.parts import submodules

Function = tuple[str, str]
"""File and name of a function, as torch's records have them."""


def own_functions(module: nn.Module, target: str | Sequence[str], hooks: Sequence[str]) -> frozenset[Function]:
    """The functions that a target consists of; whatever else is compiled is called by them.

    >>> [name for _, name in own_functions(nn.Linear(1, 1), "forward", [])]
    ['forward']
    """
    if target == "step":
        functions = [getattr(module, hook) for hook in hooks]
    else:
        functions = [submodule.forward for submodule in submodules(module, target).values()]
    codes = (getattr(function, "__code__", None) for function in functions)
    return frozenset((code.co_filename, code.co_name) for code in codes if code is not None)


def called(module: nn.Module, run: Callable[[], object]) -> list[str]:
    """Names of the submodules that ``run`` calls, in order (``""`` is the module itself).

    ``run`` is called with all compiling off, also of what the user has compiled: the hook that listens must not get
    into somebody's graph.

    >>> net = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    >>> called(net, lambda: net[1](torch.ones(1)))
    ['1']
    """
    names = {submodule: name for name, submodule in module.named_modules()}
    found: dict[str, None] = {}

    def listen(submodule: nn.Module, _args: object) -> None:
        if submodule in names:
            found[names[submodule]] = None

    # One hook of torch's, not one on each submodule: nobody can see it on the user's module.
    handle = register_module_forward_pre_hook(listen)
    try:
        with torch.compiler.set_stance("force_eager"):
            run()
    finally:
        handle.remove()
    return list(found)


def never_ran(module: nn.Module, target: str | Sequence[str], names: Sequence[str]) -> bool:
    """Whether a step that calls these submodules calls nothing of the target.

    >>> never_ran(nn.Sequential(nn.Linear(1, 1)), ["0"], []), never_ran(nn.Sequential(nn.Linear(1, 1)), ["0"], ["0"])
    (True, False)
    """
    return target != "step" and not any(name in names for name in submodules(module, target))


def other_targets(module: nn.Module, target: str | Sequence[str], names: Sequence[str]) -> list[str]:
    """Other targets that there is something to compile in, as one writes them.

    Args:
        module: the LightningModule.
        target: what was compiled, in vain.
        names: the submodules that its step calls.

    >>> model = nn.ModuleDict({"net": nn.Sequential(nn.Linear(1, 1), nn.ReLU()), "rnn": nn.LSTM(1, 1)})
    >>> other_targets(model, "forward", ["net", "net.0", "net.1"])
    ["target=['net']", "target='step'"]
    >>> other_targets(model, "step", ["net", "net.0", "net.1", "rnn"])
    ["target=['net']"]
    """
    known = dict(module.named_modules())
    tried = set(submodules(module, target)) if target != "step" else set()
    recurrent = any(isinstance(known[name], nn.RNNBase) for name in names)
    compilable = [name for name in names if name and _is_compilable(known[name]) and not _is_within(name, tried)]
    outermost = [name for name in compilable if not _is_within(name, {*compilable} - {name})]
    found = [f"target={outermost}"] if outermost else []
    if "" in names and target != "forward" and not recurrent:
        found.append("target='forward'")
    # A step that calls an RNN is not compiled at all, one that moves its optimizers itself is never the target.
    if target not in ("step", "networks") and not recurrent:
        found.append("target='step'")
    return found


def _is_compilable(module: nn.Module) -> bool:
    """It has parameters, is not compiled already, and has no recurrent layer, which torch leaves in eager."""
    if vars(module).get("_compiled_call_impl") is not None or not any(True for _ in module.parameters()):
        return False
    return not any(isinstance(submodule, nn.RNNBase) for submodule in module.modules())


def _is_within(name: str, others: set[str]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in others if other)
