"""Prefill: the whole prompt through the model, K and V straight into the preallocated cache."""

import torch

from kernels.flash_attention_wrapper import flash_attention
from model.phi3_layers import run_layers
from model.rope import rotary_tables, same_factors_for_all


@torch.no_grad()
def prefill(model, input_ids, kv_cache, *, attention_mask=None, chunk_size=None):
    """Run ``input_ids`` [B, S] behind what the cache holds; return the logits [B, vocab] of each last position.

    Attention is this project's flash kernel, on the cache itself.

    attention_mask: [B, S], 1 for tokens and 0 for padding on one side (an empty cache only). Padded sequences are moved
    to the left and from then on have lengths of their own in the cache (``kv_cache.lengths``).
    chunk_size: run the prompt in pieces of that many positions, which bounds the activations' memory; the logits are
    the same. ValueError for an empty prompt, one that does not fit, or a batch across longrope's border.
    """
    B, S = input_ids.shape
    if S == 0:
        raise ValueError("the prompt is empty: at least one token is needed")
    kv_cache.check_fits(S)
    lengths = None
    if attention_mask is not None and not bool(attention_mask.all()):
        if kv_cache.cur_pos:
            raise ValueError("a padded batch needs an empty cache")
        input_ids, lengths = _to_the_left(input_ids, attention_mask)
        same_factors_for_all(model.config, lengths.tolist())

    total = kv_cache.cur_pos + S if lengths is None else int(lengths.max())
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


def _to_the_left(input_ids, attention_mask):
    """(ids with each row's tokens first and padding last, lengths [B]); ValueError unless padding is on one side."""
    mask = attention_mask.to(torch.bool)
    if mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask must be {list(input_ids.shape)}, got {list(mask.shape)}")
    lengths = mask.sum(dim=1)
    if bool((lengths == 0).any()):
        raise ValueError("the prompt is empty: at least one token is needed in every row of attention_mask")
    if bool(((mask[:, 1:] != mask[:, :-1]).sum(dim=1) > 1).any()):
        raise ValueError("attention_mask must have its zeros on one side of each row")
    order = torch.argsort((~mask).to(torch.int8), dim=1, stable=True)
    return input_ids.gather(1, order), lengths
