"""By how much two correct runs may differ, by the precision that they compute in."""

from __future__ import annotations

from typing import NamedTuple

import torch


class _Precision(NamedTuple):
    unit_roundoff: float
    growth: float


# By how much two correct runs may differ: the unit roundoff u of the working precision times a growth factor, because
# errors of n operations grow like sqrt(n) u, at worst n u (Higham, Accuracy and Stability of Numerical Algorithms,
# 2nd ed., chapter 4; the root: Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019).
# Where sums are kept in the working precision, a compiler reorders them: sqrt(4096 terms), through 32 layers in a row.
# Lower precisions add up in float32 and round results only, of which fusion leaves some out: sqrt(64 in a row).
# For scale, torch.testing.assert_close allows a single operation 1.3e-6 (float32), 1e-3 (float16), 1.6e-2 (bfloat16).
# No limit by dtype fits every model: deep stacks of BatchNorm and ReLU amplify a rounding many times over, and eager is
# then as far from the exact result as compiled is. There the noise floor speaks.
_REORDERED_SUMS = 64 * 32
_ROUNDED_RESULTS = 8
_PRECISIONS = {
    torch.float64: _Precision(2.0**-53, _REORDERED_SUMS),  # 2.3e-13
    torch.float32: _Precision(2.0**-24, _REORDERED_SUMS),  # 1.2e-4
    torch.bfloat16: _Precision(2.0**-8, _ROUNDED_RESULTS),  # 3.1e-2
    # As much as bfloat16: small gradients lose more bits to float16's narrow exponent than to its roundoff.
    torch.float16: _Precision(2.0**-11, 8 * _ROUNDED_RESULTS),  # 3.1e-2
}
_TF32 = _Precision(2.0**-11, _ROUNDED_RESULTS)  # 3.9e-3: TensorFloat-32 keeps as many bits of a factor as float16


def tolerance_for(dtype: torch.dtype, *, autocast_dtype: torch.dtype | None = None, tf32: bool = False) -> float:
    """Largest relative distance that reordering and fusing correct operations explains in an ordinary model.

    The coarsest precision at work decides. The limits leave clean runs room (a float32 MLP shows 1e-7 for a limit of
    1e-4, under bfloat16 autocast 4e-3 for 3e-2) and still find gradients that are 1 % off in float32, 10 % in bfloat16.

    Args:
        dtype: of the parameters; complex ones count as their real part.
        autocast_dtype: what autocast computes in, if it is on. It leaves float64 alone.
        tf32: float32 products may use TensorFloat-32.

    Raises:
        ValueError: no tolerance is known for a dtype.

    >>> f"{tolerance_for(torch.float32):.1e}, {tolerance_for(torch.float32, autocast_dtype=torch.bfloat16):.1e}"
    '1.2e-04, 3.1e-02'
    """
    return max(known.unit_roundoff * known.growth for known in _precisions(dtype, autocast_dtype, tf32))


def unit_roundoff_for(dtype: torch.dtype, *, autocast_dtype: torch.dtype | None = None, tf32: bool = False) -> float:
    """Largest relative error of one rounding in the coarsest precision at work; arguments as in ``tolerance_for``.

    Weights moved by so little are the same weights to this precision: how far eager's gradients move with them is the
    noise floor that reordering cannot stay below, also where eager itself repeats to the bit.

    >>> unit_roundoff_for(torch.bfloat16) == torch.finfo(torch.bfloat16).eps / 2
    True
    """
    return max(known.unit_roundoff for known in _precisions(dtype, autocast_dtype, tf32))


def _precisions(dtype: torch.dtype, autocast_dtype: torch.dtype | None, tf32: bool) -> list[_Precision]:
    """The precisions at work."""
    dtypes = [dtype.to_real()]
    if autocast_dtype is not None and dtypes[0] != torch.float64:
        dtypes.append(autocast_dtype)
    for known in dtypes:
        if known not in _PRECISIONS:
            expected = ", ".join(str(name) for name in _PRECISIONS)
            raise ValueError(f"no drift tolerance is known for {known}, expected one of {expected}; set one yourself.")
    at_work = [_PRECISIONS[known] for known in dtypes]
    return [*at_work, _TF32] if tf32 and torch.float32 in dtypes else at_work
