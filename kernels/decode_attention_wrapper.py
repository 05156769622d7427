"""decode_attention(): what the decode kernels may be called with, and how they are launched on each GPU."""

import functools
import math
from typing import Literal, NamedTuple

import torch
import triton

import config
from kernels import INTERPRETED
from kernels.decode_attention_triton import (
    HOLE,
    STATE_WIDTH,
    _decode_attention_kernel,
    _decode_attention_split_kernel,
    collect_ptx,
)
from kernels.device import (
    TRITON_VERSION,
    check_launchable,
    device_info,
    launch_options,
    pdl_supported,
    pow2_floor,
    stride_unit,
    tile_descriptor,
    tma_fits,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NO_WINDOW = 2**31 - 1
ROOMY = 1.75  # programs per multiprocessor, of two: an eighth of the places is left to the next launch


class DecodeLaunch(NamedTuple):
    """Launch choices. rows: query heads of one program; block_t: key positions per tile; programs_per_sm: programs of
    the split kernel per multiprocessor; min_tiles: the least share of tiles that is worth a program, from the
    few_splits-th split of an item on; interleaved: whole splits take tiles in turn, not a run of them; tma: tiles by
    tensor descriptor (see tma_fits); q_columns: columns of q per load (see _load_pieces); pdl: programmatic dependent
    launch; next_after: when whole splits let the next launch's programs come, once they have read their keys, once
    the partial results are collected, or only at their end; collects: whether the last of an item's whole splits merges
    them as they come (see _collect), else that which arrives last.
    """

    rows: int
    block_t: int
    num_warps: int
    num_stages: int
    programs_per_sm: float
    min_tiles: int
    few_splits: int
    interleaved: bool
    tma: bool
    q_columns: int
    pdl: bool
    next_after: Literal["keys", "partials", "end"]
    collects: bool


@functools.lru_cache(maxsize=256)  # asked by every layer of every step, and launches wait for it
def choose_launch(batch, num_kv_heads, group_size, head_dim, dtype_bytes, max_len, device, *, block_t, tma=False):
    """DecodeLaunch for ``device`` (a DeviceInfo). A pure function.

    max_len: the most positions that a sequence can have (T_max: one cache, one compilation). block_t: the largest tile
    wanted through pointers (config.BLOCK_T); tensor descriptors take twice as much. tma: whether these may be used.

    Measured on NVIDIA H200s, 2026-11-30, float16, batch 1, PDL, microseconds per call with cold caches (keys per tile,
    warps, stages, splits per head; "turn": a split takes tiles in turn, else a run of them; "early": the next launch
    after the keys; "TMA"; another number of splits in brackets). From several machines, which differ by up to 3 %:

        32 heads of 96 (Phi-3 Mini)       T = 128  256      512      1024   2048  4096  8192  16384  32768  131072
        64, 4, 3, 1, early                3.03     4.58
        64, 4, 3, 4, turn, early                   4.66     5.54
        32, 2, 4, 8, turn, early          3.69 [2] 4.20 [4] 5.40
        32, 2, 4, 8, turn                                   5.59     6.95   9.98        28.3
        32, 2, 4, 8                                                               16.5  28.4
        32, 2, 4, 7, turn, early                                     7.14   9.84  16.2  27.6
        32, 2, 4, 7, early                                                  9.68  16.2  27.5
        64, 4, 4, 7, early, TMA                                                         29.0  52.4
        128, 8, 4, 4, early, TMA                                                              51.4   95.2   359.5

        32 heads over 8 KV heads of 128   T = 128  256      512      1024   2048  4096  8192  16384  32768  131072
        64, 4, 3, 8, turn, early          3.66 [2] 3.83 [4] 4.15     5.13   6.65
        64, 4, 3, 16, turn                                                        8.60  12.44 20.8   35.0   123.4
        32, 4, 4, 8, turn, early          3.21 [4] 3.46     4.00     5.09
        32, 4, 4, 11, turn, early                           4.40 [12] 5.29  6.43
        32, 4, 4, 16, turn                                                  6.56  8.42  12.42 20.6   35.7
        32, 4, 5, 16, turn                                                              12.34 20.1   34.6   122.2
        64, 8, 3, 16, turn                                                  7.43 [11] 9.74 13.3 21.8 36.5

    All of these merged splits by the counter: collected, 32/32 gains 0.3 to 1.2 from 512 on, 32/8 0.1 to 0.8 from 2048
    on. Then, with the next launch after keys / partials / end, 32/32 takes 6.39 / 6.56 / 6.76 at 1024 and 26.67 / 27.22
    / 27.40 at 8192, 32/8 6.16 / 6.36 / 6.88 at 2048, 8.74 / 7.99 / 8.54 at 4096, 13.30 / 11.69 / 12.23 at 8192 and
    22.92 / 20.54 / 20.34 at 16384. Other splits, pipelines, groups and head_dims, and what tensor descriptors cost
    elsewhere, are in benchmarks/LOG.md.
    """
    # A program's rows are its accumulator, which must not spill: an MQA model with many heads takes several programs.
    tensor_cores = dtype_bytes == 2 and device.capability >= (8, 0)
    rows = triton.cdiv(group_size, triton.cdiv(group_size, 32 if tensor_cores and head_dim <= 128 else 16))
    columns = sum(split_head_dim(head_dim))
    single, small_group = group_size == 1, group_size > 1 and rows <= 4
    keys_per_sm = batch * num_kv_heads * max_len // device.sm_count
    # Programs walk so far that the bytes on their way from memory matter more than what starts and ends them.
    far = keys_per_sm > 400
    # Where they gain: for groups and shorter caches pointers are as fast or faster, and batches were not measured.
    tma = tma and tensor_cores and batch == 1 and single and head_dim <= 128 and keys_per_sm > 2048
    pdl = pdl_supported(device)
    # An eighth of the places is left to the next launch's programs, where whole splits fill the others. Only batch 1
    # was measured.
    roomy = pdl and tensor_cores and batch == 1 and single and far and keys_per_sm <= 2048
    roomy = roomy and _whole_splits(int(ROOMY * device.sm_count), num_kv_heads) > 0
    programs_per_sm = 1 if tma or not single else ROOMY if roomy else 2
    # So few keys are walked sooner than the results of splits are merged.
    short = max_len <= 128 and single
    if tma:
        keys = 2 * min(block_t, 64)  # no registers go to addresses
        num_warps = keys // 16
    elif tensor_cores:
        # A warp has 16 keys, and q and the accumulator as a whole. Where those are large two or four warps share them.
        size = max(16, triton.next_power_of_2(rows)) * head_dim
        sharing = 4 if size > 2048 else 2 if columns == 128 and not single else 1
        # Small programs start soonest; large ones keep more bytes on their way, but with many rows, or wide ones, they
        # spill on some GPUs.
        if single:
            large = short or keys_per_sm > 2048
        elif sharing == 2:
            large = rows > 4 and far and device.sm_count // (batch * num_kv_heads) <= 16  # few splits to merge
        else:
            large = rows <= 16
        keys = min(16 if sharing == 4 else 64 if large else 32, block_t)
        num_warps = keys // 16 * sharing
    else:
        # Without tensor cores (fp32, and all on Turing) a product holds whole rows of both factors in registers: those
        # of 8 warps are enough at head_dim 128, not at 256.
        keys = min(max(16, triton.next_power_of_2(2048 // head_dim + 1) // 2), 64, block_t)
        num_warps = 8
    # Triton keeps num_stages - 1 tiles of K and of V in shared memory, and one more without tensor cores.
    tile_bytes = 2 * keys * columns * dtype_bytes
    tiles = device.shared_memory // (math.ceil(programs_per_sm) * tile_bytes)
    if device.capability < (8, 0):
        most_stages = 2
    elif short or (not single and tile_bytes > 4096 * num_warps):
        most_stages = 3
    else:
        most_stages = 5 if small_group and far else 4
    num_stages = max(2, min(most_stages, tiles + 1 if tensor_cores else tiles))
    # Up to eight splits of a group cost little more to merge than two.
    if single:
        min_tiles, few_splits = 256 // keys if short else 2, 1
    else:
        min_tiles, few_splits = 4 if keys == 64 else 6 if small_group else 8, 8
    # Half as many elements of q per load as threads. Of many rows, or wide ones, q would take the registers of keys.
    q_columns = 16 * num_warps // triton.next_power_of_2(rows)
    if q_columns < 8 or head_dim > 128 or (not single and device.capability < (9, 0)):
        q_columns = 256
    # One thread for each four columns: a thread that waits for several would do so one after the other.
    collects = triton.next_power_of_2(rows) * triton.next_power_of_2(head_dim) <= 4 * 32 * num_warps
    # The next launch's programs take the places that come free first, several on one multiprocessor and none on
    # another: a loss unless there is room for them, or one fills a multiprocessor, or they have little to read.
    if pdl and (tma or roomy or keys_per_sm <= (400 if single else 160)):
        next_after = "keys"
    elif pdl and collects and keys_per_sm <= 600:
        next_after = "partials"
    else:
        next_after = "end"
    return DecodeLaunch(
        rows, keys, num_warps, num_stages, programs_per_sm, min_tiles, few_splits,
        interleaved=not (single and far),
        tma=tma,
        q_columns=q_columns,
        pdl=pdl,
        next_after=next_after,
        collects=collects,
    )  # fmt: skip


def default_launch(q, k_cache, v_cache):
    """The DecodeLaunch that decode_attention takes for these tensors."""
    B, Hq, D = q.shape
    Hkv, T_max = k_cache.shape[1:3]
    device = device_info(q.device)
    tma = tma_fits(device, k_cache, v_cache)
    return choose_launch(B, Hkv, Hq // Hkv, D, q.element_size(), T_max, device, block_t=config.BLOCK_T, tma=tma)


@functools.lru_cache(maxsize=256)
def choose_num_programs(choice, batch, num_kv_heads, group_size, max_len, sm_count):
    """Programs of the split kernel: as many whole splits per item (sequence, KV head, block of query heads) as a wave
    of the GPU holds, fewer where, beyond ``few_splits``, a split would be less than ``min_tiles``.

    Where there are no such whole splits (see _whole_splits) it is the wave, in equal shares that cross items. Whole
    splits are the faster: 32 heads of 96 at 2048 positions took 11.1 microseconds in 256 programs and 13.3 in 264
    (NVIDIA H200, 2026-11-29).
    """
    items = batch * num_kv_heads * triton.cdiv(group_size, choice.rows)
    wave = int(sm_count * choice.programs_per_sm)
    tiles = max(1, triton.cdiv(max_len, choice.block_t))
    most = max(triton.cdiv(tiles, choice.min_tiles), min(tiles, choice.few_splits))
    if items * most <= wave:
        return items * most
    return _whole_splits(wave, items) or wave


def _whole_splits(wave, items):
    """Programs of a wave in whole splits of each item; 0 where these would leave more than an eighth of it idle."""
    whole = wave // items * items
    return whole if 8 * whole >= 7 * wave else 0


def split_head_dim(head_dim):
    """(low, high) powers of two that cover head_dim; high is 0 where one power of two wastes no more lanes.

    96 -> (64, 32); 128 -> (128, 0); 80 -> (64, 16); 112 -> (128, 0).
    """
    low = triton.next_power_of_2(head_dim)
    if low > head_dim:
        low //= 2
    high = max(16, triton.next_power_of_2(head_dim - low)) if head_dim > low else 0
    return (2 * low, 0) if high == low else (low, high)


class _Workspace(NamedTuple):
    """Scratch memory of the split kernel on one device: partial results [floats], arrival counters [items] of 0."""

    partial: torch.Tensor
    arrived: torch.Tensor


# By device and whether launches collect, newest last. None is ever freed: a captured CUDA graph holds the address of
# the one it was captured with.
_workspaces = {}


def holes(floats, device):
    """Memory for partial results that are collected (see _collect): ``floats`` of them, none written yet."""
    return torch.full((floats,), HOLE.value, dtype=torch.int32, device=device).view(torch.float32)


def _workspace(device, floats, items, collects):
    """The device's workspace, made or grown to powers of two at need.

    All calls on a device share it, so calls on different streams must not overlap in time: one would take what another
    waits for. A launch leaves counters of 0 and, where it collects, nothing but holes to the next.
    """
    made = _workspaces.setdefault((device, collects), [])
    if not made or made[-1].partial.numel() < floats or made[-1].arrived.numel() < items:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("decode_attention must run once with these shapes before a CUDA graph captures it")
        if made:
            floats, items = max(floats, made[-1].partial.numel()), max(items, made[-1].arrived.numel())
        made.append(
            _Workspace(
                holes(triton.next_power_of_2(floats), device),
                torch.zeros(triton.next_power_of_2(items), dtype=torch.int32, device=device),
            )
        )
    return made[-1]


def decode_attention(q, k_cache, v_cache, cache_len, *, scale=None, window=None, out=None):
    """Attention of one new token per sequence over its KV cache -> [B, Hq, D] in q's dtype.

    q: [B, Hq, D]; k_cache, v_cache: [B, Hkv, T_max, D] with Hq a multiple of Hkv, the new token's key and value
    included. float16, bfloat16 (compute capability 8.0+) or float32; D from 16 to 256; any strides as long as D is
    contiguous, so views and expanded tensors are read where they lie. Query head h reads KV head h // (Hq // Hkv).

    cache_len: positions written so far: an int for all sequences, or a contiguous int32 tensor [B] on q's device, whose
    values are clamped to 0..T_max. A length of 0 gives zeros. One compiled kernel serves every length (without groups:
    one for each distance between positions, which is D in a contiguous cache); with a tensor one captured CUDA graph
    does too (call once before capturing, so that nothing compiles during the capture).
    scale: factor of q @ k^T, D ** -0.5 by default. window: keep the last ``window`` positions, the newest included.
    out: where to write, [B, Hq, D] of q's dtype, D contiguous; returned.

    Calls on one device share scratch memory: those on different streams must not overlap in time, or they may never
    end. Raises ValueError on anything else. There is no backward: use flash_attention to train.
    """
    if torch.compiler.is_compiling():
        length, lengths = (None, cache_len) if isinstance(cache_len, torch.Tensor) else (cache_len, None)
        result = torch.ops.phi_triton.decode_attention(q, k_cache, v_cache, length, lengths, scale, window)
        return result if out is None else out.copy_(result)
    _check_arguments(q, k_cache, v_cache, cache_len, scale, window, out)
    return _launch(q, k_cache, v_cache, cache_len, scale, window, out)


def decode_attention_with_lse(
    q, k_cache, v_cache, cache_len, *, scale=None, window=None, out=None, choice=None, num_programs=None
):
    """decode_attention, and the natural log-sum-exp of the scaled scores, [B, Hq] float32 (-inf without a key).

    For tests and tuning ``choice`` and ``num_programs`` replace the policy; 0 programs mean the single-pass kernel.
    """
    _check_arguments(q, k_cache, v_cache, cache_len, scale, window, out)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    out = _launch(q, k_cache, v_cache, cache_len, scale, window, out, lse, choice, num_programs)
    return out, lse


def _check_arguments(q, k_cache, v_cache, cache_len, scale, window, out):
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
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"window must be None or an int of at least 1, got {window!r}")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    check_launchable(**tensors)
    if q.dtype == torch.bfloat16 and device_info(q.device).capability < (8, 0):
        raise ValueError("bfloat16 needs compute capability 8.0 or newer: use float16 on this GPU")


def _launch(q, k_cache, v_cache, cache_len, scale, window, out, lse=None, choice=None, num_programs=None):
    B, Hq, D = q.shape
    Hkv, T_max = k_cache.shape[1:3]
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if B == 0 or Hq == 0:
        return out
    per_sequence = isinstance(cache_len, torch.Tensor)
    window = min(window or NO_WINDOW, NO_WINDOW)
    device = device_info(q.device)
    if choice is None:
        choice = default_launch(q, k_cache, v_cache)
    if num_programs is None:
        # The interpreter runs one program after the other: nothing to gain from splitting, and each program is slow.
        # Triton 3.2's compiler dies of the split kernel's batched products.
        single = INTERPRETED or TRITON_VERSION < (3, 3)
        num_programs = 0 if single else choose_num_programs(choice, B, Hkv, Hq // Hkv, T_max, device.sm_count)
    scale_log2e = (D**-0.5 if scale is None else scale) * math.log2(math.e)
    strides = (*q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], *out.stride()[:2])
    unit = stride_unit(*strides[2:8])
    with torch.cuda.device_of(q):
        if num_programs == 0:
            grid, options = _single_pass_options(choice, B, Hq, Hkv, D, per_sequence)
            _decode_attention_kernel[grid](
                q, k_cache, v_cache, out, lse, cache_len, T_max, window, scale_log2e, *strides,
                STRIDE_UNIT=unit, **options,
            )  # fmt: skip
        else:
            wide_offsets = max(k_cache.stride(2), v_cache.stride(2)) * choice.block_t >= 2**31
            grid, slot_rows, items, options = _split_options(choice, num_programs, B, Hq, Hkv, D, per_sequence)
            descriptors = (None,) * 4
            if choice.tma:
                descriptors = [
                    tile_descriptor(cache, choice.block_t, columns) if columns else None
                    for cache in (k_cache, v_cache)
                    for columns in (options["D_LO"], options["D_HI"])
                ]
            floats = slot_rows * (options["D_PAD"] + STATE_WIDTH.value)
            workspace = _workspace(q.device, floats, items, options["COLLECT"] is not None)
            # Known strides save 20 registers, but groups are slower with them: 32 heads over 8 took 7.4 us, not 6.4,
            # at 2048 positions (NVIDIA H200, 2026-11-30).
            known_strides = (k_cache.stride(2), v_cache.stride(2)) if Hq == Hkv else (None, None)
            _decode_attention_split_kernel[grid](
                q, k_cache, v_cache, *descriptors, out, lse, workspace.partial, workspace.arrived,
                cache_len, B, T_max, window, scale_log2e, *strides, *known_strides,
                STRIDE_UNIT=unit, WIDE_OFFSETS=wide_offsets, **options,
            )  # fmt: skip
    return out


@functools.lru_cache(maxsize=256)
def _single_pass_options(choice, B, Hq, Hkv, D, per_sequence):
    """(grid, constexprs and launch options) of the single-pass kernel."""
    group_size = Hq // Hkv
    block_h = max(16, triton.next_power_of_2(choice.rows))  # tl.dot takes at least 16 rows
    return (triton.cdiv(group_size, block_h), Hkv, B), {
        "Hq": Hq, "Hkv": Hkv, "D": D, "D_PAD": triton.next_power_of_2(D), "BLOCK_H": block_h,
        "BLOCK_T": choice.block_t, "PER_SEQUENCE": per_sequence,
        # Its tiles are padded and q is in shared memory too: with 4 stages they might not fit.
        "NUM_STAGES": min(choice.num_stages, 3), "num_warps": choice.num_warps,
    }  # fmt: skip


@functools.lru_cache(maxsize=256)
def _split_options(choice, num_programs, B, Hq, Hkv, D, per_sequence):
    """(grid, rows of partial results, items, constexprs and launch options) of the split kernel."""
    items = B * Hkv * triton.cdiv(Hq // Hkv, choice.rows)
    block_r = triton.next_power_of_2(choice.rows)
    d_lo, d_hi = split_head_dim(D)
    # Sequences of one length need no balancing: every item gets the same number of splits.
    whole_splits = num_programs % items == 0 and items < 2**16 and (B == 1 or not per_sequence)
    splits = num_programs // items if whole_splits else num_programs
    d_pad = triton.next_power_of_2(D)
    # Partials merged at a time: those that 96 registers of each thread hold, and no more code than that of 16.
    block_s = min(16, pow2_floor(96 // (2 + triton.cdiv(block_r * d_pad, 32 * choice.num_warps))))
    block_s = min(block_s, triton.next_power_of_2(splits))
    distance = 4 * 2 * choice.rows * (d_pad + STATE_WIDTH.value)  # bytes: each program has two slots
    grid = (splits, items) if whole_splits else (num_programs,)
    return grid, 2 * num_programs * choice.rows, items, {
        "Hq": Hq, "Hkv": Hkv, "D": D, "D_LO": d_lo, "D_HI": d_hi, "D_PAD": d_pad, "ROWS": choice.rows,
        # tl.dot takes 16 rows, of which up to 8 leave the loop.
        "BLOCK_H": max(16, block_r), "OUT_ROWS": max(8, block_r), "BLOCK_R": block_r,
        "BLOCK_S": block_s, "ONE_BLOCK": splits <= block_s,
        "BLOCK_T": choice.block_t,
        # A product takes at least 16 keys per warp.
        "WARPS": min(choice.num_warps, choice.block_t // 16),
        "MIN_TILES": choice.min_tiles, "FEW_SPLITS": choice.few_splits,
        "Q_COLUMNS": choice.q_columns,
        "SPLITS_PER_ITEM": whole_splits, "INTERLEAVED": choice.interleaved,
        "B_PAD": triton.next_power_of_2(B), "PER_SEQUENCE": per_sequence,
        "NUM_STAGES": choice.num_stages, "NEXT_AFTER": choice.next_after,
        "COLLECT": collect_ptx(block_s, distance) if choice.collects and whole_splits else None, "PDL": choice.pdl,
        **launch_options(choice.pdl, num_warps=choice.num_warps),
    }  # fmt: skip


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
