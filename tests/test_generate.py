"""The generation loop on the rungs that need no GPU, against Hugging Face and against recomputation without cache."""

import pytest
import torch

from kv_cache.kv_layout import KVCache
from model.generate import generate, greedy, make_decoder
from model.load_model import HF_APPLIES_WINDOW
from model.phi3_decode import hf_generate
from model.phi3_decode_triton import decode_step
from model.phi3_prefill import prefill
from model.sampling import make_sampler
from model.token_check import forced_logits
from tests.tiny import DEVICE, longrope_model, prompt, recomputed_generation, tiny_model

EAGER_PATHS = ("cat", "prealloc", "triton")

SHAPES = {
    "mha": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "gqa-4:1": {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 128},
    "gqa-3:1": {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48},
    "mqa": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "head_dim-96": {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 192},
}


def poisoned_cache(model, length, batch_size=1):
    cache = KVCache.from_config(model.config, length, batch_size=batch_size, dtype=torch.float32, device=model.device)
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    return cache


@pytest.mark.parametrize("shape", SHAPES)
def test_64_tokens_equal_hugging_faces(shape):
    model = tiny_model(**SHAPES[shape])
    ids = prompt(13)
    expected, expected_logits = hf_generate(model, ids, 64)
    cache = poisoned_cache(model, 80)
    assert torch.equal(generate(model, ids, 64, kv_cache=cache, eos_token_ids=()), expected)
    assert cache.cur_pos == 13 + 63, "the last token is never written"
    assert torch.isnan(cache.k[..., 76:, :]).all()
    cache.reset()
    logits = forced_logits(model, ids, expected, path="triton", kv_cache=cache)
    assert torch.allclose(logits, expected_logits, atol=1e-4)


@pytest.mark.parametrize("path", EAGER_PATHS)
@pytest.mark.parametrize("length", [1, 9])
def test_every_rung_equals_recomputation(path, length):
    model = tiny_model()
    ids = prompt(length, batch=2)
    expected, expected_logits = recomputed_generation(model, ids, 12)
    assert torch.equal(generate(model, ids, 12, path=path, eos_token_ids=()), expected)
    assert torch.allclose(forced_logits(model, ids, expected, path=path), expected_logits, atol=1e-4)


@pytest.mark.parametrize("path", EAGER_PATHS)
@pytest.mark.parametrize("window, length", [(7, 20), (7, 4), (1, 5), (40, 9)])
def test_sliding_window(path, window, length):
    """Window smaller than the prompt, passed while decoding, of 1, and larger than the whole."""
    model = tiny_model(sliding_window=window)
    if not HF_APPLIES_WINDOW:
        pytest.skip("this transformers ignores Phi-3's window: it is no reference here")
    ids = prompt(length)
    expected, expected_logits = recomputed_generation(model, ids, 12)
    assert torch.allclose(forced_logits(model, ids, expected, path=path), expected_logits, atol=1e-4)
    assert torch.equal(generate(model, ids, 12, path=path, eos_token_ids=()), expected)


def test_window_reaches_exactly_w_keys():
    """One layer, W = 7, 20 tokens: only inputs 13 to 19 move the last logits, in prefill and in a cached step."""
    model = tiny_model(num_hidden_layers=1, sliding_window=7)
    ids = prompt(20)

    def last_logits(ids):
        cache = poisoned_cache(model, 20)
        whole = prefill(model, ids, cache)
        cache.reset()
        prefill(model, ids[:, :19], cache)
        return whole, decode_step(model, ids[:, 19], cache)

    base = last_logits(ids)
    for j in range(20):
        changed = ids.clone()
        changed[0, j] = (changed[0, j] + 1) % 96
        for got, before in zip(last_logits(changed), base, strict=True):
            assert torch.equal(got, before) == (j < 13), f"input {j}"


@pytest.mark.parametrize("path", EAGER_PATHS)
@pytest.mark.parametrize("length", [10, 15, 16, 17])
def test_longrope_below_at_above_and_across_the_border(path, length, monkeypatch):
    """Border 16. Stale keys after the crossing move the logits by 4.9; the cache is prefilled again exactly once.

    Hugging Face's generate is no judge here: from 4.57 to 5.17 its tokens leave those of its own uncached forward.
    """
    import model.generate as loop

    model = longrope_model()
    ids = prompt(length)
    expected, expected_logits = recomputed_generation(model, ids, 14)
    calls = []
    monkeypatch.setattr(loop, "prefill", lambda *a, **kw: (calls.append(a[1].shape[1]), prefill(*a, **kw))[1])
    logits = forced_logits(model, ids, expected, path=path)
    assert torch.allclose(logits, expected_logits, atol=1e-4)
    assert calls == ([length, 17] if length <= 16 else [length])
    assert torch.equal(generate(model, ids, 14, path=path, eos_token_ids=()), expected)


