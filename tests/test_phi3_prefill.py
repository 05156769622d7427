"""model/phi3_prefill.py: logits and cache against a recomputation without any cache."""

import pytest
import torch

from kv_cache.kv_layout import KVCache
from model.load_model import cache_layers, hf_forward
from model.phi3_prefill import prefill
from tests.tiny import DEVICE, longrope_model, prompt, recomputed_logits, tiny_model


def make_cache(model, length, batch_size=1):
    cache = KVCache.from_config(model.config, length, batch_size=batch_size, dtype=torch.float32, device=model.device)
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    return cache


@pytest.mark.parametrize("length", [1, 2, 31, 64, 65])
@pytest.mark.parametrize("window", [None, 7])
def test_logits_and_cache(length, window):
    model = tiny_model(sliding_window=window)
    ids = prompt(length, batch=2)
    cache = make_cache(model, length + 3, batch_size=2)
    logits = prefill(model, ids, cache)
    assert torch.allclose(logits, recomputed_logits(model, ids), atol=1e-4)
    assert cache.cur_pos == length
    _, hf_cache = hf_forward(tiny_model(), ids)
    if window is None:
        for layer, (k, v) in enumerate(cache_layers(hf_cache)):
            keys, values = cache.get(layer)
            assert torch.allclose(keys, k, atol=1e-4) and torch.allclose(values, v, atol=1e-4)
    assert torch.isnan(cache.k[..., length:, :]).all(), "nothing behind the prompt is written"


@pytest.mark.parametrize("chunk_size", [1, 7, 10, 64])
def test_chunks_give_the_same_logits(chunk_size):
    model = tiny_model(sliding_window=9)
    ids = prompt(20)
    cache = make_cache(model, 20)
    logits = prefill(model, ids, cache, chunk_size=chunk_size)
    assert torch.allclose(logits, recomputed_logits(model, ids), atol=1e-4)
    assert cache.cur_pos == 20


def test_first_chunk_of_a_long_prompt_already_has_the_long_factors():
    model = longrope_model()
    ids = prompt(20)
    logits = prefill(model, ids, make_cache(model, 128), chunk_size=10)
    assert torch.allclose(logits, recomputed_logits(model, ids), atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_padded_batch_equals_each_prompt_alone(side, chunk_size):
    model = tiny_model(sliding_window=8)
    lengths = [15, 9, 1]
    ids, mask = torch.zeros(2, 3, 15, dtype=torch.long, device=DEVICE)
    prompts = [prompt(n, seed=n) for n in lengths]
    for row, (n, p) in enumerate(zip(lengths, prompts, strict=True)):
        place = slice(15 - n, 15) if side == "left" else slice(0, n)
        ids[row, place], mask[row, place] = p[0], 1
    cache = make_cache(model, 20, batch_size=3)
    logits = prefill(model, ids, cache, attention_mask=mask, chunk_size=chunk_size)
    for row, p in enumerate(prompts):
        assert torch.allclose(logits[row], recomputed_logits(model, p)[0], atol=1e-4)
    assert cache.lengths.tolist() == lengths


def test_lm_head_sees_one_position():
    model = tiny_model()
    rows = []
    hook = model.lm_head.register_forward_pre_hook(lambda module, inputs: rows.append(inputs[0].shape))
    prefill(model, prompt(64), make_cache(model, 64))
    hook.remove()
    assert rows == [(1, 64)], "one row of hidden size 64, not 64 positions of it"


def test_errors_leave_the_cache_alone():
    model = tiny_model()
    cache = make_cache(model, 8)
    with pytest.raises(ValueError, match="the prompt is empty"):
        prefill(model, prompt(0), cache)
    with pytest.raises(ValueError, match="9 positions do not fit a KV cache of 8"):
        prefill(model, prompt(9), cache)
    mask = torch.tensor([[1, 0, 1]], device=DEVICE)
    with pytest.raises(ValueError, match="zeros on one side"):
        prefill(model, prompt(3), cache, attention_mask=mask)
    with pytest.raises(ValueError, match=r"attention_mask must be \[1, 3\], got \[1, 2\]"):
        prefill(model, prompt(3), cache, attention_mask=mask[:, :2])
    assert cache.cur_pos == 0 and torch.isnan(cache.k).all()


def test_a_prompt_padded_in_every_row_loses_those_columns():
    """Padded to a multiple of 8, say: the cache holds what is left."""
    model = tiny_model()
    ids, mask = torch.zeros(2, 1, 12, dtype=torch.long, device=DEVICE)
    ids[0, 4:], mask[0, 4:] = prompt(8)[0], 1
    cache = make_cache(model, 20)
    logits = prefill(model, ids, cache, attention_mask=mask)
    assert torch.allclose(logits, recomputed_logits(model, prompt(8)), atol=1e-4)
    assert cache.cur_pos == 8 and cache.lengths.tolist() == [8]


def test_a_second_prefill_across_longropes_border_is_refused():
    """Border 16: the keys of the first part have the short factors, and logits on them would be off by 5."""
    model = longrope_model()
    cache = make_cache(model, 40)
    prefill(model, prompt(10), cache)
    with pytest.raises(ValueError, match="positions 10 to 19 cross longrope's border 16"):
        prefill(model, prompt(10), cache)
    assert cache.cur_pos == 10
    prefill(model, prompt(6), cache)
    cache.reset()
    ids = prompt(30)
    prefill(model, ids[:, :20], cache)
    assert torch.allclose(prefill(model, ids[:, 20:], cache), recomputed_logits(model, ids), atol=1e-4)


def test_what_a_prefill_cannot_follow_or_fill_is_refused():
    model = tiny_model()
    cache = make_cache(model, 20, batch_size=2)
    mask = torch.ones(2, 5, dtype=torch.long, device=DEVICE)
    mask[1, 0] = 0
    for wrong in (mask * 2, torch.where(mask == 0, float("-inf"), 0.0)):
        with pytest.raises(ValueError, match="attention_mask must hold 1 for tokens and 0 for padding"):
            prefill(model, prompt(5, batch=2), cache, attention_mask=wrong)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        prefill(model, prompt(5, batch=2), cache, chunk_size=0)
    prefill(model, prompt(5, batch=2), cache, attention_mask=mask)
    with pytest.raises(ValueError, match="kv_cache holds padded sequences"):
        prefill(model, prompt(3, batch=2), cache)
    with pytest.raises(ValueError, match="kv_cache has 3 layers, the model 2"):
        prefill(tiny_model(num_hidden_layers=2), prompt(3), make_cache(model, 8))
