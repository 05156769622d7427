"""Decode attention: one new token per sequence against a long KV cache. Memory-bound, so K and V are read once.

    out[b, h] = softmax(scale * q[b, h] @ k[b, h // G, t]^T, over the visible t) @ v[b, h // G, t]       G = Hq // Hkv

q, out [B, Hq, D]; k, v [B, Hkv, T_max, D]. Visible are the last ``window`` of the first ``cache_len`` positions.
Scores, softmax and accumulators are fp32. Softmax runs in base 2 (scores carry a factor log2(e), because exp2 is one
instruction); a log-sum-exp that leaves a kernel is natural.

Two kernels compute it:

- ``_decode_attention_kernel``, the one to read first: one program per KV head walks all its keys.
- ``_decode_attention_split_kernel``: at batch 1 that is 32 programs (or 8) on a GPU with 132 multiprocessors, so here
  the keys are split as well, the split results are merged in the same launch, and every program has the same work.

Sources: online softmax, FlashAttention (Dao et al. 2022, arXiv 2205.14135, section 3.1); splitting the keys,
Flash-Decoding (Dao et al. 2023, pytorch.org/blog/flash-decoding); equal shares of all tiles, crossing heads, Stream-K
(Osama et al. 2023, arXiv 2301.03598) and LeanAttention (Sanovar et al. 2024, arXiv 2405.10480).
"""

import functools
import struct

import triton
import triton.language as tl

import kernels
from kernels.device import TRITON_VERSION, _launch_next, _wait_for_previous, _wait_once_known

INTERPRETED = tl.constexpr(kernels.INTERPRETED)
JOINS = tl.constexpr(TRITON_VERSION >= (3, 4))  # Triton 3.3 finds no layout for the join of what two warps have
LN_2 = tl.constexpr(0.6931471805599453)
# Where a running maximum starts in the split kernel: below every score but finite, so that a lane or a split without a
# key has weight 0 when it is merged, and never -inf - (-inf).
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _dot(a, b):
    """a @ b with an fp32 result; fp32 inputs multiply in full precision (the default is TF32: 10 bits of mantissa)."""
    if INTERPRETED:
        # The interpreter keeps bfloat16 as its bit pattern, and its dot multiplies those as integers.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _accumulate(acc, rescale, weights, v):
    """acc * rescale + weights @ v, rescale with a last dimension of 1.

    In float32 the tile is summed up by itself: continued from acc, as the tensor cores do it in other dtypes, the sum
    would be one chain of additions over all keys, which has twice SDPA's error at 5000 of them.
    """
    if v.dtype == tl.float32:
        return tl.fma(acc, tl.broadcast_to(rescale, acc.shape), _dot(weights, v))
    return acc * rescale + _dot(weights, v)


@triton.jit
def _in_units(stride, UNIT: tl.constexpr):
    """The stride, which is a multiple of UNIT, so that the compiler sees it."""
    return stride // UNIT * UNIT if UNIT > 1 else stride


@triton.jit
def _visible_range(length, T_max, window):
    """[first, end): the positions that a query sees. A length that came from the device is clamped to the cache."""
    end = tl.minimum(tl.maximum(length, 0), T_max)
    return tl.maximum(end - window, 0), end


