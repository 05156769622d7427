"""One decode step as few kernels, each near the memory's bandwidth: matrix-vector products, attention, greedy choice.

Batch 1, so that every matrix product is a matrix-vector product: y = W x with W [N, K] read once from DRAM and used
once. A layer is five launches (see fused_decode_wrapper.py):

    qkv  = W_qkv rmsnorm(h)                         _matvec_kernel NORM
    attn = attention(rope(q), cache + rope(k), v)   _rope_attention_kernel
    h   += W_o attn                                 _matvec_kernel RESIDUAL
    act  = silu(W_gate n) * (W_up n), n = rmsnorm(h)    _matvec_kernel NORM GATED
    h   += W_down act                               _matvec_kernel RESIDUAL

Every program issues the loads of its weights before it waits for the previous kernel (programmatic dependent launch,
PDL: PTX ISA, griddepcontrol). What keeps that safe, in this file and for whoever adds a kernel to the chain:

- Each program that does any work waits before it reads what an earlier kernel of the same token wrote, and before it
  writes anything. So a kernel that has completed implies that all before it have: their buffers may be reused.
- Before the wait only weights, RoPE tables, the position and *past* keys and values are read. They are older than the
  token's first kernel, which is launched without PDL (a full edge).
- The wait stands outside every loop that the compiler could pipeline.

Sources: the fusion map follows the published CUDA-graph step for Llama-1B in msaroufim/megakernels-vs-cuda-graphs
(llama/kernels); the split-KV scheme is Flash-Decoding (Dao et al., 2023), reduced by the last split's program.
"""

import triton
import triton.language as tl

from kernels.decode_attention_triton import (
    JOINS,
    LOWEST,
    STATE_WIDTH,
    _accumulate,
    _collect,
    _dot,
    _first_rows,
    _in_units,
    _leave_holes,
    _load_columns,
    _merge_warps,
    _spread,
    _spread_columns,
    _store_state,
    _sum_tuple,
    _unstack,
)
from kernels.device import _launch_next, _wait_for_previous

LOG2_E = tl.constexpr(1.4426950408889634)
EMPTY_KEY = tl.constexpr(-(1 << 63))  # below the key of every logit


@triton.jit
def _prefetch(ptr, BYTES: tl.constexpr, after):
    """Ask L2 for BYTES from ptr on, once ``after`` (int32) is known; nothing waits for it.

    One bulk instruction of one thread (PTX ISA, cp.async.bulk.prefetch: compute capability 9.0, multiples of 16 bytes).
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; setp.ne.and.s32 p, $3, 0x7fffffff, p; "
        "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r,r",
        [ptr, BYTES, after],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _fence_loads(FENCE: tl.constexpr):
    """Keep the compiler from moving the loads above down behind those below, towards where their results are used.

    By another griddepcontrol.wait (compute capability 9.0): it returns at once, but it lets no load pass.
    """
    if FENCE:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip


@triton.jit
def _prefetch_share(ptr, part_stride, share, BYTES: tl.constexpr, PARTS: tl.constexpr, after):
    """Ask L2 for one share of a weight: BYTES of each of its PARTS, which lie part_stride elements apart."""
    start = ptr + share.to(tl.int64) * (BYTES * 8 // ptr.dtype.element_ty.primitive_bitwidth)
    for part in tl.static_range(PARTS):
        _prefetch(start + part * part_stride, BYTES, after)


@triton.jit
def _load_tiles(ptr, rows, in_range, K: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    """Rows of a [*, K] matrix as a tuple of tiles [ROWS, BLOCK_K]: one load each, all in flight together.

    EVEN: every row is in range. A mask costs registers for the zeros that it leaves, so there is one only where needed.
    """
    offs_k = tl.arange(0, BLOCK_K)
    row_ptrs = ptr + rows.to(tl.int64)[:, None] * K
    tiles = ()
    for start in tl.static_range(0, K, BLOCK_K):
        tile_ptrs = row_ptrs + (start + offs_k)[None, :]
        if start + BLOCK_K > K:
            mask = in_range[:, None] & (start + offs_k < K)[None, :]
            tiles += (tl.load(tile_ptrs, mask=mask, other=0.0, eviction_policy="evict_first"),)
        elif EVEN:
            tiles += (tl.load(tile_ptrs, eviction_policy="evict_first"),)
        else:
            tiles += (tl.load(tile_ptrs, mask=in_range[:, None], other=0.0, eviction_policy="evict_first"),)
    return tiles


@triton.jit
def _load_vector(ptr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """A vector [K] as a tuple of float32 blocks [BLOCK_K], zeros behind its end."""
    offs_k = tl.arange(0, BLOCK_K)
    blocks = ()
    for start in tl.static_range(0, K, BLOCK_K):
        if start + BLOCK_K > K:
            block = tl.load(ptr + start + offs_k, mask=start + offs_k < K, other=0.0)
        else:
            block = tl.load(ptr + start + offs_k)
        blocks += (block,)
    return blocks


@triton.jit
def _multiply(tiles, xs, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Products [ROWS, BLOCK_K] of the rows with x, the blocks of K added up."""
    products = tl.zeros([ROWS, BLOCK_K], dtype=tl.float32)
    for i in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        products += tiles[i].to(tl.float32) * xs[i][None, :]
    return products


