"""decode_attention(): what the decode kernels may be called with, and how they are launched on each GPU."""

import math
from typing import NamedTuple

import torch
import triton

import config
from kernels.decode_attention_triton import _decode_attention_kernel
from kernels.device import check_launchable, device_info

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NO_WINDOW = 2**31 - 1


class DecodeLaunch(NamedTuple):
    """Launch choices. block_h: query heads of one program; block_t: key positions per tile."""

    block_h: int
    block_t: int
    num_warps: int
    num_stages: int


def choose_launch(group_size, head_dim, dtype_bytes, device, *, block_t):
    """DecodeLaunch for ``device`` (a DeviceInfo); ``block_t`` is the largest tile wanted (config.BLOCK_T).

    A pure function. The defaults are not tuned: four warps, two tiles in flight, and tiles halved until both stages of
    K and V fit the shared memory.
    """
    # tl.dot takes at least 16 rows. Products without tensor cores (fp32, and on Turing) hold whole rows in registers:
    # keep them small. An MQA model with many heads takes several programs rather than spill the accumulator.
    small = dtype_bytes == 4 or device.capability < (8, 0)
    block_h = min(16 if small else 64, max(16, triton.next_power_of_2(group_size)))
    block_t = min(block_t, 32) if small else block_t
    num_stages = 2
    d_pad = triton.next_power_of_2(head_dim)
    while block_t > 16 and (2 * num_stages * block_t + block_h) * d_pad * dtype_bytes > device.shared_memory:
        block_t //= 2
    return DecodeLaunch(block_h, block_t, num_warps=4, num_stages=num_stages)


def decode_attention(q, k_cache, v_cache, cache_len, *, scale=None, window=None, out=None):
    """Attention of one new token per sequence over its KV cache -> [B, Hq, D] in q's dtype.

    q: [B, Hq, D]; k_cache, v_cache: [B, Hkv, T_max, D] with Hq a multiple of Hkv, the new token's key and value
    included. float16, bfloat16 (compute capability 8.0+) or float32; D from 16 to 256; any strides as long as D is
    contiguous, so views and expanded tensors are read where they lie. Query head h reads KV head h // (Hq // Hkv).

    cache_len: positions written so far: an int for all sequences, or a contiguous int32 tensor [B] on q's device, whose
    values are clamped to 0..T_max. A length of 0 gives zeros. One compiled kernel serves every length; with a tensor
    one captured CUDA graph does too (call once before capturing, so that nothing compiles during the capture).
    scale: factor of q @ k^T, D ** -0.5 by default. window: keep the last ``window`` positions, the newest included.
    out: where to write, [B, Hq, D] of q's dtype, D contiguous; returned.

    Raises ValueError on anything else. There is no backward: use flash_attention to train.
    """
    if torch.compiler.is_compiling():
        length, lengths = (None, cache_len) if isinstance(cache_len, torch.Tensor) else (cache_len, None)
        result = torch.ops.phi_triton.decode_attention(q, k_cache, v_cache, length, lengths, scale, window)
        return result if out is None else out.copy_(result)
    _check_arguments(q, k_cache, v_cache, cache_len, window, out)
    return _launch(q, k_cache, v_cache, cache_len, scale, window, out)


def decode_attention_with_lse(q, k_cache, v_cache, cache_len, *, scale=None, window=None):
    """decode_attention, and the natural log-sum-exp of the scaled scores, [B, Hq] float32 (-inf without a key)."""
    _check_arguments(q, k_cache, v_cache, cache_len, window, None)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    return _launch(q, k_cache, v_cache, cache_len, scale, window, None, lse=lse), lse


