"""Phi-3's fused projection: one matrix gives q, k and v, in that order, heads of head_dim rows each."""


def extract_qkv(qkv, num_heads, num_kv_heads, head_dim):
    """Split ``qkv`` [B, S, (Hq + 2 Hkv) * D] into q [B, Hq, S, D] and k, v [B, Hkv, S, D], all views.

    The widths are Hq*D, Hkv*D, Hkv*D: equal thirds only for MHA. ValueError where they do not add up to qkv's.
    """
    B, S, width = qkv.shape
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    if width != sum(sizes):
        raise ValueError(
            f"qkv has {width} features, not the {sum(sizes)} of {num_heads} query and 2 x {num_kv_heads} KV heads "
            f"of {head_dim}"
        )
    return tuple(x.view(B, S, -1, head_dim).transpose(1, 2) for x in qkv.split(sizes, dim=-1))
