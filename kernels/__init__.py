"""Triton kernels and the functions that launch them. Nothing here knows a model.

Without a CUDA device the kernels run in Triton's interpreter on CPU tensors: right, and very slow. Triton decides that
when a kernel is *defined*, its own library functions included, so the variable has to be set before the first import
of triton; importing this package does it.
"""

import os
import sys

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

if "triton.language" in sys.modules:
    from triton.runtime.jit import JITFunction

    if isinstance(sys.modules["triton.language"].sum, JITFunction) == INTERPRETED:
        raise ImportError(
            f"triton was imported before TRITON_INTERPRET={int(INTERPRETED)} was set; "
            "import phi-triton's kernels first, or set the variable in the shell"
        )
