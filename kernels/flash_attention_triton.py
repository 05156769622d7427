"""Prefill attention, forward and backward (FlashAttention-2), for MHA, GQA and MQA.

    out = softmax(scale * q @ k^T, over the visible keys) @ v          kv_head = q_head // group_size

    q, out, dq, dout [B, Hq, S, D]      k, v, dk, dv [B, Hkv, T, D]      lse, row_* [B, Hq, S] float32, contiguous

Which keys a query sees is a band of diagonals: query m sees key n where ``lower < n - m <= upper``. Causal, sliding
window, both or neither differ in these two numbers alone, so one compiled kernel serves them all. From the band each
program works out which tiles it must visit: tiles with nothing to see are skipped, tiles seen entirely take a loop
without a mask, and only the tiles on the band's borders (and the ragged last one) are masked.

Scores, softmax and all sums are float32. float32 inputs are multiplied in full precision (never TF32). Exponentials are
base 2 inside (the hardware's instruction), with log2(e) folded into ``scale_log2``; ``lse`` is the natural logarithm.

A ``*_source`` is a pointer, or (compute capability 9.0) a tensor descriptor, whose tiles the GPU's copy engine fetches
into shared memory without passing through registers; ``_load_tile`` is the only place that knows which.

Sources: Milakov and Gimelshein, arXiv 1805.02867 (online softmax); Dao et al., FlashAttention, arXiv 2205.14135, and
FlashAttention-2, arXiv 2307.08691 (tiling, and the backward from the forward's lse).
"""

import triton
import triton.language as tl

import kernels

INTERPRETED = tl.constexpr(kernels.INTERPRETED)

# What changes from call to call is not compiled in: no variant for a length of 1, or for multiples of 16.
_RUNTIME_SIZES = ["S", "T", "lower", "upper", "num_heads", "group_size"]


