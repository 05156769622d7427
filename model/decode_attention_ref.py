"""Reference attention in plain PyTorch: what the kernels must compute, written to be read, on any device.

    out = softmax(scale * q @ k^T, over the visible keys) @ v        kv_head = q_head // (Hq // Hkv)

It shares nothing with the kernels. Pass float64 inputs for an oracle; in float16 it is the naive program of that dtype.
"""

import torch


def attention_ref(q, k, v, *, causal=True, scale=None, window=None, return_lse=False):
    """Attention of q [B, Hq, S, D] over k, v [B, Hkv, T, D] -> [B, Hq, S, D] in q's dtype.

    The last query sees the last key (bottom-right alignment). ``window`` keeps the last ``window`` keys up to and
    including the query's own position. A row that sees no key gives 0 (and logsumexp -inf). With ``return_lse`` also
    the natural logsumexp of the scaled scores, [B, Hq, S] float32 or wider.
    """
    S, T = q.shape[2], k.shape[2]
    query_position = torch.arange(T - S, T, device=q.device)[:, None]
    key_position = torch.arange(T, device=q.device)[None, :]
    visible = torch.ones(S, T, dtype=torch.bool, device=q.device)
    if causal:
        visible &= key_position <= query_position
    if window is not None:
        visible &= key_position > query_position - window
    return _masked_attention(q, k, v, visible, scale, return_lse)


def decode_attention_ref(q, k_cache, v_cache, cache_len, *, scale=None, window=None):
    """One query per sequence: q [B, Hq, D] over the first ``cache_len`` positions of the caches [B, Hkv, T_max, D].

    ``cache_len``: int, or a tensor [B]. What lies behind it is never read. Returns [B, Hq, D] in q's dtype.
    """
    lengths = torch.as_tensor(cache_len).expand(q.shape[0]).tolist()
    rows = []
    for b, length in enumerate(lengths):
        row = attention_ref(
            q[b : b + 1, :, None], k_cache[b : b + 1, :, :length], v_cache[b : b + 1, :, :length],
            scale=scale, window=window,
        )  # fmt: skip
        rows.append(row[:, :, 0])
    return torch.cat(rows)


def _masked_attention(q, k, v, visible, scale, return_lse):
    group_size = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group_size, dim=1)
    v = v.repeat_interleave(group_size, dim=1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    softmax_dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(-2, -1)).to(softmax_dtype) * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    # exp(score - lse) with lse = -inf would be NaN: a row without a visible key has weights 0.
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0)[..., None])
    out = weights.to(q.dtype) @ v
    return (out, lse) if return_lse else out
