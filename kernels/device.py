"""What a launch needs to know about the GPU, in one place, so that launch choices stay pure functions of it."""

import ctypes
import functools
from contextlib import contextmanager
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels import INTERPRETED

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.4
    TensorDescriptor = None


class DeviceInfo(NamedTuple):
    """capability: (major, minor); sm_count: multiprocessors; shared_memory: bytes that one block may take."""

    capability: tuple[int, int]
    sm_count: int
    shared_memory: int


# Bytes of shared memory that one block may opt in to, by compute capability (CUDA C++ Programming Guide, table of
# technical specifications per compute capability).
SHARED_MEMORY = {
    (7, 5): 65536,
    (8, 0): 166912,
    (8, 6): 101376,
    (8, 7): 166912,
    (8, 9): 101376,
    (9, 0): 232448,
    (10, 0): 232448,
    (12, 0): 101376,
}

# Stands in where no GPU is: the interpreter takes the launch choices of a small Ada card (RTX 4060: 24 SMs).
NO_GPU = DeviceInfo((8, 9), 24, SHARED_MEMORY[8, 9])

# Programmatic dependent launch (PDL): a kernel may start while the one before it still runs, and waits by itself (CUDA
# C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"). Triton has it from 3.6 on; the functions
# of 3.4 cannot be called. By name, because before 3.4 an attribute that is missing is an error in dead branches too.
TRITON_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
TRITON_HAS_PDL = TRITON_VERSION >= (3, 6)
_gdc_wait = tl.extra.cuda.gdc_wait if TRITON_HAS_PDL else None
_gdc_launch_dependents = tl.extra.cuda.gdc_launch_dependents if TRITON_HAS_PDL else None

_override = None


@triton.jit
def _launch_next(PDL: tl.constexpr):
    """Allow the next kernel's programs to start (they wait before they need this kernel's results)."""
    if PDL:
        _gdc_launch_dependents()


@triton.jit
def _wait_for_previous(PDL: tl.constexpr):
    """Return once the previous kernel has completed and what it wrote is visible."""
    if PDL:
        _gdc_wait()


@triton.jit
def _wait_once_known(addresses):
    """_wait_for_previous with PDL, but not before these addresses (uint64) are known; no element has the address 1.

    Left alone, the compiler waits first and computes then.
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u64 p, $1, 1; @p griddepcontrol.wait; mov.u32 $0, 0; }",
        "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def pow2_floor(n):
    """The largest power of two that is at most n."""
    return 1 << (n.bit_length() - 1)


def prefetch_supported(device):
    """Whether kernels on ``device``, a DeviceInfo, can ask L2 for whole blocks of bytes: compute capability 9.0+."""
    return not INTERPRETED and device.capability >= (9, 0)


def pdl_supported(device):
    """Whether kernels on ``device``, a DeviceInfo, can use PDL: compute capability 9.0+ and a Triton that has it."""
    return TRITON_HAS_PDL and prefetch_supported(device)


def stride_unit(*strides):
    """8 where all strides are multiples of 8 and Triton does not see it, else 1.

    Triton looks for multiples of 16 among integer arguments. Rows of 72 or 200 elements begin on 16 bytes as well, but
    are then loaded one element at a time, which no copy to shared memory can do and no register file can hold.
    """
    bits = 0
    for stride in strides:
        bits |= stride
    return 8 if bits % 16 == 8 else 1


def tma_fits(device, *tensors):
    """Whether kernels on ``device``, a DeviceInfo, may fetch these [B, H, length, D] by tensor descriptor: compute
    capability 9.x, and the copy engine's rules on alignment.
    """
    return (
        TensorDescriptor is not None
        and device.capability[0] == 9
        and all(
            tensor.element_size() == 2
            and tensor.numel() > 0
            and tensor.data_ptr() % 16 == 0
            and all(stride > 0 and stride % 8 == 0 for stride in tensor.stride()[:3])
            for tensor in tensors
        )
    )


def tile_descriptor(tensor, rows, columns):
    """TensorDescriptor of tensor [B, H, length, D] in tiles of ``rows`` of its length by ``columns`` of D."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, rows, columns])


def launch_options(pdl, **options):
    """Keyword arguments of a kernel launch without those that are None; Triton before 3.6 does not know launch_pdl."""
    options["launch_pdl"] = pdl or None
    return {name: value for name, value in options.items() if value is not None}


# CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT of the CUDA driver API's CUfunction_attribute.
_CARVEOUT_ATTRIBUTE = 9


@functools.cache
def _cuda_driver():
    """The CUDA driver's library, which a process with a CUDA context has loaded; None where it has another name."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def prefer_carveout(kernel, percent):
    """Hint to the driver: ``kernel`` wants that share of a multiprocessor's fast memory as shared memory, rest as L1.

    kernel: what a launch returned; None (the interpreter, ahead-of-time compilation) is left alone. Once per kernel.
    PyTorch and Triton have no name for it, so it is the driver's own call, cuFuncSetAttribute.
    """
    if kernel is not None and not hasattr(kernel, "carveout"):
        kernel.carveout = percent
        if _cuda_driver() is not None:
            _cuda_driver().cuFuncSetAttribute(ctypes.c_void_p(kernel.function), _CARVEOUT_ATTRIBUTE, percent)


@functools.cache
def _cuda_device_info(index):
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    shared = getattr(properties, "shared_memory_per_block_optin", SHARED_MEMORY.get(capability, 101376))
    return DeviceInfo(capability, properties.multi_processor_count, shared)


def device_info(device):
    """DeviceInfo of a torch.device; that of a small card where no GPU is."""
    if _override is not None:
        return _override
    if device.type != "cuda":
        return NO_GPU
    return _cuda_device_info(torch.cuda.current_device() if device.index is None else device.index)


@contextmanager
def pretend_device(info):
    """Within the block every launch choice is made for ``info`` (ahead-of-time compilation, tests of the choices)."""
    global _override
    before, _override = _override, info
    try:
        yield
    finally:
        _override = before


@triton.jit
def _copy_kernel(source_ptr, target_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    values = tl.load(source_ptr + offsets, mask=offsets < n, other=0.0)
    tl.store(target_ptr + offsets, values, mask=offsets < n)


@functools.cache
def _check_interpreter():
    """Triton before 3.2 loses every interpreted store under NumPy 2, silently: copy 1..16 once and look."""
    source = torch.arange(1, 17, dtype=torch.float32)
    target = torch.zeros(16)
    _copy_kernel[(1,)](source, target, 16, BLOCK=16)
    if not torch.equal(source, target):
        raise RuntimeError("Triton's interpreter loses stores here: install triton >= 3.2 (or numpy < 2)")


def check_launchable(**tensors):
    """Raise ValueError where a kernel cannot run on these tensors: mixed devices, or CPU without the interpreter."""
    if _override is not None:
        return
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) > 1:
        places = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise ValueError(f"all tensors must be on one device, got {places}")
    device = devices.pop()
    if device.type == "cpu":
        if not INTERPRETED:
            raise ValueError(
                "CPU tensors need Triton's interpreter: set TRITON_INTERPRET=1 before Python starts, "
                "or move the tensors to a CUDA device"
            )
        _check_interpreter()
    elif device.type != "cuda":
        raise ValueError(f"the kernels run on CUDA devices or, interpreted, on the CPU; got {device}")