@triton.jit
def _warp_sums(x, WARPS: tl.constexpr):
    """[..., WARPS]: each warp's sum over its part of the last dimension of x, which lies across the warps (fewer parts
    where it is shorter).
    """
    SHAPE: tl.constexpr = x.shape[:-1]
    PARTS: tl.constexpr = WARPS if x.shape[len(SHAPE)] > WARPS else x.shape[len(SHAPE)]
    return tl.sum(tl.reshape(x, SHAPE + [PARTS, x.shape[len(SHAPE)] // PARTS]), axis=len(SHAPE) + 1)  # noqa: RUF005


@triton.jit
def _add_parts(x):
    """Sum over the last dimension of x, whose elements the warps have.

    They go to every thread that needs one at once and are added there: one exchange through shared memory. A reduction
    takes two, each of which everybody waits for; it is for more warps, and for Triton 3.3.
    """
    LAST: tl.constexpr = len(x.shape) - 1
    if JOINS and x.shape[LAST] <= 16:
        return _sum_tuple(_unstack(x))
    else:
        return tl.sum(x, axis=LAST)


@triton.jit
def _add_warps(y, up, squares, NORM: tl.constexpr, GATED: tl.constexpr):
    """Sums over the warps: of y and of up (GATED, else y again) [ROWS, WARPS], and of squares [WARPS] (NORM, else 0)
    -> each [ROWS]. All in one exchange, if a thread has registers for what it gets.
    """
    VALUES: tl.constexpr = y.shape[1] * (2 if NORM else 1) * (2 if GATED else 1)
    norm = 0.0
    if JOINS and VALUES <= 32:
        if GATED:
            y = tl.join(y, up)
        if NORM:
            squares = tl.broadcast_to(squares[None, :], y.shape[:2])
            y = tl.join(y, tl.join(squares, squares) if GATED else squares)
        if NORM or GATED:
            y = tl.permute(y, (0, 2, 3, 1) if NORM and GATED else (0, 2, 1))
        y = _add_parts(y)
        if NORM:
            y, norm = tl.split(y)
            if GATED:
                norm, _ = tl.split(norm)
        up = y
        if GATED:
            y, up = tl.split(y)
    else:
        if NORM:
            norm = _add_parts(squares[None, :])
        if JOINS and GATED:
            y, up = tl.split(_add_parts(tl.permute(tl.join(y, up), (0, 2, 1))))
        else:
            y = _add_parts(y)
            up = _add_parts(up) if GATED else y
    return y, up, norm


@triton.jit
def _finish_rows(
    tiles, up_tiles, residual, xs, squares, eps, out_ptr, rows, in_range,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Weights and x to finished outputs [ROWS], stored and returned. squares: the warps' sums of those of x (NORM)."""
    y = _warp_sums(_multiply(tiles, xs, K, ROWS, BLOCK_K), WARPS)
    up = _warp_sums(_multiply(up_tiles, xs, K, ROWS, BLOCK_K), WARPS) if GATED else y
    y, up, norm = _add_warps(y, up, squares, NORM, GATED)
    inverse_rms = tl.rsqrt(norm / K + eps) if NORM else 1.0
    y *= inverse_rms
    if GATED:
        y = y * tl.sigmoid(y) * (up * inverse_rms)
    if RESIDUAL:
        y += residual.to(tl.float32)
    y = y.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows, y, mask=in_range)
    return y


@triton.jit
def _choice_keys(logits, index, in_range, V):
    """int64 keys in the order of greedy choice: the larger logit first, among equals the lower index.

    The upper half orders as the float does: a negative one has its bits below the sign flipped. Where a logit is NaN
    there is no largest one: its key is above all others and stands for the index V, which is no token.
    """
    logits = logits.to(tl.float32)
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)  # -0 equals 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    is_nan = logits != logits
    ordered = tl.where(is_nan, 0x7FFFFFFF, ordered)
    index = tl.where(is_nan, V, index)
    return tl.where(in_range, (ordered.to(tl.int64) << 32) + (0x7FFFFFFF - index), EMPTY_KEY)


@triton.jit
def _choose(keys, best_ptr, arrived_ptr, token_ptr, history_ptr, lengths_ptr):
    """Add a program's keys to the choice; the last program to arrive ends the step and leaves the scratch as it was.

    A maximum does not depend on the order of arrival. Both atomics are one thread's, so the counter's release covers
    the maximum.
    """
    tl.atomic_max(best_ptr, tl.max(keys, axis=0), sem="relaxed", scope="gpu")
    arrived = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu")
    if arrived == tl.num_programs(0) - 1:
        key = tl.atomic_xchg(best_ptr, EMPTY_KEY, sem="acq_rel", scope="gpu")
        token = 0x7FFFFFFF - (key & 0x7FFFFFFF)
        position = tl.load(lengths_ptr)
        tl.store(token_ptr, token)
        tl.store(history_ptr + position, token)
        tl.store(lengths_ptr, position + 1)
        tl.store(arrived_ptr, 0)


@triton.jit
def _matvec_kernel(
    x_ptr,  # [K]
    gain_ptr,  # [K], RMSNorm's weight (NORM)
    weight_ptr,  # [N, K]; GATED: [2 * N, K], the gate's rows and then the rows of "up"
    out_ptr,  # [N]; RESIDUAL: added to
    next_ptr,  # the part of a weight of which each program from first_share on asks L2 for PREFETCH bytes in each part
    next_part_stride,
    first_share,
    look_ahead,  # LOOK_AHEAD: the first programs, which also ask L2 for their second tile
    best_ptr,  # [1] int64, EMPTY_KEY before and after; None: no choice
    arrived_ptr,  # [1] int32, zero before and after
    token_ptr,  # [1] int64
    history_ptr,  # [T_max] int64
    lengths_ptr,  # [1] int32
    N,
    eps,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr,
    LOOP: tl.constexpr,
    LOOK_AHEAD: tl.constexpr,
    PREFETCH: tl.constexpr,
    PARTS: tl.constexpr,
    PREFETCH_EARLY: tl.constexpr,
    FENCE: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program = ROWS elements of the output, or with LOOP every num_programs-th such tile of it.

    The weight rows of the first tile are held whole in registers while the program waits for x. The norm is recomputed
    by every program: x is a few KB out of L2, less than a kernel boundary costs. Its factor 1 / rms(x) is one number,
    so it multiplies the finished sums, and the weights need not wait for it. With best_ptr the outputs are logits: the
    token is chosen here, because a kernel for it takes 31 us of a step (H200, 2026-11), most of them idle.

    Between the last weights of one kernel and the second tiles of the next lie about two microseconds (completion, x,
    sums), in which memory would idle once the first tiles are there. Prefetches fill them: of what the next kernel will
    load after its wait (PREFETCH), and of the second tiles of some programs (LOOK_AHEAD). Without PDL memory idles from
    the last weights of one kernel to the first of the next, which PREFETCH asks for then. More is a loss: L2 delivers
    hardly faster than memory does.
    """
    if EARLY:
        _launch_next(PDL)
    program = tl.program_id(0)
    rows = program * ROWS + tl.arange(0, ROWS)
    tiles = _load_tiles(weight_ptr, rows, rows < N, K, BLOCK_K, EVEN)
    up_tiles = tiles
    if GATED:
        up_tiles = _load_tiles(weight_ptr, N + rows, rows < N, K, BLOCK_K, EVEN)
    if NORM:
        gains = _load_vector(gain_ptr, K, BLOCK_K)
    if PREFETCH > 0 and PREFETCH_EARLY:
        if program >= first_share:
            # Not before the program's own tile is there (of which this is the last element): that is needed first.
            arrived = tl.load(weight_ptr + tl.minimum((program + 1) * ROWS, N).to(tl.int64) * K - 1)
            arrived = arrived.to(tl.float32).to(tl.int32, bitcast=True)
            _prefetch_share(next_ptr, next_part_stride, program - first_share, PREFETCH, PARTS, arrived)
    _wait_for_previous(PDL)
    if not EARLY:
        _launch_next(PDL)

    residual = rows
    if RESIDUAL:
        # Before x, so that it is there in time: the compiler would load it behind the products and wait for L2 again.
        residual = tl.load(out_ptr + rows, mask=rows < N, other=0.0)
        _fence_loads(FENCE)
    blocks = _load_vector(x_ptr, K, BLOCK_K)
    TILE_BYTES: tl.constexpr = ROWS * K * weight_ptr.dtype.element_ty.primitive_bitwidth // 8
    if LOOK_AHEAD:
        if program < look_ahead:
            second = weight_ptr + (program + tl.num_programs(0)).to(tl.int64) * (ROWS * K)
            _prefetch(second, TILE_BYTES, 0)
            if GATED:
                _prefetch(second + N.to(tl.int64) * K, TILE_BYTES, 0)
    if PREFETCH > 0 and not PREFETCH_EARLY:
        if program >= first_share:
            _prefetch_share(next_ptr, next_part_stride, program - first_share, PREFETCH, PARTS, 0)
    xs = ()
    squares = tl.zeros([BLOCK_K], dtype=tl.float32)
    for i in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        x = blocks[i].to(tl.float32)
        if NORM:
            # Rounded here. Left to the compiler, of two lanes that add theirs each rounds the other's lone product and
            # not its own, and which of the two sums everybody gets depends on who stores last.
            squares = tl.fma(x, x, squares)
            x *= gains[i].to(tl.float32)
        xs += (x,)
    squares = _warp_sums(squares, WARPS)
    keys = tl.full([ROWS], EMPTY_KEY, dtype=tl.int64)
    if LOOP:
        num_tiles = tl.cdiv(N, ROWS)
        for tile in range(program, num_tiles, tl.num_programs(0)):
            rows = tile * ROWS + tl.arange(0, ROWS)
            y = _finish_rows(
                tiles, up_tiles, residual, xs, squares, eps, out_ptr, rows, rows < N,
                K, ROWS, BLOCK_K, WARPS, NORM, GATED, RESIDUAL,
            )  # fmt: skip
            if best_ptr is not None:
                keys = tl.maximum(keys, _choice_keys(y, rows, rows < N, N))
            # Only now, behind the store: loads any earlier need a second set of registers, that is, fewer programs per
            # multiprocessor, and the other programs' loads fill the gap. (H200, 2026-11: 1.931 ms against 2.032 for
            # the QKV projection's loop with the next tile's loads before the sums.)
            if tile + tl.num_programs(0) < num_tiles:
                rows += tl.num_programs(0) * ROWS
                if RESIDUAL:
                    residual = tl.load(out_ptr + rows, mask=rows < N, other=0.0)
                tiles = _load_tiles(weight_ptr, rows, rows < N, K, BLOCK_K, EVEN)
                up_tiles = tiles
                if GATED:
                    up_tiles = _load_tiles(weight_ptr, N + rows, rows < N, K, BLOCK_K, EVEN)
    else:
        y = _finish_rows(
            tiles, up_tiles, residual, xs, squares, eps, out_ptr, rows, rows < N,
            K, ROWS, BLOCK_K, WARPS, NORM, GATED, RESIDUAL,
        )  # fmt: skip
        if best_ptr is not None:
            keys = _choice_keys(y, rows, rows < N, N)
    if best_ptr is not None:
        _choose(keys, best_ptr, arrived_ptr, token_ptr, history_ptr, lengths_ptr)


@triton.jit
def _load_rotated(ptr, offs_d, cos, sin, D: tl.constexpr, ROTARY: tl.constexpr):
    """Dims offs_d of one head [D] -> RoPE in float32: i and i + ROTARY / 2 are partners, those from ROTARY on pass."""
    HALF: tl.constexpr = ROTARY // 2
    partner = tl.where(offs_d < HALF, offs_d + HALF, offs_d - HALF)
    x = tl.load(ptr + offs_d, mask=offs_d < D, other=0.0).to(tl.float32)
    x_partner = tl.load(ptr + partner, mask=offs_d < ROTARY, other=0.0).to(tl.float32)
    return x * cos + tl.where(offs_d < HALF, -x_partner, x_partner) * sin


@triton.jit
def _load_rotation(cos_ptr, sin_ptr, position, offs_d, ROTARY: tl.constexpr):
    """RoPE's factors of these dims at one position; those from ROTARY on turn by nothing."""
    angle = position * (ROTARY // 2) + tl.where(offs_d < ROTARY // 2, offs_d, offs_d - ROTARY // 2)
    cos = tl.load(cos_ptr + angle, mask=offs_d < ROTARY, other=1.0)
    return cos, tl.load(sin_ptr + angle, mask=offs_d < ROTARY, other=0.0)


@triton.jit
def _load_new(
    qkv_ptr, head, kv_head, owns, k_dims, v_dims, cos, sin,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """The new token's q (float32) and k at k_dims, and its v at v_dims.

    The key is rounded before it is used: later steps see the same one. v is 0 where it is not the program's own: its
    weight of 0 would turn an infinite one into NaN.
    """
    q = _load_rotated(qkv_ptr + head * D, k_dims, cos, sin, D, ROTARY)
    k = _load_rotated(qkv_ptr + (HQ + kv_head) * D, k_dims, cos, sin, D, ROTARY).to(qkv_ptr.dtype.element_ty)
    v = tl.load(qkv_ptr + (HQ + HKV + kv_head) * D + v_dims, mask=owns & (v_dims < D), other=0.0)
    return q, k, v


# K and V reach the tensor cores without shared memory (DIRECT). A product takes its second factor from fixed registers:
# lane 4 n + c has column n of each 8, in rows 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 of each 16 (PTX ISA, mma.m16n8k16). In
# q K^T rows are dims and columns keys, in weights V rows are keys and columns dims. Memory wants to be read in runs of
# 16 bytes of one key, and with dims in their own order a run is not what the lane that reads it needs. But a score may
# sum its dims in any order, and the outputs may come in any. So the eight dims of a run are given the places of one
# lane: four pairs of rows of K, or one column of eight products with V. q and the new key follow K's order, the outputs
# and the new value V's; in memory every dim stays where it is, but for partial results. Without tensor cores, or where
# warps share keys, a dim's place is its own number.


@triton.jit
def _k_dims(COLUMN: tl.constexpr, WIDTH: tl.constexpr, DIRECT: tl.constexpr):
    """[WIDTH]: the dim at each place of K, of dims COLUMN .. COLUMN + WIDTH.

    The dims (chunk, c, i, b) of _load_k have the places (chunk, i, c, b).
    """
    place = tl.arange(0, WIDTH)
    if DIRECT:
        RUN: tl.constexpr = 8 if WIDTH >= 32 else WIDTH // 4
        chunk, i, c, b = place // (4 * RUN), place // 8 % (RUN // 2), place // 2 % 4, place % 2
        place = (chunk * 4 + c) * RUN + i * 2 + b
    return COLUMN + place


@triton.jit
def _v_dims(place, COLUMN: tl.constexpr, WIDTH: tl.constexpr, DIRECT: tl.constexpr):
    """The dims at these places of V, of dims COLUMN .. COLUMN + WIDTH: (chunk, n, i) of _load_v for (chunk, i, n)."""
    if DIRECT:
        RUN: tl.constexpr = 8 if WIDTH >= 64 else WIDTH // 8
        chunk, i, n = place // (8 * RUN), place // 8 % RUN, place % 8
        place = (chunk * 8 + n) * RUN + i
    return COLUMN + place


@triton.jit
def _load_runs(
    ptr, start, end, t, dim, later, COLUMN,
    STRIDE_T: tl.constexpr, RUN: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """[N, RUN]: of N positions start + t + later their dims from dim + COLUMN on; 0 from position ``end`` on and, if
    MASKED, from dim D on.

    t and dim differ between lanes, later and COLUMN only between loads. So a thread computes one address and one
    limit, and its loads differ from these by constants.
    """
    i = tl.arange(0, RUN)[None, :]
    ptr += start.to(tl.int64) * STRIDE_T
    ptrs = ptr + (t * STRIDE_T + dim)[:, None] + (later * STRIDE_T + COLUMN)[:, None] + i
    mask = (later < end - start - t)[:, None]
    if MASKED:
        mask = mask & ((dim + COLUMN)[:, None] + i < D)
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def _load_k(
    ptr, start, end, STRIDE_T: tl.constexpr, COLUMN: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    WARPS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Keys [WARPS, KEYS, WIDTH] from ``start`` on: dims COLUMN .. COLUMN + WIDTH, at K's places; 0 from ``end`` on."""
    RUN: tl.constexpr = 8 if WIDTH >= 32 else WIDTH // 4
    CHUNKS: tl.constexpr = WIDTH // (4 * RUN)
    # The compiler deals out a load's rows, here the runs, to lanes, then to warps, and then starts over.
    run = tl.arange(0, KEYS // 8 * CHUNKS * WARPS * 32)  # (eight, chunk, warp, n, c)
    c, n, warp, rest = run % 4, run // 4 % 8, run // 32 % WARPS, run // (32 * WARPS)
    chunk, eight = rest % CHUNKS, rest // CHUNKS
    k = _load_runs(
        ptr, start, end, warp * KEYS + n, c * RUN, eight * 8, COLUMN + chunk * 4 * RUN,
        STRIDE_T, RUN, COLUMN + WIDTH > D, D,
    )  # fmt: skip
    k = tl.reshape(k, [KEYS // 8, CHUNKS, WARPS, 8, 4, RUN // 2, 2])
    return tl.reshape(tl.permute(k, (2, 0, 3, 1, 5, 4, 6)), [WARPS, KEYS, WIDTH])


@triton.jit
def _load_v(
    ptr, start, end, STRIDE_T: tl.constexpr, COLUMN: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    WARPS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Values [WARPS, KEYS, WIDTH] as _load_k's keys, at V's places."""
    RUN: tl.constexpr = 8 if WIDTH >= 64 else WIDTH // 8
    CHUNKS: tl.constexpr = WIDTH // (8 * RUN)
    run = tl.arange(0, KEYS // 4 * CHUNKS * WARPS * 32)  # (eight, b, chunk, warp, n, c)
    c, n, warp, rest = run % 4, run // 4 % 8, run // 32 % WARPS, run // (32 * WARPS)
    chunk, b, eight = rest % CHUNKS, rest // CHUNKS % 2, rest // (2 * CHUNKS)
    v = _load_runs(
        ptr, start, end, warp * KEYS + c * 2, n * RUN, eight * 8 + b, COLUMN + chunk * 8 * RUN,
        STRIDE_T, RUN, COLUMN + WIDTH > D, D,
    )  # fmt: skip
    v = tl.reshape(v, [KEYS // 8, 2, CHUNKS, WARPS, 8, 4, RUN])
    return tl.reshape(tl.permute(v, (3, 0, 5, 1, 2, 6, 4)), [WARPS, KEYS, WIDTH])


@triton.jit
def _load_in_order(
    ptr, start, end, STRIDE_T: tl.constexpr, COLUMN: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    WARPS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Keys or values [WARPS, KEYS, WIDTH] from ``start`` on, every dim at its own place; 0 from ``end`` on."""
    t = start + tl.arange(0, WARPS)[:, None] * KEYS + tl.arange(0, KEYS)[None, :]
    return _load_columns(ptr + t.to(tl.int64) * STRIDE_T, t < end, COLUMN, WIDTH, D)


@triton.jit
def _load_tile(
    k_ptr, v_ptr, start, end, STRIDE_KT: tl.constexpr, STRIDE_VT: tl.constexpr, D: tl.constexpr, D_LO: tl.constexpr,
    D_HI: tl.constexpr, WARPS: tl.constexpr, KEYS: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """WARPS * KEYS positions of one head's K and V, from ``start`` on, each in two column ranges; 0 from ``end`` on."""
    load_k: tl.constexpr = _load_k if DIRECT else _load_in_order
    load_v: tl.constexpr = _load_v if DIRECT else _load_in_order
    k_lo = load_k(k_ptr, start, end, STRIDE_KT, 0, D_LO, D, WARPS, KEYS)
    k_hi = load_k(k_ptr, start, end, STRIDE_KT, D_LO, D_HI, D, WARPS, KEYS) if D_HI else k_lo
    v_lo = load_v(v_ptr, start, end, STRIDE_VT, 0, D_LO, D, WARPS, KEYS)
    v_hi = load_v(v_ptr, start, end, STRIDE_VT, D_LO, D_HI, D, WARPS, KEYS) if D_HI else v_lo
    return k_lo, k_hi, v_lo, v_hi


@triton.jit
def _rope_attention_kernel(
    qkv_ptr,  # [(HQ + 2 * HKV) * D]: q, k, v of the new token
    cos_ptr,  # [T_max, ROTARY / 2] float32
    sin_ptr,
    lengths_ptr,  # [1] int32: positions in the cache, which is the new token's position
    k_ptr,  # [HKV, T_max, D]
    v_ptr,
    out_ptr,  # [HQ * D]
    partial_ptr,  # [HQ, SPLITS, D_PAD + STATE_WIDTH] float32, accumulators in V's places; holes before and after
    window,
    scale,
    stride_kh,
    stride_vh,
    STRIDE_KT: tl.constexpr,
    STRIDE_VT: tl.constexpr,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    D_LO: tl.constexpr,
    D_HI: tl.constexpr,
    ROTARY: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WARPS: tl.constexpr,
    DIRECT: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    BLOCK_S: tl.constexpr,
    COLLECT: tl.constexpr,  # collect_ptx(BLOCK_S, bytes of a partial)
    PDL: tl.constexpr,
):
    """One program = (query head, split): RoPE, attention over its share of the past, and the new token in the last.

    The splits take the past's tiles in turn, and those that would get none do not take part, so one launch serves every
    length and a short context has no reduction at all. With more than one split, the last one adds them up as they
    come (see _collect), always in their order: the same bits every time. The first query head of a group writes the
    group's new K/V row; all of them take it from qkv, so nobody reads what is being written.

    Within a tile each warp has keys and a softmax state of its own, as decode_attention_triton.py's ``_attend`` has
    them and for its reasons: warps meet once, at the end. The query is one row of a product's 16, the others repeat it.
    """
    _launch_next(PDL)
    stride_kh, stride_vh = _in_units(stride_kh, STRIDE_UNIT), _in_units(stride_vh, STRIDE_UNIT)
    head = tl.program_id(0)
    split = tl.program_id(1)
    kv_head = head // (HQ // HKV)
    position = tl.load(lengths_ptr)
    first = tl.maximum(position + 1 - window, 0)
    active = tl.maximum(tl.minimum(tl.cdiv(position - first, BLOCK_T), SPLITS), 1)
    if split >= active:
        return

    start = first + split * BLOCK_T
    step = active * BLOCK_T
    KEYS: tl.constexpr = BLOCK_T // WARPS
    offs_t = tl.arange(0, WARPS)[:, None] * KEYS + tl.arange(0, KEYS)[None, :]
    k_ptr += kv_head.to(tl.int64) * stride_kh
    v_ptr += kv_head.to(tl.int64) * stride_vh
    k_lo, k_hi, v_lo, v_hi = _load_tile(
        k_ptr, v_ptr, start, position, STRIDE_KT, STRIDE_VT, D, D_LO, D_HI, WARPS, KEYS, DIRECT
    )  # fmt: skip
    ROWS: tl.constexpr = 8  # equal ones that leave a product of 16, see _spread
    k_dims_lo = _k_dims(0, D_LO, DIRECT)
    places_lo, kept_lo = _spread_columns(ROWS, D_LO, ROWS)
    # The 0, which the compiler does not know, hides that these run down the rows: that would be the layout of the sums.
    zero = position >> 31
    v_dims_lo = tl.where(kept_lo, _v_dims(places_lo, 0, D_LO, DIRECT), D) ^ zero
    cos_lo, sin_lo = _load_rotation(cos_ptr, sin_ptr, position, k_dims_lo, ROTARY)
    if D_HI:
        k_dims_hi = _k_dims(D_LO, D_HI, DIRECT)
        places_hi, kept_hi = _spread_columns(ROWS, D_HI, ROWS)
        v_dims_hi = tl.where(kept_hi, _v_dims(places_hi, D_LO, D_HI, DIRECT), D) ^ zero
        cos_hi, sin_hi = _load_rotation(cos_ptr, sin_ptr, position, k_dims_hi, ROTARY)
    _wait_for_previous(PDL)

    # All loads before the first store and the first sum, so that they wait for L2 together: none would pass either.
    owns_new = split == active - 1
    q_lo, k_new_lo, v_new_lo = _load_new(
        qkv_ptr, head, kv_head, owns_new, k_dims_lo, v_dims_lo, cos_lo, sin_lo, HQ, HKV, D, ROTARY
    )  # fmt: skip
    if D_HI:
        q_hi, k_new_hi, v_new_hi = _load_new(
            qkv_ptr, head, kv_head, owns_new, k_dims_hi, v_dims_hi, cos_hi, sin_hi, HQ, HKV, D, ROTARY
        )  # fmt: skip
    writes = owns_new & (head % (HQ // HKV) == 0)
    k_row = k_ptr + position.to(tl.int64) * STRIDE_KT
    v_row = v_ptr + position.to(tl.int64) * STRIDE_VT
    tl.store(k_row + k_dims_lo, k_new_lo, mask=writes & (k_dims_lo < D))
    tl.store(v_row + v_dims_lo, v_new_lo, mask=writes & (v_dims_lo < D))
    if D_HI:
        tl.store(k_row + k_dims_hi, k_new_hi, mask=writes & (k_dims_hi < D))
        tl.store(v_row + v_dims_hi, v_new_hi, mask=writes & (v_dims_hi < D))
    q_rows_lo = tl.broadcast_to(q_lo.to(k_lo.dtype)[None, None, :], [WARPS, 16, D_LO])
    acc_lo = tl.zeros([WARPS, 16, D_LO], tl.float32)
    acc_hi = acc_lo
    if D_HI:
        q_rows_hi = tl.broadcast_to(q_hi.to(k_lo.dtype)[None, None, :], [WARPS, 16, D_HI])
        acc_hi = tl.zeros([WARPS, 16, D_HI], tl.float32)
    scale_log2e = scale * LOG2_E

    warp_max = tl.full([WARPS, 16], LOWEST, tl.float32)
    warp_sum = tl.zeros([WARPS, 16], tl.float32)
    for tile in range(start, position, step):
        scores = _dot(q_rows_lo, tl.permute(k_lo, (0, 2, 1)))
        if D_HI:
            scores += _dot(q_rows_hi, tl.permute(k_hi, (0, 2, 1)))
        scores = tl.where((tile + offs_t < position)[:, None, :], scores * scale_log2e, float("-inf"))
        new_max = tl.maximum(warp_max, tl.max(scores, axis=2))
        rescale = tl.exp2(warp_max - new_max)
        weights = tl.exp2(scores - new_max[:, :, None])
        warp_sum = warp_sum * rescale + tl.sum(weights, axis=2)
        weights = weights.to(v_lo.dtype)
        acc_lo = _accumulate(acc_lo, rescale[:, :, None], weights, v_lo)
        if D_HI:
            acc_hi = _accumulate(acc_hi, rescale[:, :, None], weights, v_hi)
        warp_max = new_max
        # Only now: loads any earlier need a second set of registers, that is, fewer programs per multiprocessor.
        if tile + step < position:
            k_lo, k_hi, v_lo, v_hi = _load_tile(
                k_ptr, v_ptr, tile + step, position, STRIDE_KT, STRIDE_VT, D, D_LO, D_HI, WARPS, KEYS, DIRECT
            )  # fmt: skip

    # Only now: this sum passes between warps, which the products need not wait for.
    new_score = tl.sum(q_lo * k_new_lo.to(tl.float32), axis=0)
    if D_HI:
        new_score += tl.sum(q_hi * k_new_hi.to(tl.float32), axis=0)
    new_score *= scale_log2e
    warp_max = tl.reshape(_first_rows(warp_max[:, :, None], ROWS), [WARPS, ROWS])
    warp_sum = tl.reshape(_first_rows(warp_sum[:, :, None], ROWS), [WARPS, ROWS])
    acc_lo = _spread(_first_rows(acc_lo, ROWS), ROWS)
    acc_hi = _spread(_first_rows(acc_hi, ROWS), ROWS) if D_HI else acc_lo
    # An active split holds a past key or the new one: the sum is 0 only where all scores are -inf, and the result NaN.
    least = tl.where(owns_new, new_score, LOWEST)
    running_max, running_sum, acc_lo, acc_hi = _merge_warps(warp_max, warp_sum, acc_lo, acc_hi, least, D_HI)
    new_weight = tl.where(owns_new, tl.exp2(new_score - running_max), 0.0)
    running_sum += new_weight
    acc_lo += new_weight[:, None] * v_new_lo.to(tl.float32)
    if D_HI:
        acc_hi += new_weight[:, None] * v_new_hi.to(tl.float32)

    out_ptr += head * D
    kind = out_ptr.dtype.element_ty
    if active == 1:
        tl.store(out_ptr + v_dims_lo, (acc_lo / running_sum[:, None]).to(kind), mask=v_dims_lo < D)
        if D_HI:
            tl.store(out_ptr + v_dims_hi, (acc_hi / running_sum[:, None]).to(kind), mask=v_dims_hi < D)
        return
    # Partial results stay in V's places, which the threads have side by side.
    row = partial_ptr + (head * SPLITS + split) * (D_PAD + STATE_WIDTH)
    tl.store(row + places_lo, acc_lo, mask=kept_lo)
    if D_HI:
        tl.store(row + D_LO + places_hi, acc_hi, mask=kept_hi)
    copy = tl.arange(0, ROWS)
    _store_state(row + 0 * copy, copy == 0, running_max, running_sum, D_PAD, places_lo.shape[1])
    if owns_new:
        first_row = partial_ptr + (head * SPLITS + tl.arange(0, 1)) * (D_PAD + STATE_WIDTH)
        _, total, merged = _collect(
            first_row, active, D_PAD + STATE_WIDTH, D_LO + D_HI, D_PAD, BLOCK_S, SPLITS == BLOCK_S, COLLECT
        )  # fmt: skip
        for i in tl.static_range(4):
            places = 4 * tl.arange(0, D_PAD // 4)[None, :] + i
            dims = _v_dims(places, 0, D_LO, DIRECT)
            if D_HI:
                dims = tl.where(places < D_LO, dims, _v_dims(places - D_LO, D_LO, D_HI, DIRECT))
            tl.store(out_ptr + dims, (merged[i] / total).to(kind), mask=(places < D_LO + D_HI) & (dims < D))
        _leave_holes(
            first_row, tl.arange(0, 1) == 0, active, D_PAD + STATE_WIDTH, D_LO + D_HI, D_PAD, BLOCK_S, SPLITS == BLOCK_S
        )  # fmt: skip


@triton.jit
def _embed_kernel(
    token_ptr,  # [1] int64
    table_ptr,  # [V, N]
    out_ptr,  # [N]
    V,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program = BLOCK_N elements of the token's row. An id outside the vocabulary gives NaN, not a stray read."""
    _launch_next(PDL)
    token = tl.load(token_ptr)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs_n < N
    known = (token >= 0) & (token < V)
    row = tl.load(table_ptr + token * N + offs_n, mask=mask & known, other=float("nan"))
    tl.store(out_ptr + offs_n, row, mask=mask)
