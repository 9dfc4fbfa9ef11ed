"""Arms: ways to run a step of the module, eager or compiled, that leave nothing behind on it."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torchmetrics import Metric, MetricCollection

from compile_profiler.compiler import lookup_s, tracing_with
from compile_profiler.hooks import HookWatch
from compile_profiler.logs import DeferredLogs
from compile_profiler.own_code import OwnCode
from compile_profiler.parts import submodules

Call = Callable[..., Any]

_MISSING = object()

# Code that the step calls and that is compiled apart from it, behind a graph break, else shares its cache and its
# recompile limit with every other fit of the process (since torch 2.13).
_ISOLATED = {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}


def known_backends() -> list[str]:
    """Names that ``torch.compile(backend=...)`` accepts, those for debugging included."""
    return [str(name) for name in torch.compiler.list_backends(exclude_tags=())]


def known_modes() -> list[str]:
    """Names that ``torch.compile(mode=...)`` accepts."""
    from torch._inductor import list_mode_options  # imported late: loads the compiler

    return list(list_mode_options())


def mode_options(mode: str) -> dict[str, Any]:
    """The options that ``torch.compile(mode=...)`` stands for."""
    from torch._inductor import list_mode_options  # imported late: loads the compiler

    return dict(list_mode_options(mode))


@contextmanager
def patched(patches: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Attributes ``(object, name, value)`` set in the objects' ``__dict__`` for a moment.

    Past ``nn.Module.__setattr__`` on purpose: that one costs microseconds and registers what looks like a module.
    """
    before = []
    for target, name, value in patches:
        held = vars(target)
        before.append((held, name, held.get(name, _MISSING)))
        held[name] = value
    try:
        yield
    finally:
        for held, name, value in reversed(before):
            if value is _MISSING:
                held.pop(name, None)
            else:
                held[name] = value


def disguised(module: nn.Module, attributes: Mapping[str, Any]) -> list[tuple[Any, str, Any]]:
    """Patches that put ``attributes`` on a module, unseen by ``copy`` and ``pickle``.

    A step may copy its module (a teacher, a moving average): the copy must not carry stand-ins for the original.
    """
    held = {name: vars(module)[name] for name in attributes if name in vars(module)}

    def get_state() -> Any:
        read = getattr(type(module), "__getstate__", None)
        state = read(module) if read is not None else vars(module)
        if not isinstance(state, dict):  # a class of the user's that packs itself its own way
            return state
        own = {name: value for name, value in state.items() if name != "__getstate__" and name not in attributes}
        return {**own, **{name: value for name, value in held.items() if name in state}}

    return [(module, name, value) for name, value in {**attributes, "__getstate__": get_state}.items()]


def called_once(module: nn.Module, hook: str, call: Call, through: Call, *args: Any, **kwargs: Any) -> Any:
    """``through(*args, **kwargs)``, with ``call`` in place of the method ``hook`` until it is called.

    It is taken off before ``call`` runs: user code inside a step, a deep copy or a pickle made there, and every
    hook around it see the module as its author wrote it. A function, because a context manager costs each step more.
    """
    held = vars(module)
    given_back = {hook: held[hook]} if hook in held else {}

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if held.get(hook) is stand_in:
            del held[hook]
            held.update(given_back)
        return call(*args, **kwargs)

    held[hook] = stand_in
    try:
        return through(*args, **kwargs)
    finally:
        if held.get(hook) is stand_in:
            del held[hook]
            held.update(given_back)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """In place of ``self.log`` in the eager pass of a pair."""


