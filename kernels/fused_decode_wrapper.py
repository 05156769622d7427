"""Launches of the fused decode kernels: argument checks, and launch choices as pure functions of sizes and GPU.

All vectors belong to one sequence (batch 1) and everything is written into the caller's buffers, so that a captured
CUDA graph allocates nothing. ``pdl=True`` launches a kernel with programmatic dependent launch: it may start while the
kernel before it still runs, and waits by itself. The first kernel of a token, ``embed``, never is: its full edge makes
reading the past before the wait right (fused_decode_triton.py states the rules).
"""

import math
from typing import NamedTuple

import torch
import triton

from kernels.decode_attention_triton import STATE_WIDTH, collect_ptx
from kernels.decode_attention_wrapper import holes, split_head_dim
from kernels.device import (
    check_launchable,
    device_info,
    launch_options,
    pow2_floor,
    prefer_carveout,
    prefetch_supported,
    stride_unit,
)
from kernels.fused_decode_triton import EMPTY_KEY, _embed_kernel, _matvec_kernel, _rope_attention_kernel

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class MatvecConfig(NamedTuple):
    """rows: output elements per tile; block_k: elements of a row per load; num_warps: warps per program.

    programs: in all, each with every programs-th tile; None: one per tile. look_ahead: so many of them ask L2 for their
    second tile as soon as they may load x (needs compute capability 9.0).
    """

    rows: int
    block_k: int
    num_warps: int
    programs: int | None = None
    look_ahead: int = 0

    def first_wave_rows(self, sm_count):
        """Output elements of the programs that are resident at once: what is loaded before the wait."""
        resident = 32 // self.num_warps * sm_count
        return self.rows * min(self.programs or resident, resident)


class AttentionConfig(NamedTuple):
    """splits: programs that share a head's past at most; block_t: positions per tile; num_warps: warps per program."""

    splits: int
    block_t: int
    num_warps: int


class AttentionWorkspace(NamedTuple):
    """Scratch of rope_attention, shared by all layers of a chain: partial results, nothing but holes in between."""

    partial: torch.Tensor
    config: AttentionConfig


