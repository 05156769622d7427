"""Rungs 0 to 2: Hugging Face ``generate``, a hand-written loop with a cache grown by ``torch.cat``, a preallocated one.

Rung 0 is the baseline that everything is held against, token by token. Rungs 1 and 2 use PyTorch's SDPA, so that the
ladder shows what the loop and the cache bring before any kernel is written.
"""

import torch

from model.phi3_decode_triton import check_step
from model.phi3_layers import run_layers, sdpa_attention
from model.rope import rotary_tables


@torch.no_grad()
def hf_generate(model, input_ids, max_new_tokens, *, attention_mask=None, eos_token_ids=(), cache="dynamic", **options):
    """Greedy ``model.generate`` -> (new ids [B, N], logits [B, N, vocab] float32 of every step).

    cache: "dynamic" (DynamicCache) or "static" (StaticCache with the compiled forward). eos_token_ids: () for exactly
    ``max_new_tokens`` tokens. Further keywords go to ``generate``.
    """
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if cache == "static":
        options["cache_implementation"] = "static"
    output = model.generate(
        input_ids,
        attention_mask=attention_mask,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=list(eos_token_ids) or None,
        pad_token_id=eos_token_ids[0] if eos_token_ids else 0,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return output.sequences[:, input_ids.shape[1] :], torch.stack([x.float() for x in output.logits], dim=1)


class _SdpaDecoder:
    """A decode step with PyTorch attention; subclasses say where K and V live."""

    def __init__(self, model, kv_cache):
        self.model, self.kv_cache = model, kv_cache
        self.window = getattr(model.config, "sliding_window", None)

    @torch.no_grad()
    def step(self, token_ids):
        """Logits [B, vocab] after ``token_ids`` [B]."""
        cache = self.kv_cache
        check_step(self.model, cache)
        cos, sin = rotary_tables(self.model, cache.max_seq_len).for_length(cache.cur_pos + 1)
        position = cache.lengths if cache.ragged else cache.cur_pos
        cos, sin = (x[position][:, None, None] if cache.ragged else x[position] for x in (cos, sin))
        hidden = run_layers(self.model, token_ids[:, None], cos, sin, self._attend)
        self._advance()
        return self.model.lm_head(hidden[:, 0])


class CatDecoder(_SdpaDecoder):
    """Rung 1: each layer's K and V are concatenated anew with every token, as DynamicCache does.

    What is prefilled is taken over from ``kv_cache`` at the first step; afterwards only its ``cur_pos`` moves.
    """

    def __init__(self, model, kv_cache):
        super().__init__(model, kv_cache)
        self.taken_over_after = None

    def step(self, token_ids):
        if self.kv_cache.ragged:
            raise ValueError('path "cat" has one length for the whole batch; use path="prealloc" for padded prompts')
        if self.taken_over_after != self.kv_cache.resets:
            written = [self.kv_cache.get(layer) for layer in range(self.kv_cache.num_layers)]
            self.keys = [k.clone() for k, _ in written]
            self.values = [v.clone() for _, v in written]
            self.taken_over_after = self.kv_cache.resets
        return super().step(token_ids)

    def _append(self, layer, k, v):
        self.keys[layer] = torch.cat((self.keys[layer], k), dim=2)
        self.values[layer] = torch.cat((self.values[layer], v), dim=2)

    def _attend(self, layer, q, k, v):
        self._append(layer, k, v)
        return sdpa_attention(q, self.keys[layer], self.values[layer], window=self.window)

    def _advance(self):
        self.kv_cache.note_written(1)


class PreallocDecoder(_SdpaDecoder):
    """Rung 2: K and V written in place into the preallocated cache."""

    def _attend(self, layer, q, k, v):
        self.kv_cache.append(layer, k, v)
        lengths = self.kv_cache.lengths + 1 if self.kv_cache.ragged else None
        return sdpa_attention(q, *self.kv_cache.get(layer), window=self.window, lengths=lengths)

    def _advance(self):
        self.kv_cache.advance(1)