class Arm(Protocol):
    """A way to run a step method of the module."""

    name: str

    @property
    def logs(self) -> DeferredLogs:
        """What takes the place of logging."""

    def run(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        """Run the method called ``hook``; nothing is logged."""


class EagerArm:
    """The user's own code; in a pair its logging is muted, as the compiled arm's is."""

    name = "eager"

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.logs = DeferredLogs()

    def run(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        """Run the hook as the user wrote it, without logging."""
        stand_ins = {"log": _nothing, "log_dict": _nothing} if self.logs.kept is None else self.logs.stand_ins
        with patched(disguised(self._module, stand_ins)):
            output = getattr(self._module, hook)(*args, **kwargs)
        self.logs.drop()
        return output


class CompiledArm:
    """One configuration of ``torch.compile`` on one module.

    Between calls nothing of it is on the module. During a call ``log`` and ``log_dict`` are deferred, metric objects
    stay outside the graph (compiled in, their update counters recompile on every step), as does what the user has
    compiled, and for the targets inside the step the submodules carry torch's own ``_compiled_call_impl``.

    Args:
        module: the LightningModule.
        target: ``"step"``, ``"forward"``, ``"blocks"``, ``"networks"``, or names of submodules.
        hooks: step methods that run compiled, of ``training_step`` and ``validation_step``.
        options: keyword arguments of ``torch.compile``.
        on_error: for modules whose hooks talk to other processes (FSDP), which nobody can have run twice: only what is
            between the hooks is compiled, and where that fails this one call runs in eager, then ``on_error``.

    Raises:
        ValueError: ``target`` names nothing on this module.
    """

    name = "compiled"

    def __init__(
        self,
        module: nn.Module,
        *,
        target: str | Sequence[str],
        hooks: Sequence[str],
        options: Mapping[str, Any],
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        self._module = module
        self._target = target
        self._hooks = tuple(hooks)
        self._on_error = on_error
        self._options = {**options, **_ISOLATED}
        self._is_broken = False
        self._tracer: dict[str, Any] = {}
        self._watch = HookWatch(module)
        self.logs = DeferredLogs()
        self._own_code = OwnCode()
        self._compile()

    def _compile(self) -> None:
        """Compile the target as the module is now."""
        module = self._module
        self._own_code.free()
        self._steps: dict[str, Call] = {}
        self._functions: dict[str, types.FunctionType] = {}
        self._in_place: list[tuple[nn.Module, Call]] = []
        self.compiled_names: list[str] = []
        if self._target == "step":
            self._steps = {hook: self._compiled_method(hook) for hook in self._hooks}
        else:
            self._compile_in_place(submodules(module, self._target), shared=self._target != "networks")
        in_place = dict(self._in_place)
        self._patches: list[tuple[Any, str, Any]] = []
        for submodule in module.modules():
            attributes = dict(self.logs.stand_ins) if submodule is module else {}
            if submodule in in_place:
                attributes["forward" if self._on_error else "_compiled_call_impl"] = in_place[submodule]
            elif isinstance(submodule, (Metric, MetricCollection)):
                attributes.update(
                    {n: _outside_the_graph(getattr(submodule, n)) for n in ("forward", "update", "compute")}
                )
            else:
                attributes.update(_compiled_by_user(submodule))
            if attributes:
                self._patches += disguised(submodule, attributes)

    def _compiled_method(self, hook: str) -> Call:
        """The step as a compiled function of its own, so that its cache and recompile limit are its own too."""
        method = getattr(self._module, hook)
        function = getattr(method, "__func__", None)
        if isinstance(function, types.FunctionType) and method.__self__ is self._module:
            self._functions[hook] = own = self._own_code.of(function)
            return functools.partial(torch.compile(own, **self._options), self._module)
        return torch.compile(method, **self._options)

    def _compile_in_place(self, found: Mapping[str, nn.Module], *, shared: bool) -> None:
        """One compiled function for each class, so that equal blocks share one graph; else one for each module."""
        by_class: dict[type | str, Call] = {}
        for name, submodule in found.items():
            if vars(submodule).get("_compiled_call_impl") is not None:
                continue  # the user compiled it already
            kind = type(submodule) if shared else name
            if kind not in by_class:
                inside = _call_module if self._on_error is None else _forward_of
                by_class[kind] = torch.compile(self._own_code.of(inside), **self._options)
            compiled: Call = functools.partial(by_class[kind], submodule)
            if self._on_error is not None:
                compiled = self._or_eager(compiled, functools.partial(_forward_of, submodule), self._on_error)
            self._in_place.append((submodule, compiled))
            self.compiled_names.append(name)

    def _or_eager(self, compiled: Call, eager: Call, on_error: Callable[[Exception], None]) -> Call:
        """One call compiled, or in eager where that fails; an error of eager too is the user's own."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._is_broken:
                return eager(*args, **kwargs)
            try:
                return compiled(*args, **kwargs)
            except Exception as error:
                failure = error.with_traceback(None)
            output = eager(*args, **kwargs)
            self._is_broken = True
            on_error(failure)
            return output

        return run

    def run(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        """Run the hook compiled, without logging."""
        output = self.call(hook, *args, **kwargs)
        self.logs.drop()
        return output

    def call(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        """Run the hook compiled; what it logged is in ``logs``, to be replayed or dropped."""
        self.logs.entries.clear()
        if self._watch.changed():  # somebody put a hook on the module or took one off: no guard of torch sees that
            self._compile()
        # ``patched`` written out: with context managers for it and for the tracer this call cost twice as much.
        before = [(target.__dict__, name, target.__dict__.get(name, _MISSING)) for target, name, _ in self._patches]
        try:
            for target, name, value in self._patches:
                target.__dict__[name] = value
            step = self._steps.get(hook) or getattr(self._module, hook)
            if not self._tracer:
                return step(*args, **kwargs)
            with tracing_with(self._tracer):
                return step(*args, **kwargs)
        finally:
            for held, name, value in before:
                if value is _MISSING:
                    held.pop(name, None)
                else:
                    held[name] = value

    def lookup_s(self, hook: str, *args: Any, **kwargs: Any) -> float | None:
        """Seconds that a call of the compiled hook takes to find its graph; ``None`` where that cannot be seen."""
        function = self._functions.get(hook)
        if function is None:
            return None
        bound = inspect.signature(function).bind(self._module, *args, **kwargs)
        bound.apply_defaults()
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        enclosed = {name: cell.cell_contents for name, cell in cells}  # __class__ for one: super() needs it
        with patched(self._patches):
            return lookup_s(function.__code__, {**bound.arguments, **enclosed})

    def change(self, *, options: Mapping[str, Any], tracer: Mapping[str, Any]) -> None:
        """Compile anew from the next call on.

        Args:
            options: other arguments of ``torch.compile``.
            tracer: settings of torch's tracer for the duration of a call, because ``torch.compile`` takes none.
        """
        self._options.update(options)
        self._tracer.update(tracer)
        self._compile()

    def release(self) -> None:
        """Drop the compiled code, so that torch can free graphs and CUDA-graph pools."""
        self._steps.clear()
        self._functions.clear()
        self._in_place.clear()
        self._patches.clear()
        self.logs.entries.clear()
        self._own_code.free()


def _call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def _forward_of(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _outside_the_graph(call: Call) -> Call:
    def run(*args: Any, **kwargs: Any) -> Any:  # a function of our own: of a compiled one, disable takes the inside
        return call(*args, **kwargs)

    return cast("Call", torch.compiler.disable(run))  # type: ignore[no-untyped-call]


def _compiled_by_user(module: nn.Module) -> dict[str, Call]:
    """What keeps a module that the user has compiled out of our graph, so that their own compile serves it."""
    if isinstance(module, OptimizedModule):
        return {"forward": _outside_the_graph(module.forward)}
    theirs = vars(module).get("_compiled_call_impl")
    if theirs is None:
        return {}
    # Tracing takes the way to the class's forward, past _compiled_call_impl, unless the object has one of its own.
    return {"forward": module.forward, "_compiled_call_impl": _outside_the_graph(theirs)}
