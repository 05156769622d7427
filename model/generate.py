"""The one generation loop: prefill, then a step per token on the rung asked for.

What differs between rungs is only how a step is made. The loop owns the sequence: it picks tokens, stops at end of
text and, where longrope changes its factors, prefills the whole sequence again as Hugging Face does.
"""

import contextlib

import torch

from kv_cache.kv_layout import KVCache
from model.load_model import check_weights_are_here
from model.load_model import eos_token_ids as checkpoint_eos_token_ids
from model.phi3_decode import CatDecoder, PreallocDecoder
from model.phi3_decode_triton import TritonDecoder
from model.phi3_prefill import check_mask, prefill
from model.rope import longrope_border, same_factors_for_all

PATHS = ("cat", "prealloc", "triton", "graph", "fused")

# Steps that a decoder which feeds itself (graph, fused) is given at a time. The next ones are queued before the host
# looks for end-of-text in the last ones: the GPU never waits for the host, and fewer than twice as many steps are
# computed in vain.
STEPS_AHEAD = 8


def make_decoder(path, model, kv_cache, **options):
    """The decoder of a rung: an object with ``step(token_ids [B]) -> logits [B, vocab]``.

    Those of "graph" and "fused" also have ``run(token_ids [B], num_steps) -> ids [B, num_steps]`` on the device:
    greedy, without waiting for the host; ``captured`` says whether it can start at once. ``options`` go to the decoder
    (fused: ``pdl``). ValueError: unknown path, or weights that are offloaded.
    """
    check_weights_are_here(model)
    if path == "cat":
        return CatDecoder(model, kv_cache, **options)
    if path == "prealloc":
        return PreallocDecoder(model, kv_cache, **options)
    if path == "triton":
        return TritonDecoder(model, kv_cache, **options)
    if path == "graph":
        from model.phi3_decode_graph import GraphDecoder

        return GraphDecoder(model, kv_cache, **options)
    if path == "fused":
        from model.phi3_decode_fused import FusedDecoder

        return FusedDecoder(model, kv_cache, **options)
    raise ValueError(f"path must be one of {', '.join(PATHS)}, got {path!r}")


def greedy(logits):
    """The index of the largest logit per row, the lowest one among equals, on any device; [B, vocab] -> [B] int64.

    A row with a NaN has no largest logit and gives ``vocab``, which is no token: the caller can tell without a second
    look at the logits.
    """
    vocab = logits.shape[-1]
    index = torch.arange(vocab, device=logits.device)
    return torch.where(logits == logits.amax(dim=-1, keepdim=True), index, vocab).amin(dim=-1)


@torch.no_grad()
def generate(
    model, input_ids, max_new_tokens, *, path="triton", kv_cache=None, eos_token_ids=None, on_token=None,
    attention_mask=None, sampler=None, decoder=None,
):  # fmt: skip
    """Continue ``input_ids`` [B, S] by up to ``max_new_tokens``; return the new ids [B, N] int64.

    path: the rung (see PATHS). kv_cache: an empty cache to use; without one a cache of the needed size is made.
    eos_token_ids: id or ids that end a sequence (kept in the result); None takes the checkpoint's, () none. A sequence
    that has ended is filled up with its end token while others go on. on_token: called with each step's ids [B] (CPU).
    attention_mask: [B, S], for prompts padded on one side (not across longrope's border). sampler: a function
    ``(ids [B, L], logits [B, vocab]) -> [B]``; greedy without. decoder: one made by ``make_decoder`` for this model, to
    reuse a captured graph; ``path`` has no say then, and its cache is the one used.

    A decoder that feeds itself may have written up to 2 * STEPS_AHEAD - 1 positions more than were accepted when
    generation stops early: ``kv_cache.reset()`` before the next sequence. Ctrl-C returns what was generated so far.
    ValueError for an empty prompt, or one that with its continuation does not fit the cache; RuntimeError for NaN
    logits.
    """
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids must be [B, S], got shape {list(input_ids.shape)}")
    B, S = input_ids.shape
    if B == 0 or S == 0:
        raise ValueError("the prompt is empty: at least one token is needed")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    # The last token is returned and never written.
    needed = S + max_new_tokens - 1
    if decoder is not None:
        if kv_cache not in (None, decoder.kv_cache):
            raise ValueError("decoder was made for another cache than kv_cache: pass the one it was made for, or none")
        kv_cache = decoder.kv_cache
    if kv_cache is None:
        dtype = model.model.embed_tokens.weight.dtype
        kv_cache = KVCache.from_config(model.config, needed, batch_size=B, dtype=dtype, device=input_ids.device)
    if kv_cache.batch_size != B or kv_cache.cur_pos:
        raise ValueError(
            f"kv_cache must be empty and made for {B} sequences; it holds {kv_cache.cur_pos} positions "
            f"of {kv_cache.batch_size} (reset() empties it)"
        )
    kv_cache.check_fits(needed)
    if eos_token_ids is None:
        eos_token_ids = checkpoint_eos_token_ids(model)
    elif isinstance(eos_token_ids, int):
        eos_token_ids = (eos_token_ids,)
    if attention_mask is not None:
        check_mask(input_ids, attention_mask)
        if bool(attention_mask.all()):
            attention_mask = None  # nothing is padded
    if attention_mask is not None:
        lengths = attention_mask.sum(dim=1)
        same_factors_for_all(model.config, [int(lengths.min()), int(lengths.max()) + max_new_tokens - 1])
    decoder = decoder or make_decoder(path, model, kv_cache)

    loop = _Loop(model, input_ids, kv_cache, max_new_tokens, eos_token_ids, on_token)
    with contextlib.suppress(KeyboardInterrupt):
        _run(loop, decoder, prefill(model, input_ids, kv_cache, attention_mask=attention_mask), sampler)
    return loop.new_ids()


