"""Launches of the fused decode kernels: argument checks, and launch choices as pure functions of sizes and GPU.

All vectors belong to one sequence (batch 1) and everything is written into the caller's buffers, so that a captured
CUDA graph allocates nothing. ``pdl=True`` launches a kernel with programmatic dependent launch: it may start while the
kernel before it still runs, and waits by itself. The first kernel of a token, ``embed``, never is: its full edge makes
reading the past before the wait right (fused_decode_triton.py states the rules).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.device import check_launchable, device_info
from kernels.fused_decode_triton import _embed_kernel, _greedy_kernel, _matvec_kernel, _rope_attention_kernel

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class MatvecConfig(NamedTuple):
    """rows: output elements per program; block_k: elements of a row per load; num_warps: warps per program."""

    rows: int
    block_k: int
    num_warps: int


class AttentionConfig(NamedTuple):
    """splits: chunks that the past is cut into at most; block_t: positions per tile; num_warps: warps per program."""

    splits: int
    block_t: int
    num_warps: int


class AttentionWorkspace(NamedTuple):
    """Scratch of rope_attention, shared by all layers of a chain: partial sums, softmax states, arrival counters."""

    partial: torch.Tensor
    state: torch.Tensor
    arrived: torch.Tensor
    config: AttentionConfig


class Prefetch(NamedTuple):
    """L2 prefetch of ``weight`` (the next matvec's; gated: its two halves side by side), ``lines`` of 128 bytes.

    For matvec ``lines`` is the distance of the lookahead, for rope_attention the count per program (a power of two).
    """

    weight: torch.Tensor
    gated: bool
    lines: int

    def strides(self):
        """(elements between pairs of lines, elements between the lines of a pair)."""
        line = 128 // self.weight.element_size()
        return (line, self.weight.numel() // 2) if self.gated else (2 * line, line)


def pdl_supported(device):
    """Whether kernels can use programmatic dependent launch: compute capability 9.0+ and a Triton that has it (3.6)."""
    has_instructions = hasattr(getattr(tl.extra, "cuda", None), "gdc_wait")
    return has_instructions and device.type == "cuda" and device_info(device).capability >= (9, 0)


def _pow2_floor(n):
    return 1 << (n.bit_length() - 1)


def matvec_config(n, k, itemsize, *, gated=False):
    """MatvecConfig for a weight [n, k] (gated: two rows per output).

    A thread holds 192 bytes of plain weights, 48 registers, and 96 to 128 of gated or long rows, where x and gain take
    more of its registers: none spills, and 84 to 144 KB per multiprocessor are under way. The sizes are the fastest of
    a search on one H200 over the whole step of Phi-3-mini (rows, block_k and warps per projection).
    """
    row_bytes = k * itemsize * (2 if gated else 1)
    long_rows = row_bytes >= 128 * 128
    small = not gated and n * row_bytes <= 20 << 20
    num_warps = 8 if long_rows or small else 4
    thread_bytes = 128 if gated or long_rows else 192
    rows = _pow2_floor(max(1, num_warps * 32 * thread_bytes // row_bytes))
    rows = min(rows, 32, triton.next_power_of_2(n))
    block_k = min(triton.next_power_of_2(k), (1024 if small else num_warps * 256) * 2 // itemsize)
    return MatvecConfig(rows, block_k, num_warps)


def attention_config(num_heads, head_dim, itemsize, max_seq_len, sm_count):
    """AttentionConfig: a tile of K takes 128 bytes per thread; at most two programs per multiprocessor."""
    num_warps = 8
    block_t = max(16, num_warps * 32 * 128 // (triton.next_power_of_2(head_dim) * itemsize))
    needed = triton.next_power_of_2(triton.cdiv(max_seq_len, block_t))
    splits = min(needed, _pow2_floor(max(1, 2 * sm_count // num_heads)))
    return AttentionConfig(splits, block_t, num_warps)


def attention_workspace(num_heads, head_dim, max_seq_len, dtype, device, config=None):
    """AttentionWorkspace for one sequence of up to ``max_seq_len`` positions."""
    if config is None:
        sm_count = device_info(device).sm_count
        config = attention_config(num_heads, head_dim, dtype.itemsize, max_seq_len, sm_count)
    splits, d_pad = config.splits, triton.next_power_of_2(head_dim)
    return AttentionWorkspace(
        torch.empty(num_heads, splits, d_pad, dtype=torch.float32, device=device),
        torch.empty(num_heads, splits, 2, dtype=torch.float32, device=device),
        torch.zeros(num_heads, dtype=torch.int32, device=device),
        config,
    )


def _check(reference, **tensors):
    """Raise ValueError unless each tensor has its expected shape, ``reference``'s dtype (or its own), and is dense."""
    if reference.dtype not in DTYPES:
        raise ValueError(f"the fused kernels take float16, bfloat16 or float32, got {reference.dtype}")
    for name, (tensor, shape, dtype) in tensors.items():
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    check_launchable(**{name: tensor for name, (tensor, _, _) in tensors.items()})


def _launch_options(pdl, **options):
    # Without PDL the keyword is left out: Triton before 3.6 does not know it.
    return {**options, "launch_pdl": True} if pdl else options


def matvec(
    x, weight, out, *, gain=None, eps=0.0, gated=False, residual=False, pdl=False, config=None, prefetch=None,
    early=False,
):  # fmt: skip
    """out = W x for one vector; with ``gain`` of rmsnorm(x) * gain; returns ``out``.

    x: [K]. weight: [N, K]; with ``gated`` [2 N, K], and out = silu(W[:N] x) * (W[N:] x). out: [N]; with ``residual``
    out += W x. Sums in float32, one rounding at the end. All of one dtype (float16, bfloat16, float32), contiguous.
    With pdl, ``early`` lets the next kernel's programs start beside this one's, which pays where all of these are
    resident at once, instead of when the last of these has its input.
    """
    K, N = x.shape[0], out.shape[0]
    tensors = {
        "x": (x, (K,), x.dtype),
        "weight": (weight, (2 * N if gated else N, K), x.dtype),
        "out": (out, (N,), x.dtype),
    }
    if gain is not None:
        tensors["gain"] = (gain, (K,), x.dtype)
    _check(x, **tensors)
    if config is None:
        config = matvec_config(N, K, x.element_size(), gated=gated)
    ahead = Prefetch(weight, gated, 0) if prefetch is None else prefetch
    _matvec_kernel[(triton.cdiv(N, config.rows),)](
        x, weight if gain is None else gain, weight, out,
        ahead.weight, ahead.weight.numel() * x.element_size() // 128, *ahead.strides(), ahead.lines, N, eps,
        K=K, ROWS=config.rows, BLOCK_K=config.block_k, NORM=gain is not None, GATED=gated, RESIDUAL=residual,
        PREFETCH=prefetch is not None, EARLY=early, PDL=pdl,
        **_launch_options(pdl, num_warps=config.num_warps, num_stages=1),
    )  # fmt: skip
    return out


def rope_attention(
    qkv, cos, sin, lengths, k_cache, v_cache, out, workspace, *, window=None, scale=None, pdl=False, prefetch=None,
    early=True,
):  # fmt: skip
    """Attention of one new token over its cache, RoPE and the cache's new row included; returns ``out``.

    qkv: [(Hq + 2 Hkv) D], q, k, v as the projection gives them. cos, sin: [>= T_max, rotary_dim / 2] float32, row p for
    position p. lengths: [1] int32, the positions already in the cache; not advanced here. k_cache, v_cache:
    [Hkv, T_max, D] with dense rows; row ``lengths`` is written and must exist. out: [Hq D]. ``window`` keeps the last
    ``window`` positions, the new one included. scale: 1 / sqrt(D) unless given.
    """
    Hkv, T_max, D = k_cache.shape
    Hq = out.shape[0] // D
    if out.shape[0] % D or Hq % Hkv:
        raise ValueError(f"out has {out.shape[0]} elements, no multiple of {Hkv} KV heads of head_dim {D}")
    if not 16 <= D <= 256:
        raise ValueError(f"head_dim must be from 16 to 256, got {D}")
    half = cos.shape[1]
    if not 0 < 2 * half <= D or cos.shape[0] < T_max:
        raise ValueError(f"cos must have shape [>= {T_max}, <= {D // 2}], got {list(cos.shape)}")
    _check(
        qkv,
        qkv=(qkv, ((Hq + 2 * Hkv) * D,), qkv.dtype),
        cos=(cos, cos.shape, torch.float32),
        sin=(sin, cos.shape, torch.float32),
        lengths=(lengths, (1,), torch.int32),
        out=(out, (Hq * D,), qkv.dtype),
    )
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.shape != k_cache.shape or cache.dtype != qkv.dtype or cache.stride(2) != 1:
            raise ValueError(
                f"{name} must be {qkv.dtype} {list(k_cache.shape)} with dense rows, "
                f"got {cache.dtype} {list(cache.shape)}, strides {cache.stride()}"
            )
    splits, block_t, num_warps = workspace.config
    if tuple(workspace.partial.shape) != (Hq, splits, triton.next_power_of_2(D)):
        raise ValueError(f"workspace was made for other sizes than {Hq} heads of head_dim {D}")
    if prefetch is None:
        prefetch = Prefetch(qkv, False, 0)
    _rope_attention_kernel[(Hq, splits)](
        qkv, cos, sin, lengths, k_cache, v_cache, out, workspace.partial, workspace.state, workspace.arrived,
        prefetch.weight, *prefetch.strides(), T_max if window is None else window, D**-0.5 if scale is None else scale,
        k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1),
        HQ=Hq, HKV=Hkv, D=D, D_PAD=triton.next_power_of_2(D), ROTARY=2 * half, SPLITS=splits, BLOCK_T=block_t,
        PREFETCH_LINES=prefetch.lines, EARLY=early, PDL=pdl,
        **_launch_options(pdl, num_warps=num_warps, num_stages=1),
    )  # fmt: skip
    return out


