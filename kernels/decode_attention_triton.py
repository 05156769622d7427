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

import triton
import triton.language as tl

import kernels

INTERPRETED = tl.constexpr(kernels.INTERPRETED)
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
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program = (sequence, KV head, block of BLOCK_H of its query heads); one pass over the visible keys.

    Grid: (ceil(G / BLOCK_H), Hkv, B). The query heads of one KV head share each K and V tile as the rows of a matrix
    product; rows past the group are masked, columns past D are zeros that add nothing to a dot product.
    """
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
        acc = acc * rescale[:, None] + _dot(weights.to(v.dtype), v)
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
def _load_columns(row_ptrs, mask_row, COLUMN: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """[N, WIDTH]: columns COLUMN .. COLUMN + WIDTH of N rows; 0 where a row is masked and past column D."""
    columns = COLUMN + tl.arange(0, WIDTH)
    mask = mask_row[:, None] & (columns < D)[None, :]
    return tl.load(row_ptrs[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _store_columns(row_ptrs, mask_row, value, COLUMN: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    columns = COLUMN + tl.arange(0, WIDTH)
    mask = mask_row[:, None] & (columns < D)[None, :]
    tl.store(row_ptrs[:, None] + columns[None, :], value.to(row_ptrs.dtype.element_ty), mask=mask)


# The next two attend to positions [first, end) of one KV head and return the softmax state of the query rows: maximum
# [BLOCK_H], sum [BLOCK_H], and the accumulator in two column ranges, [BLOCK_H, D_LO] and [BLOCK_H, D_HI]. Both are
# powers of two, so that 96 is 64 + 32 and no lane idles; where D_HI is 0 the second range's variables repeat the first.


@triton.jit
def _attend_group(
    q_lo, q_hi, k_ptr, v_ptr, first, end, scale_log2e, stride_kt, stride_vt,
    D: tl.constexpr, D_LO: tl.constexpr, D_HI: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Several query heads share the KV head: their rows make a matrix product."""
    running_max = tl.full([BLOCK_H], LOWEST, tl.float32)
    running_sum = tl.zeros([BLOCK_H], tl.float32)
    acc_lo = tl.zeros([BLOCK_H, D_LO], tl.float32)
    acc_hi = tl.zeros([BLOCK_H, D_HI if D_HI else D_LO], tl.float32)
    for tile_start in tl.range(first, end, BLOCK_T, num_stages=NUM_STAGES):
        position = (tile_start + tl.arange(0, BLOCK_T)).to(tl.int64)
        mask_t = position < end
        k_rows = k_ptr + position * stride_kt
        scores = _dot(q_lo, tl.trans(_load_columns(k_rows, mask_t, 0, D_LO, D)))
        if D_HI:
            scores += _dot(q_hi, tl.trans(_load_columns(k_rows, mask_t, D_LO, D_HI, D)))
        scores = tl.where(mask_t[None, :], scores * scale_log2e, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))
        rescale = tl.exp2(running_max - new_max)
        weights = tl.exp2(scores - new_max[:, None])
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        v_rows = v_ptr + position * stride_vt
        weights = weights.to(v_ptr.dtype.element_ty)
        acc_lo = acc_lo * rescale[:, None] + _dot(weights, _load_columns(v_rows, mask_t, 0, D_LO, D))
        if D_HI:
            acc_hi = acc_hi * rescale[:, None] + _dot(weights, _load_columns(v_rows, mask_t, D_LO, D_HI, D))
        running_max = new_max
    return running_max, running_sum, acc_lo, acc_hi


