"""When a kernel is right: its error against a float64 reference is near that of an ordinary PyTorch program.

A fixed tolerance ("max difference under 0.01") passes a kernel that skips the newest key of a long cache. The bar here
is the error of a native program in the same dtype on the same inputs.
"""

from typing import NamedTuple

import torch

from kernels import INTERPRETED

# Triton's interpreter truncates to bfloat16 where a GPU rounds to nearest: up to twice the error per rounding, and all
# to one side. Measured there: up to 4 times SDPA's error, so the bar is this much wider, in the interpreter only.
INTERPRETED_BFLOAT16_SLACK = 3.0

# In float32 the exp2 and the division of a GPU show beside a library's exp: good to two units in the last place each
# (CUDA C++ Programming Guide, "Mathematical Functions"), so four steps at the largest value are granted there. Measured
# on an H200: errors up to 2.4 times SDPA's in the norm, and up to 4.6 times in the largest of few elements.
FLOAT32_FACTOR = 3.0
FLOAT32_STEPS = 4.0


class Accuracy(NamedTuple):
    """Errors against float64 of the tested and of the native program: largest absolute, and relative (Frobenius)."""

    ok: bool
    max_error: float
    native_max_error: float
    relative_error: float
    native_relative_error: float

    def __str__(self):
        return (
            f"max error {self.max_error:.3e} (native {self.native_max_error:.3e}), "
            f"relative {self.relative_error:.3e} (native {self.native_relative_error:.3e})"
        )


def bar(dtype, *, factor=1.5, computed_in=None):
    """(factor, steps): errors in ``dtype`` may be ``factor`` times the native ones, the largest also ``steps`` of the
    dtype's rounding steps at the largest value more. ``factor`` is raised where a comment above says so."""
    if INTERPRETED and dtype == torch.bfloat16:
        return factor * INTERPRETED_BFLOAT16_SLACK, 1 / 4
    if not INTERPRETED and dtype == torch.float32 and computed_in is None:
        return max(factor, FLOAT32_FACTOR), FLOAT32_STEPS
    return factor, 1 / 4


def judge(out, reference, native, *, factor=1.5, computed_in=None):
    """Accuracy of ``out``; ok when both errors are at most ``bar`` times the native ones, and all is finite.

    reference: float64; native: the same quantity by an ordinary PyTorch program in out's dtype. A fraction of the
    dtype's rounding step is granted on top, since a native program can be exact by luck. computed_in: the dtype that
    both programs computed in, where ``out`` was widened since.
    """
    if not out.shape == native.shape == reference.shape:
        shapes = ", ".join(str(list(x.shape)) for x in (out, native, reference))
        raise ValueError(f"out, native and reference must have one shape, got {shapes}")
    out64, native64, reference = out.double(), native.double(), reference.double()
    eps = torch.finfo(computed_in or out.dtype).eps
    factor, steps = bar(out.dtype, factor=factor, computed_in=computed_in)
    peak, norm = float(reference.abs().max()), float(reference.norm())
    max_error, native_max = (float((x - reference).abs().max()) for x in (out64, native64))
    error, native_error = (float((x - reference).norm()) for x in (out64, native64))
    # Written so that NaN fails.
    ok = max_error <= factor * native_max + steps * eps * peak and error <= factor * native_error + eps / 16 * norm
    ok = ok and out.dtype == native.dtype and bool(torch.isfinite(out).all())
    relative = norm if norm > 0 else 1.0
    return Accuracy(ok, max_error, native_max, error / relative, native_error / relative)
