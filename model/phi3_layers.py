"""The part of a Phi-3 forward pass that all eager rungs share: everything around attention, in PyTorch.

A rung passes ``attend(layer, q, k, v)``; RMSNorm, projections and MLP are the Hugging Face model's own modules.
"""

import torch
import torch.nn.functional as F

from model.extract_qkv import extract_qkv
from model.load_model import head_dim
from model.rope import apply_rope


def run_layers(model, input_ids, cos, sin, attend):
    """Hidden states [B, S, hidden] behind the final norm, for ``input_ids`` [B, S].

    cos, sin broadcast to [B, heads, S, rotary_dim / 2]. ``attend(layer, q, k, v)`` gets q [B, Hq, S, D] and k, v
    [B, Hkv, S, D], q and k rotated, keeps k and v in its cache, and returns [B, Hq, S, D].
    """
    config = model.config
    hidden = model.model.embed_tokens(input_ids)
    B, S = input_ids.shape
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        qkv = attention.qkv_proj(layer.input_layernorm(hidden))
        q, k, v = extract_qkv(qkv, config.num_attention_heads, config.num_key_value_heads, head_dim(config))
        out = attend(index, apply_rope(q, cos, sin), apply_rope(k, cos, sin), v)
        hidden = hidden + attention.o_proj(out.transpose(1, 2).reshape(B, S, -1))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.model.norm(hidden)


def sdpa_attention(q, k, v, *, window=None, lengths=None):
    """PyTorch's scaled_dot_product_attention with this project's meaning: q [B, Hq, S, D], k, v [B, Hkv, T, D].

    The last query sees the last key; ``window`` keeps the last ``window`` keys; ``lengths`` int [B], with one query per
    sequence, is how many keys each sequence has.
    """
    S, T = q.shape[2], k.shape[2]
    mask = None
    if lengths is not None or S > 1 or (window is not None and window < T):
        key = torch.arange(T, device=q.device)
        last = torch.arange(T - S, T, device=q.device) if lengths is None else lengths[:, None] - 1
        mask = key <= last[..., None]
        if window is not None:
            mask &= key > last[..., None] - window
    if lengths is not None:
        # Behind a sequence's end memory may hold anything, and 0 * NaN is NaN.
        unwritten = key >= lengths[:, None]
        k, v = (x.masked_fill(unwritten[:, None, :, None], 0) for x in (k, v))
        mask = mask[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
