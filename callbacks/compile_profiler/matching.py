"""A second compiled arm that draws eager's random numbers, where a run is long enough to pay for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from compile_profiler.arms import Arm, CompiledArm, mode_options


def with_eagers_numbers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of ``torch.compile`` for the same code with the random numbers that eager draws.

    A mode becomes the options that it stands for, because torch takes one or the other. CUDA graphs, which change no
    number, are left out: this arm is never timed.

    >>> with_eagers_numbers({"backend": "inductor", "mode": None, "options": {"max_autotune": True}})
    {'backend': 'inductor', 'mode': None, 'options': {'max_autotune': True, 'fallback_random': True}}
    """
    asked = options["options"] or (mode_options(options["mode"]) if options["mode"] else {})
    kept = {name: value for name, value in asked.items() if name != "triton.cudagraphs"}
    return {**options, "mode": None, "options": {**kept, "fallback_random": True}}


class Matching:
    """The second arm, made when it is first asked for, unless that would cost too much.

    Args:
        make: makes it; nothing is compiled before its first pass.
        expected_s: seconds that compiling it will take, as the first arm's compiling took.
        left_s: seconds that the run still has, ``inf`` where nobody knows.
        budget: share of those that measuring may take.
        tell: told once where it is too dear.

    >>> Matching(lambda: 1 / 0, expected_s=lambda: 30.0, left_s=lambda: 60.0, budget=0.02, tell=print).arm()
    Drift is shown but not judged: the step draws random numbers; compiling it once more with those of eager would \
take about 30 s, more than 2 % of the 60 s that are left of the run.
    """

    def __init__(
        self,
        make: Callable[[], CompiledArm],
        *,
        expected_s: Callable[[], float],
        left_s: Callable[[], float],
        budget: float,
        tell: Callable[[str], None],
    ) -> None:
        self._make = make
        self._expected_s = expected_s
        self._left_s = left_s
        self._budget = budget
        self._tell = tell
        self._asked = False
        self._arm: CompiledArm | None = None

    def arm(self) -> Arm | None:
        """The arm, or ``None``. What a run cannot afford now it cannot afford later, when less of it is left."""
        if not self._asked:
            self._asked = True
            expected_s, left_s = self._expected_s(), self._left_s()
            if expected_s <= self._budget * left_s:
                self._arm = self._make()
            else:
                self._tell(
                    "Drift is shown but not judged: the step draws random numbers; compiling it once more with those "
                    f"of eager would take about {expected_s:.0f} s, more than {self._budget:.0%} of the {left_s:.0f} s "
                    "that are left of the run.".replace("%", " %")
                )
        return self._arm

    def release(self) -> None:
        """Drop the compiled code."""
        if self._arm is not None:
            self._arm.release()
        self._arm = None