@triton.jit
def _attend_one_head(
    q_lo, q_hi, k_ptr, v_ptr, first, end, scale_log2e, stride_kt, stride_vt,
    D: tl.constexpr, D_LO: tl.constexpr, D_HI: tl.constexpr, BLOCK_T: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One query head per KV head: a matrix product would compute 15 empty rows, so fp32 products and sums instead.

    Each of the BLOCK_T lanes keeps a softmax state of its own, as if it were a split: the loop exchanges nothing
    between warps, and the lanes are merged once, at the end.
    """
    lane_max = tl.full([BLOCK_T], LOWEST, tl.float32)
    lane_sum = tl.zeros([BLOCK_T], tl.float32)
    acc_lo = tl.zeros([BLOCK_T, D_LO], tl.float32)
    acc_hi = tl.zeros([BLOCK_T, D_HI if D_HI else D_LO], tl.float32)
    q_lo = q_lo.to(tl.float32) * scale_log2e
    q_hi = q_hi.to(tl.float32) * scale_log2e
    for tile_start in tl.range(first, end, BLOCK_T, num_stages=NUM_STAGES):
        position = (tile_start + tl.arange(0, BLOCK_T)).to(tl.int64)
        mask_t = position < end
        k_rows = k_ptr + position * stride_kt
        scores = tl.sum(_load_columns(k_rows, mask_t, 0, D_LO, D).to(tl.float32) * q_lo, axis=1)
        if D_HI:
            scores += tl.sum(_load_columns(k_rows, mask_t, D_LO, D_HI, D).to(tl.float32) * q_hi, axis=1)
        scores = tl.where(mask_t, scores, float("-inf"))
        new_max = tl.maximum(lane_max, scores)
        rescale = tl.exp2(lane_max - new_max)
        weights = tl.exp2(scores - new_max)
        lane_sum = lane_sum * rescale + weights
        v_rows = v_ptr + position * stride_vt
        v_lo = _load_columns(v_rows, mask_t, 0, D_LO, D).to(tl.float32)
        acc_lo = acc_lo * rescale[:, None] + weights[:, None] * v_lo
        if D_HI:
            v_hi = _load_columns(v_rows, mask_t, D_LO, D_HI, D).to(tl.float32)
            acc_hi = acc_hi * rescale[:, None] + weights[:, None] * v_hi
        lane_max = new_max
    running_max = tl.max(lane_max, axis=0, keep_dims=True)
    rescale = tl.exp2(lane_max - running_max)
    running_sum = tl.sum(lane_sum * rescale, axis=0, keep_dims=True)
    acc_lo = tl.sum(acc_lo * rescale[:, None], axis=0, keep_dims=True)
    acc_hi = tl.sum(acc_hi * rescale[:, None], axis=0, keep_dims=True)
    return running_max, running_sum, acc_lo, acc_hi


@triton.jit
def _merge(
    partial_ptr, stat_ptr, first_program, last_program, first_slot,
    ROWS: tl.constexpr, D: tl.constexpr, D_LO: tl.constexpr, D_HI: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Softmax state of BLOCK_R rows merged from the partials of programs first_program .. last_program.

    Always in this order, whoever arrived last, so that the sum has the same bits on every run. A program's partial is
    in slot 2 * program, except that of the first, which may be its second (``first_slot``).
    """
    offs_r = tl.arange(0, BLOCK_R)
    running_max = tl.full([BLOCK_R], LOWEST, tl.float32)
    running_sum = tl.zeros([BLOCK_R], tl.float32)
    acc_lo = tl.zeros([BLOCK_R, D_LO], tl.float32)
    acc_hi = tl.zeros([BLOCK_R, D_HI if D_HI else D_LO], tl.float32)
    for block_start in range(first_program, last_program + 1, BLOCK_S):
        program = block_start + tl.arange(0, BLOCK_S)
        slot = tl.where(program == first_program, first_slot, 2 * program)
        row = slot[:, None].to(tl.int64) * ROWS + offs_r[None, :]
        mask_row = (program <= last_program)[:, None] & (offs_r < ROWS)[None, :]
        # .cg: read from the L2, where the other programs' stores are.
        part_max = tl.load(stat_ptr + 2 * row, mask=mask_row, other=LOWEST, cache_modifier=".cg")  # [BLOCK_S, BLOCK_R]
        part_sum = tl.load(stat_ptr + 2 * row + 1, mask=mask_row, other=0.0, cache_modifier=".cg")
        new_max = tl.maximum(running_max, tl.max(part_max, axis=0))
        rescale = tl.exp2(running_max - new_max)
        share = tl.exp2(part_max - new_max[None, :])
        running_sum = running_sum * rescale + tl.sum(part_sum * share, axis=0)
        columns = tl.arange(0, D_LO)
        mask = mask_row[:, :, None] & (columns < D)[None, None, :]
        ptrs = partial_ptr + row[:, :, None] * D + columns[None, None, :]
        part = tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")  # [BLOCK_S, BLOCK_R, D_LO]
        acc_lo = acc_lo * rescale[:, None] + tl.sum(part * share[:, :, None], axis=0)
        if D_HI:
            columns = D_LO + tl.arange(0, D_HI)
            mask = mask_row[:, :, None] & (columns < D)[None, None, :]
            ptrs = partial_ptr + row[:, :, None] * D + columns[None, None, :]
            part = tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")
            acc_hi = acc_hi * rescale[:, None] + tl.sum(part * share[:, :, None], axis=0)
        running_max = new_max
    return running_max, running_sum, acc_lo, acc_hi


@triton.jit
def _write_result(
    out_rows, lse_rows, mask_row, running_max, running_sum, acc_lo, acc_hi,
    D: tl.constexpr, D_LO: tl.constexpr, D_HI: tl.constexpr,
):  # fmt: skip
    """Divide by the softmax sum and store. A row without a visible key is 0, its log-sum-exp -inf."""
    divisor = tl.where(running_sum == 0, 1.0, running_sum)
    _store_columns(out_rows, mask_row, acc_lo / divisor[:, None], 0, D_LO, D)
    if D_HI:
        _store_columns(out_rows, mask_row, acc_hi / divisor[:, None], D_LO, D_HI, D)
    if lse_rows is not None:
        lse = tl.where(running_sum == 0, float("-inf"), (running_max + tl.log2(divisor)) * LN_2)
        tl.store(lse_rows, lse, mask=mask_row)


@triton.jit
def _program_of(tile, share, extra):
    """The program whose share holds ``tile``: the first ``extra`` programs have share + 1 tiles, the others share."""
    return tl.where(tile < extra * (share + 1), tile // (share + 1), extra + (tile - extra * (share + 1)) // share)


@triton.jit(do_not_specialize=["cache_len", "B", "T_max", "window", "min_tiles"])
def _decode_attention_split_kernel(
    q_ptr,  # [B, Hq, D]
    k_ptr,  # [B, Hkv, T_max, D]
    v_ptr,  # [B, Hkv, T_max, D]
    out_ptr,  # [B, Hq, D]
    lse_ptr,  # [B, Hq] fp32 contiguous, or None
    partial_ptr,  # [2 * programs, ROWS, D] fp32: accumulators
    stat_ptr,  # [2 * programs, ROWS, 2] fp32: softmax maximum and sum
    arrived_ptr,  # [B * Hkv * HEAD_BLOCKS] int32: partials that are stored; 0 before and after each launch
    cache_len,  # int, or with PER_SEQUENCE a pointer to int32 [B]
    B,
    T_max,
    window,
    scale_log2e,
    min_tiles,
    stride_qb, stride_qh,
    stride_kb, stride_kh, stride_kt,
    stride_vb, stride_vh, stride_vt,
    stride_ob, stride_oh,
    Hq: tl.constexpr,
    Hkv: tl.constexpr,
    D: tl.constexpr,
    D_LO: tl.constexpr,
    D_HI: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    B_PAD: tl.constexpr,
    PER_SEQUENCE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program = an equal share of the key tiles of all sequences and KV heads, laid end to end.

    An item is one (sequence, KV head, block of ROWS of its query heads); its tiles start at its first visible position.
    A share may begin inside one item, cover others whole and end inside a third. A whole item is written at once. Of an
    item in pieces each program stores its partial softmax state, and the one that arrives last merges them. The grid is
    any number of programs: shares follow from the lengths, at run time, so one captured launch serves a growing cache.
    """
    GROUP: tl.constexpr = Hq // Hkv
    HEAD_BLOCKS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    ITEMS: tl.constexpr = Hkv * HEAD_BLOCKS  # per sequence

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
    active = tl.minimum(tl.num_programs(0), tl.cdiv(total, min_tiles))
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
        piece_first_position = first + (tile - item_start) * BLOCK_T
        piece_end_position = tl.minimum(first + (piece_end - item_start) * BLOCK_T, end)

        # int64 before any product with a stride: a large cache has more than 2^31 elements.
        wide_batch = batch.to(tl.int64)
        kv_head = (item // HEAD_BLOCKS).to(tl.int64)
        head_block = item % HEAD_BLOCKS
        offs_h = tl.arange(0, BLOCK_H)
        mask_h = (offs_h < ROWS) & (head_block * ROWS + offs_h < GROUP)
        q_rows = q_ptr + wide_batch * stride_qb + (kv_head * GROUP + head_block * ROWS + offs_h) * stride_qh
        q_lo = _load_columns(q_rows, mask_h, 0, D_LO, D)
        q_hi = _load_columns(q_rows, mask_h, D_LO, D_HI, D) if D_HI else q_lo
        k_head_ptr = k_ptr + wide_batch * stride_kb + kv_head * stride_kh
        v_head_ptr = v_ptr + wide_batch * stride_vb + kv_head * stride_vh
        if BLOCK_H == 1:
            running_max, running_sum, acc_lo, acc_hi = _attend_one_head(
                q_lo, q_hi, k_head_ptr, v_head_ptr, piece_first_position, piece_end_position, scale_log2e,
                stride_kt, stride_vt, D, D_LO, D_HI, BLOCK_T, NUM_STAGES,
            )  # fmt: skip
        else:
            running_max, running_sum, acc_lo, acc_hi = _attend_group(
                q_lo, q_hi, k_head_ptr, v_head_ptr, piece_first_position, piece_end_position, scale_log2e,
                stride_kt, stride_vt, D, D_LO, D_HI, BLOCK_H, BLOCK_T, NUM_STAGES,
            )  # fmt: skip

        if tile == item_start and piece_end == item_end:
            q_head = kv_head * GROUP + head_block * ROWS + offs_h
            _write_result(
                out_ptr + wide_batch * stride_ob + q_head * stride_oh,
                None if lse_ptr is None else lse_ptr + wide_batch * Hq + q_head,
                mask_h, running_max, running_sum, acc_lo, acc_hi, D, D_LO, D_HI,
            )  # fmt: skip
        else:
            # Only a program's first piece and its last can be partial: two slots.
            slot = 2 * program + (tile > program_start).to(tl.int32)
            row = slot.to(tl.int64) * ROWS + offs_h
            _store_columns(partial_ptr + row * D, offs_h < ROWS, acc_lo, 0, D_LO, D)
            if D_HI:
                _store_columns(partial_ptr + row * D, offs_h < ROWS, acc_hi, D_LO, D_HI, D)
            tl.store(stat_ptr + 2 * row, running_max, mask=offs_h < ROWS)
            tl.store(stat_ptr + 2 * row + 1, running_sum, mask=offs_h < ROWS)

            first_program = _program_of(item_start, share, extra)
            last_program = _program_of(item_end - 1, share, extra)
            # A scalar atomic is issued by one thread, and orders only what that thread has seen: all stores of the
            # program have to be behind a barrier first.
            tl.debug_barrier()
            arrived = arrived_ptr + batch * ITEMS + item
            before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
            if before == last_program - first_program:
                tl.store(arrived, 0)  # for the next launch (a replay of a captured graph cannot clear it)
                first_program_start = first_program * share + tl.minimum(first_program, extra)
                first_slot = 2 * first_program + (item_start > first_program_start).to(tl.int32)
                merged_max, merged_sum, merged_lo, merged_hi = _merge(
                    partial_ptr, stat_ptr, first_program, last_program, first_slot,
                    ROWS, D, D_LO, D_HI, BLOCK_R, BLOCK_S,
                )  # fmt: skip
                offs_r = tl.arange(0, BLOCK_R)
                merged_head = kv_head * GROUP + head_block * ROWS + offs_r
                _write_result(
                    out_ptr + wide_batch * stride_ob + merged_head * stride_oh,
                    None if lse_ptr is None else lse_ptr + wide_batch * Hq + merged_head,
                    (offs_r < ROWS) & (head_block * ROWS + offs_r < GROUP),
                    merged_max, merged_sum, merged_lo, merged_hi, D, D_LO, D_HI,
                )  # fmt: skip
        tile = piece_end
