"""The fused step against Hugging Face and against recomputation without a cache; interpreted where no GPU is."""

from types import SimpleNamespace

import pytest
import torch

from kernels import device
from kernels.device import DeviceInfo, pretend_device
from kv_cache.kv_layout import KVCache
from model import phi3_decode_fused
from model.generate import generate, make_decoder
from model.load_model import HF_APPLIES_WINDOW, PARTIAL_ROTARY_SINCE, VERSION
from model.phi3_decode import hf_generate
from model.phi3_decode_fused import FusedDecoder
from model.phi3_prefill import prefill
from model.sampling import make_sampler
from model.token_check import forced_logits
from tests.tiny import longrope_model, prompt, recomputed_generation, recomputed_logits, tiny_model

SMALL = {"num_hidden_layers": 2}
FAMILY = {
    "mha-odd-sizes": {"num_key_value_heads": 4, "intermediate_size": 72, "vocab_size": 101},
    "gqa-3:1-tied-head": {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "hidden_size": 48,
        "tie_word_embeddings": True,
    },
    "head_dim-96": {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 192},
    "partial-rotary": {"partial_rotary_factor": 0.75},
}


def poisoned_cache(model, length):
    weight = model.lm_head.weight
    cache = KVCache.from_config(model.config, length, dtype=weight.dtype, device=weight.device)
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    return cache


@pytest.mark.parametrize("shape", FAMILY)
def test_tokens_equal_hugging_faces(shape, device):
    if shape == "partial-rotary" and VERSION < PARTIAL_ROTARY_SINCE:
        pytest.skip("this transformers rotates every dimension whatever the config says; load_model refuses it there")
    model = tiny_model(device=device, **(SMALL | FAMILY[shape]))
    ids = prompt(13).to(device)
    expected, expected_logits = hf_generate(model, ids, 5)
    cache = poisoned_cache(model, 24)
    assert torch.equal(generate(model, ids, 5, path="fused", kv_cache=cache, eos_token_ids=()), expected)
    assert cache.cur_pos == cache.lengths.item() == 13 + 4, "the last token is never written"
    assert torch.isnan(cache.k[..., 17:, :]).all() and torch.isfinite(cache.k[..., :17, :]).all()
    cache.reset()
    logits = forced_logits(model, ids, expected, path="fused", kv_cache=cache)
    assert torch.allclose(logits, expected_logits, atol=1e-4)


@pytest.mark.parametrize("window, length", [(7, 12), (7, 4), (1, 5)])
def test_sliding_window(window, length, device):
    model = tiny_model(device=device, sliding_window=window, **SMALL)
    if not HF_APPLIES_WINDOW:
        pytest.skip("this transformers ignores Phi-3's window: it is no reference here")
    ids = prompt(length).to(device)
    expected, expected_logits = recomputed_generation(model, ids, 4)
    assert torch.allclose(forced_logits(model, ids, expected, path="fused"), expected_logits, atol=1e-4)