def _check_arguments(q, k_cache, v_cache, cache_len, window, out):
    if q.dim() != 3:
        raise ValueError(f"q must be [B, Hq, D], got shape {list(q.shape)}")
    B, Hq, D = q.shape
    if k_cache.dim() != 4 or k_cache.shape[0] != B or k_cache.shape[3] != D:
        raise ValueError(f"k_cache must be [B={B}, Hkv, T_max, D={D}] to match q, got shape {list(k_cache.shape)}")
    if v_cache.shape != k_cache.shape:
        raise ValueError(f"v_cache must have k_cache's shape {list(k_cache.shape)}, got {list(v_cache.shape)}")
    Hkv, T_max = k_cache.shape[1:3]
    if not 16 <= D <= 256:
        raise ValueError(f"head_dim must be from 16 to 256, got {D}")
    if Hkv == 0 or Hq % Hkv:
        raise ValueError(f"query heads must be a multiple of KV heads, got {Hq} and {Hkv}")
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    if out is not None:
        if out.shape != q.shape:
            raise ValueError(f"out must have q's shape {list(q.shape)}, got {list(out.shape)}")
        tensors["out"] = out
    if q.dtype not in DTYPES:
        raise ValueError(f"dtype must be float16, bfloat16 or float32, got {q.dtype}")
    for name, tensor in tensors.items():
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} must have q's dtype {q.dtype}, got {tensor.dtype}")
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name}'s last dimension must be contiguous (stride 1), got stride {tensor.stride(-1)}")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors.values()):
        raise ValueError("decode_attention has no backward: call it under torch.no_grad(), or use flash_attention")
    if isinstance(cache_len, torch.Tensor):
        if cache_len.dtype != torch.int32 or cache_len.shape != (B,) or not cache_len.is_contiguous():
            raise ValueError(
                f"cache_len must be an int or a contiguous int32 tensor [B={B}], "
                f"got {cache_len.dtype} {list(cache_len.shape)}"
            )
        tensors["cache_len"] = cache_len
    elif isinstance(cache_len, bool) or not isinstance(cache_len, int):
        raise ValueError(f"cache_len must be an int or an int32 tensor [B={B}], got {type(cache_len).__name__}")
    elif not 0 <= cache_len <= T_max:
        raise ValueError(f"cache_len must be from 0 to the cache's {T_max} positions, got {cache_len}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    check_launchable(**tensors)
    if q.dtype == torch.bfloat16 and device_info(q.device).capability < (8, 0):
        raise ValueError("bfloat16 needs compute capability 8.0 or newer: use float16 on this GPU")


def _launch(q, k_cache, v_cache, cache_len, scale, window, out, *, lse=None):
    B, Hq, D = q.shape
    Hkv, T_max = k_cache.shape[1:3]
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if B == 0 or Hq == 0:
        return out
    scale = D**-0.5 if scale is None else scale
    choice = choose_launch(Hq // Hkv, D, q.element_size(), device_info(q.device), block_t=config.BLOCK_T)
    grid = (triton.cdiv(Hq // Hkv, choice.block_h), Hkv, B)
    with torch.cuda.device_of(q):
        _decode_attention_kernel[grid](
            q, k_cache, v_cache, out, lse,
            cache_len, T_max, min(window or NO_WINDOW, NO_WINDOW), scale * math.log2(math.e),
            *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], *out.stride()[:2],
            Hq=Hq, Hkv=Hkv, D=D, D_PAD=triton.next_power_of_2(D), BLOCK_H=choice.block_h, BLOCK_T=choice.block_t,
            PER_SEQUENCE=isinstance(cache_len, torch.Tensor), NUM_STAGES=choice.num_stages,
            num_warps=choice.num_warps,
        )  # fmt: skip
    return out


@torch.library.custom_op(
    "phi_triton::decode_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k_cache, Tensor v_cache, SymInt? cache_len, Tensor? lengths, float? scale, "
    "SymInt? window) -> Tensor",
)
def _decode_attention_op(q, k_cache, v_cache, cache_len, lengths, scale, window):
    """What torch.compile calls: the int and the tensor form of cache_len are two arguments of the operator's schema."""
    return decode_attention(q, k_cache, v_cache, cache_len if lengths is None else lengths, scale=scale, window=window)


@_decode_attention_op.register_fake
def _decode_attention_fake(q, k_cache, v_cache, cache_len, lengths, scale, window):
    return torch.empty_like(q, memory_format=torch.contiguous_format)
