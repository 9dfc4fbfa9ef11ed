"""Who may import whom, checked on the source: the rooms of docs/how-it-works.md keep their walls."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "callbacks" / "compile_profiler"

LIGHTNING = {"lightning", "lightning_utilities", "pytorch_lightning"}

# Module: the modules of this package it may import, and the packages of others. The standard library is free.
# A row names only rows above it, so data flows one way; a new module has to be given its place here.
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    # nouns
    "plain": (set(), set()),
    "results": ({"plain"}, set()),
    "records": ({"plain", "results"}, set()),
    # pure: values in, values out
    "stats": ({"records"}, {"numpy", "scipy"}),
    "verdict": ({"records", "stats"}, set()),
    "candidates": ({"plain"}, set()),
    "outlook": ({"plain", "records", "candidates"}, set()),
    "trial": ({"records", "results", "stats", "candidates", "outlook"}, set()),
    "duel": ({"records", "results", "verdict", "candidates", "trial"}, set()),
    "purse": ({"outlook"}, set()),
    "scout": ({"records", "candidates", "outlook", "trial", "duel", "purse"}, set()),
    "ending": ({"records", "outlook", "trial", "verdict"}, set()),
    "search": (
        {"candidates", "duel", "ending", "outlook", "purse", "records", "results", "scout", "trial", "verdict"},
        set(),
    ),
    "scalars": ({"records", "results"}, set()),
    "sums": (set(), {"torch"}),
    "drift": ({"records", "sums"}, {"torch"}),
    "metrics": ({"sums"}, {"torch", "torchmetrics"}),
    "tolerances": (set(), {"torch"}),
    "advice": (set(), set()),
    "notices": ({"advice", "records"}, set()),
    "ledger": ({"records", "stats", "verdict"}, set()),
    "checkpoint": ({"records"}, {"torch"}),
    "meeting": ({"records"}, set()),
    # measuring, compiling, observing: a torch module is all they know
    "clock": (set(), {"torch"}),
    "windows": ({"records", "clock"}, set()),
    "hooks": (set(), {"torch"}),
    "cells": ({"hooks"}, {"torch", "numpy"}),
    "sandbox": ({"cells", "hooks"}, {"torch", "numpy"}),
    "parts": (set(), {"torch"}),
    "shapes": (set(), {"torch"}),
    "compiler": ({"records"}, {"torch"}),
    "logs": (set(), {"torch", "numpy"}),
    "own_code": (set(), {"torch"}),
    "arms": ({"hooks", "logs", "own_code", "compiler", "parts"}, {"torch", "numpy", "torchmetrics"}),
    "manual": ({"sandbox", "arms"}, {"torch"}),
    "reducer": (set(), {"torch"}),
    "scaling": (set(), {"torch"}),
    "watch": ({"scaling"}, {"torch"}),
    "matching": ({"arms"}, set()),
    "guard": ({"sandbox", "logs", "arms", "manual", "reducer"}, {"torch"}),
    "group": ({"meeting"}, {"torch"}),
    "targets": ({"parts"}, {"torch"}),
    "places": ({"records"}, {"torch"}),
    "reach": ({"places"}, {"torch"}),
    "job": ({"records", "checkpoint", "shapes", "reach"}, {"torch"}),
    "causes": ({"records"}, set()),
    "events": ({"records", "places", "causes"}, set()),
    "tally": ({"records"}, set()),
    "shortfalls": ({"records", "causes", "places", "compiler", "events"}, set()),
    "observe": ({"records", "places", "compiler", "events", "shortfalls", "tally"}, set()),
    "machine": ({"advice"}, {"torch"}),
    "host": ({"records", "arms"}, {"torch", "tqdm", *LIGHTNING}),
    "step_door": ({"arms", "clock", "logs", "manual", "scaling", "guard", "reducer", "host"}, {"torch"}),
    # one batch in, one sample out
    "effects": ({"sums", "sandbox"}, {"torch"}),
    "arrivals": (set(), {"torch"}),
    "contrast": (
        {"records", "sums", "drift", "clock", "sandbox", "arms", "effects", "arrivals"},
        {"torch"},
    ),
    "probe": ({"records", "shapes", "clock", "hooks", "sandbox", "arms", "contrast"}, {"torch"}),
    # faces
    "wording": (set(), set()),
    "candidates_table": ({"results", "wording"}, {"rich"}),
    "render": ({"records", "wording", "candidates_table"}, {"rich"}),
    "loggers": ({"arms"}, set()),
    "export": ({"records", "scalars", "candidates_table", "render", "host", "loggers"}, set()),
    "runs_on_disk": ({"records", "scalars", "wording", "export"}, {"tensorboard"}),
    "comparison": ({"records", "results", "wording", "candidates_table", "render"}, {"rich"}),
    "recall": ({"plain"}, set()),
    "pictures": ({"results", "scalars", "wording", "runs_on_disk"}, {"matplotlib"}),
    "page": (
        {"records", "results", "scalars", "wording", "candidates_table", "render", "runs_on_disk", "pictures"},
        {"jinja2"},
    ),
    "doctor": ({"advice", "machine"}, {"torch"}),
    # one fit: what is due, what follows
    "arguments": ({"verdict", "arms", "candidates"}, set()),
    "pairs": (
        {"arms", "guard", "host", "meeting", "notices", "probe", "records", "sandbox", "step_door", "windows"},
        {"torch"},
    ),
    "rig": (
        {
            "arguments",
            "arms",
            "clock",
            "contrast",
            "guard",
            "host",
            "matching",
            "meeting",
            "pairs",
            "probe",
            "records",
            "step_door",
            "tolerances",
            "verdict",
            "watch",
            "windows",
        },
        {"torch"},
    ),
    "workshop": (
        {
            "advice",
            "arguments",
            "arms",
            "clock",
            "host",
            "ledger",
            "machine",
            "matching",
            "notices",
            "observe",
            "records",
            "rig",
        },
        set(),
    ),
    "healing": ({"arms", "compiler", "records"}, set()),
    "explainer": (
        {
            "arguments",
            "arms",
            "clock",
            "export",
            "healing",
            "host",
            "notices",
            "observe",
            "records",
            "rig",
            "shapes",
            "targets",
        },
        set(),
    ),
    "lookout": (
        {"arguments", "candidates", "clock", "job", "parts", "recall", "records", "results", "search", "shapes"},
        {"torch"},
    ),
    "first_steps": ({"meeting", "notices", "reducer", "rig"}, set()),
    "judgement": (
        {"advice", "explainer", "ledger", "machine", "meeting", "notices", "records", "verdict"},
        {"torch"},
    ),
    "account": ({"explainer", "ledger", "records", "windows"}, set()),
    "contest": (
        {
            "arguments",
            "candidates",
            "duel",
            "explainer",
            "host",
            "ledger",
            "lookout",
            "meeting",
            "notices",
            "observe",
            "outlook",
            "records",
            "results",
            "rig",
            "search",
            "stats",
            "verdict",
            "windows",
            "workshop",
        },
        set(),
    ),
    "seat": (
        {
            "account",
            "arguments",
            "clock",
            "explainer",
            "judgement",
            "ledger",
            "meeting",
            "records",
            "rig",
            "watch",
            "windows",
        },
        set(),
    ),
    "company": (
        {"arguments", "compiler", "first_steps", "group", "host", "meeting", "rig", "seat", "windows"},
        set(),
    ),
    "session": (
        {
            "account",
            "arguments",
            "candidates",
            "checkpoint",
            "clock",
            "company",
            "contest",
            "explainer",
            "export",
            "group",
            "host",
            "judgement",
            "ledger",
            "lookout",
            "machine",
            "meeting",
            "notices",
            "records",
            "rig",
            "seat",
            "verdict",
            "windows",
            "workshop",
        },
        {"torch"},
    ),
    # Lightning says when; it comes in through the host
    "callback": (
        {"records", "verdict", "checkpoint", "parts", "host", "render", "export", "arguments", "judgement", "session"},
        set(),
    ),
    # a user's module and a batch: what compiling does to them
    "lookup": (set(), set()),
    "bench_run": ({"parts", "host", "callback", "lookup", "wording"}, {"torch"}),
    "bench": ({"records", "export", "bench_run"}, set()),
    "cli": (
        {"wording", "render", "runs_on_disk", "comparison", "recall", "page", "doctor", "bench", "lookup"},
        {"click", "rich"},
    ),
    "__main__": ({"cli"}, set()),
    "__init__": ({"records", "callback"}, set()),
}
LIGHTNING_DOORS = {"host"}
DYNAMO_DOORS = {"compiler", "own_code", "arms", "machine"}
COMPILER_INTERNALS = ("torch._dynamo", "torch._C._dynamo", "torch._inductor", "torch._functorch")


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything a module imports, anywhere in it, also for type checking only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def touched(tree: ast.AST) -> set[str]:
    """Compiler internals that a module imports or reaches through an attribute of ``torch``."""
    attributes = (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    names = [*imported(tree), *attributes]
    return {door for door in COMPILER_INTERNALS for name in names if f"{name}.".startswith(f"{door}.")}


def runs_at_import(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Top-level statements that do more than name something."""
    quiet = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for node in statements:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from runs_at_import([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):  # one package or another
            yield from runs_at_import([*node.body, *(line for handler in node.handlers for line in handler.body)])
        elif not isinstance(node, quiet) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            yield node


def complaints(module: str, source: str) -> list[str]:
    """What the source of ``module`` does that its row does not allow."""
    if module not in ALLOWED:
        return [f"{module} has no row in the table"]
    ours, theirs = ALLOWED[module]
    tree = ast.parse(source)
    found = []
    for name in imported(tree):
        top, _, rest = name.partition(".")
        if top == "":
            found.append(f"{module} imports {name}: imports are absolute")
        elif top == "compile_profiler":
            if rest.partition(".")[0] not in ours:
                found.append(f"{module} imports {name} from a room it may not enter")
        elif top not in theirs and top not in sys.stdlib_module_names:
            found.append(f"{module} imports {name}")
    if module not in DYNAMO_DOORS:
        found += [f"{module} touches {name}" for name in sorted(touched(tree))]
    if module != "__main__":  # which is run, not imported
        found += [f"{module} runs line {node.lineno} at import" for node in runs_at_import(tree.body)]
    return found


def test_every_module_keeps_to_its_row_of_the_table():
    """Lower layers never import higher ones, and what is unstable is touched through its door alone."""
    modules = {path.stem: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}

    found = [line for module, source in sorted(modules.items()) for line in complaints(module, source)]

    assert found == []
    assert len(modules) > 1


def test_the_table_itself_only_looks_down():
    """A row names only rows above it; Lightning has one door; no room is a drawer for odds and ends."""
    above: set[str] = set()
    for module, (ours, _) in ALLOWED.items():
        assert ours <= above, module
        above.add(module)

    assert {module for module, (_, theirs) in ALLOWED.items() if theirs & LIGHTNING} == LIGHTNING_DOORS
    assert not {"utils", "types", "config", "common", "helpers"} & set(ALLOWED)


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("records", "import torch", "records imports torch"),
        ("stats", "from compile_profiler.verdict import judge", "from a room it may not enter"),
        ("stats", "import compile_profiler.callback", "from a room it may not enter"),
        ("drift", "from . import callback", "imports are absolute"),
        ("probe", "def f():\n    from lightning.pytorch import Trainer", "probe imports lightning.pytorch.Trainer"),
        ("sandbox", "if TYPE_CHECKING:\n    import pytorch_lightning", "sandbox imports pytorch_lightning"),
        ("clock", "import torch._dynamo.utils", "clock touches torch._dynamo"),
        ("callback", "import torch\ndef f():\n    torch._dynamo.reset()", "callback touches torch._dynamo"),
        ("render", "print('hello')", "render runs line 1 at import"),
        ("host", "if TYPE_CHECKING:\n    pass\nelse:\n    print()", "host runs line 2 at import"),
        ("host", "try:\n    import lightning\nexcept ImportError:\n    print()", "host runs line 4 at import"),
        ("utils", "", "utils has no row"),
    ],
)
def test_the_check_can_fail(module, source, complaint):
    """Each rule, broken on purpose, is reported."""
    assert any(complaint in line for line in complaints(module, source))


def test_the_docs_show_every_room_in_this_order():
    """The table that people read is this table."""
    docs = (PACKAGE.parents[1] / "docs" / "how-it-works.md").read_text(encoding="utf-8")

    rooms = re.findall(r"^\| `(\w+)\.py` \|", docs, flags=re.MULTILINE)

    assert rooms == [module for module in ALLOWED if not module.startswith("__")]


def test_importing_the_package_changes_nothing():
    """No output, no seed used, no compiler setting changed, beyond what Lightning's own import does."""
    script = """if True:
        import random, torch, torch._dynamo.config, torch._inductor.config, lightning
        configs = (torch._dynamo.config, torch._inductor.config)
        before = [torch.get_rng_state().tolist(), random.getstate(), *(c.save_config() for c in configs)]
        import compile_profiler
        after = [torch.get_rng_state().tolist(), random.getstate(), *(c.save_config() for c in configs)]
        assert before == after
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