def test_a_step_across_longropes_border_is_refused():
    model = longrope_model()
    cache = poisoned_cache(model, 20)
    prefill(model, prompt(16), cache)
    with pytest.raises(ValueError, match="position 16 crosses longrope's border"):
        decode_step(model, torch.tensor([5], device=DEVICE), cache)


@pytest.mark.parametrize("path", ["prealloc", "triton"])
def test_left_padded_batch_equals_each_prompt_alone(path):
    model = tiny_model(sliding_window=11)
    lengths = [15, 9, 1]
    ids, mask = torch.zeros(2, 3, 15, dtype=torch.long, device=DEVICE)
    expected = []
    for row, n in enumerate(lengths):
        p = prompt(n, seed=n)
        ids[row, 15 - n :], mask[row, 15 - n :] = p[0], 1
        expected.append(recomputed_generation(model, p, 12)[0][0])
    out = generate(model, ids, 12, path=path, attention_mask=mask, eos_token_ids=())
    assert torch.equal(out, torch.stack(expected))


def test_padded_batch_on_the_cat_rung_or_across_the_border_is_refused():
    ids = prompt(8, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    with pytest.raises(ValueError, match='use path="prealloc" for padded prompts'):
        generate(tiny_model(), ids, 3, path="cat", attention_mask=mask, eos_token_ids=())
    with pytest.raises(ValueError, match="longrope's border 16"):
        generate(longrope_model(), ids, 12, attention_mask=mask, eos_token_ids=())


def test_a_mask_of_ones_pads_nothing():
    """So it may cross longrope's border, as without a mask."""
    model, ids = longrope_model(), prompt(10, batch=2)
    mask = torch.ones_like(ids, dtype=torch.bool)
    expected, _ = recomputed_generation(model, ids, 12)
    assert torch.equal(generate(model, ids, 12, attention_mask=mask, eos_token_ids=()), expected)


def test_written_positions_step_by_step():
    """Prompt 9, 5 new tokens: slots 0 to 8, then 9, 10, 11, 12, each once and nothing behind."""
    model = tiny_model()
    cache = poisoned_cache(model, 16)
    logits = prefill(model, prompt(9), cache)
    for position in range(9, 13):
        logits = decode_step(model, greedy(logits), cache)
        assert torch.isfinite(logits).all()
        written = torch.isfinite(cache.k).all(-1)
        assert written[..., : position + 1].all() and not written[..., position + 1 :].any()


@pytest.mark.parametrize("new_tokens, fits", [(3, True), (4, False)])
def test_capacity_counts_what_is_written(new_tokens, fits):
    model = tiny_model()
    cache = poisoned_cache(model, 32)
    if fits:
        assert generate(model, prompt(30), new_tokens, kv_cache=cache, eos_token_ids=()).shape == (1, 3)
    else:
        with pytest.raises(ValueError, match="33 positions do not fit a KV cache of 32; raise MAX_SEQ_LEN to 33"):
            generate(model, prompt(30), new_tokens, kv_cache=cache, eos_token_ids=())
        assert cache.cur_pos == 0 and torch.isnan(cache.k).all(), "refused before any work"


def test_decode_step_on_a_full_or_empty_cache_is_refused():
    model = tiny_model()
    cache = poisoned_cache(model, 4)
    with pytest.raises(ValueError, match="prefill a prompt first"):
        decode_step(model, torch.tensor([5], device=DEVICE), cache)
    prefill(model, prompt(4), cache)
    before = cache.k.clone()
    with pytest.raises(ValueError, match="5 positions do not fit"):
        decode_step(model, torch.tensor([5], device=DEVICE), cache)
    assert torch.equal(before, cache.k) and cache.cur_pos == 4


@pytest.mark.parametrize("path", EAGER_PATHS)
def test_a_reused_cache_remembers_nothing(path):
    model = tiny_model()
    a, b = prompt(20, seed=1), prompt(6, seed=2)
    cache = poisoned_cache(model, 64)
    fresh = forced_logits(model, b, prompt(5, seed=3), path=path, kv_cache=cache)
    cache.reset()
    generate(model, a, 40, path=path, kv_cache=cache, eos_token_ids=())
    cache.reset()
    cache.k[..., 11:, :], cache.v[..., 11:, :] = float("nan"), float("nan")
    assert torch.equal(forced_logits(model, b, prompt(5, seed=3), path=path, kv_cache=cache), fresh)


def test_a_used_or_wrong_cache_is_refused():
    model = tiny_model()
    cache = poisoned_cache(model, 32)
    generate(model, prompt(4), 2, kv_cache=cache, eos_token_ids=())
    with pytest.raises(ValueError, match="holds 5 positions"):
        generate(model, prompt(4), 2, kv_cache=cache)
    cache.reset()
    with pytest.raises(ValueError, match="made for 2 sequences"):
        generate(model, prompt(4, batch=2), 2, kv_cache=cache)


def test_a_reused_decoder_brings_its_cache():
    model = tiny_model()
    cache = poisoned_cache(model, 32)
    decoder = make_decoder("triton", model, cache)
    for seed in (1, 2):
        ids = prompt(6, seed=seed)
        cache.reset()
        out = generate(model, ids, 5, decoder=decoder, eos_token_ids=())
        assert torch.equal(out, generate(model, ids, 5, eos_token_ids=()))
    with pytest.raises(ValueError, match="holds 10 positions"):
        generate(model, ids, 5, decoder=decoder)
    with pytest.raises(ValueError, match="decoder was made for another cache"):
        generate(model, ids, 5, decoder=decoder, kv_cache=poisoned_cache(model, 32))


@pytest.mark.parametrize("path", EAGER_PATHS)
def test_stops_at_any_of_several_end_tokens(path):
    model = tiny_model()
    ids = prompt(9)
    free = generate(model, ids, 20, path=path, eos_token_ids=())[0].tolist()
    end = free[7]
    first = free.index(end)
    seen = []
    out = generate(model, ids, 20, path=path, eos_token_ids=(95, end), on_token=lambda t: seen.append(t.item()))
    assert out[0].tolist() == free[: first + 1] == seen
    assert torch.equal(generate(model, ids, 20, path=path, eos_token_ids=end), out)


def test_a_finished_sequence_is_filled_while_others_go_on():
    model = tiny_model()
    ids = prompt(9, batch=3, seed=5)
    free = generate(model, ids, 10, eos_token_ids=())
    end = int(free[1, 3])
    out = generate(model, ids, 10, eos_token_ids=(end,))
    for row in range(3):
        tokens = free[row].tolist()
        stop = tokens.index(end) if end in tokens else None
        expected = tokens if stop is None else tokens[: stop + 1] + [end] * 10
        assert out[row].tolist() == expected[: out.shape[1]]


def test_end_tokens_default_to_the_checkpoints(monkeypatch):
    model = tiny_model()
    ids = prompt(9)
    free = generate(model, ids, 12, eos_token_ids=())[0].tolist()
    monkeypatch.setattr(model.generation_config, "eos_token_id", [95, free[4]])
    assert generate(model, ids, 12)[0].tolist() == free[: free.index(free[4]) + 1]


@pytest.mark.parametrize("path", EAGER_PATHS)
@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.7}, {"top_k": 5}, {"temperature": 1.3, "top_p": 0.8}, {"top_k": 20, "top_p": 0.9}],
    ids=lambda o: "-".join(o),
)
def test_sampling_equals_hugging_faces(path, options):
    """Same logits processors, same seed, same draws."""
    model = tiny_model()
    ids = prompt(9)
    torch.manual_seed(3)
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=True, eos_token_id=None, pad_token_id=0,
        **({"top_k": 0, "top_p": 1.0, "temperature": 1.0} | options),
    )[:, 9:]  # fmt: skip
    torch.manual_seed(3)
    out = generate(model, ids, 16, path=path, eos_token_ids=(), sampler=make_sampler(**options))
    assert torch.equal(out, expected)


