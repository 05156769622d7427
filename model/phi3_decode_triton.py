"""Rung 3: a decode step with Triton attention over the preallocated KV cache; the rest is the model's own modules."""

import torch

from kernels.decode_attention_wrapper import decode_attention
from model.phi3_layers import run_layers
from model.rope import longrope_border, rotary_tables


@torch.no_grad()
def decode_step(model, token_ids, kv_cache):
    """Append ``token_ids`` [B] to the cached sequences and return the logits [B, vocab] for what follows.

    ValueError where the cache is full, or where the step would cross longrope's border: from there on other factors
    hold for every cached key, so the whole sequence has to be prefilled again (``generate`` does).
    """
    check_step(model, kv_cache)
    if kv_cache.ragged:
        logits = decode_step_at(model, token_ids, kv_cache, kv_cache.lengths)
    else:
        logits = decode_step_at(model, token_ids, kv_cache, kv_cache.cur_pos)
    kv_cache.advance(1)
    return logits


def check_step(model, kv_cache):
    """Raise ValueError unless one more position can follow in this cache."""
    kv_cache.check_fits(1)
    if kv_cache.cur_pos == 0:
        raise ValueError("the KV cache is empty: prefill a prompt first")
    if kv_cache.cur_pos == longrope_border(model.config):
        raise ValueError(
            f"position {kv_cache.cur_pos} crosses longrope's border and the cached keys have the short factors: "
            "reset the cache and prefill the whole sequence"
        )


def decode_step_at(model, token_ids, kv_cache, position):
    """The step itself, at ``position``: an int, or an int32 device tensor [B] (a captured graph would freeze an int).

    Writes the cache and leaves moving ``cur_pos`` and ``lengths`` to the caller.
    """
    cos, sin = rotary_tables(model, kv_cache.max_seq_len).for_length(kv_cache.cur_pos + 1)
    if isinstance(position, int):
        positions, cos, sin = None, cos[position], sin[position]
    else:
        positions, cos, sin = position, cos[position][:, None, None], sin[position][:, None, None]
    cache_len = position + 1
    window = getattr(model.config, "sliding_window", None)

    def attend(layer, q, k, v):
        kv_cache.append(layer, k, v, positions)
        out = decode_attention(q[:, :, 0], kv_cache.k[layer], kv_cache.v[layer], cache_len, window=window)
        return out[:, :, None]

    return model.lm_head(run_layers(model, token_ids[:, None], cos, sin, attend)[:, 0])


class TritonDecoder:
    """decode_step bound to a model and a cache."""

    def __init__(self, model, kv_cache):
        self.model, self.kv_cache = model, kv_cache

    def step(self, token_ids):
        """Logits [B, vocab] after ``token_ids`` [B]."""
        return decode_step(self.model, token_ids, self.kv_cache)
