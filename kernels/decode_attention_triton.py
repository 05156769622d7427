"""Decode attention: one new token per sequence against a long KV cache. Memory-bound, so K and V are read once.

    out[b, h] = softmax(scale * q[b, h] @ k[b, h // G, t]^T, over the visible t) @ v[b, h // G, t]       G = Hq // Hkv

q, out [B, Hq, D]; k, v [B, Hkv, T_max, D]. Visible are the last ``window`` of the first ``cache_len`` positions.
Scores, softmax and accumulators are fp32. Softmax runs in base 2 (scores carry a factor log2(e), because exp2 is one
instruction); a log-sum-exp that leaves a kernel is natural.

Sources: the online softmax of FlashAttention (Dao et al. 2022, arXiv 2205.14135, section 3.1).
"""

import triton
import triton.language as tl

import kernels

INTERPRETED = tl.constexpr(kernels.INTERPRETED)


@triton.jit
def _dot(a, b):
    """a @ b with an fp32 result; fp32 inputs multiply in full precision (the default is TF32: 10 bits of mantissa)."""
    if INTERPRETED:
        # The interpreter keeps bfloat16 as its bit pattern, and its dot multiplies those as integers.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _visible_range(cache_len, batch, T_max, window, PER_SEQUENCE: tl.constexpr):
    """[first, end): positions that the query of sequence ``batch`` sees. A device length is clamped to the cache."""
    if PER_SEQUENCE:
        end = tl.load(cache_len + batch)
    else:
        end = cache_len
    end = tl.minimum(tl.maximum(end, 0), T_max)
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
    first, end = _visible_range(cache_len, batch, T_max, window, PER_SEQUENCE)

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
        # running_max is -inf where no key is visible, and so is the result. ln(2) turns base 2 into the natural log.
        lse = (running_max + tl.log2(tl.where(running_sum == 0, 1.0, running_sum))) * 0.6931471805599453
        tl.store(lse_ptr + batch * Hq + q_head, lse, mask=head_in_group < Hq // Hkv)