def test_sampling_with_a_seed_repeats_and_ignores_the_global_generator():
    model = tiny_model()
    first = generate(model, prompt(9), 16, eos_token_ids=(), sampler=make_sampler(temperature=1.5, seed=7))
    torch.manual_seed(99)
    again = generate(model, prompt(9), 16, eos_token_ids=(), sampler=make_sampler(temperature=1.5, seed=7))
    other = generate(model, prompt(9), 16, eos_token_ids=(), sampler=make_sampler(temperature=1.5, seed=8))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 0}, "top_k"),
    ],
)
def test_sampling_refuses_values_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        make_sampler(**options)


def test_greedy_takes_the_lowest_of_equal_logits_and_nan_is_no_token():
    logits = torch.zeros(3, 32064)
    logits[0, [500, 32000]] = 5.0
    logits[1, [256, 5]] = 1.0
    logits[2, 7] = float("nan")
    assert greedy(logits).tolist() == [500, 5, 32064]
    assert greedy(logits.half()).tolist() == [500, 5, 32064]


def test_nan_logits_raise(monkeypatch):
    model = tiny_model()
    with pytest.raises(RuntimeError, match="logits of step 2 contain NaN"):
        generate(
            model, prompt(4), 5, eos_token_ids=(),
            sampler=lambda ids, logits: greedy(logits if ids.shape[1] < 6 else logits * float("nan")),
        )  # fmt: skip


