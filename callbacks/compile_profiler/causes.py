"""Say in plain words what torch's reason for a recompile or a graph break means."""

from __future__ import annotations

import re
from typing import NamedTuple

from compile_profiler.records import Cause


class Explanation(NamedTuple):
    """Why something was compiled again or not at all, and what to write instead."""

    cause: Cause
    hint: str


_GUARD = re.compile(r"^(?:\S+/\d+: )?(?P<guard>.*?)(?:\s+# (?P<source>.*?))?(?:\s+\(HINT.*)?$")
_LIBRARY = re.compile(r"\b(numpy) function\b|\bmodule: ([A-Za-z_]\w*)")
_EXAMPLE = re.compile(r"\(e\.g\.[^)]*\)")
_CARRIED = re.compile(r"___stack\d+")

_SIZE = re.compile(
    r"tensor '(?P<name>[^']+(?:'[^']+'[^']*)*)' (?:size|stride) mismatch at index (?P<dim>\d+)\. "
    r"expected (?P<old>-?\d+), actual (?P<new>-?\d+)"
)
_SHAPE = re.compile(r"(?:size|stride|rank) mismatch|\.(?:size|stride)\(\)|\.shape\[|\.storage_offset\(\)")
_STAGE = re.compile(
    r"requires_grad mismatch|key set mismatch|grad_mode|global.state|autocast|\.training\b|inference", re.I
)
_IDENTITY = re.compile(
    r"___check_(?:obj|type)_id\((?P<name>.+?), |(?P<same>\S+) is (?:not )?\S|\bid\(|to be a tensor type"
)
_SCALAR = re.compile(r"^(?P<name>.+?) (?:==|!=|<=|>=|<|>) (?P<value>-?[\d.]+\S*|True|False|None|'.*|\".*)")
_TRUTH = re.compile(r"^not (?P<name>\S+)$")
_FORMULA = re.compile(r"\((\S+) .*\)")
_LOCAL = re.compile(r"\bL\['(\w+)'\]")
_OF_TENSOR = re.compile(r"\.(?:item|tolist)\(|\b(?:float|int|bool)\(")

_COUNTERS = (  # Lightning's and torchmetrics' own counters, and what the user wrote to read them
    (re.compile(r"optim_progress\S*\.completed|global_step"), "self.global_step"),
    (re.compile(r"epoch_progress\S*|current_epoch"), "self.current_epoch"),
    (re.compile(r"batch_progress"), "Lightning's batch counter"),
    (re.compile(r"_update_count|_num_updates"), "a metric's update counter"),
)

