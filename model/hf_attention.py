"""This project's attention inside any Hugging Face model: ``register()``, then ``attn_implementation="phi_triton"``.

Prefill runs the flash kernel, a single new token the decode kernel, and what neither supports (padded batches, custom
masks, dropout, other dtypes) PyTorch's SDPA with Hugging Face's own mask. Two interfaces of transformers
take part: AttentionInterface computes, AttentionMaskInterface says what is visible. Both are needed: a static cache
hands over its whole length, and only the mask knows how much of it is written.
"""

import torch

from kernels import INTERPRETED
from kernels.decode_attention_wrapper import decode_attention
from kernels.flash_attention_wrapper import flash_attention

NAME = "phi_triton"


def register():
    """Make ``attn_implementation="phi_triton"`` known to transformers. ValueError where it is too old (before 4.53)."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError:
        import transformers

        raise ValueError(
            f"attn_implementation={NAME!r} needs transformers >= 4.53, this is {transformers.__version__}"
        ) from None
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_mask(batch_size, kv_length, **kwargs):
    """The mask of one forward pass, as AttentionMaskInterface asks: None, lengths, or a boolean mask for SDPA.

    None: causal, nothing padded, the last query sees the last key. int32 [B, 1, 1, 1], for a static cache longer
    than its written part: one query sees the first so many keys; of several, query i sees keys up to i. It has four
    dimensions because transformers hands such tensors on untouched where it makes masks ahead of a compiled forward.
    """
    from transformers.masking_utils import sdpa_mask

    if "cache_position" in kwargs:  # before transformers 5
        q_length, q_offset = kwargs["cache_position"].shape[0], kwargs["cache_position"][0]
    else:
        q_length, q_offset = kwargs["q_length"], kwargs.get("q_offset", 0)
    if _is_plain(q_length, kwargs):
        start = q_offset - kwargs.get("kv_offset", 0)
        device = kwargs.get("device", getattr(q_offset, "device", "cpu"))
        lengths = torch.zeros(batch_size, 1, 1, 1, dtype=torch.int32, device=device)
        if q_length == 1:
            return lengths + torch.as_tensor(start + 1, dtype=torch.int32, device=device)
        if int(start) + q_length == kv_length:
            return None
        if int(start) == 0:
            return lengths + q_length
    if "allow_is_causal_skip" in kwargs:
        # A skipped mask would leave it to is_causal, which means another corner than ours where lengths differ.
        kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(batch_size=batch_size, kv_length=kv_length, **kwargs)


def _is_plain(q_length, kwargs):
    """Causal, at most with the config's sliding window (which reaches attention_forward by itself), nothing padded."""
    if kwargs.get("use_vmap") or kwargs.get("allow_is_bidirectional_skip") is not None:
        return False
    # Packed sequences forbid the skip and change the mask function. Compileable caches forbid it as well (before
    # transformers 5 for any number of queries), leave the function as it is, and are plain all the same.
    if not kwargs.get("allow_is_causal_skip", True) and q_length > 1:
        from transformers.masking_utils import causal_mask_function

        if kwargs.get("mask_function") is not causal_mask_function:
            return False
    local_size = kwargs.get("local_size")
    if local_size is not None and local_size != getattr(kwargs.get("config"), "sliding_window", None):
        return False
    padding = kwargs.get("attention_mask")
    return padding is None or (not torch.compiler.is_compiling() and bool(padding.all()))


def attention_forward(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None, is_causal=None, **kwargs
):
    """query [B, Hq, S, D], key and value [B, Hkv, T, D] -> (out [B, S, Hq, D], None), as AttentionInterface asks.

    ValueError for what changes the softmax itself (softcap, attention sinks), which SDPA would leave out silently.
    """
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(f"attn_implementation={NAME!r} does not support this model's {name}: use 'eager'")
    # Rare, since models and their caches keep D dense, and a GPU's SDPA does not take all such layouts either.
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    S, T = query.shape[2], key.shape[2]
    lengths = attention_mask if attention_mask is not None and attention_mask.dtype == torch.int32 else None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    ours = (attention_mask is None or lengths is not None) and _is_supported(query, key, value, dropout, kwargs)
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if ours and S == 1 and not trains:
        cache_len = T if lengths is None else lengths.flatten()
        out = decode_attention(query[:, :, 0], key, value, cache_len, scale=scaling, window=sliding_window)[:, :, None]
    elif ours and (S > 1 or lengths is None):
        if lengths is not None:
            key, value = key[:, :, :S], value[:, :, :S]
        out = flash_attention(query, key, value, causal=causal, scale=scaling, window=sliding_window)
    else:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if causal and (attention_mask is None or lengths is not None):
            attention_mask = _explicit_mask(S, T, lengths, sliding_window, query.device)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
            is_causal=causal if attention_mask is None else None, **kwargs,
        )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _is_supported(query, key, value, dropout, kwargs):
    """Whether the kernels can do it; SDPA can do, or refuse, the rest."""
    return (
        dropout == 0.0
        and kwargs.get("position_bias") is None
        and query.dtype == key.dtype == value.dtype
        and query.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and 16 <= query.shape[-1] == value.shape[-1] <= 256
        and (query.is_cuda or INTERPRETED)
    )


def _explicit_mask(S, T, lengths, window, device):
    """[B or 1, 1, S, T] boolean: what the kernels would see."""
    last = torch.arange(T - S, T, device=device)[:, None]
    if lengths is not None:
        last = lengths - 1 if S == 1 else torch.arange(S, device=device)[:, None]
    position = torch.arange(T, device=device)
    mask = position <= last
    if window is not None:
        mask = mask & (position > last - window)
    return mask.expand(-1, 1, -1, -1) if mask.dim() == 4 else mask[None, None]