def embed(token, table, out, *, pdl=False):
    """out = table[token]; returns ``out``. token: [1] int64; table: [V, N]; out: [N]. An unknown id gives NaN.

    The first kernel of a token: it waits for everything before it. ``pdl`` only lets the next kernel start early.
    """
    V, N = table.shape
    _check(out, token=(token, (1,), torch.int64), table=(table, (V, N), out.dtype), out=(out, (N,), out.dtype))
    block_n = min(1024, triton.next_power_of_2(N))
    _embed_kernel[(triton.cdiv(N, block_n),)](token, table, out, V, N=N, BLOCK_N=block_n, PDL=pdl, num_warps=4)
    return out


def greedy(logits, token, history, lengths, *, pdl=False):
    """The greedy choice on the device: token and history[lengths] become argmax(logits), lengths grows by one.

    logits: [V]; token: [1] int64; history: [T_max] int64; lengths: [1] int32, less than T_max. The lowest index wins a
    tie; a NaN among the logits gives V, which is no token.
    """
    V = logits.shape[0]
    _check(
        logits,
        logits=(logits, (V,), logits.dtype),
        token=(token, (1,), torch.int64),
        history=(history, history.shape, torch.int64),
        lengths=(lengths, (1,), torch.int32),
    )
    block_v = min(16384, triton.next_power_of_2(V))
    num_warps = max(1, min(32, block_v // 256))
    _greedy_kernel[(1,)](
        logits, token, history, lengths, V, BLOCK_V=block_v, PDL=pdl, **_launch_options(pdl, num_warps=num_warps)
    )
    return token