@triton.jit
def _dot(a, b, acc):
    """acc + a @ b in float32. "ieee" keeps float32 inputs off TF32; 16-bit inputs are exact products either way."""
    if INTERPRETED:
        # The interpreter keeps bfloat16 as its bit pattern, and its dot multiplies those as integers.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _load_tile(
    source, batch, head, start, length, stride_b, stride_h, stride_s,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, RAGGED: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Rows start .. start + BLOCK of one head -> [BLOCK, D_PAD], with zeros beyond ``length`` and beyond D.

    RAGGED says that rows may lie beyond ``length``; a descriptor checks its bounds in any case.
    """
    if USE_TMA:
        tile = source.load([batch, head, start, 0]).reshape(BLOCK, D_PAD)
    else:
        rows = tl.arange(0, BLOCK)
        columns = tl.arange(0, D_PAD)
        base = (
            source
            + tl.cast(batch, tl.int64) * stride_b
            + tl.cast(head, tl.int64) * stride_h
            + tl.cast(start, tl.int64) * stride_s
        )
        pointers = base + tl.cast(rows, tl.int64)[:, None] * stride_s + columns[None, :]
        if RAGGED:
            tile = tl.load(pointers, mask=(start + rows < length)[:, None] & (columns < D)[None, :], other=0.0)
        elif D != D_PAD:
            tile = tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def _store_tile(
    target_ptr, tile, batch, head, start, length, stride_b, stride_h, stride_s,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = start + tl.arange(0, BLOCK)
    columns = tl.arange(0, D_PAD)
    base = target_ptr + tl.cast(batch, tl.int64) * stride_b + tl.cast(head, tl.int64) * stride_h
    pointers = base + tl.cast(rows, tl.int64)[:, None] * stride_s + columns[None, :]
    mask = (rows < length)[:, None] & (columns < D)[None, :]
    tl.store(pointers, tile.to(target_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _visited_tiles(start, length, lower, upper, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Tiles of STEP keys that queries start .. start + BLOCK visit: (first, full_first, full_last, last).

    Every query sees all of [full_first, full_last); [first, full_first) and [full_last, last) are the borders. Seen
    from a key, queries lie in the band (-upper - 1, -lower - 1], so the same function finds the queries of some keys.
    """
    any_begin = tl.maximum(start + lower + 1, 0)
    any_end = tl.maximum(tl.minimum(start + BLOCK + upper, length), 0)
    all_begin = tl.maximum(start + BLOCK + lower, 0)
    all_end = tl.maximum(tl.minimum(start + upper + 1, length), 0)
    last = (any_end + STEP - 1) // STEP
    first = tl.minimum(any_begin // STEP, last)
    full_first = tl.minimum((all_begin + STEP - 1) // STEP, last)
    full_last = tl.maximum(all_end // STEP, full_first)
    return first, full_first, full_last, last


@triton.jit
def _num_tiles(first, full_first, full_last, last, BORDER: tl.constexpr):
    num_full = full_last - full_first
    return last - first - num_full if BORDER else num_full


@triton.jit
def _nth_tile(i, first, full_first, full_last, BORDER: tl.constexpr):
    """Index of the i-th full tile, or of the i-th border tile: those before the full ones, then those behind."""
    if BORDER:
        tile = first + i + tl.where(first + i < full_first, 0, full_last - full_first)
    else:
        tile = full_first + i
    return tile


@triton.jit(do_not_specialize=_RUNTIME_SIZES)
def _flash_forward_kernel(
    q_source, k_source, v_source, out_ptr, lse_ptr,
    S, T, lower, upper, num_heads, group_size, scale_log2,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """One program = (query head, BLOCK_M queries, batch): reads the keys that its queries see, writes out and lse.

    Heads run fastest, so that those of one KV group read the same keys at the same time (L2). Under a causal mask the
    last queries see the most keys: they start first, and the short tiles fill the gaps at the end.
    """
    head = tl.program_id(0)
    query_start = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    batch = tl.program_id(2)
    kv_head = head // group_size

    q = _load_tile(
        q_source, batch, head, query_start, S, stride_qb, stride_qh, stride_qs, D, D_PAD, BLOCK_M, True, USE_TMA
    )
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    queries = query_start + tl.arange(0, BLOCK_M)
    first, full_first, full_last, last = _visited_tiles(query_start, T, lower, upper, BLOCK_M, BLOCK_N)
    for BORDER in tl.static_range(2):
        for i in range(0, _num_tiles(first, full_first, full_last, last, BORDER)):
            start = _nth_tile(i, first, full_first, full_last, BORDER) * BLOCK_N
            k = _load_tile(
                k_source, batch, kv_head, start, T, stride_kb, stride_kh, stride_ks, D, D_PAD, BLOCK_N, BORDER, USE_TMA
            )
            # [BLOCK_M, D] @ [D, BLOCK_N]
            scores = _dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            if BORDER:
                keys = start + tl.arange(0, BLOCK_N)
                offset = keys[None, :] - queries[:, None]
                visible = (offset > lower) & (offset <= upper) & (keys < T)[None, :]
                scores = tl.where(visible, scores, float("-inf"))
            new_max = tl.maximum(running_max, tl.max(scores, 1) * scale_log2)
            shift = new_max
            if BORDER:  # a row that has seen no key yet: -inf - -inf would be NaN
                shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.math.exp2(scores * scale_log2 - shift[:, None])
            rescale = tl.math.exp2(running_max - shift)
            running_max = new_max
            running_sum = running_sum * rescale + tl.sum(weights, 1)
            v = _load_tile(
                v_source, batch, kv_head, start, T, stride_vb, stride_vh, stride_vs, D, D_PAD, BLOCK_N, BORDER, USE_TMA
            )
            # [BLOCK_M, BLOCK_N] @ [BLOCK_N, D]
            acc = _dot(weights.to(v.dtype), v, acc * rescale[:, None])

    empty = running_sum == 0.0
    running_sum = tl.where(empty, 1.0, running_sum)
    _store_tile(
        out_ptr, acc / running_sum[:, None], batch, head, query_start, S, stride_ob, stride_oh, stride_os,
        D, D_PAD, BLOCK_M,
    )  # fmt: skip
    LN_2: tl.constexpr = 0.6931471805599453
    lse = tl.where(empty, float("-inf"), (running_max + tl.math.log2(running_sum)) * LN_2)
    tl.store(lse_ptr + (tl.cast(batch, tl.int64) * num_heads + head) * S + queries, lse, mask=queries < S)


@triton.jit(do_not_specialize=_RUNTIME_SIZES)
def _flash_backward_rows_kernel(
    out_ptr, dout_ptr, lse_ptr, row_score_ptr, row_dweight_ptr,
    S, num_heads, scale,
    stride_ob, stride_oh, stride_os, stride_dob, stride_doh, stride_dos,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One program = (query head, BLOCK_M queries, batch): the two numbers per query that the backward kernels need.

        weights = exp(scale * q @ k^T - lse)     = exp(scale * (q @ k^T + row_score))      row_score = -lse / scale
        dscores = weights * (dout @ v^T - delta) = weights * (dout @ v^T + row_dweight)    row_dweight = -delta

    with delta = sum over D of out * dout. Written so, both products start from these numbers instead of from 0, and no
    register holds them any longer: at D = 128 on sm_90 that is the difference between 216 bytes of spills in the dk/dv
    kernel and none. A query that sees no key gets row_score = -inf, hence weights 0.
    """
    head = tl.program_id(0)
    start = tl.program_id(1) * BLOCK_M
    batch = tl.program_id(2)
    out = _load_tile(out_ptr, batch, head, start, S, stride_ob, stride_oh, stride_os, D, D_PAD, BLOCK_M, True, False)
    dout = _load_tile(
        dout_ptr, batch, head, start, S, stride_dob, stride_doh, stride_dos, D, D_PAD, BLOCK_M, True, False
    )
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    rows = start + tl.arange(0, BLOCK_M)
    offsets = (tl.cast(batch, tl.int64) * num_heads + head) * S + rows
    lse = tl.load(lse_ptr + offsets, mask=rows < S, other=0.0)
    row_score = tl.where(lse == float("-inf"), float("-inf"), -lse / scale)
    tl.store(row_score_ptr + offsets, row_score, mask=rows < S)
    tl.store(row_dweight_ptr + offsets, -delta, mask=rows < S)


@triton.jit
def _load_rows(row_score_ptr, row_dweight_ptr, batch, head, num_heads, start, S, BLOCK_M: tl.constexpr):
    """(row_score, row_dweight) of BLOCK_M queries; those beyond S get weights 0."""
    rows = start + tl.arange(0, BLOCK_M)
    offsets = (tl.cast(batch, tl.int64) * num_heads + head) * S + rows
    row_score = tl.load(row_score_ptr + offsets, mask=rows < S, other=float("-inf"))
    row_dweight = tl.load(row_dweight_ptr + offsets, mask=rows < S, other=0.0)
    return row_score, row_dweight


@triton.jit(do_not_specialize=_RUNTIME_SIZES)
def _flash_dq_kernel(
    q_source, k_source, v_source, dout_source, row_score_ptr, row_dweight_ptr, dq_ptr,
    S, T, lower, upper, num_heads, group_size, scale, scale_log2,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_dob, stride_doh, stride_dos, stride_dqb, stride_dqh, stride_dqs,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """One program = (query head, BLOCK_M queries, batch): dq from the keys that its queries see. Order: as forward."""
    head = tl.program_id(0)
    query_start = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    batch = tl.program_id(2)
    kv_head = head // group_size

    q = _load_tile(
        q_source, batch, head, query_start, S, stride_qb, stride_qh, stride_qs, D, D_PAD, BLOCK_M, True, USE_TMA
    )
    dout = _load_tile(
        dout_source, batch, head, query_start, S, stride_dob, stride_doh, stride_dos, D, D_PAD, BLOCK_M, True, USE_TMA
    )
    row_score, row_dweight = _load_rows(row_score_ptr, row_dweight_ptr, batch, head, num_heads, query_start, S, BLOCK_M)
    dq = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    queries = query_start + tl.arange(0, BLOCK_M)
    first, full_first, full_last, last = _visited_tiles(query_start, T, lower, upper, BLOCK_M, BLOCK_N)
    for BORDER in tl.static_range(2):
        for i in range(0, _num_tiles(first, full_first, full_last, last, BORDER)):
            start = _nth_tile(i, first, full_first, full_last, BORDER) * BLOCK_N
            k = _load_tile(
                k_source, batch, kv_head, start, T, stride_kb, stride_kh, stride_ks, D, D_PAD, BLOCK_N, BORDER, USE_TMA
            )
            v = _load_tile(
                v_source, batch, kv_head, start, T, stride_vb, stride_vh, stride_vs, D, D_PAD, BLOCK_N, BORDER, USE_TMA
            )
            # [BLOCK_M, D] @ [D, BLOCK_N], twice
            scores = _dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32) + row_score[:, None])
            weights = tl.math.exp2(scores * scale_log2)
            if BORDER:
                keys = start + tl.arange(0, BLOCK_N)
                offset = keys[None, :] - queries[:, None]
                visible = (offset > lower) & (offset <= upper) & (keys < T)[None, :]
                weights = tl.where(visible, weights, 0.0)
            dweights = _dot(dout, tl.trans(v), tl.zeros([BLOCK_M, BLOCK_N], tl.float32) + row_dweight[:, None])
            dscores = weights * dweights
            # [BLOCK_M, BLOCK_N] @ [BLOCK_N, D]
            dq = _dot(dscores.to(k.dtype), k, dq)

    _store_tile(dq_ptr, dq * scale, batch, head, query_start, S, stride_dqb, stride_dqh, stride_dqs, D, D_PAD, BLOCK_M)


@triton.jit(do_not_specialize=_RUNTIME_SIZES)
def _flash_dk_dv_kernel(
    q_source, k_source, v_source, dout_source, row_score_ptr, row_dweight_ptr, dk_ptr, dv_ptr,
    S, T, lower, upper, num_heads, group_size, scale, scale_log2,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_dob, stride_doh, stride_dos, stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """One program = (KV head, BLOCK_N keys, batch): dk and dv, summed in float32 over the group's query heads.

    No other program writes these rows: no atomics, no expanded K or V. Under a causal mask the first keys are seen by
    the most queries, so the natural order is longest first. Scores are transposed, [BLOCK_N, BLOCK_M]: both sums run
    over queries, and the weights are the left operand, straight from registers.
    """
    kv_head = tl.program_id(0)
    key_start = tl.program_id(1) * BLOCK_N
    batch = tl.program_id(2)

    k = _load_tile(
        k_source, batch, kv_head, key_start, T, stride_kb, stride_kh, stride_ks, D, D_PAD, BLOCK_N, True, USE_TMA
    )
    v = _load_tile(
        v_source, batch, kv_head, key_start, T, stride_vb, stride_vh, stride_vs, D, D_PAD, BLOCK_N, True, USE_TMA
    )
    dk = tl.zeros([BLOCK_N, D_PAD], tl.float32)
    dv = tl.zeros([BLOCK_N, D_PAD], tl.float32)
    keys = key_start + tl.arange(0, BLOCK_N)
    first, full_first, full_last, last = _visited_tiles(key_start, S, -upper - 1, -lower - 1, BLOCK_N, BLOCK_M)
    for head in range(kv_head * group_size, (kv_head + 1) * group_size):
        for BORDER in tl.static_range(2):
            for i in range(0, _num_tiles(first, full_first, full_last, last, BORDER)):
                start = _nth_tile(i, first, full_first, full_last, BORDER) * BLOCK_M
                q = _load_tile(
                    q_source, batch, head, start, S, stride_qb, stride_qh, stride_qs,
                    D, D_PAD, BLOCK_M, BORDER, USE_TMA,
                )  # fmt: skip
                dout = _load_tile(
                    dout_source, batch, head, start, S, stride_dob, stride_doh, stride_dos,
                    D, D_PAD, BLOCK_M, BORDER, USE_TMA,
                )  # fmt: skip
                row_score, row_dweight = _load_rows(
                    row_score_ptr, row_dweight_ptr, batch, head, num_heads, start, S, BLOCK_M
                )
                # [BLOCK_N, D] @ [D, BLOCK_M]
                scores = _dot(k, tl.trans(q), tl.zeros([BLOCK_N, BLOCK_M], tl.float32) + row_score[None, :])
                weights = tl.math.exp2(scores * scale_log2)
                if BORDER:
                    # Keys beyond T need no mask: they fill rows of dk and dv that are not stored.
                    offset = keys[:, None] - (start + tl.arange(0, BLOCK_M))[None, :]
                    weights = tl.where((offset > lower) & (offset <= upper), weights, 0.0)
                # [BLOCK_N, BLOCK_M] @ [BLOCK_M, D]
                dv = _dot(weights.to(dout.dtype), dout, dv)
                dweights = _dot(v, tl.trans(dout), tl.zeros([BLOCK_N, BLOCK_M], tl.float32) + row_dweight[None, :])
                dscores = weights * dweights
                dk = _dot(dscores.to(q.dtype), q, dk)

    _store_tile(dk_ptr, dk * scale, batch, kv_head, key_start, T, stride_dkb, stride_dkh, stride_dks, D, D_PAD, BLOCK_N)
    _store_tile(dv_ptr, dv, batch, kv_head, key_start, T, stride_dvb, stride_dvh, stride_dvs, D, D_PAD, BLOCK_N)