class Prefetch(NamedTuple):
    """A hint to L2: ``nbytes`` of a weight, an equal share from each of its ``parts`` (2: gate and "up"), behind the
    first ``skip`` bytes of the part. early: before x is there instead of right after.
    """

    weight: torch.Tensor
    nbytes: int
    parts: int = 1
    skip: int = 0
    early: bool = False

    def share(self, shares):
        """Bytes per program and part, for that many programs; 0 where the weight does not lie on 16 bytes."""
        part = self.weight.nbytes // self.parts
        if self.weight.data_ptr() % 16 or part % 16 or self.skip % 16:
            return 0
        return max(0, min(self.nbytes // self.parts, part - self.skip)) // shares // 16 * 16


class GreedyChoice(NamedTuple):
    """Where a matvec whose outputs are logits leaves its choice, and its scratch; made by ``greedy_choice``."""

    best: torch.Tensor
    arrived: torch.Tensor
    token: torch.Tensor
    history: torch.Tensor
    lengths: torch.Tensor


def greedy_choice(token, history, lengths):
    """GreedyChoice into token [1] int64, history [T_max] int64 at position lengths [1] int32, which grows by one."""
    best = torch.full((1,), EMPTY_KEY.value, dtype=torch.int64, device=token.device)
    return GreedyChoice(best, torch.zeros_like(best, dtype=torch.int32), token, history, lengths)


def matvec_config(n, k, itemsize, sm_count, *, gated=False, pdl=False, choice=False, prefetched=False):
    """MatvecConfig for a weight [n, k] (gated: two rows per output). The fastest found on one H200, 2026-11.

    Microseconds per token of Phi-3-mini in float16, context 128, PDL, all else equal; (rows, block_k, warps):

    - QKV: (2, 1024, 4) on 7 programs per multiprocessor 1931, two tiles each 1942, (2, 1024, 4) without loop 1951,
      (4, 1024, 4) without 1955. Gate and up: (1, 1024, 4) on 7 per multiprocessor 1916, two tiles each 1924. Head:
      (2, 1024, 4) on 7 per multiprocessor 1922, without loop 1923. All three: 96 bytes of weights per thread.
    - O, too small to loop over: (4, 1024, 4) 1922, (8, 1024, 8) 1927; looping 1982. Since attention leaves it room to
      start beside it (2026-11-30), at contexts 128 / 512 / 2048 / 4000: (4, 1024, 4) 1834 / 1872 / 2053 / 2261,
      (8, 1024, 4) 1839 / 1875 / 2066 / 2266.
    - Down, long rows: (4, 4096, 16) 1927, (4, 2048, 8) 1934, (2, 2048, 8) 1955; looping 1941.

    Then with look_ahead, programs that fetch their second tile: QKV none 1922, 264 1889, 528 1886, all 1919; gate and
    up none 1924, 264 1900, 528 1891, all 1931.

    Without PDL a new program's loads start as soon as there is room, and two tiles each are the compromise: gate and up
    2113 (7 per multiprocessor +16, one tile each 2155), QKV 2113 (one tile each 2115). Where the first bytes come out
    of L2 (``prefetched``, see FusedDecoder._prefetches) one tile each is best: two 2081, one for gate and up 2073, for
    QKV 2070, for both 2063. Then, all from 2039, gate and up as (2, 1024, 4) 2050, (1, 1024, 8) 2044, (2, 1024, 8)
    2094, QKV as (1, 1024, 4) 2057, (4, 1024, 4) 2081, (4, 1024, 8) 2090, O as (2, 1024, 4) 2050, (8, 1024, 8) 2070,
    down (2, 4096, 16), as (4, 4096, 16) 2045, (2, 2048, 8) 2047. A choice wants few programs to meet: 7 per
    multiprocessor (then of 72 registers, now 6 of 80) 2039, two tiles each 2047, one 2054.
    """
    row_bytes = k * itemsize * (2 if gated else 1)
    long_rows = row_bytes >= 128 * 128
    small = not gated and n * row_bytes <= 20 << 20
    num_warps = 16 if long_rows else 4
    thread_bytes = (128 if pdl else 64) if long_rows else 192 if small else 96
    rows = pow2_floor(max(1, num_warps * 32 * thread_bytes // row_bytes))
    rows = min(rows, 32, triton.next_power_of_2(n))
    block_k = min(triton.next_power_of_2(k), num_warps * 256 * 2 // itemsize)
    tiles = triton.cdiv(n, rows)
    if small or long_rows:
        return MatvecConfig(rows, block_k, num_warps, tiles)
    if not pdl and not choice:
        return MatvecConfig(rows, block_k, num_warps, tiles if prefetched else triton.cdiv(tiles, 2))
    # As many as have room: 72 registers leave seven places on a multiprocessor. Where GPUs can prefetch (compute
    # capability 9.0) a choice takes 80.
    programs = min(tiles, (24 if choice and prefetched else 28) // num_warps * sm_count)
    # Whole second tiles in whole lines of 16 bytes, so that one instruction can ask for them.
    whole = pdl and n % rows == 0 and rows * k * itemsize % 16 == 0
    look_ahead = max(0, min(4 * sm_count, tiles - programs)) if whole else 0
    return MatvecConfig(rows, block_k, num_warps, programs, look_ahead)


def attention_config(num_heads, head_dim, itemsize, max_seq_len, sm_count, *, tensor_cores=True):
    """AttentionConfig for a cache of max_seq_len: one launch, captured once, serves every length of it.

    A short cache is one of which each program has one tile, on a multiprocessor of its own. It is a matter of latency:
    eight warps, 16 keys for each. A longer one has six warps per multiprocessor, in programs of four with 32 keys for
    each warp: eight would fit, but then the O projection's programs find no room to load their weights meanwhile.
    Always as many keys as their registers hold. tensor_cores: whether the GPU has them for 16 bits. With and without
    PDL alike, so that both give the same bits. Microseconds per token of Phi-3-mini in float16, all else equal,
    (splits, block_t, warps), one H200 for each paragraph, 2026-11:

    - Context 128, K and V still passing through shared memory: (2, 128, 8) 1871, (2, 128, 4) 1876, (4, 128, 8) 1877,
      (4, 64, 2) 1885, (8, 32, 2) 1895, (4, 64, 4) 1900; (1, 256, 8), too large to start beside the programs before it,
      2174. Without PDL: (8, 32, 2) 2115 to 2123, (2, 128, 8) 2113 to 2131, (4, 64, 2) 2127.
    - A cache of 384 at contexts 128 / 220 / 340: (2, 128, 8) 1837 / 1838 / 1906, (4, 128, 8) 1842 / 1847 / 1859,
      (4, 128, 4) 1872 / 1876 / 1871, (8, 64, 4) 1875 / 1887 / 1905.
    - A cache of 512 at 250 / 400 / 470: (4, 128, 8) 1849 / 1886 / 1895, (2, 256, 8) 1869 / 1875 / 1883, (4, 128, 4)
      1873 / 1888 / 1891, (8, 64, 4) 1891 / 1902 / 1913.
    - Contexts 512 / 1024 / 2048 / 4096, in caches of 64 more: (8, 128, 4) 1893 / 1996 / 2072 / 2264, (4, 256, 8)
      1896 / 1980 / 2116 / 2321; on another day (8, 128, 4) 1909 / 2006 / 2087 / 2282, (16, 64, 2) - / 2015 / 2100 /
      2292, (16, 64, 4) - / 2002 / 2106 / 2499, (4, 128, 8) 1924 / 2003 / 2125 / 2310, (8, 64, 4) 1961 / 2017 / 2120 /
      2331. Without PDL at 2048: (16, 64, 4) 2327, (16, 64, 2) 2343, (4, 128, 8) 2346, (8, 128, 4) 2357.
    - That was with runs of tiles for each split. In turn, at 512 / 1024 / 1600 / 2048 / 3000 / 4000: (8, 128, 4) 1899 /
      1991 / 2030 / 2100 / 2172 / 2273, (7, 128, 4) 1897 / 1973 / 2012 / 2085 / 2167 / 2268, (6, 128, 4) 1899 / 1955 /
      2032 / 2070 / 2158 / 2265, (5, 128, 4) 1897 / 1965 / 2044 / 2112 / 2200 / 2314; in runs (8, 128, 4) 1897 / 1987 /
      2014 / 2066 / 2185 / 2289. Without PDL at 512 / 1024 / 2048 / 4000: (6, 128, 4) in turn 2141 / 2209 / 2311 / 2518,
      (8, 128, 4) in runs 2145 / 2217 / 2327 / 2512.
    """
    elements_per_dim = sum(split_head_dim(head_dim))
    direct = itemsize == 2 and tensor_cores
    # A query and an accumulator of more than 128 dims are too much for one warp: two share each set of 16 keys.
    wide = head_dim > 128
    # Elements of K per thread; a tile of V is as large. Without tensor cores a product holds whole rows of both factors
    # in registers, those of 16 bits also unpacked.
    elements = (64 if wide else 96) if direct else 4 * itemsize

    def tile(num_warps, keys):
        return min(pow2_floor(max(16, num_warps * 32 * elements // elements_per_dim)), num_warps * keys)

    num_warps, block_t = 8, tile(8, 16)
    splits = pow2_floor(max(1, sm_count // num_heads))
    if max_seq_len > splits * block_t:
        if direct and not wide:
            num_warps = 4
        block_t = tile(num_warps, 32)
        splits = max(1, round(6 * sm_count / (num_heads * num_warps)))
    splits = min(splits, triton.cdiv(max_seq_len, block_t))
    return AttentionConfig(splits, block_t, num_warps)


def _partial_shape(num_heads, head_dim, config):
    return num_heads, config.splits, triton.next_power_of_2(head_dim) + STATE_WIDTH.value


def attention_workspace(num_heads, head_dim, max_seq_len, dtype, device, config=None):
    """AttentionWorkspace for one sequence of up to ``max_seq_len`` positions."""
    if config is None:
        info = device_info(device)
        config = attention_config(
            num_heads, head_dim, dtype.itemsize, max_seq_len, info.sm_count, tensor_cores=info.capability >= (8, 0)
        )
    shape = _partial_shape(num_heads, head_dim, config)
    return AttentionWorkspace(holes(math.prod(shape), device).view(shape), config)


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


# Percent of a multiprocessor's fast memory that a projection asks to have as shared memory, with PDL. It needs 1 KiB
# per program, and the driver would leave it hardly more; but kernels that overlap share one division, and attention
# needs 12 or 24. Microseconds per token of Phi-3-mini in float16 at contexts 128 / 512 / 2048 on two H200s, a and b
# (2026-11-30): the driver's choice a 1857 / 1914 / 2072, b 1888 / 1948 / 2102; 7 % b 1882 / 1920 / 2093; 8 % a 1838 /
# 1896 / 2073, b 1883 / 1919 / 2093; with 44 % for attention, 6 % b 1887 / 1924 / 2096, 8 % b 1882 / 1921 / 2094, 9 % b
# 1885 / 1942 / 2107; 10 % a 2167 / 2191 / 2429, too little L1 for the loads on their way. Without PDL it is a loss: a
# 2103 / 2150, with 8 % 2120 / 2168.
_CARVEOUT = 7


def matvec(
    x, weight, out, *, gain=None, eps=0.0, gated=False, residual=False, pdl=False, config=None, prefetch=None,
    early=False, choice=None,
):  # fmt: skip
    """out = W x for one vector; with ``gain`` of rmsnorm(x) * gain; returns ``out``.

    x: [K]. weight: [N, K]; with ``gated`` [2 N, K], and out = silu(W[:N] x) * (W[N:] x). out: [N]; with ``residual``
    out += W x. Sums in float32, one rounding at the end. All of one dtype (float16, bfloat16, float32), contiguous.
    With pdl, ``early`` lets the next kernel's programs start beside this one's, which pays where all of these are
    resident at once, instead of when the last of these has its input.

    With ``choice`` (see greedy_choice) out are logits and the token is chosen as well: token and history[lengths]
    become argmax(out), lengths grows by one and must be less than T_max before. The lowest index wins a tie; NaN among
    the logits gives N, which is no token.
    """
    K, N = x.shape[0], out.shape[0]
    tensors = {
        "x": (x, (K,), x.dtype),
        "weight": (weight, (2 * N if gated else N, K), x.dtype),
        "out": (out, (N,), x.dtype),
    }
    if gain is not None:
        tensors["gain"] = (gain, (K,), x.dtype)
    if choice is not None:
        for name, dtype in (("token", torch.int64), ("history", torch.int64), ("lengths", torch.int32)):
            tensor = getattr(choice, name)
            tensors[name] = (tensor, tensor.shape if name == "history" else (1,), dtype)
    _check(x, **tensors)
    device = device_info(x.device)
    sm_count, can_prefetch = device.sm_count, prefetch_supported(device)
    if config is None:
        config = matvec_config(
            N, K, x.element_size(), sm_count, gated=gated, pdl=pdl, choice=choice is not None, prefetched=can_prefetch
        )
    if (prefetch or config.look_ahead) and not can_prefetch:
        raise ValueError("prefetch and look_ahead need compute capability 9.0")
    tiles = triton.cdiv(N, config.rows)
    programs = config.programs or tiles
    # The last programs, one per multiprocessor: their own loads come last.
    shares = min(programs, sm_count)
    ahead = prefetch or Prefetch(weight, 0)
    look_ahead = 0 if weight.data_ptr() % 16 else config.look_ahead
    part_elements = ahead.weight.numel() // ahead.parts
    kernel = _matvec_kernel[(programs,)](
        x, weight if gain is None else gain, weight, out,
        ahead.weight.view(-1)[ahead.skip // ahead.weight.element_size() :], part_elements, programs - shares,
        look_ahead, *(choice or (None,) * 5), N, eps,
        K=K, ROWS=config.rows, BLOCK_K=config.block_k, WARPS=config.num_warps,
        NORM=gain is not None, GATED=gated, RESIDUAL=residual,
        EVEN=N % config.rows == 0, LOOP=programs < tiles, LOOK_AHEAD=look_ahead > 0,
        PREFETCH=ahead.share(shares), PARTS=ahead.parts, PREFETCH_EARLY=ahead.early, FENCE=can_prefetch,
        EARLY=early, PDL=pdl,
        **launch_options(pdl, num_warps=config.num_warps, num_stages=1),
    )  # fmt: skip
    if pdl:
        prefer_carveout(kernel, _CARVEOUT)
    return out


def rope_attention(qkv, cos, sin, lengths, k_cache, v_cache, out, workspace, *, window=None, scale=None, pdl=False):
    """Attention of one new token over its cache, RoPE and the cache's new row included; returns ``out``.

    qkv: [(Hq + 2 Hkv) D], q, k, v as the projection gives them. cos, sin: [>= T_max, rotary_dim / 2] float32, row p for
    position p. lengths: [1] int32, the positions already in the cache; not advanced here. k_cache, v_cache:
    [Hkv, T_max, D] with dense rows, one compilation for each distance between them; row ``lengths`` is written and must
    exist. out: [Hq D]. workspace: of one launch at a time, and ``lengths`` may not change during it, or it may never
    end. ``window`` keeps the last ``window`` positions, the new one included. scale: 1 / sqrt(D) unless given.
    """
    Hkv, T_max, D = k_cache.shape
    Hq = out.shape[0] // D
    if Hkv == 0 or out.shape[0] % D or Hq % Hkv:
        raise ValueError(f"out has {out.shape[0]} elements, no multiple of {Hkv} KV heads of head_dim {D}")
    if not 16 <= D <= 256:
        raise ValueError(f"head_dim must be from 16 to 256, got {D}")
    if window is not None and window < 1:
        raise ValueError(f"window must be None or at least 1, got {window}")
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
        # Within a tile of 256 positions the kernel counts in int32.
        if cache.shape != k_cache.shape or cache.dtype != qkv.dtype or cache.stride(2) != 1 or cache.stride(1) >= 2**23:
            raise ValueError(
                f"{name} must be {qkv.dtype} {list(k_cache.shape)} with dense rows, less than 2^23 elements apart, "
                f"got {cache.dtype} {list(cache.shape)}, strides {cache.stride()}"
            )
    check_launchable(qkv=qkv, k_cache=k_cache, v_cache=v_cache, workspace=workspace.partial)
    config = workspace.config
    if tuple(workspace.partial.shape) != _partial_shape(Hq, D, config):
        raise ValueError(f"workspace was made for other sizes than {Hq} heads of head_dim {D}")
    d_lo, d_hi = split_head_dim(D)
    if qkv.dtype == torch.float32 and d_lo > 64 and d_hi == 0:
        # A score in float32 is one chain of additions over the dims; two of half the length are the more accurate.
        d_lo = d_hi = d_lo // 2
    warps = min(config.num_warps, config.block_t // 16)
    # K and V go to the tensor cores directly where there are some, and a warp for each set of keys.
    direct = qkv.element_size() == 2 and device_info(qkv.device).capability >= (8, 0) and warps == config.num_warps
    head_strides = k_cache.stride(0), v_cache.stride(0)
    block_s = min(config.splits, 16)  # more at once only take long to compile
    _rope_attention_kernel[(Hq, config.splits)](
        qkv, cos, sin, lengths, k_cache, v_cache, out, workspace.partial,
        T_max if window is None else window, D**-0.5 if scale is None else scale,
        *head_strides, STRIDE_KT=k_cache.stride(1), STRIDE_VT=v_cache.stride(1),
        HQ=Hq, HKV=Hkv, D=D, D_PAD=triton.next_power_of_2(D), D_LO=d_lo, D_HI=d_hi, ROTARY=2 * half,
        SPLITS=config.splits, BLOCK_T=config.block_t, WARPS=warps, DIRECT=direct,
        STRIDE_UNIT=stride_unit(*head_strides),
        BLOCK_S=block_s, COLLECT=collect_ptx(block_s, 4 * workspace.partial.shape[2]), PDL=pdl,
        **launch_options(pdl, num_warps=config.num_warps, num_stages=1),
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
