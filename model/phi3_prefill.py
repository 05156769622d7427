"""Prefill: the whole prompt through the model, K and V straight into the preallocated cache."""

import torch

from kernels.flash_attention_wrapper import flash_attention
from model.phi3_layers import run_layers
from model.rope import longrope_border, rotary_tables, same_factors_for_all, uses_long_factors


@torch.no_grad()
def prefill(model, input_ids, kv_cache, *, attention_mask=None, chunk_size=None):
    """Run ``input_ids`` [B, S] behind what the cache holds; return the logits [B, vocab] of each last position.

    Attention is this project's flash kernel, on the cache itself.

    attention_mask: [B, S], 1 for tokens and 0 for padding on one side (an empty cache only). Padded sequences are moved
    to the left and from then on have lengths of their own in the cache (``kv_cache.lengths``).
    chunk_size: run the prompt in pieces of that many positions, which bounds the activations' memory; the logits are
    the same. ValueError for an empty prompt, one that does not fit, a batch or an earlier prefill on the other side of
    longrope's border, or a cache that holds padded sequences.
    """
    B, S = input_ids.shape
    if S == 0:
        raise ValueError("the prompt is empty: at least one token is needed")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    if kv_cache.num_layers != model.config.num_hidden_layers:
        raise ValueError(f"kv_cache has {kv_cache.num_layers} layers, the model {model.config.num_hidden_layers}")
    if kv_cache.ragged:
        raise ValueError("kv_cache holds padded sequences, behind which only single tokens can follow: reset it first")
    lengths = None
    if attention_mask is not None:
        check_mask(input_ids, attention_mask)
        if not bool(attention_mask.all()):
            if kv_cache.cur_pos:
                raise ValueError("a padded batch needs an empty cache")
            input_ids, lengths = _to_the_left(input_ids, attention_mask)
            same_factors_for_all(model.config, lengths.tolist())
            S = input_ids.shape[1]
    kv_cache.check_fits(S)

    total = kv_cache.cur_pos + S
    if kv_cache.cur_pos and uses_long_factors(model.config, total) != uses_long_factors(model.config, kv_cache.cur_pos):
        raise ValueError(
            f"positions {kv_cache.cur_pos} to {total - 1} cross longrope's border {longrope_border(model.config)} and "
            "the cached keys have the short factors: reset the cache and prefill the whole sequence"
        )
    cos, sin = rotary_tables(model, kv_cache.max_seq_len).for_length(total)
    window = getattr(model.config, "sliding_window", None)

    def attend(layer, q, k, v):
        kv_cache.append(layer, k, v)
        # Bottom-right aligned: the chunk's last query sees the last key that is written.
        return flash_attention(q, *kv_cache.get(layer), window=window)

    last_hidden = None
    for chunk in input_ids.split(chunk_size or S, dim=1):
        start, end = kv_cache.cur_pos, kv_cache.cur_pos + chunk.shape[1]
        hidden = run_layers(model, chunk, cos[start:end], sin[start:end], attend)
        kv_cache.advance(chunk.shape[1])
        if lengths is None:
            last_hidden = hidden[:, -1]
        else:
            # Keep the row of each sequence whose last token lies in this chunk.
            inside = (lengths > start) & (lengths <= end)
            rows = hidden[torch.arange(B, device=hidden.device), (lengths - 1 - start).clamp(0, end - start - 1)]
            last_hidden = rows if last_hidden is None else torch.where(inside[:, None], rows, last_hidden)
    if lengths is not None:
        kv_cache.set_lengths(lengths)
    # One row per sequence: logits of all positions would take S times vocab_size floats.
    return model.lm_head(last_hidden)


def check_mask(input_ids, attention_mask):
    """ValueError unless ``attention_mask`` has the shape of ``input_ids`` and holds 0 and 1 (or booleans) alone."""
    if attention_mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask must be {list(input_ids.shape)}, got {list(attention_mask.shape)}")
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        raise ValueError("attention_mask must hold 1 for tokens and 0 for padding, nothing else")


def _to_the_left(input_ids, attention_mask):
    """(ids with each row's tokens first and padding last, lengths [B]); ValueError unless padding is on one side.

    Columns that are padding in every row are dropped.
    """
    mask = attention_mask.to(input_ids.device, torch.bool)
    lengths = mask.sum(dim=1)
    if bool((lengths == 0).any()):
        raise ValueError("the prompt is empty: at least one token is needed in every row of attention_mask")
    if bool(((mask[:, 1:] != mask[:, :-1]).sum(dim=1) > 1).any()):
        raise ValueError("attention_mask must have its zeros on one side of each row")
    order = torch.argsort((~mask).to(torch.int8), dim=1, stable=True)
    return input_ids.gather(1, order)[:, : int(lengths.max())], lengths