def _run(loop, decoder, logits, sampler):
    border = longrope_border(loop.model.config)
    cache = loop.kv_cache
    while True:
        tokens = greedy(logits) if sampler is None else sampler(loop.all_ids(), logits)
        if sampler is None and hasattr(decoder, "run"):
            tokens = _run_ahead(loop, decoder, tokens, border)
            if tokens is None:
                return
        elif not loop.accept(tokens):
            return
        if cache.cur_pos == border:
            # From here on the long factors hold, for the cached keys too: prefill everything anew, as HF does.
            logits = loop.prefill_again()
        else:
            logits = decoder.step(tokens)


def _run_ahead(loop, decoder, tokens, border):
    """Let the decoder feed itself in chunks from ``tokens`` on, which are accepted too; return the tokens to go on with
    at longrope's border, None when done.

    Chunk n is queued before chunk n - 1 is read, so the GPU has work while the host looks. The first is one step: what
    prefill chose is to be seen at once. A decoder that has to capture first, or that computes on the CPU, takes its
    time: what is there is read before.
    """
    pending, pending_steps, steps = _start_copy(tokens[:, None]), 1, 1

    def accept():
        return all(loop.accept(column) for column in pending().unbind(1))

    while True:
        queued = loop.remaining - pending_steps
        room = queued if border is None or loop.kv_cache.cur_pos > border else border - loop.kv_cache.cur_pos
        num_steps = min(steps, queued, room)
        chunk = arrival = None
        at_once = decoder.captured
        if not at_once and not accept():
            return None
        if num_steps > 0:
            chunk = decoder.run(tokens, num_steps)
            arrival = _start_copy(chunk)
        if at_once and not accept():
            return None
        if chunk is None:
            return tokens
        pending, pending_steps, tokens, steps = arrival, num_steps, chunk[:, -1], STEPS_AHEAD


def _start_copy(ids):
    """A function that waits for ``ids`` and returns them on the CPU.

    The copy is queued here: one that is asked for later would stand behind the steps queued in between.
    """
    if ids.device.type != "cuda":
        return lambda: ids
    with torch.cuda.device(ids.device):
        copy = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
        copy.copy_(ids, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

    def wait():
        arrived.synchronize()
        return copy

    return wait


class _Loop:
    """The sequences being generated: accepted ids, which have ended, how many tokens remain."""

    def __init__(self, model, input_ids, kv_cache, max_new_tokens, eos_token_ids, on_token):
        self.model, self.kv_cache = model, kv_cache
        self.input_ids = input_ids
        self.remaining = max_new_tokens
        self.eos_token_ids = torch.tensor(list(eos_token_ids), dtype=torch.long)
        self.on_token = on_token
        self.columns = []
        self.ended = torch.zeros(input_ids.shape[0], dtype=torch.bool)

    def accept(self, tokens):
        """Take the next ids [B]; return whether generation goes on."""
        tokens = tokens.cpu()
        vocab = self.model.config.vocab_size
        if bool((tokens >= vocab).any()):
            raise RuntimeError(f"the logits of step {len(self.columns)} contain NaN")
        if self.columns:
            tokens = torch.where(self.ended, self.columns[-1], tokens)
        self.columns.append(tokens)
        self.ended |= torch.isin(tokens, self.eos_token_ids)
        self.remaining -= 1
        if self.on_token is not None:
            self.on_token(tokens)
        return self.remaining > 0 and not bool(self.ended.all())

    def new_ids(self):
        """[B, N] of what was accepted."""
        if not self.columns:
            return self.input_ids[:, :0]
        return torch.stack(self.columns, dim=1).to(self.input_ids.device)

    def all_ids(self):
        """Prompt and accepted ids [B, L] on the model's device."""
        return torch.cat((self.input_ids, self.new_ids()), dim=1)

    def prefill_again(self):
        """Logits of the whole sequence so far, computed into the emptied cache."""
        self.kv_cache.reset()
        return prefill(self.model, self.all_ids(), self.kv_cache)