@pytest.mark.parametrize("length", [14, 16, 17])
def test_longrope_below_at_above_and_across_the_border(length, device):
    model = longrope_model(device=device, **SMALL)
    ids = prompt(length).to(device)
    expected, expected_logits = recomputed_generation(model, ids, 5)
    assert torch.equal(generate(model, ids, 5, path="fused", eos_token_ids=()), expected)
    assert torch.allclose(forced_logits(model, ids, expected, path="fused"), expected_logits, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_as_near_to_float32_as_hugging_faces(dtype, device):
    """Logits' error against float32 at most 1.5 times that of the model's own forward in the same dtype."""
    exact, model = tiny_model(device=device, **SMALL), tiny_model(device=device, dtype=dtype, **SMALL)
    errors = {"fused": 0.0, "native": 0.0}
    for seed in range(3):
        ids = prompt(9, seed=seed).to(device)
        reference = recomputed_logits(exact, ids)
        cache = poisoned_cache(model, 9)
        prefill(model, ids[:, :8], cache)
        fused = FusedDecoder(model, cache).step(ids[:, 8]).float()
        errors["fused"] += (fused - reference).norm().item() ** 2
        errors["native"] += (recomputed_logits(model, ids) - reference).norm().item() ** 2
    assert errors["fused"] ** 0.5 <= 1.5 * errors["native"] ** 0.5, errors


def test_run_equals_steps_and_leaves_the_cache_alike(device):
    model = tiny_model(device=device, **SMALL)
    ids = prompt(6).to(device)
    caches = [poisoned_cache(model, 16) for _ in range(2)]
    first = torch.stack([prefill(model, ids, cache).argmax(dim=-1) for cache in caches])[0]
    stepped = []
    decoder = FusedDecoder(model, caches[0])
    for _ in range(5):
        stepped.append(decoder.step(stepped[-1] if stepped else first).argmax(dim=-1))
    decoder = FusedDecoder(model, caches[1])
    ran = torch.cat((decoder.run(first, 3), decoder.run(stepped[2], 2)), dim=1)
    assert torch.equal(ran, torch.stack(stepped, dim=1))
    assert torch.equal(caches[0].k.nan_to_num(7), caches[1].k.nan_to_num(7))
    assert caches[1].cur_pos == caches[1].lengths.item() == 11


def test_a_reused_decoder_remembers_nothing(device):
    model = tiny_model(device=device, **SMALL)
    a, b = prompt(9, seed=1).to(device), prompt(4, seed=2).to(device)
    cache = poisoned_cache(model, 24)
    decoder = FusedDecoder(model, cache)
    fresh = generate(model, b, 3, kv_cache=cache, decoder=decoder, eos_token_ids=())
    cache.reset()
    generate(model, a, 5, kv_cache=cache, decoder=decoder, eos_token_ids=())
    cache.reset()
    cache.k[..., 4:, :], cache.v[..., 4:, :] = float("nan"), float("nan")
    assert torch.equal(generate(model, b, 3, kv_cache=cache, decoder=decoder, eos_token_ids=()), fresh)


def test_nan_logits_are_reported(device):
    model = tiny_model(device=device, **SMALL)
    cache = poisoned_cache(model, 16)
    prefill(model, prompt(4).to(device), cache)
    cache.k[0, ..., 2, :] = float("nan")
    ids = FusedDecoder(model, cache).run(torch.tensor([5], device=device), 3)
    assert ids.tolist() == [[96, 96, 96]], "no token of the vocabulary"


def test_what_does_not_fit_is_refused_and_changes_nothing(device):
    model = longrope_model(device=device, **SMALL)
    cache = poisoned_cache(model, 20)
    decoder = FusedDecoder(model, cache)
    token = torch.tensor([5], device=device)
    with pytest.raises(ValueError, match="prefill a prompt first"):
        decoder.step(token)
    prefill(model, prompt(14).to(device), cache)
    before = cache.k.clone().nan_to_num(7)
    with pytest.raises(ValueError, match="3 steps from position 14 cross longrope's border 16: run 2"):
        decoder.run(token, 3)
    with pytest.raises(ValueError, match="21 positions do not fit"):
        decoder.run(token, 7)
    assert torch.equal(cache.k.nan_to_num(7), before) and cache.cur_pos == cache.lengths.item() == 14


def test_what_the_kernels_do_not_cover_is_refused(device):
    model = tiny_model(device=device, **SMALL)
    batch = KVCache.from_config(model.config, 8, batch_size=2, dtype=torch.float32, device=device)
    with pytest.raises(ValueError, match=r'one sequence at a time, got a batch of 2; use path="graph"'):
        make_decoder("fused", model, batch)
    half = KVCache.from_config(model.config, 8, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match=r"the cache has torch.float16 and .* torch.float32"):
        make_decoder("fused", model, half)
    other = tiny_model(device=device, hidden_act="gelu", **SMALL)
    with pytest.raises(ValueError, match="silu as its only activation, the model has gelu"):
        make_decoder("fused", other, poisoned_cache(other, 8))
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"pdl=True needs a GPU of compute capability 9\.0"):
            make_decoder("fused", model, poisoned_cache(model, 8), pdl=True)


def test_a_triton_that_cannot_compile_the_kernels_is_refused(monkeypatch):
    monkeypatch.setattr(phi3_decode_fused, "INTERPRETED", False)
    monkeypatch.setattr(phi3_decode_fused, "TRITON_VERSION", (3, 2))
    model = tiny_model(**SMALL)
    with pytest.raises(ValueError, match=r'needs Triton 3\.3 or newer, this is 3\.2; use path="graph"'):
        make_decoder("fused", model, poisoned_cache(model, 8))