@triton.jit(do_not_specialize=["cache_len", "T_max", "window"])
def _decode_attention_kernel(
    q_ptr,  # [B, Hq, D]
    k_ptr,  # [B, Hkv, T_max, D]
    v_ptr,  # [B, Hkv, T_max, D]
    out_ptr,  # [B, Hq, D]
    lse_ptr,  # [B, Hq] fp32 contiguous, or None
    cache_len,  # int, or with PER_SEQUENCE a pointer to int32 [B]
    T_max,
    window,
    scale_log2e,
    stride_qb, stride_qh,
    stride_kb, stride_kh, stride_kt,
    stride_vb, stride_vh, stride_vt,
    stride_ob, stride_oh,
    Hq: tl.constexpr,
    Hkv: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PER_SEQUENCE: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program = (sequence, KV head, block of BLOCK_H of its query heads); one pass over the visible keys.

    Grid: (ceil(G / BLOCK_H), Hkv, B). The query heads of one KV head share each K and V tile as the rows of a matrix
    product; rows past the group are masked, columns past D are zeros that add nothing to a dot product.
    """
    stride_kb, stride_vb = _in_units(stride_kb, STRIDE_UNIT), _in_units(stride_vb, STRIDE_UNIT)
    stride_kh, stride_vh = _in_units(stride_kh, STRIDE_UNIT), _in_units(stride_vh, STRIDE_UNIT)
    stride_kt, stride_vt = _in_units(stride_kt, STRIDE_UNIT), _in_units(stride_vt, STRIDE_UNIT)
    # int64 before any product with a stride: a large cache has more than 2^31 elements.
    batch = tl.program_id(2).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    head_in_group = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    q_head = kv_head * (Hq // Hkv) + head_in_group
    offs_t = tl.arange(0, BLOCK_T)
    offs_d = tl.arange(0, D_PAD)
    mask_d = offs_d[None, :] < D
    mask_hd = (head_in_group < Hq // Hkv)[:, None] & mask_d
    if PER_SEQUENCE:
        first, end = _visible_range(tl.load(cache_len + batch), T_max, window)
    else:
        first, end = _visible_range(cache_len, T_max, window)

    q_ptrs = q_ptr + batch * stride_qb + q_head[:, None] * stride_qh + offs_d[None, :]
    q = tl.load(q_ptrs, mask=mask_hd, other=0.0)  # [BLOCK_H, D_PAD]
    k_ptrs = k_ptr + batch * stride_kb + kv_head * stride_kh + offs_d[None, :]
    v_ptrs = v_ptr + batch * stride_vb + kv_head * stride_vh + offs_d[None, :]

    running_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, D_PAD], tl.float32)
    # Every tile holds a visible key, so the running maximum is finite from the first tile on: no -inf - (-inf).
    for tile_start in tl.range(first, end, BLOCK_T, num_stages=NUM_STAGES):
        position = (tile_start + offs_t).to(tl.int64)
        mask_t = position < end
        mask_td = mask_t[:, None] & mask_d
        k = tl.load(k_ptrs + position[:, None] * stride_kt, mask=mask_td, other=0.0)
        scores = _dot(q, tl.trans(k)) * scale_log2e  # [BLOCK_H, BLOCK_T]
        # A padded key's score would be 0, not "absent": it must not enter the softmax denominator.
        scores = tl.where(mask_t[None, :], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))
        rescale = tl.exp2(running_max - new_max)
        weights = tl.exp2(scores - new_max[:, None])
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        v = tl.load(v_ptrs + position[:, None] * stride_vt, mask=mask_td, other=0.0)
        acc = _accumulate(acc, rescale[:, None], weights.to(v.dtype), v)
        running_max = new_max

    # No visible key (cache_len 0): the sum is 0 and the row is 0, not 0 / 0.
    out = acc / tl.where(running_sum == 0, 1.0, running_sum)[:, None]
    out_ptrs = out_ptr + batch * stride_ob + q_head[:, None] * stride_oh + offs_d[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask_hd)
    if lse_ptr is not None:
        # running_max is -inf where no key is visible, and so is the result.
        lse = (running_max + tl.log2(tl.where(running_sum == 0, 1.0, running_sum))) * LN_2
        tl.store(lse_ptr + batch * Hq + q_head, lse, mask=head_in_group < Hq // Hkv)


@triton.jit
def _load_columns(
    row_ptrs, mask_row, COLUMN: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, FROM_L2: tl.constexpr = False
):
    """Columns COLUMN .. COLUMN + WIDTH of the rows as one more dimension; 0 where a row is masked and past column D."""
    columns = COLUMN + tl.arange(0, WIDTH)
    ptrs = tl.expand_dims(row_ptrs, -1) + columns
    mask = tl.expand_dims(mask_row, -1) & (columns < D)
    return tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg" if FROM_L2 else "")


@triton.jit
def _load_pieces(row_ptrs, mask_row, COLUMN: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, PIECE: tl.constexpr):
    """_load_columns of rows [R], in loads of PIECE columns.

    Where a load has fewer elements than the program has threads, Triton lets each thread load what a product wants of
    it. Larger ones pass through shared memory, and loads of keys behind them in the program wait for that. Triton 3.3
    cannot join the pieces.
    """
    COLUMNS: tl.constexpr = PIECE if PIECE < WIDTH and JOINS else WIDTH
    pieces = ()
    for i in tl.static_range(WIDTH // COLUMNS):
        pieces += (_load_columns(row_ptrs, mask_row, COLUMN + i * COLUMNS, COLUMNS, D),)
    for _ in tl.static_range(4):  # 16 at most
        if len(pieces) > 1:
            pairs = ()
            for i in tl.static_range(len(pieces) // 2):
                pair = tl.permute(tl.join(pieces[2 * i], pieces[2 * i + 1]), (0, 2, 1))
                pairs += (tl.reshape(pair, [pair.shape[0], 2 * pair.shape[2]]),)
            pieces = pairs
    return pieces[0]


@triton.jit
def _load_described(descriptor, batch, kv_head, start, COLUMN: tl.constexpr, WARPS: tl.constexpr):
    """The descriptor's tile from position ``start`` and COLUMN on, its rows dealt out to warps; 0 past column D."""
    tile = descriptor.load([batch, kv_head, start, COLUMN])  # [1, 1, BLOCK_T, columns]
    return tl.reshape(tile, [WARPS, tile.shape[2] // WARPS, tile.shape[3]])


@triton.jit
def _prefetch(rows, BYTES: tl.constexpr):
    """Ask the L2 for the first BYTES of each row (64 at a time); nothing waits for it."""
    STEPS: tl.constexpr = triton.next_power_of_2((BYTES + 63) // 64)
    if not INTERPRETED:
        steps = tl.minimum(tl.arange(0, STEPS) * 64, BYTES - 64 if BYTES > 64 else 0)
        ptrs = tl.expand_dims(rows.to(tl.uint64), -1) + steps
        tl.inline_asm_elementwise(
            "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [ptrs], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _spread_columns(ROWS: tl.constexpr, WIDTH: tl.constexpr, COPIES: tl.constexpr):
    """Which of WIDTH columns _spread leaves where, [ROWS, WIDTH // PARTS], and which rows [ROWS, 1] repeat no other."""
    PARTS: tl.constexpr = COPIES if COPIES < WIDTH // 8 else WIDTH // 8
    copy = (tl.arange(0, ROWS) // (ROWS // COPIES))[:, None]
    return copy % PARTS * (WIDTH // PARTS) + tl.arange(0, WIDTH // PARTS)[None, :], copy < PARTS


@triton.jit
def _store_columns(
    row_ptrs, mask_row, value, COLUMN: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, COPIES: tl.constexpr
):
    """Store columns COLUMN .. COLUMN + WIDTH of the rows [ROWS], of which COPIES that are equal share the columns."""
    columns, kept = _spread_columns(value.shape[0], WIDTH, COPIES)
    columns += COLUMN
    mask = mask_row[:, None] & kept & (columns < D)
    tl.store(row_ptrs[:, None] + columns, value.to(row_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _first_rows(x, ROWS: tl.constexpr):
    """[W, ROWS, N] of x [W, 2 * ROWS, N]; in the layout of a product's result this moves nothing."""
    first, _ = tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, ROWS, x.shape[2]]), (0, 2, 3, 1)))
    return first


@triton.jit
def _spread(acc, COPIES: tl.constexpr):
    """[W, ROWS, N // PARTS] of acc [W, ROWS, N], whose rows are COPIES equal sets: set c keeps part c % PARTS of the
    columns. In the layout of a product's result, where a lane has a row's every eighth pair, this moves nothing.
    """
    PARTS: tl.constexpr = COPIES if acc.shape[2] // 8 > COPIES else acc.shape[2] // 8
    if PARTS == 1:
        return acc
    else:
        parts = tl.reshape(acc, [acc.shape[0], COPIES, acc.shape[1] // COPIES, PARTS, acc.shape[2] // PARTS])
        own = tl.arange(0, COPIES)[:, None] % PARTS == tl.arange(0, PARTS)[None, :]
        kept = tl.sum(tl.where(own[None, :, None, :, None], parts, 0.0), axis=3)
        return tl.reshape(kept, [acc.shape[0], acc.shape[1], acc.shape[2] // PARTS])


@triton.jit
def _split_last(x):
    """x [..., W] as two tensors [..., W // 2]: the even ones and the odd ones."""
    SHAPE: tl.constexpr = x.shape[:-1]
    return tl.split(tl.reshape(x, SHAPE + [x.shape[len(SHAPE)] // 2, 2]))  # noqa: RUF005 (kernels have no star)


@triton.jit
def _unstack(x):
    """x [..., W], W up to 16, as a tuple of W tensors [...]; those of neighbours are half the tuple apart."""
    SHAPE: tl.constexpr = x.shape[:-1]
    tensors = (x,)
    for _ in tl.static_range(4):
        if len(tensors) < x.shape[len(SHAPE)]:
            halves = ()
            for i in tl.static_range(len(tensors)):
                even, odd = _split_last(tensors[i])
                halves += (even, odd)
            tensors = halves
    unstacked = ()
    for i in tl.static_range(len(tensors)):
        unstacked += (tl.reshape(tensors[i], SHAPE),)
    return unstacked


@triton.jit
def _sum_tuple(terms):
    """Sum of a tuple, neighbours (see _unstack) first: in pairs less is lost than one after the other."""
    for _ in tl.static_range(4):
        if len(terms) > 1:
            pairs = ()
            for i in tl.static_range(len(terms) // 2):
                pairs += (terms[i] + terms[len(terms) // 2 + i],)
            terms = pairs
    return terms[0]


@triton.jit
def _weighted_sum(terms, weights):
    """Sum of two tuples' products."""
    products = ()
    for i in tl.static_range(len(terms)):
        products += (terms[i] * weights[i],)
    return _sum_tuple(products)


@triton.jit
def _merge_warps(warp_max, warp_sum, acc_lo, acc_hi, least, D_HI: tl.constexpr):
    """The warps' softmax states (maxima and sums [W, R], accumulators [W, R, N]) as one, of a maximum of at least
    ``least``.

    What all warps have goes to every thread that needs it at once, and is rescaled there: two exchanges through shared
    memory, three with D_HI (and one more with Triton 3.3), each of which costs two barriers. Reductions over W would
    take a dozen barriers.
    """
    if JOINS:
        maxima, sums = (), ()
        states = _unstack(tl.permute(tl.join(warp_max, warp_sum), (1, 2, 0)))
        for i in tl.static_range(len(states)):
            one_max, one_sum = tl.split(states[i])
            maxima += (one_max,)
            sums += (one_sum,)
    else:
        maxima, sums = _unstack(tl.permute(warp_max, (1, 0))), _unstack(tl.permute(warp_sum, (1, 0)))
    running_max = tl.maximum(maxima[0], least)
    for i in tl.static_range(1, len(maxima)):
        running_max = tl.maximum(running_max, maxima[i])
    shares, column_shares = (), ()
    for i in tl.static_range(len(maxima)):
        shares += (tl.exp2(maxima[i] - running_max),)
        column_shares += (shares[i][:, None],)
    acc_lo = _weighted_sum(_unstack(tl.permute(acc_lo, (1, 2, 0))), column_shares)
    acc_hi = _weighted_sum(_unstack(tl.permute(acc_hi, (1, 2, 0))), column_shares) if D_HI else acc_lo
    return running_max, _weighted_sum(sums, shares), acc_lo, acc_hi


@triton.jit
def _weigh_tile(q_lo, q_hi, k_lo, k_hi, visible, warp_max, warp_sum, scale_log2e, D_HI: tl.constexpr):
    """One more tile of keys in the warps' softmax: its weights, the factor of what there was, and maximum and sum.

    ``visible`` [W, N] says which keys count; None: all.
    """
    scores = _dot(q_lo, tl.permute(k_lo, (0, 2, 1)))
    if D_HI:
        scores += _dot(q_hi, tl.permute(k_hi, (0, 2, 1)))
    scores *= scale_log2e
    if visible is not None:
        scores = tl.where(visible[:, None, :], scores, float("-inf"))
    new_max = tl.maximum(warp_max, tl.max(scores, axis=2))
    rescale = tl.exp2(warp_max - new_max)
    weights = tl.exp2(scores - new_max[:, :, None])
    return weights, rescale[:, :, None], new_max, warp_sum * rescale + tl.sum(weights, axis=2)


@triton.jit
def _attend(
    q_lo, q_hi, k_ptr, v_ptr, k_lo_desc, k_hi_desc, v_lo_desc, v_hi_desc, batch, kv_head,
    start, stop, step, zero, scale_log2e, stride_kt, stride_vt,
    D: tl.constexpr, D_LO: tl.constexpr, D_HI: tl.constexpr, BLOCK_H: tl.constexpr, OUT_ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr, WARPS: tl.constexpr, WIDE_OFFSETS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to the tiles of one KV head that begin at start, start + step, ..., as far as position stop.

    q [R, D_LO] and [R, D_HI]: column ranges that are powers of two, so that 96 is 64 + 32 and no lane idles (D_HI 0:
    the second repeats the first). A product takes BLOCK_H rows, so each is there BLOCK_H // R times, and OUT_ROWS come
    out. Return the softmax state: the maximum and the sum [OUT_ROWS], and the accumulators of both column ranges as
    _spread leaves them, OUT_ROWS rows of which OUT_ROWS // R are equal.

    Of each tile a warp takes BLOCK_T // WARPS keys and keeps a softmax state of its own, as if it were a split. A
    batched product, one matrix per warp, says so: nothing in the loop crosses warps, which are merged once, at the end.
    """
    R: tl.constexpr = q_lo.shape[0]
    q_lo = tl.broadcast_to(q_lo[None, None, :, :], [WARPS, BLOCK_H // R, R, D_LO])
    q_lo = tl.reshape(q_lo, [WARPS, BLOCK_H, D_LO])
    q_hi = tl.broadcast_to(q_hi[None, None, :, :], [WARPS, BLOCK_H // R, R, D_HI if D_HI else D_LO])
    q_hi = tl.reshape(q_hi, [WARPS, BLOCK_H, D_HI if D_HI else D_LO])
    warp_max = tl.full([WARPS, BLOCK_H], LOWEST, tl.float32)
    warp_sum = tl.zeros([WARPS, BLOCK_H], tl.float32)
    acc_lo = tl.zeros([WARPS, BLOCK_H, D_LO], tl.float32)
    acc_hi = tl.zeros([WARPS, BLOCK_H, D_HI if D_HI else D_LO], tl.float32)
    offs_t = tl.arange(0, WARPS)[:, None] * (BLOCK_T // WARPS) + tl.arange(0, BLOCK_T // WARPS)[None, :] + zero
    # Offsets within a tile are int32, half the registers, unless positions lie more than 2^31 / BLOCK_T elements apart.
    if WIDE_OFFSETS:
        stride_kt, stride_vt = tl.cast(stride_kt, tl.int64), tl.cast(stride_vt, tl.int64)
    k_offset, v_offset = offs_t * stride_kt, offs_t * stride_vt
    kind = v_ptr.dtype.element_ty
    if k_lo_desc is not None:
        # Whole tiles by the copy engine. It would also read what lies behind position stop, which may be NaN and no
        # weight of 0 removes; so the tile that stop cuts is loaded through pointers, in front of the loop, and used
        # behind it.
        tail = start + tl.maximum(tl.cdiv(stop - BLOCK_T + 1 - start, step), 0) * step
        visible = tail + offs_t < stop
        k_rows = (k_ptr + tl.cast(tail, tl.int64) * stride_kt) + k_offset
        v_rows = (v_ptr + tl.cast(tail, tl.int64) * stride_vt) + v_offset
        k_lo = _load_columns(k_rows, visible, 0, D_LO, D)
        k_hi = _load_columns(k_rows, visible, D_LO, D_HI, D) if D_HI else k_lo
        v_lo = _load_columns(v_rows, visible, 0, D_LO, D)
        v_hi = _load_columns(v_rows, visible, D_LO, D_HI, D) if D_HI else v_lo
        for tile_start in tl.range(start, tail, step, num_stages=NUM_STAGES):
            weights, rescale, warp_max, warp_sum = _weigh_tile(
                q_lo, q_hi,
                _load_described(k_lo_desc, batch, kv_head, tile_start, 0, WARPS),
                _load_described(k_hi_desc, batch, kv_head, tile_start, D_LO, WARPS) if D_HI else k_hi,
                None, warp_max, warp_sum, scale_log2e, D_HI,
            )  # fmt: skip
            tile = _load_described(v_lo_desc, batch, kv_head, tile_start, 0, WARPS)
            acc_lo = _accumulate(acc_lo, rescale, weights.to(kind), tile)
            if D_HI:
                tile = _load_described(v_hi_desc, batch, kv_head, tile_start, D_LO, WARPS)
                acc_hi = _accumulate(acc_hi, rescale, weights.to(kind), tile)
        if tail < stop:
            weights, rescale, warp_max, warp_sum = _weigh_tile(
                q_lo, q_hi, k_lo, k_hi, visible, warp_max, warp_sum, scale_log2e, D_HI
            )  # fmt: skip
            acc_lo = _accumulate(acc_lo, rescale, weights.to(kind), v_lo)
            if D_HI:
                acc_hi = _accumulate(acc_hi, rescale, weights.to(kind), v_hi)
    else:
        for tile_start in tl.range(start, stop, step, num_stages=NUM_STAGES):
            visible = tile_start + offs_t < stop
            k_rows = (k_ptr + tl.cast(tile_start, tl.int64) * stride_kt) + k_offset
            k_lo = _load_columns(k_rows, visible, 0, D_LO, D)
            k_hi = _load_columns(k_rows, visible, D_LO, D_HI, D) if D_HI else k_lo
            weights, rescale, warp_max, warp_sum = _weigh_tile(
                q_lo, q_hi, k_lo, k_hi, visible, warp_max, warp_sum, scale_log2e, D_HI
            )  # fmt: skip
            v_rows = (v_ptr + tl.cast(tile_start, tl.int64) * stride_vt) + v_offset
            acc_lo = _accumulate(acc_lo, rescale, weights.to(kind), _load_columns(v_rows, visible, 0, D_LO, D))
            if D_HI:
                v_hi = _load_columns(v_rows, visible, D_LO, D_HI, D)
                acc_hi = _accumulate(acc_hi, rescale, weights.to(kind), v_hi)

    if BLOCK_H > OUT_ROWS:
        warp_max = tl.reshape(_first_rows(warp_max[:, :, None], OUT_ROWS), [WARPS, OUT_ROWS])
        warp_sum = tl.reshape(_first_rows(warp_sum[:, :, None], OUT_ROWS), [WARPS, OUT_ROWS])
        acc_lo = _first_rows(acc_lo, OUT_ROWS)
        acc_hi = _first_rows(acc_hi, OUT_ROWS) if D_HI else acc_lo
    acc_lo = _spread(acc_lo, OUT_ROWS // R)
    acc_hi = _spread(acc_hi, OUT_ROWS // R) if D_HI else acc_lo
    return _merge_warps(warp_max, warp_sum, acc_lo, acc_hi, LOWEST, D_HI)


# A partial result is a row of D_PAD + STATE_WIDTH floats in memory: an accumulator, the maximum, the sum.
STATE_WIDTH = tl.constexpr(8)


@triton.jit
def _store_state(row_ptrs, mask_row, running_max, running_sum, D_PAD: tl.constexpr, WIDTH: tl.constexpr):
    """Store maxima and sums [ROWS] of partial results, as if they were the first two columns of [ROWS, WIDTH].

    So they are stored by threads that have them, not by others that they are passed on to.
    """
    column = tl.arange(0, WIDTH)[None, :]
    value = tl.where(column == 0, running_max[:, None], running_sum[:, None])
    tl.store(row_ptrs[:, None] + D_PAD + column, value, mask=mask_row[:, None] & (column < 2))


@triton.jit
def _merge_partials(rows, masks, running_max, running_sum, acc, D: tl.constexpr, D_PAD: tl.constexpr):
    """The softmax state of R rows (maximum and sum [R], accumulator [R, D_PAD]) with partial results merged into it.

    rows and masks: for each partial, where its rows [R] begin, and which of them there are. One after the other, each
    thread for its own columns: nothing passes between threads, for which everybody would wait.
    """
    maxima, sums, accs = (), (), ()
    new_max = running_max
    # All loads first, so that they wait for memory together. .cg: from the L2, where the others' stores are.
    for i in tl.static_range(len(rows)):
        maxima += (tl.load(rows[i] + D_PAD, mask=masks[i], other=LOWEST, cache_modifier=".cg"),)
        sums += (tl.load(rows[i] + D_PAD + 1, mask=masks[i], other=0.0, cache_modifier=".cg"),)
        accs += (_load_columns(rows[i], masks[i], 0, D_PAD, D, True),)
    for i in tl.static_range(len(rows)):
        new_max = tl.maximum(new_max, maxima[i])
    rescale = tl.exp2(running_max - new_max)
    running_sum *= rescale
    acc *= rescale[:, None]
    for i in tl.static_range(len(rows)):
        share = tl.exp2(maxima[i] - new_max)
        running_sum += sums[i] * share
        acc += accs[i] * share[:, None]
    return new_max, running_sum, acc


@triton.jit
def _merge(
    partial_ptr, base_slot, first_program, last_program, first_slot, zero,
    ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Softmax state of BLOCK_R rows merged from the partials of programs first_program .. last_program.

    Always in this order, whoever arrived last, so that the sum has the same bits on every run. A program's partial is
    in slot 2 * program, except that of the first, which may be its second (``first_slot``). ONE_BLOCK: there are at
    most BLOCK_S.
    """
    offs_r = tl.arange(0, BLOCK_R) + zero
    running_max = tl.full([BLOCK_R], LOWEST, tl.float32)
    running_sum = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, D_PAD], tl.float32)
    end = first_program + 1 if ONE_BLOCK else last_program + 1
    for block_start in range(first_program, end, BLOCK_S):
        rows, masks = (), ()
        for i in tl.static_range(BLOCK_S):
            program = block_start + i
            slot = tl.where(program == first_program, first_slot, 2 * program)
            rows += (partial_ptr + ((base_slot + slot).to(tl.int64) * ROWS + offs_r) * (D_PAD + STATE_WIDTH),)
            masks += ((program <= last_program) & (offs_r < ROWS),)
        running_max, running_sum, acc = _merge_partials(rows, masks, running_max, running_sum, acc, D, D_PAD)
    return running_max, running_sum, acc


# Bits of a word that no partial result has: as a float a NaN, but not the one that arithmetic gives (0x7fffffff).
HOLE = tl.constexpr(-1)


@functools.lru_cache(maxsize=256)  # one string for all launches, which Triton then need not hash anew
def collect_ptx(partials, distance):
    """PTX for _load_partials: ``partials`` of them, ``distance`` bytes apart.

    All loads are issued together; then those that had a hole again, until none has. Each thread spins on what it needs
    itself, so nothing passes between threads.
    """
    words = [[f"${6 * i + j}" for j in range(6)] for i in range(partials)]  # four columns, maximum, sum
    acc, state, count = (f"${6 * partials + i}" for i in range(3))
    absent = struct.unpack("<I", struct.pack("<f", LOWEST.value))[0]

    def load(i):
        a, b, c, d, one_max, one_sum = words[i]
        return [
            f"@one ld.relaxed.gpu.global.v2.b32 {{{one_max}, {one_sum}}}, [{state}+{i * distance}];",
            f"@one ld.relaxed.gpu.global.v4.b32 {{{a}, {b}, {c}, {d}}}, [{acc}+{i * distance}];",
        ]

    lines = ["{", ".reg .pred one, any;"]
    for i in range(partials):
        lines += [f"mov.b32 {word}, {absent if j == 4 else 0};" for j, word in enumerate(words[i])]
        lines += [f"setp.gt.s32 one, {count}, {i};", *load(i)]
    lines += ["again:", "setp.ne.b32 any, 0, 0;"]
    for i in range(partials):
        lines += [f"setp.eq.b32 one, {words[i][0]}, {HOLE.value};"]
        lines += [f"setp.eq.or.b32 one, {word}, {HOLE.value}, one;" for word in words[i][1:]]
        lines += [*load(i), "or.pred any, any, one;"]
    return "\n".join([*lines, "@any bra again;", "}"])


@triton.jit
def _load_partials(acc_ptrs, state_ptrs, count, DISTANCE: tl.constexpr, S: tl.constexpr, PTX: tl.constexpr):
    """Of S partials, DISTANCE floats apart, six tensors each: four columns from acc_ptrs on, the maximum and the sum.

    Waits for those that are not there yet. From the count-th on they are empty.
    """
    if INTERPRETED:  # programs run one after the other: all partials are there
        loaded = ()
        for i in tl.static_range(S):
            for j in tl.static_range(4):
                loaded += (tl.load(acc_ptrs + (i * DISTANCE + j), mask=i < count, other=0.0),)
            loaded += (tl.load(state_ptrs + i * DISTANCE, mask=i < count, other=LOWEST),)
            loaded += (tl.load(state_ptrs + (i * DISTANCE + 1), mask=i < count, other=0.0),)
        return loaded
    else:
        KINDS: tl.constexpr = (tl.float32,) * (6 * S)
        return tl.inline_asm_elementwise(
            PTX, "=&r," * (6 * S) + "l,l,r", [acc_ptrs.to(tl.uint64), state_ptrs.to(tl.uint64), count],
            dtype=KINDS, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _collect(
    rows, count, DISTANCE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr, ONE_BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """The softmax state of rows [R] merged from ``count`` partials, in their order, as they come.

    rows: where those of the first partial begin; those of the next are DISTANCE floats further. A partial is its own
    flag, as in the LL protocol of NCCL: memory is full of holes before and after every launch (see _leave_holes), and
    nobody signals. Against a counter this saves its round trip and the fence in front of it. The program that calls
    this must be the last to start of those that share the item: then those that it waits for are running or done.

    S partials are loaded at a time; ONE_BLOCK: there are no more. Return maximum and sum, [R, D_PAD / 4] that are equal
    in each row, and the accumulator, every fourth column from columns 0, 1, 2 and 3 on: four times [R, D_PAD / 4].
    """
    column = 4 * tl.arange(0, D_PAD // 4)[None, :]
    accs = rows[:, None] + tl.where(column < D, column, 0)
    states = rows[:, None] + D_PAD + 0 * column
    running_max = tl.full(accs.shape, LOWEST, tl.float32)
    running_sum = tl.zeros(accs.shape, tl.float32)
    a, b, c, d = running_sum, running_sum, running_sum, running_sum
    tl.debug_barrier()  # this program's own partial is stored
    for start in range(0, 1 if ONE_BLOCK else count, S):
        first = start * DISTANCE
        loaded = _load_partials(accs + first, states + first, count - start, DISTANCE, S, PTX)
        new_max = running_max
        for i in tl.static_range(S):
            new_max = tl.maximum(new_max, loaded[6 * i + 4])
        share = tl.exp2(running_max - new_max)
        running_sum *= share
        a, b, c, d = a * share, b * share, c * share, d * share
        for i in tl.static_range(S):
            share = tl.exp2(loaded[6 * i + 4] - new_max)
            running_sum += loaded[6 * i + 5] * share
            a += loaded[6 * i] * share
            b += loaded[6 * i + 1] * share
            c += loaded[6 * i + 2] * share
            d += loaded[6 * i + 3] * share
        running_max = new_max
    return running_max, running_sum, (a, b, c, d)


@triton.jit
def _store_collected(row_ptrs, mask_row, running_sum, columns, D: tl.constexpr, D_PAD: tl.constexpr):
    """Divide what _collect returns by its sum (0 where that is 0) and store the first D columns.

    Of one row, each thread what it has. Of more, Triton would first pass them on between threads, for each store anew.
    """
    kind = row_ptrs.dtype.element_ty
    divisor = tl.where(running_sum == 0, 1.0, running_sum)
    if row_ptrs.shape[0] == 1:
        for i in tl.static_range(4):
            column = 4 * tl.arange(0, D_PAD // 4)[None, :] + i
            mask = mask_row[:, None] & (column < D)
            tl.store(row_ptrs[:, None] + column, (columns[i] / divisor).to(kind), mask=mask)
    else:
        even = tl.join(columns[0] / divisor, columns[2] / divisor)
        odd = tl.join(columns[1] / divisor, columns[3] / divisor)
        joined = tl.reshape(tl.join(even, odd), [row_ptrs.shape[0], D_PAD])
        _store_columns(row_ptrs, mask_row, joined, 0, D_PAD, D, 1)


@triton.jit
def _leave_holes(
    rows, mask_row, count, DISTANCE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Make holes of the partials that _collect has read, for the next launch."""
    tl.debug_barrier()  # several threads may have needed the same words
    columns = tl.arange(0, D_PAD)[None, :]
    words = rows.to(tl.pointer_type(tl.int32), bitcast=True)[:, None] + columns
    for start in range(0, 1 if ONE_BLOCK else count, S):
        for i in tl.static_range(S):
            mask = mask_row[:, None] & (start + i < count)
            tl.store(words + (start + i) * DISTANCE, HOLE, mask=mask & (columns < D))
            tl.store(words + ((start + i) * DISTANCE + D_PAD), HOLE, mask=mask & (columns < 2))


@triton.jit
def _write_result(
    out_rows, lse_rows, mask_row, running_max, running_sum, acc_lo, acc_hi,
    D: tl.constexpr, D_LO: tl.constexpr, D_HI: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Divide by the softmax sum and store. A row without a visible key is 0, its log-sum-exp -inf."""
    divisor = tl.where(running_sum == 0, 1.0, running_sum)
    _store_columns(out_rows, mask_row, acc_lo / divisor[:, None], 0, D_LO, D, COPIES)
    if D_HI:
        _store_columns(out_rows, mask_row, acc_hi / divisor[:, None], D_LO, D_HI, D, COPIES)
    if lse_rows is not None:
        lse = tl.where(running_sum == 0, float("-inf"), (running_max + tl.log2(divisor)) * LN_2)
        tl.store(lse_rows, lse, mask=mask_row)


@triton.jit
def _program_of(tile, share, extra):
    """The program whose share holds ``tile``: the first ``extra`` programs have share + 1 tiles, the others share."""
    return tl.where(tile < extra * (share + 1), tile // (share + 1), extra + (tile - extra * (share + 1)) // share)


@triton.jit
def _attend_piece(
    q_ptr, k_ptr, v_ptr, k_lo_desc, k_hi_desc, v_lo_desc, v_hi_desc, out_ptr, lse_ptr, partial_ptr,
    arrived_ptr,
    batch, item, start, stop, step, whole, base_slot, slot, first_program, last_program, first_slot, zero,
    scale_log2e, stride_qb, stride_qh, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_ob, stride_oh,
    Hq: tl.constexpr, ITEMS: tl.constexpr, HEAD_BLOCKS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, D_LO: tl.constexpr, D_HI: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr, OUT_ROWS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
    ONE_BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, WARPS: tl.constexpr, WIDE_OFFSETS: tl.constexpr,
    Q_COLUMNS: tl.constexpr, NUM_STAGES: tl.constexpr, NEXT_AFTER: tl.constexpr, LATE: tl.constexpr,
    COLLECT: tl.constexpr,
):  # fmt: skip
    """Attend to the tiles at start, start + step, ... of one item, as far as position stop.

    Write the result where they are the whole item. Else store the partial softmax state in ``slot``. Of the programs
    that share the item, first_program .. last_program, one merges the states and writes: the last one with COLLECT (see
    _collect), else that which arrives last.
    """
    # int64 before any product with a stride: a large cache has more than 2^31 elements.
    wide_batch = batch.to(tl.int64)
    kv_head = (item // HEAD_BLOCKS).to(tl.int64)
    head_block = item % HEAD_BLOCKS
    k_head_ptr = k_ptr + wide_batch * stride_kb + kv_head * stride_kh
    v_head_ptr = v_ptr + wide_batch * stride_vb + kv_head * stride_vh
    ahead = tl.minimum(start + tl.arange(0, BLOCK_T), tl.maximum(stop - 1, 0)).to(tl.int64)
    k_ahead, v_ahead = k_head_ptr + ahead * stride_kt, v_head_ptr + ahead * stride_vt
    if LATE:  # what it takes to know where the first keys are is computed before
        _wait_once_known(k_ahead.to(tl.uint64) | v_ahead.to(tl.uint64))
    # Before anything else: the addresses of q and of the tiles' own loads take a while to compute.
    _prefetch(k_ahead, D * k_ptr.dtype.element_ty.primitive_bitwidth // 8)
    _prefetch(v_ahead, D * k_ptr.dtype.element_ty.primitive_bitwidth // 8)
    WIDTH: tl.constexpr = D_PAD + STATE_WIDTH
    if COLLECT is not None:
        if slot == 2 * last_program:
            # Holes that other launches' reads drove out of the L2 would have to come from DRAM, behind all the keys.
            other = tl.minimum(tl.arange(0, BLOCK_S), last_program)
            _prefetch(partial_ptr + (base_slot + 2 * other).to(tl.int64) * (ROWS * WIDTH), 4 * ROWS * WIDTH)
    offs_r = tl.arange(0, BLOCK_R) + zero
    mask_r = (offs_r < ROWS) & (head_block * ROWS + offs_r < GROUP)
    q_rows = q_ptr + wide_batch * stride_qb + (kv_head * GROUP + head_block * ROWS + offs_r) * stride_qh
    q_lo = _load_pieces(q_rows, mask_r, 0, D_LO, D, Q_COLUMNS)
    q_hi = _load_pieces(q_rows, mask_r, D_LO, D_HI, D, Q_COLUMNS) if D_HI else q_lo
    running_max, running_sum, acc_lo, acc_hi = _attend(
        q_lo, q_hi, k_head_ptr, v_head_ptr, k_lo_desc, k_hi_desc, v_lo_desc, v_hi_desc, batch, item // HEAD_BLOCKS,
        start, stop, step, zero, scale_log2e, stride_kt, stride_vt, D, D_LO, D_HI, BLOCK_H, OUT_ROWS, BLOCK_T, WARPS,
        WIDE_OFFSETS, NUM_STAGES,
    )  # fmt: skip
    # All that is left is the merge. Where now is too early for the next launch, choose_launch says so.
    _launch_next(NEXT_AFTER == "keys")

    COPIES: tl.constexpr = OUT_ROWS // BLOCK_R
    offs_o = tl.arange(0, OUT_ROWS) + zero
    offs_h = offs_o % BLOCK_R
    mask_h = (offs_h < ROWS) & (head_block * ROWS + offs_h < GROUP)
    if whole:
        q_head = kv_head * GROUP + head_block * ROWS + offs_h
        _write_result(
            out_ptr + wide_batch * stride_ob + q_head * stride_oh,
            None if lse_ptr is None else lse_ptr + wide_batch * Hq + q_head,
            mask_h, running_max, running_sum, acc_lo, acc_hi, D, D_LO, D_HI, COPIES,
        )  # fmt: skip
    else:
        FOURS: tl.constexpr = (D + 3) // 4 * 4  # columns are collected in fours
        rows = partial_ptr + ((base_slot + slot).to(tl.int64) * ROWS + offs_h) * WIDTH
        _store_columns(rows, offs_h < ROWS, acc_lo, 0, D_LO, FOURS, COPIES)
        if D_HI:
            _store_columns(rows, offs_h < ROWS, acc_hi, D_LO, D_HI, FOURS, COPIES)
        _store_state(rows, offs_o < ROWS, running_max, running_sum, D_PAD, acc_lo.shape[1])
        merged_head = kv_head * GROUP + head_block * ROWS + offs_r
        out_rows = out_ptr + wide_batch * stride_ob + merged_head * stride_oh
        lse_rows = None if lse_ptr is None else lse_ptr + wide_batch * Hq + merged_head
        if COLLECT is not None:
            if slot == 2 * last_program:
                # Rows that only pad stand for the last one.
                first_rows = partial_ptr + (base_slot.to(tl.int64) * ROWS + tl.minimum(offs_r, ROWS - 1)) * WIDTH
                merged_max, merged_sum, merged = _collect(
                    first_rows, last_program + 1, 2 * ROWS * WIDTH, FOURS, D_PAD, BLOCK_S, ONE_BLOCK, COLLECT
                )  # fmt: skip
                _launch_next(NEXT_AFTER == "partials")
                _store_collected(out_rows, mask_r, merged_sum, merged, D, D_PAD)
                if lse_ptr is not None:
                    lse = (merged_max + tl.log2(merged_sum)) * LN_2
                    column = tl.arange(0, D_PAD // 4)[None, :]
                    tl.store(lse_rows[:, None] + 0 * column, lse, mask=mask_r[:, None] & (column == 0))
                _leave_holes(
                    first_rows, offs_r < ROWS, last_program + 1, 2 * ROWS * WIDTH, FOURS, D_PAD, BLOCK_S, ONE_BLOCK
                )  # fmt: skip
            return

        # A scalar atomic is issued by one thread, and orders only what that thread has seen: all stores of the
        # program have to be behind a barrier first.
        tl.debug_barrier()
        arrived = arrived_ptr + batch * ITEMS + item
        before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
        if before == last_program - first_program:
            tl.store(arrived, 0)  # for the next launch (a replay of a captured graph cannot clear it)
            merged_max, merged_sum, merged = _merge(
                partial_ptr, base_slot, first_program, last_program, first_slot, zero,
                ROWS, D, D_PAD, BLOCK_R, BLOCK_S, ONE_BLOCK,
            )  # fmt: skip
            _write_result(
                out_rows, lse_rows, mask_r, merged_max, merged_sum, merged, merged, D, D_PAD, 0, 1
            )  # fmt: skip


@triton.jit(do_not_specialize=["cache_len", "B", "T_max", "window"])
def _decode_attention_split_kernel(
    q_ptr,  # [B, Hq, D]
    k_ptr,  # [B, Hkv, T_max, D]
    v_ptr,  # [B, Hkv, T_max, D]
    k_lo_desc,  # descriptors of tiles of BLOCK_T positions of k, with D_LO and with D_HI columns, and of v; or None
    k_hi_desc,
    v_lo_desc,
    v_hi_desc,
    out_ptr,  # [B, Hq, D]
    lse_ptr,  # [B, Hq] fp32 contiguous, or None
    partial_ptr,  # [2 * programs, ROWS, D_PAD + STATE_WIDTH] fp32; with COLLECT holes before and after each launch
    arrived_ptr,  # [B * Hkv * HEAD_BLOCKS] int32: partials that are stored; 0 before and after each launch
    cache_len,  # int, or with PER_SEQUENCE a pointer to int32 [B]
    B,
    T_max,
    window,
    scale_log2e,
    stride_qb, stride_qh,
    stride_kb, stride_kh, stride_kt,
    stride_vb, stride_vh, stride_vt,
    stride_ob, stride_oh,
    STRIDE_KT: tl.constexpr,  # in place of stride_kt and stride_vt, so that the compiler knows them; or None
    STRIDE_VT: tl.constexpr,
    Hq: tl.constexpr,
    Hkv: tl.constexpr,
    D: tl.constexpr,
    D_LO: tl.constexpr,
    D_HI: tl.constexpr,
    D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    OUT_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WARPS: tl.constexpr,
    WIDE_OFFSETS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    FEW_SPLITS: tl.constexpr,
    Q_COLUMNS: tl.constexpr,
    SPLITS_PER_ITEM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    B_PAD: tl.constexpr,
    PER_SEQUENCE: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    NEXT_AFTER: tl.constexpr,  # when the next launch may start (PDL): "keys", "partials" or "end", see DecodeLaunch
    COLLECT: tl.constexpr,  # collect_ptx(BLOCK_S, bytes between two programs' partials): see _collect; or None
    PDL: tl.constexpr,
):  # fmt: skip
    """One program = an equal share of the key tiles of all sequences and KV heads, laid end to end.

    An item is one (sequence, KV head, block of ROWS of its query heads); its tiles start at its first visible position.
    A share may begin inside one item, cover others whole and end inside a third. A whole item is written at once. Of an
    item in pieces each program stores its partial softmax state, and the one that arrives last merges them. The grid is
    any number of programs: shares follow from the lengths, at run time, so one captured launch serves a growing cache.

    With SPLITS_PER_ITEM the grid is (splits, items) and a program has one piece. Sequences of one length need no more,
    and the first keys are asked for much sooner: what a loop over pieces does not change is computed in front of it.
    The piece is a run of tiles or, INTERLEAVED, every splits-th tile, which takes no division to find. With COLLECT the
    item's last program, whose index is the highest and which so starts last, merges the states as they come.
    """
    GROUP: tl.constexpr = Hq // Hkv
    HEAD_BLOCKS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    ITEMS: tl.constexpr = Hkv * HEAD_BLOCKS  # per sequence
    stride_kb, stride_vb = _in_units(stride_kb, STRIDE_UNIT), _in_units(stride_vb, STRIDE_UNIT)
    stride_kh, stride_vh = _in_units(stride_kh, STRIDE_UNIT), _in_units(stride_vh, STRIDE_UNIT)
    if STRIDE_KT is None:
        stride_kt, stride_vt = _in_units(stride_kt, STRIDE_UNIT), _in_units(stride_vt, STRIDE_UNIT)
    else:
        stride_kt, stride_vt = STRIDE_KT, STRIDE_VT

    # A length on the device may be the previous kernel's work.
    LATE: tl.constexpr = (PDL and SPLITS_PER_ITEM) and not PER_SEQUENCE
    _wait_for_previous(PDL and not LATE)
    if SPLITS_PER_ITEM:
        split = tl.program_id(0)
        batch = tl.program_id(1) // ITEMS
        item = tl.program_id(1) % ITEMS
        if PER_SEQUENCE:
            first, end = _visible_range(tl.load(cache_len + batch), T_max, window)
        else:
            first, end = _visible_range(cache_len, T_max, window)
        tiles = tl.maximum(tl.cdiv(end - first, BLOCK_T), 1)
        splits = tl.maximum(tl.cdiv(tiles, MIN_TILES), tl.minimum(tiles, FEW_SPLITS))
        splits = tl.minimum(tl.num_programs(0), splits)
        if split >= splits:
            return
        if INTERLEAVED:
            start = first + split * BLOCK_T
            stop = end
            step = splits * BLOCK_T
        else:
            share = tiles // splits
            extra = tiles - share * splits
            start = first + (split * share + tl.minimum(split, extra)) * BLOCK_T
            stop = tl.minimum(start + (share + (split < extra).to(tl.int32)) * BLOCK_T, end)
            step = BLOCK_T
        _attend_piece(
            q_ptr, k_ptr, v_ptr, k_lo_desc, k_hi_desc, v_lo_desc, v_hi_desc, out_ptr, lse_ptr,
            partial_ptr, arrived_ptr,
            batch, item, start, stop, step, splits == 1, 2 * tl.program_id(1) * tl.num_programs(0), 2 * split,
            0, splits - 1, 0, 0,
            scale_log2e, stride_qb, stride_qh, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
            stride_ob, stride_oh, Hq, ITEMS, HEAD_BLOCKS, GROUP, D, D_LO, D_HI, D_PAD, ROWS, BLOCK_H, OUT_ROWS,
            BLOCK_R, BLOCK_S, ONE_BLOCK, BLOCK_T, WARPS, WIDE_OFFSETS, Q_COLUMNS, NUM_STAGES, NEXT_AFTER, LATE,
            COLLECT,
        )  # fmt: skip
        return

    offs_b = tl.arange(0, B_PAD)
    if PER_SEQUENCE:
        lengths = tl.load(cache_len + offs_b, mask=offs_b < B, other=0)
    else:
        lengths = tl.full([B_PAD], 0, tl.int32) + cache_len
    first_b, end_b = _visible_range(lengths, T_max, window)
    # An item without a key still has one (empty) tile: somebody must write its zeros.
    item_tiles_b = tl.maximum(tl.cdiv(end_b - first_b, BLOCK_T), 1)
    tiles_b = tl.where(offs_b < B, item_tiles_b * ITEMS, 0)
    tiles_end_b = tl.cumsum(tiles_b, axis=0)
    total = tl.sum(tiles_b, axis=0)
    active = tl.maximum(tl.cdiv(total, MIN_TILES), tl.minimum(total, B * ITEMS * FEW_SPLITS))
    active = tl.minimum(tl.num_programs(0), active)
    program = tl.program_id(0)
    if program >= active:
        return
    # The first ``extra`` programs have one tile more than the others.
    share = total // active
    extra = total % active
    program_start = program * share + tl.minimum(program, extra)
    program_end = program_start + share + (program < extra).to(tl.int32)

    tile = program_start
    while tile < program_end:
        # 0, which the compiler does not know. Added to indices it keeps what depends on them, the addresses of stores
        # and of the merge above all, from being computed before the loop, where every program would wait for it.
        zero = tile >> 31
        batch = tl.sum((tiles_end_b <= tile).to(tl.int32), axis=0)
        this = offs_b == batch
        first = tl.sum(tl.where(this, first_b, 0), axis=0)
        end = tl.sum(tl.where(this, end_b, 0), axis=0)
        item_tiles = tl.sum(tl.where(this, item_tiles_b, 0), axis=0)
        sequence_start = tl.sum(tl.where(this, tiles_end_b - tiles_b, 0), axis=0)
        item = (tile - sequence_start) // item_tiles  # within its sequence
        item_start = sequence_start + item * item_tiles
        item_end = item_start + item_tiles
        piece_end = tl.minimum(program_end, item_end)
        start = first + (tile - item_start) * BLOCK_T
        stop = tl.minimum(first + (piece_end - item_start) * BLOCK_T, end)
        # Only a program's first piece and its last can be partial: two slots.
        slot = 2 * program + (tile > program_start).to(tl.int32)
        first_program = _program_of(item_start, share, extra)
        last_program = _program_of(item_end - 1, share, extra)
        first_program_start = first_program * share + tl.minimum(first_program, extra)
        first_slot = 2 * first_program + (item_start > first_program_start).to(tl.int32)
        _attend_piece(
            q_ptr, k_ptr, v_ptr, k_lo_desc, k_hi_desc, v_lo_desc, v_hi_desc, out_ptr, lse_ptr, partial_ptr,
            arrived_ptr,
            batch, item, start, stop, BLOCK_T, (tile == item_start) & (piece_end == item_end), 0, slot,
            first_program, last_program, first_slot, zero,
            scale_log2e, stride_qb, stride_qh, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
            stride_ob, stride_oh, Hq, ITEMS, HEAD_BLOCKS, GROUP, D, D_LO, D_HI, D_PAD, ROWS, BLOCK_H, OUT_ROWS,
            BLOCK_R, BLOCK_S, ONE_BLOCK, BLOCK_T, WARPS, WIDE_OFFSETS, Q_COLUMNS, NUM_STAGES, "end", False,
            None,
        )  # fmt: skip
        tile = piece_end
