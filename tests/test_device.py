"""What the kernels take from Triton, and what they do where an older one lacks it."""

import ast
import os
import subprocess
import sys
import types

import pytest

from kernels import device as device_module
from kernels.device import prefer_carveout, stride_unit
from tests.conftest import ROOT

OLDER_TRITON = """
import sys, torch, triton
triton.__version__ = sys.argv[1]
from kernels.aot import compile_only
from kernels.decode_attention_wrapper import decode_attention
from kernels.device import TRITON_HAS_PDL
from kernels.fused_decode_wrapper import matvec
e = lambda *shape: torch.empty(*shape, dtype=torch.float16)
with compile_only((9, 0)) as compiled:
    decode_attention(e(1, 4, 64), e(1, 4, 512, 64), e(1, 4, 512, 64), 512)
    matvec(e(64), e(32, 64), e(32), pdl=TRITON_HAS_PDL)
print(*(f"{kernel.name} {'griddepcontrol' in kernel.ptx}" for kernel in compiled), sep=";")
"""


@pytest.mark.parametrize("version, attention, pdl", [
    ("3.2.0", "_decode_attention_kernel", False), ("3.4.0", "_decode_attention_split_kernel", False),
    ("3.6.0", "_decode_attention_split_kernel", True),
])  # fmt: skip
def test_launches_keep_to_what_triton_has(version, attention, pdl):
    """3.2's compiler dies of the split kernel's products, and the gdc_wait of 3.4 cannot be called."""
    result = subprocess.run(
        [sys.executable, "-c", OLDER_TRITON, version],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == f"{attention} {pdl};_matvec_kernel {pdl}"


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").glob("*.py")), ids=lambda path: path.name)
def test_kernels_keep_to_what_older_compilers_read(path):
    """Before Triton 3.4: ``a and b``, not ``a and b and c``; and a kernel's attributes are looked up even in branches
    that are not compiled, so what only a newer Triton has goes by a global name. A kernel's function that calls itself
    sends 3.3 round in circles, and ``min`` of two constants is a tensor there.
    """
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    kernels = [f for f in functions if any("triton.jit" in ast.unparse(decorator) for decorator in f.decorator_list)]
    for name, node in ((kernel.name, node) for kernel in kernels for node in ast.walk(kernel)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("min", "max", name), ast.unparse(node)
        assert not (isinstance(node, ast.BoolOp) and len(node.values) > 2), ast.unparse(node)
        assert not (isinstance(node, ast.Attribute) and node.attr.startswith("gdc_")), ast.unparse(node)


def test_stride_unit():
    """8 only where it says more than Triton sees by itself: multiples of 16 need no word, odd strides take none."""
    assert stride_unit(72, 7200, 0) == 8
    assert stride_unit(96, 200) == 8
    assert stride_unit(96, 9600, 0) == 1
    assert stride_unit(72, 100) == 1
    assert stride_unit(73, 7300) == 1


def test_carveout_is_asked_for_once_per_kernel(monkeypatch):
    calls = []

    class Driver:
        def cuFuncSetAttribute(function, which, value):
            calls.append((function.value, which, value))

    monkeypatch.setattr(device_module, "_cuda_driver", lambda: Driver)
    first, second = (types.SimpleNamespace(function=handle) for handle in (11, 22))
    for kernel in (first, None, second, first):
        prefer_carveout(kernel, 7)
    assert calls == [(11, 9, 7), (22, 9, 7)]
    monkeypatch.setattr(device_module, "_cuda_driver", lambda: None)
    prefer_carveout(types.SimpleNamespace(function=33), 7)
