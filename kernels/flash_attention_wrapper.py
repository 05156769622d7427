"""flash_attention(): prefill attention with gradients, its argument checks, and the tiles per GPU.

Both passes are custom operators (``torch.ops.phi_triton.flash_attention_forward`` and ``..._backward``), so autograd,
``torch.compile(fullgraph=True)`` and ``torch.library.opcheck`` know their shapes without looking into the kernels.
"""

import math
from typing import NamedTuple

import torch
import triton

from kernels.device import check_launchable, device_info, tile_descriptor, tma_fits
from kernels.flash_attention_triton import (
    _flash_backward_rows_kernel,
    _flash_dk_dv_kernel,
    _flash_dq_kernel,
    _flash_forward_kernel,
)

__all__ = ["choose_tiles", "flash_attention", "flash_attention_forward"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256

# A side of the mask's band that is open: above any length, and sums of two positions still fit int32.
UNBOUNDED = 2**30


def flash_attention(q, k, v, *, causal=True, scale=None, window=None):
    """Attention of q [B, Hq, S, D] over k, v [B, Hkv, T, D] -> [B, Hq, S, D] in q's dtype, differentiable.

    Hq is a multiple of Hkv (MHA, GQA, MQA); query head h reads KV head h // (Hq // Hkv). Any S and T, D from 16 to 256,
    float16, bfloat16 or float32 (multiplied in full precision). Strides are free as long as D is contiguous; nothing
    is copied. The result lies in memory as [B, S, Hq, D], so that merging the heads is a view.

    causal: the last query sees the last key, also where S != T (bottom-right alignment).
    scale: factor of q @ k^T, positive; D ** -0.5 by default.
    window: a query sees only the last ``window`` keys up to and including its own position.
    A query that sees no key gives 0 and passes no gradient.

    Raises ValueError, naming the argument and what it got, for shapes, dtypes, devices or strides that do not fit.
    """
    out, _ = flash_attention_forward(q, k, v, causal=causal, scale=scale, window=window)
    return out


def flash_attention_forward(q, k, v, *, causal=True, scale=None, window=None):
    """``flash_attention`` that also returns lse [B, Hq, S] float32: the natural logsumexp of the scaled scores.

    With it the results over two sets of keys merge exactly: weigh them by exp(lse - logaddexp(lse_1, lse_2)). -inf
    where a query sees no key. Gradients flow through ``out`` only.
    """
    _check_arguments(q, k, v, scale, window)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    diagonal = k.shape[2] - q.shape[2]  # key minus query position of "the same" token
    upper = diagonal if causal else UNBOUNDED
    lower = -UNBOUNDED if window is None else max(diagonal - window, -UNBOUNDED)
    return _forward_op(q, k, v, scale, lower, upper)


def _check_arguments(q, k, v, scale, window):
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions [B, H, length, D], got shape {tuple(tensor.shape)}")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} must be float16, bfloat16 or float32, got {tensor.dtype}")
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} must have q's dtype {q.dtype}, got {tensor.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {tensor.device}")
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}")
    head_dim = q.shape[3]
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"q must have a head_dim from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, got {head_dim}")
    if k.shape[0] != q.shape[0] or k.shape[3] != head_dim:
        raise ValueError(f"k must have q's batch size {q.shape[0]} and head_dim {head_dim}, got shape {tuple(k.shape)}")
    if v.shape != k.shape:
        raise ValueError(f"v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"q must have a multiple of k's {k.shape[1]} heads, got {q.shape[1]}")
    if scale is not None and not 0.0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"window must be None or an int of at least 1, got {window!r}")