# First match wins; the texts are the headlines and explanations of torch's graph breaks.
_BREAKS: tuple[tuple[re.Pattern[str], Cause, str], ...] = (
    (
        re.compile(r"Tensor\.item\(\)|tolist\(\)|_local_scalar_dense"),
        "data_dependent",
        "A tensor's value becomes a Python number here. Keep it a tensor: torch.where for a branch, self.log takes "
        "tensors; or move .item() out of the step.",
    ),
    (
        re.compile(r"[Dd]ata.dependent|generic_jump"),
        "data_dependent",
        "A branch depends on a tensor's value. Compute both sides and choose with torch.where.",
    ),
    (
        re.compile(r"Dynamic shape operator|nonzero|data-dependent output shape|Dynamic slicing"),
        "data_dependent",
        "The size of the result depends on a tensor's values. Instead of x[mask] use torch.where(mask, x, 0), and "
        "divide by mask.sum() for a mean.",
    ),
    (
        re.compile(r"\b[Mm]etric\b|torchmetrics"),
        "side_effect",
        "A metric stays out of the graph, which breaks it here. Return what it needs from training_step and update it "
        "in on_train_batch_end.",
    ),
    (
        re.compile(r"torch\.compiler\.disable|_dynamo\.disable"),
        "side_effect",
        "The function called here is marked with torch.compiler.disable. Call it outside the step, or drop the mark.",
    ),
    (
        re.compile(
            r"`print`|warnings\.warn|logging\.Logger|[Ll]ogger|side effect|STORE_GLOBAL|builtin `(?:open|input)`"
        ),
        "side_effect",
        "Printing, warning and logging cannot be compiled. Move the call to on_train_batch_end, or put it under "
        "`if not torch.compiler.is_compiling():`.",
    ),
    (
        re.compile(r"RNN, GRU, or LSTM"),
        "unsupported",
        "RNN, GRU and LSTM are not compiled, nor is the function that calls them. Name the other submodules in target.",
    ),
    (
        re.compile(r"\bRandom\.|\brandom\.(?!default_rng)"),
        "unsupported",
        "Python's random numbers are drawn in the step. Draw with torch.rand, or draw in on_train_batch_start.",
    ),
    (
        re.compile(r"\bnumpy\b|ndarray"),
        "unsupported",
        "This NumPy function cannot be compiled. Use torch's own, or call it outside the step.",
    ),
    (
        re.compile(r"__torch_function__|[Tt]ensor subclass|as_subclass"),
        "unsupported",
        "The batch holds a tensor subclass. Make it plain in on_after_batch_transfer: x.as_subclass(torch.Tensor).",
    ),
    (
        re.compile(r"[Hh]ook|RemovableHandle"),
        "unsupported",
        "A hook is registered or run inside the step. Register it once, outside, or stop watching gradients.",
    ),
    (
        re.compile(r"\.backward\(\)|autograd\.grad|requires_grad|optimizer"),
        "unsupported",
        "Backward and the optimizer cannot be part of the graph. Compile the submodules instead: name them in target.",
    ),
    (
        re.compile(r"autograd\.Function|AutogradFunction"),
        "unsupported",
        "This custom autograd.Function cannot be traced. Simplify its context, or make it a torch.library.custom_op.",
    ),
    (
        re.compile(r"\bloop\b"),
        "unsupported",
        "Something in the body of this loop cannot be traced, so the whole function is not. Move the loop's body into "
        "a function of its own.",
    ),
    (
        re.compile(r"Backend compiler"),
        "unsupported",
        "The backend failed on this graph, so it runs in eager. Try another backend, or another target.",
    ),
)
UNTRACEABLE = (
    "torch.compile cannot trace this construct. Move it out of the step, or name the other submodules in target."
)


def explain_break(reason: str) -> Explanation:
    r"""The cause behind a graph break, or behind a function that was not compiled.

    >>> explain_break("Failed to trace builtin operator\n Explanation: cannot trace builtin operator `print`").cause
    'side_effect'
    """
    # torch's own hints and examples mention printing and warning whatever the reason is.
    text = _EXAMPLE.sub("", _own_words(reason))
    context = reason.partition("Developer debug context:")[2].partition("\n")[0]
    for pattern, cause, hint in _BREAKS:
        if pattern.search(text):
            return Explanation(cause, hint)
    for pattern, cause, hint in _BREAKS:
        if pattern.search(context):
            return Explanation(cause, hint)
    return Explanation("unsupported", UNTRACEABLE)


