"""attn_implementation="phi_triton" in models of four families, against the same model with eager attention."""

import pytest
import torch
import transformers

import model.hf_attention as hf_attention
from model.load_model import VERSION
from tests.tiny import DEVICE, VOCAB, prompt

pytest.importorskip("transformers.masking_utils", reason="AttentionMaskInterface came with transformers 4.53")

COMMON = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.25, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "phi3": ("Phi3", {"sliding_window": None}),
    "phi3-window": ("Phi3", {"sliding_window": 7}),
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
}
NEW_TOKENS = 8


@pytest.fixture
def calls(monkeypatch):
    """How often each kernel ran."""
    hf_attention.register()
    count = {"flash": 0, "decode": 0}

    def counted(name, function):
        def call(*args, **kwargs):
            count[name] += 1
            return function(*args, **kwargs)

        return call

    for name in count:
        attribute = f"{name}_attention"
        monkeypatch.setattr(hf_attention, attribute, counted(name, getattr(hf_attention, attribute)))
    return count


def make_model(family, implementation):
    name, fields = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**COMMON, **fields, attn_implementation=implementation)
    return getattr(transformers, f"{name}ForCausalLM")(config).to(DEVICE).eval().requires_grad_(False)


def generate(model, ids, mask, cache):
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    return model.generate(ids, attention_mask=mask, **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "left-padded"])
def test_tokens_equal_eager_attention(family, cache, padded, calls):
    ids = prompt(11, batch=2)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :5], ids[1, :5] = 0, 0
    ours, eager = (make_model(family, name) for name in (hf_attention.NAME, "eager"))
    assert torch.equal(generate(ours, ids, mask, cache), generate(eager, ids, mask, "dynamic"))
    if padded:
        assert calls == {"flash": 0, "decode": 0}, "padding is SDPA's"
    else:
        layers = ours.config.num_hidden_layers
        # Before transformers 5 a static cache's windowed prefill cannot be told from packed sequences: SDPA's.
        by_sdpa = VERSION < (5, 1) and cache == "static" and "window" in family
        assert calls == {"flash": 0 if by_sdpa else layers, "decode": layers * (NEW_TOKENS - 1)}


def test_a_prompt_in_two_parts_on_a_dynamic_cache(calls):
    """The second part has more keys than queries: the last query sees the last key."""
    from model.load_model import hf_forward

    ids = prompt(12)
    ours, eager = (make_model("llama", name) for name in (hf_attention.NAME, "eager"))
    _, cache = hf_forward(ours, ids[:, :7])
    logits, _ = hf_forward(ours, ids[:, 7:], cache)
    expected, _ = hf_forward(eager, ids)
    assert torch.allclose(logits, expected, atol=1e-4)
    assert calls["flash"] == 2 * ours.config.num_hidden_layers


def test_gradients_flow_through_the_flash_kernel(calls):
    ids = prompt(9)
    gradients = []
    for name in (hf_attention.NAME, "eager"):
        model = make_model("qwen2", name).requires_grad_(True)
        model(ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss.backward()
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    assert calls["flash"] == 2 and torch.allclose(*gradients, atol=1e-4)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("S, written", [(1, 6), (4, 4)])
def test_sdpa_fallback_sees_what_the_kernels_see(window, S, written, monkeypatch, calls):
    """A static cache of 9 positions, 6 or 4 of them written; NaN behind shows that nobody looks there."""
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, 2
    q = torch.randn(1, 4, S, 16, device=DEVICE)
    k, v = torch.randn(2, 1, 2, 9, 16, device=DEVICE)
    lengths = torch.full((1, 1, 1, 1), written, dtype=torch.int32, device=DEVICE)
    ours, _ = hf_attention.attention_forward(module, q, k, v, lengths, sliding_window=window)
    assert sum(calls.values()) == 1
    monkeypatch.setattr(hf_attention, "_is_supported", lambda *args: False)
    fallback, _ = hf_attention.attention_forward(module, q, k, v, lengths, sliding_window=window)
    assert torch.allclose(ours, fallback, atol=1e-5)
    k[:, :, written:], v[:, :, written:] = float("nan"), float("nan")
    monkeypatch.undo()
    unread, _ = hf_attention.attention_forward(module, q, k, v, lengths, sliding_window=window)
    assert torch.equal(ours, unread)


def test_dropout_and_float64_go_to_sdpa(calls):
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups, module.training = True, 1, True
    q, k, v = torch.randn(3, 1, 2, 5, 16, dtype=torch.float64, device=DEVICE)
    out, _ = hf_attention.attention_forward(module, q, k, v, None)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.allclose(out.transpose(1, 2), expected)
    hf_attention.attention_forward(module, q.float(), k.float(), v.float(), None, dropout=0.5)
    assert calls == {"flash": 0, "decode": 0}


def plain_module(groups):
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, groups
    return module


@pytest.mark.parametrize("trained", ["q", "k", "v"])
def test_one_query_with_gradients_takes_the_kernel_that_has_them(trained, calls):
    """Whichever of the three asks: a frozen model with a trained prefix has gradients in its keys and values alone."""
    tensors = {"q": torch.randn(1, 4, 1, 16), "k": torch.randn(1, 2, 5, 16), "v": torch.randn(1, 2, 5, 16)}
    tensors = {name: x.to(DEVICE).requires_grad_(name == trained) for name, x in tensors.items()}
    gradients = []
    for forward in (
        lambda: hf_attention.attention_forward(plain_module(2), *tensors.values(), None)[0].transpose(1, 2),
        lambda: torch.nn.functional.scaled_dot_product_attention(*tensors.values(), enable_gqa=True),
    ):
        gradients.append(torch.autograd.grad(forward().square().sum(), tensors[trained])[0])
    assert torch.allclose(*gradients, atol=1e-5) and calls == {"flash": 1, "decode": 0}


@pytest.mark.parametrize("S, kernel", [(1, "decode"), (5, "flash")])
def test_a_last_dimension_that_is_not_contiguous_reaches_the_kernel(S, kernel, calls):
    """Not SDPA: for one query of this layout, on a GPU, it ends with "query is not correctly aligned (strideM)"."""
    q, k, v = (torch.randn(1, H, 16, n, device=DEVICE).mT for H, n in ((4, S), (2, 5), (2, 5)))
    assert k.stride(-1) != 1 and v.stride(-1) != 1
    out, _ = hf_attention.attention_forward(plain_module(2), q, k, v, None)
    assert calls == {"flash": 0, "decode": 0, kernel: 1}
    expected, _ = hf_attention.attention_forward(plain_module(2), *(x.contiguous() for x in (q, k, v)), None)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("extra", ["softcap", "s_aux"])
def test_another_softmax_is_refused_not_left_out(extra):
    q = torch.randn(1, 2, 3, 16, device=DEVICE)
    with pytest.raises(ValueError, match=f"does not support this model's {extra}: use 'eager'"):
        hf_attention.attention_forward(plain_module(1), q, q, q, None, **{extra: torch.ones(2)})
