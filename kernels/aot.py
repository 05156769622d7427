"""Compile kernels for a GPU that is not here, and read what they cost: registers, spills, shared memory.

``compile_only((8, 9))`` turns every kernel launch inside the block into a compilation for that target with exactly the
launch's own arguments, so what is measured is what a launch would run. It needs TRITON_INTERPRET=0.

    with compile_only((8, 9)) as compiled:
        decode_attention(q, k_cache, v_cache, 512)      # CPU tensors, nothing runs
    for kernel in compiled:
        print(kernel.name, kernel.registers, kernel.spill_bytes, kernel.shared_memory)
"""

import re
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kernels import INTERPRETED
from kernels.device import SHARED_MEMORY, DeviceInfo, pretend_device

# Multiprocessors of a well-known card of each capability: they decide split counts, not resources.
SM_COUNT = {(7, 5): 40, (8, 0): 108, (8, 6): 82, (8, 9): 24, (9, 0): 132, (10, 0): 148, (12, 0): 170}


class CompiledKernel(NamedTuple):
    """What one compiled kernel takes. spill_bytes is local memory per thread."""

    name: str
    registers: int
    spill_bytes: int
    shared_memory: int
    num_warps: int
    ptx: str


class _TargetDriver:
    """The part of Triton's driver that compiling asks; there is no device behind it."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability[0] * 10 + self.capability[1], 32)

    def get_current_device(self):
        return self.capability

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


def resource_usage(cubin):
    """(registers, spill bytes) of a cubin, read by the cuobjdump that Triton's wheel carries."""
    binary = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([binary, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {text.strip()[:200]}")
    return int(found[1]), int(found[2])


@contextmanager
def compile_only(capability):
    """Collect a CompiledKernel for each launch inside the block, compiled for ``capability`` and not run."""
    if INTERPRETED:
        raise RuntimeError("ahead-of-time compilation needs TRITON_INTERPRET=0 before Python starts")
    compiled = []
    run = JITFunction.run

    def compile_instead(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        registers, spill_bytes = resource_usage(kernel.asm["cubin"])
        metadata = kernel.metadata
        compiled.append(
            CompiledKernel(
                self.__name__, registers, spill_bytes, metadata.shared, metadata.num_warps, kernel.asm["ptx"]
            )
        )

    info = DeviceInfo(capability, SM_COUNT[capability], SHARED_MEMORY[capability])
    driver = triton.runtime.driver
    # Not `driver.active` and `reset_active()`: both look for a GPU and raise where there is none.
    before = driver._active
    driver.set_active(_TargetDriver(capability))
    JITFunction.run = compile_instead
    try:
        with pretend_device(info):
            yield compiled
    finally:
        JITFunction.run = run
        driver._active = before