def test_ctrl_c_keeps_what_was_generated():
    model = tiny_model()
    seen = []

    def interrupt(token):
        seen.append(token.item())
        if len(seen) == 4:
            raise KeyboardInterrupt

    out = generate(model, prompt(9), 20, eos_token_ids=(), on_token=interrupt)
    assert out[0].tolist() == seen and len(seen) == 4


def test_offloaded_weights_are_refused():
    with torch.device("meta"):
        model = type(tiny_model())(tiny_model().config)
    cache = poisoned_cache(tiny_model(), 8)
    with pytest.raises(ValueError, match=r"weight .*embed_tokens.* is offloaded"):
        make_decoder("triton", model, cache)


def test_arguments_out_of_range():
    with pytest.raises(ValueError, match="the prompt is empty"):
        generate(tiny_model(), prompt(0), 3)
    with pytest.raises(ValueError, match=r"input_ids must be \[B, S\], got shape \[3\]"):
        generate(tiny_model(), prompt(3)[0], 3)
    with pytest.raises(ValueError, match=r"attention_mask must be \[1, 3\], got \[1, 5\]"):
        generate(tiny_model(), prompt(3), 3, attention_mask=torch.ones(1, 5))
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        generate(tiny_model(), prompt(3), 0)
    with pytest.raises(ValueError, match="path must be one of cat, prealloc, triton, graph, fused, got 'fast'"):
        generate(tiny_model(), prompt(3), 3, path="fast")


class _SelfFeeding:
    """Stands in for a captured graph: feeds itself with a real decoder, and keeps a record of how far it ran."""

    def __init__(self, model, kv_cache, captured=True):
        self.decoder = make_decoder("prealloc", model, kv_cache)
        self.kv_cache = kv_cache
        self.captured = captured
        self.chunks = []

    def step(self, token_ids):
        return self.decoder.step(token_ids)

    def run(self, token_ids, num_steps):
        self.chunks.append(num_steps)
        tokens = []
        for _ in range(num_steps):
            token_ids = greedy(self.decoder.step(token_ids))
            tokens.append(token_ids)
        return torch.stack(tokens, dim=1)


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "at first use"])
@pytest.mark.parametrize("new_tokens", [1, 2, 9, 10, 30])
@pytest.mark.parametrize("model", [tiny_model, longrope_model], ids=["default", "longrope"])
def test_running_ahead_gives_the_same_tokens(new_tokens, model, captured):
    model = model()
    ids = prompt(10)
    cache = poisoned_cache(model, 10 + new_tokens - 1)
    decoder = _SelfFeeding(model, cache, captured)
    out = generate(model, ids, new_tokens, kv_cache=cache, decoder=decoder, eos_token_ids=())
    assert torch.equal(out, generate(model, ids, new_tokens, path="prealloc", eos_token_ids=()))


def test_running_ahead_stops_at_the_end_token_and_wastes_little():
    model = tiny_model()
    ids = prompt(10)
    free = generate(model, ids, 60, path="prealloc", eos_token_ids=())[0].tolist()
    end = free[20]
    cache = poisoned_cache(model, 80)
    decoder = _SelfFeeding(model, cache)
    out = generate(model, ids, 60, kv_cache=cache, decoder=decoder, eos_token_ids=(end,))
    assert out[0].tolist() == free[: free.index(end) + 1]
    assert sum(decoder.chunks) <= free.index(end) + 16


@pytest.mark.parametrize(("captured", "queued"), [(True, [1, 9, 9, 9]), (False, [0, 1, 9, 9])])
def test_the_first_token_waits_for_one_step_at_most(captured, queued):
    """Steps that had been asked for when each token arrived: a captured decoder is a chunk ahead, another is not."""
    model = tiny_model()
    cache = poisoned_cache(model, 20)
    decoder = _SelfFeeding(model, cache, captured)
    seen = []
    generate(model, prompt(10), 10, kv_cache=cache, decoder=decoder, eos_token_ids=(),
             on_token=lambda tokens: seen.append(sum(decoder.chunks)))  # fmt: skip
    assert seen[: len(queued)] == queued
