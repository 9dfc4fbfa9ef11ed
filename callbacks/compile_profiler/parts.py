"""The submodules that a target stands for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn


def submodules(module: nn.Module, target: str | Sequence[str]) -> dict[str, nn.Module]:
    """The modules that a target other than ``"step"`` stands for, by name (``""`` is the module itself).

    Raises:
        ValueError: a name is not a submodule, or ``"blocks"`` finds no repeated block.
    """
    if target == "forward":
        return {"": module}
    if target == "networks":
        return dict(_networks(module, ""))
    if target == "blocks":
        found = dict(_blocks(module, ""))
        if not found:
            raise ValueError(
                f"target='blocks' found no block in {type(module).__name__}: no ModuleList or Sequential holds two or "
                "more modules of one class that have submodules of their own. Use target='step' or a list of names."
            )
        return found
    known = dict(module.named_modules())
    for name in target:
        if name not in known or not name:
            names = ", ".join(sorted(key for key, _ in module.named_children())[:20])
            raise ValueError(
                f"target names the submodule {name!r}, which {type(module).__name__} does not have. "
                f"Expected names as in named_modules(), for instance {names or 'none: it has no submodules'}."
            )
    return {name: known[name] for name in target}


def _blocks(module: nn.Module, prefix: str) -> Iterable[tuple[str, nn.Module]]:
    """Repeated blocks, outermost first: siblings of one class in a list that do more than one torch layer does."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        siblings = list(child.named_children()) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        kinds = [type(sibling) for _, sibling in siblings]
        chosen = {kind for kind in kinds if kinds.count(kind) > 1 and not _is_plain_layer(kind)}
        for sibling_name, sibling in siblings:
            if type(sibling) in chosen and any(True for _ in sibling.parameters()):
                yield f"{path}.{sibling_name}", sibling
            else:
                yield from _blocks(sibling, f"{path}.{sibling_name}.")
        if not siblings:
            yield from _blocks(child, f"{path}.")


def _networks(module: nn.Module, prefix: str) -> Iterable[tuple[str, nn.Module]]:
    """Children that own parameters; of a list or a dict, which nobody calls, what is in it."""
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _networks(child, f"{prefix}{name}.")
        elif any(True for _ in child.parameters()):
            yield f"{prefix}{name}", child


def _is_plain_layer(kind: type) -> bool:
    """Linear, ReLU and the like: compiled alone they have nothing to fuse. Transformer layers do."""
    return kind.__module__.startswith("torch.nn.modules.") and kind.__module__ != "torch.nn.modules.transformer"