# --- Launch choices --------------------------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """block_m queries by block_n keys per step of the kernel's loop; warps per program; depth of Triton's pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Three ways a GPU multiplies tiles, and for each kernel the tiles at a head_dim of up to 64, 128 and 256. "mma" and
# "fma" are defaults: the largest of those tried that compile without spilling registers and fit the smallest GPU of
# their kind (the tests compile them all).
#
# "wgmma": NVIDIA H200, 2026-11-29, Triton 3.6.0, fp16, B=2, S=4096, 32/8 heads, TFLOP/s causal/full, best of 3 to 10
# configurations a kernel. At D=128 one warpgroup with 64 x 64 tiles beats two with 128 x 128: forward 482/458 against
# 422/450, dk/dv 529/493 against 427/400 (two blocks per multiprocessor: one multiplies while the other takes
# exponentials); dq 584/619 with three stages against 502/523 with two. At D=64: 383/432, 571/550 and 358/348 (128 x 64
# tiles reach 394/390 for dk/dv, and spill under Triton 3.7.1).
_HEAD_DIMS = (64, 128, 256)
_TILES = {
    # sm_90 with tensor descriptors: asynchronous products of operands in shared memory (227 KB).
    "wgmma": {
        "forward": (Tiles(64, 128, 4, 3), Tiles(64, 64, 4, 3), Tiles(128, 64, 8, 2)),
        "dq": (Tiles(64, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(64, 64, 8, 2)),
        "dk_dv": (Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(32, 64, 8, 2)),
    },
    # Compute capability 8.0 and newer, pointers: 99 KB of shared memory on sm_86, sm_89 and sm_120.
    "mma": {
        "forward": (Tiles(128, 64, 8, 3), Tiles(128, 32, 8, 3), Tiles(64, 32, 8, 2)),
        "dq": (Tiles(128, 32, 8, 2), Tiles(64, 64, 8, 2), Tiles(32, 32, 4, 2)),
        "dk_dv": (Tiles(32, 128, 8, 2), Tiles(32, 64, 8, 2), Tiles(32, 32, 8, 2)),
    },
    # No tensor cores: float32 in full precision, and everything on sm_75 (64 KB), where Triton emits none.
    "fma": {
        "forward": (Tiles(16, 32, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1)),
        "dq": (Tiles(16, 16, 4, 1), Tiles(16, 16, 8, 1), Tiles(16, 16, 4, 1)),
        "dk_dv": (Tiles(16, 16, 4, 1), Tiles(16, 16, 8, 1), Tiles(16, 8, 4, 1)),
    },
}


def choose_tiles(kernel, head_dim, dtype, capability, use_tma=False):
    """Tiles of ``kernel`` ("forward", "dq" or "dk_dv"): a pure function of what they are for and where they run."""
    if dtype == torch.float32 or capability < (8, 0):
        unit = "fma"
    else:
        unit = "wgmma" if use_tma else "mma"
    size = next(i for i, limit in enumerate(_HEAD_DIMS) if head_dim <= limit)
    return _TILES[unit][kernel][size]


# --- The operators ---------------------------------------------------------------------------------------------------


def _empty(like):
    """Uninitialised [B, H, length, D] whose memory is [B, length, H, D]."""
    B, H, length, D = like.shape
    return like.new_empty(B, length, H, D).transpose(1, 2)


def _device_info(q):
    info = device_info(q.device)
    if q.dtype == torch.bfloat16 and info.capability < (8, 0):
        major, minor = info.capability
        raise ValueError(f"bfloat16 needs compute capability 8.0 or newer, this GPU has {major}.{minor}: use float16")
    return info


def _padded(head_dim):
    return max(16, triton.next_power_of_2(head_dim))


def _source(tensor, block, use_tma):
    """What ``_load_tile`` reads ``tensor`` [B, H, length, D] by: a descriptor of tiles of ``block`` rows, or itself."""
    if not use_tma:
        return tensor
    return tile_descriptor(tensor, block, _padded(tensor.shape[-1]))


@torch.library.custom_op("phi_triton::flash_attention_forward", mutates_args=())
def _forward_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, lower: int, upper: int
) -> tuple[torch.Tensor, torch.Tensor]:
    check_launchable(q=q, k=k, v=v)
    info = _device_info(q)
    B, Hq, S, D = q.shape
    out = _empty(q)
    lse = q.new_empty(B, Hq, S, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    use_tma = tma_fits(info, q, k, v)
    tiles = choose_tiles("forward", D, q.dtype, info.capability, use_tma)
    with torch.cuda.device_of(q):
        _flash_forward_kernel[(Hq, triton.cdiv(S, tiles.block_m), B)](
            _source(q, tiles.block_m, use_tma), _source(k, tiles.block_n, use_tma), _source(v, tiles.block_n, use_tma),
            out, lse,
            S, k.shape[2], lower, upper, Hq, Hq // k.shape[1], scale * math.log2(math.e),
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            D=D, D_PAD=_padded(D), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, USE_TMA=use_tma,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return out, lse


@_forward_op.register_fake
def _(q, k, v, scale, lower, upper):
    return _empty(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("phi_triton::flash_attention_backward", mutates_args=())
def _backward_op(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    scale: float, lower: int, upper: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    info = _device_info(q)
    B, Hq, S, D = q.shape
    Hkv, T = k.shape[1:3]
    dq, dk, dv = _empty(q), _empty(k), _empty(v)
    if q.numel() == 0:  # nobody looks at the keys
        return dq, dk.zero_(), dv.zero_()
    if dout.stride(-1) != 1:  # autograd hands over what it has: the gradient of sum() is expanded from one number
        dout = dout.contiguous()
    row_score, row_dweight = torch.empty_like(lse), torch.empty_like(lse)
    use_tma = tma_fits(info, q, k, v, dout)
    scale_log2 = scale * math.log2(math.e)
    sizes = (S, T, lower, upper, Hq, Hq // Hkv)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3])
    with torch.cuda.device_of(q):
        BLOCK_ROWS = 64
        _flash_backward_rows_kernel[(Hq, triton.cdiv(S, BLOCK_ROWS), B)](
            out, dout, lse, row_score, row_dweight,
            S, Hq, scale, *out.stride()[:3], *dout.stride()[:3],
            D=D, D_PAD=_padded(D), BLOCK_M=BLOCK_ROWS,
        )  # fmt: skip
        tiles = choose_tiles("dq", D, q.dtype, info.capability, use_tma)
        _flash_dq_kernel[(Hq, triton.cdiv(S, tiles.block_m), B)](
            _source(q, tiles.block_m, use_tma), _source(k, tiles.block_n, use_tma), _source(v, tiles.block_n, use_tma),
            _source(dout, tiles.block_m, use_tma), row_score, row_dweight, dq,
            *sizes, scale, scale_log2, *strides, *dq.stride()[:3],
            D=D, D_PAD=_padded(D), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, USE_TMA=use_tma,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
        if T == 0:
            return dq, dk, dv
        tiles = choose_tiles("dk_dv", D, q.dtype, info.capability, use_tma)
        _flash_dk_dv_kernel[(Hkv, triton.cdiv(T, tiles.block_n), B)](
            _source(q, tiles.block_m, use_tma), _source(k, tiles.block_n, use_tma), _source(v, tiles.block_n, use_tma),
            _source(dout, tiles.block_m, use_tma), row_score, row_dweight, dk, dv,
            *sizes, scale, scale_log2, *strides, *dk.stride()[:3], *dv.stride()[:3],
            D=D, D_PAD=_padded(D), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, USE_TMA=use_tma,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return dq, dk, dv


@_backward_op.register_fake
def _(dout, q, k, v, out, lse, scale, lower, upper):
    return _empty(q), _empty(k), _empty(v)


def _setup_context(ctx, inputs, output):
    q, k, v, ctx.scale, ctx.lower, ctx.upper = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse)


def _backward(ctx, dout, _dlse):
    dq, dk, dv = _backward_op(dout, *ctx.saved_tensors, ctx.scale, ctx.lower, ctx.upper)
    return dq, dk, dv, None, None, None


_forward_op.register_autograd(_backward, setup_context=_setup_context)