def explain_recompile(reason: str) -> Explanation:
    """The cause behind a failed guard.

    Only the guard is judged; of the source line behind it only whether a number was read off a tensor.

    >>> explain_recompile("0/1: self.n == 2  # self.n += 1  # mine/train.py:34 in training_step")
    Explanation(cause='python_scalar', hint="self.n changes and is a constant of the graph. Keep it as a tensor: \
self.register_buffer('n', torch.tensor(0)), changed in place.")
    """
    guard, source = _taken_apart(reason)
    size = _SIZE.search(guard)
    if size:
        return Explanation("shape", _size_hint(**size.groupdict()))
    if _SHAPE.search(guard):
        return Explanation("shape", "A tensor's shape changed. Pad to a few fixed sizes, or pass dynamic=True.")
    if _STAGE.search(guard):
        return Explanation("stage", "Another grad mode, dtype or train/eval flag has its own graph; a few are normal.")
    scalar = _SCALAR.match(guard)
    if scalar and _CARRIED.search(guard):
        if _OF_TENSOR.search(source):
            return Explanation("data_dependent", explain_break("Tensor.item()").hint)
        return Explanation("python_scalar", "A Python number made at a graph break differs. Mend that break first.")
    identity = _IDENTITY.search(guard)
    if identity:
        name = identity["name"] or identity["same"] or "An object"
        return Explanation("object_identity", f"{name} is another object every time. Make it once, in __init__.")
    if scalar:
        return Explanation("python_scalar", _scalar_hint(_FORMULA.sub(r"\1", scalar["name"]), scalar["value"]))
    truth = _TRUTH.match(guard)
    if truth:
        return Explanation("python_scalar", _scalar_hint(truth["name"], "False"))
    return Explanation("other", "")


def _size_hint(name: str, dim: str, old: str, new: str) -> str:
    if _CARRIED.search(name):
        return "A tensor made at a graph break changed its size. Mend that break: no x[mask], but torch.where."
    change = f"Dimension {dim} of {name} went from {old} to {new}."
    if dim == "0":
        drop = "One more graph for a ragged last batch is normal; DataLoader(drop_last=True) saves it."
        return f"{change} {drop} If it keeps changing, pass dynamic=True."
    return f"{change} Pad the batches to a few fixed lengths, or pass dynamic=True."


def _scalar_hint(name: str, value: str) -> str:
    for counter, known_as in _COUNTERS:
        if counter.search(name):
            return (
                f"{known_as} changes and is a constant of the graph. Read it outside the compiled step: copy it into a "
                "buffer in on_train_batch_start (self.n.fill_(...)), and use that."
            )
    if name.startswith("len("):
        return f"{name} changes: a list grows or shrinks in the step. Append outside it, in on_train_batch_end."
    attribute = re.fullmatch(r"self\.(\w+)", name)
    if attribute and re.match(r"-?[\d.]", value):
        start = "0." if "." in value else "0"
        buffer = f"self.register_buffer('{attribute[1]}', torch.tensor({start}))"
        return f"{name} changes and is a constant of the graph. Keep it as a tensor: {buffer}, changed in place."
    if re.match(r"-?[\d.]", value):
        return f"{name} changes and is a constant of the graph. Hand it in as a tensor. A few such graphs are normal."
    return f"{name} takes several values; each has its own graph. Keep what varies out of the compiled step."


def detail_of(reason: str) -> str:
    """A reason in one line: a guard without the source behind it, a graph break without torch's own hints.

    >>> detail_of("0/1: self.n == 2      # self.n += 1  # mine/train.py:34 in training_step")
    'self.n == 2'
    """
    guard, _ = _taken_apart(reason)
    return " ".join((guard if "\n" not in _own_words(reason) else _own_words(reason)).split())


def _taken_apart(reason: str) -> tuple[str, str]:
    """The guard of a recompile reason, its names as the user writes them, and the source line behind it."""
    line = reason.partition("\n")[0]
    match = _GUARD.match(line)
    guard, source = (match["guard"], match["source"] or "") if match else (line, "")
    return _LOCAL.sub(r"\1", guard), source


def _own_words(reason: str) -> str:
    return re.split(r"\n(?:\s*(?:Hint|Developer debug context)|User stack trace):", reason)[0]


def library_in(reason: str) -> str | None:
    """The top-level package whose function could not be traced, where the reason names one.

    >>> library_in("Can't find numpy numpy function <class 'numpy.poly1d'> in torch._numpy.")
    'numpy'
    """
    match = _LIBRARY.search(reason)
    return (match[1] or match[2]) if match else None
