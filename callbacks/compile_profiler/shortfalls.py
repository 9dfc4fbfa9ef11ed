"""What inductor says it does not do for a graph, as an event: CUDA graphs, kernels, tuning."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from compile_profiler.causes import Explanation
from compile_profiler.compiler import Heard
from compile_profiler.events import event
from compile_profiler.places import Place, places_in
from compile_profiler.records import Event

# First match wins; the texts are those of torch 2.7 to 2.13.
_SKIPS: tuple[tuple[re.Pattern[str], Explanation], ...] = (
    (
        re.compile(r"cpu device|multiple devices"),
        Explanation(
            "unsupported",
            "A tensor of this graph is not on the GPU, so no CUDA graph can hold it. Make it there (device=x.device), "
            "or keep it as a buffer of the module.",
        ),
    ),
    (
        re.compile(r"mutat"),
        Explanation(
            "side_effect",
            "This graph writes a tensor that it was given. Compute a new one (x = x + 1, not x += 1), or keep what is "
            "written in a buffer of the module.",
        ),
    ),
    (
        re.compile(r"symbolic shapes|dynamic shape"),
        Explanation("shape", "The size of a tensor varies. Pad the batches to a few fixed sizes."),
    ),
    (
        re.compile(r"re-recording limit"),
        Explanation(
            "shape",
            "A CUDA graph was recorded too often, for ever new sizes or addresses. Pad the batches to a few fixed "
            "sizes, or leave mode='reduce-overhead' out.",
        ),
    ),
    (
        re.compile(r"incompatible op"),
        Explanation(
            "unsupported",
            "This operator waits for the GPU or cannot be replayed. Move it out of the compiled step, or leave "
            "mode='reduce-overhead' out.",
        ),
    ),
)
_SKIPPED = Explanation("other", "This graph is launched kernel by kernel, as without mode='reduce-overhead'.")

# Kernels of libraries, better than any that inductor would write.
_LIBRARY = re.compile(r"attention|convolution|cudnn|miopen|mkl|onednn|sort|topk|_grouped_mm|c10d|rng_prims", re.I)
_NO_KERNEL = "inductor has no kernel for {}: it runs as in eager, and nothing is fused with it."
_COMPLEX = (
    "inductor writes no code for complex numbers: {} runs as in eager, and nothing is fused with it. "
    "Compute with torch.view_as_real, or name the other submodules in target."
)
_TOO_SMALL = Explanation(
    "unsupported", "This GPU is too small for max-autotune to choose matrix kernels; mode='default' compiles faster."
)


def of_heard(heard: Heard, stack: Sequence[Place], here: dict[str, Any]) -> Event | None:
    """What inductor said as an event, ``None`` where it is nothing that the user could miss.

    Args:
        heard: the message.
        stack: where the function is that was being compiled, for a message that names no line.
        here: stage, step, epoch, shapes of the event.

    >>> at = {"stage": "train", "step": 0, "epoch": 0}
    >>> found = of_heard(Heard("Using FallbackKernel: torch.ops.aten.cumprod.default", ""), [], at)
    >>> found.kind, found.hint
    ('backend_fallback', 'inductor has no kernel for aten.cumprod: it runs as in eager, and nothing is fused with it.')
    >>> of_heard(Heard("Using FallbackKernel: torch.ops.aten._scaled_dot_product_flash_attention.default", ""), [], at)
    """
    operator = re.match(r"Using FallbackKernel: (?:torch\.ops\.)?(\S+?)(?:\.\w+)?$", heard.text)
    named = [*stack, *places_in(heard.text), *places_in(heard.trace)]
    if operator:
        name = operator[1]
        if _LIBRARY.search(name):
            return None
        hint = (_COMPLEX if heard.is_complex else _NO_KERNEL).format(name)
        return event("backend_fallback", name, Explanation("unsupported", hint), named, here, None)
    if re.search(r"Not enough SMs|does not support max_autotune", heard.text):
        return event("backend_fallback", heard.text, _TOO_SMALL, stack, here, None)
    if re.search(r"skipping cuda ?graph|disabling cuda ?graph", heard.text, re.I):
        explained = next((explained for pattern, explained in _SKIPS if pattern.search(heard.text)), _SKIPPED)
        return event("cudagraph_skip", _reason(heard.text), explained, named, here, None)
    return None


def untold_skip(num: int, stack: Sequence[Place], here: dict[str, Any]) -> Event:
    """So many CUDA graphs that were skipped without a word, as on a CPU."""
    text = "torch counted a skipped CUDA graph and gave no reason; on a CPU there are none."
    return event("cudagraph_skip", text, _SKIPPED, stack, here, None, count=num)


def _reason(text: str) -> str:
    r"""What torch says, without the stack behind it.

    >>> _reason("skipping cudagraphs due to mutated inputs (1 instances). Found from : \n   File 'a.py', line 3")
    'mutated inputs (1 instances)'
    """
    before = re.split(r"\.? Found from", text)[0]
    return re.sub(r"^(?:(?:skipping|disabling) cuda ?graphs? due to )+", "", before, flags=re.I).strip()