def test_where_the_prefetches_of_phi_3_mini_lie(monkeypatch):
    """Phi-3-mini on an H200: gate/up takes 9 rounds of 924 rows, of which the seventh is asked for; without PDL, what
    is needed first.
    """
    monkeypatch.setattr(device, "INTERPRETED", False)

    def linear(rows, columns):
        return SimpleNamespace(weight=torch.empty(rows, columns, dtype=torch.float16, device="meta"))

    layer = SimpleNamespace(
        mlp=SimpleNamespace(gate_up_proj=linear(16384, 3072), down_proj=linear(3072, 8192)),
        self_attn=SimpleNamespace(qkv_proj=linear(9216, 3072), o_proj=linear(3072, 3072)),
    )
    model = SimpleNamespace(model=SimpleNamespace(layers=[layer, layer]), lm_head=linear(32064, 3072))

    def hints(pdl, capability=(9, 0), index=0):
        decoder = SimpleNamespace(pdl=pdl, device=torch.device("cpu"), model=model)
        with pretend_device(DeviceInfo(capability, 132, 232448)):
            return FusedDecoder._prefetches(decoder, index)

    def places(pdl):
        return {name: (hint.skip, hint.parts, hint.share(132), hint.early) for name, hint in hints(pdl).items()}

    assert places(True) == {
        "o": (0, 1, 7936, False), "gate_up": (6 * 924 * 3072 * 2, 2, 11904, True),
        "down": (4 * 264 * 8192 * 2, 1, 23824, True), "following": (0, 1, 15872, False),
    }  # fmt: skip
    assert places(False) == {
        "o": (0, 1, 7936, False), "gate_up": (0, 2, 15872, False), "down": (0, 1, 31760, False),
        "following": (0, 1, 31760, False),
    }  # fmt: skip
    assert hints(False)["following"].weight is layer.self_attn.qkv_proj.weight
    assert hints(False, index=1)["following"].weight is model.lm_head.weight, "behind the last layer"
    assert set(hints(False, capability=(8, 9)).values()) == {None}


def test_adapters_and_offloaded_weights_are_refused():
    import copy

    model = copy.deepcopy(tiny_model(**SMALL))
    cache = poisoned_cache(model, 8)

    class Adapter(torch.nn.Linear):
        pass

    plain = model.model.layers[1].mlp.down_proj
    model.model.layers[1].mlp.down_proj = Adapter(96, 64, bias=False)
    with pytest.raises(ValueError, match=r"layers.1.mlp.down_proj is Adapter.*use path=.graph"):
        FusedDecoder(model, cache)
    model.model.layers[1].mlp.down_proj = plain
    plain.weight = torch.nn.Parameter(plain.weight.to("meta"), requires_grad=False)
    with pytest.raises(ValueError, match=r"layers.1.mlp.down_proj.weight is on meta"):
        FusedDecoder(model, cache)


@pytest.mark.gpu
def test_pdl_on_and_off_give_the_same_bits():
    device = torch.device("cuda")
    model = tiny_model(device=device, dtype=torch.float16)
    ids = prompt(13).to(device)
    results = []
    for pdl in (False, None):
        cache = poisoned_cache(model, 400)
        decoder = FusedDecoder(model, cache, pdl=pdl)
        tokens = generate(model, ids, 380, kv_cache=cache, decoder=decoder, eos_token_ids=())
        results.append((tokens, decoder.logits.clone(), cache.k.clone().nan_to_num(7)))
    for off, on in zip(*results, strict=True):
        assert torch.equal(off, on)


def test_sampling_draws_as_on_the_other_paths():
    """A sampler makes the loop step instead of running ahead: same logits, same seed, same tokens."""
    model = tiny_model()
    ids = prompt(9)
    draws = [
        generate(model, ids, 6, path=path, eos_token_ids=(), sampler=make_sampler(temperature=1.3, top_p=0.9, seed=5))
        for path in ("fused", "prealloc")
    ]
    assert torch.equal(*draws)
