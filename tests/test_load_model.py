"""model/load_model.py: presets, checkpoints of old and new transformers, the differences between versions, and errors.

The checkpoints are written here, as json and safetensors, so that each layout is read by the version under test.
"""

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import config as settings
from benchmarks import counts
from model import load_model as loading
from model.inspect_attention import decode_weight_bytes
from model.load_model import (
    HEAD_DIM_SINCE,
    HF_APPLIES_WINDOW,
    PARTIAL_ROTARY_SINCE,
    PRESETS,
    VERSION,
    cache_layers,
    check_weights_are_here,
    eos_token_ids,
    head_dim,
    hf_forward,
    last_logits_kwargs,
    layer_output,
    load_config,
    load_model,
    load_tokenizer,
    num_parameters,
    rope_settings,
)

CPU = {"dtype": "float32", "device": "cpu"}

# A GQA model with 2 KV heads for 4 query heads; the fields that both layouts of config.json share.
FIELDS = {
    "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "vocab_size": 96, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "original_max_position_embeddings": 16, "rms_norm_eps": 1e-5,
    "initializer_range": 0.25, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 94, "pad_token_id": 0,
    "hidden_act": "silu", "sliding_window": None,
}  # fmt: skip
SHORT, LONG = [1.0 + i / 10 for i in range(8)], [2.0 + i for i in range(8)]


def write_config(folder, **fields):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**FIELDS, "rope_theta": 10000.0, **fields}))
    return folder


def write_checkpoint(folder, *, dtype=torch.float32, shards=1, **fields):
    """A checkpoint with random weights, its files written without transformers; returns its folder."""
    write_config(folder, **fields)
    c = SimpleNamespace(**{**FIELDS, **fields})
    dim = getattr(c, "head_dim", c.hidden_size // c.num_attention_heads)
    weights = {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "lm_head.weight": (c.vocab_size, c.hidden_size),
        "model.norm.weight": (c.hidden_size,),
    }
    if c.tie_word_embeddings:
        del weights["lm_head.weight"]
    for layer in range(c.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        heads = c.num_attention_heads + 2 * c.num_key_value_heads
        weights |= {
            prefix + "self_attn.qkv_proj.weight": (heads * dim, c.hidden_size),
            prefix + "self_attn.o_proj.weight": (c.hidden_size, c.num_attention_heads * dim),
            prefix + "mlp.gate_up_proj.weight": (2 * c.intermediate_size, c.hidden_size),
            prefix + "mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
            prefix + "input_layernorm.weight": (c.hidden_size,),
            prefix + "post_attention_layernorm.weight": (c.hidden_size,),
        }
    weights = {name: (torch.randn(shape) * 0.25).to(dtype) for name, shape in weights.items()}
    names = list(weights)
    index = {}
    for shard in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    if shards > 1:
        total = sum(w.numel() * w.itemsize for w in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


# --- Presets ---------------------------------------------------------------------------------------------------------


def presets_here():
    return [name for name in PRESETS if name != "phi-4-mini" or VERSION >= PARTIAL_ROTARY_SINCE]


# Sizes of the published 16-bit weight files (metadata.total_size of each model.safetensors.index.json).
PUBLISHED_BYTES = {
    "phi-3-mini-4k": 7_642_159_104,
    "phi-3-mini-128k": 7_642_159_104,
    "phi-3-medium-4k": 27_920_476_160,
    "phi-4-mini": 7_672_043_520,
}


@pytest.mark.parametrize("name", [name for name in presets_here() if name != "tiny"])
def test_presets_have_the_published_size(name):
    assert num_parameters(load_config(f"random:{name}")) * 2 == PUBLISHED_BYTES[name]


@pytest.mark.parametrize("name", presets_here())
def test_longrope_factor_lists_fit_the_rotary_part(name):
    c = load_config(f"random:{name}")
    rope = rope_settings(c)
    assert (rope["type"] == "longrope") == (name in ("phi-3-mini-128k", "phi-4-mini"))
    if rope["type"] == "longrope":
        rotary = int(head_dim(c) * rope["partial_rotary_factor"])
        assert len(rope["short_factor"]) == len(rope["long_factor"]) == rotary // 2
        assert rope["original_max_position_embeddings"] == 4096


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_random_model_is_seeded_and_ready(dtype, device, monkeypatch):
    before = torch.random.get_rng_state()
    first, second = (load_model("random:tiny", dtype=dtype, device=device) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before), "loading must not disturb the caller's random numbers"
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert a.dtype == getattr(torch, dtype) and a.device.type == device.type and not a.requires_grad, name
        assert torch.equal(a, b), name
    assert not first.training
    assert sum(p.numel() for p in first.parameters()) == num_parameters(first.config)
    monkeypatch.setattr(settings, "SEED", 1)
    other = load_model("random:tiny", dtype=dtype, device=device)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_presets_stay_as_they_are():
    before = json.dumps(PRESETS)
    for name in presets_here():
        load_config(f"random:{name}")
    assert json.dumps(PRESETS) == before


def test_byte_tokenizer_round_trips():
    tokenizer = load_tokenizer("random:tiny")
    text = "Why?\n  naïve ☃"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert ids.tolist() == [list(text.encode())]
    assert tokenizer.decode(ids[0]) == text
    assert tokenizer.decode([104, 300, 105]) == "hi"


# --- Rotary settings -------------------------------------------------------------------------------------------------


def layouts(theta, kind, partial=1.0, factors=None):
    """The same rotary settings as transformers 4 and as transformers 5 write them."""
    old = {"rope_theta": theta, "rope_scaling": None}
    new = {"rope_type": kind, "rope_theta": theta, "partial_rotary_factor": partial}
    if kind == "longrope":
        short, long = factors
        old["rope_scaling"] = {"type": "longrope", "short_factor": short, "long_factor": long}
        new |= {"short_factor": short, "long_factor": long, "original_max_position_embeddings": 16}
    if partial != 1.0:
        old["partial_rotary_factor"] = partial
    return {"old": old, "new": {"rope_parameters": new}}


CASES = {
    "default": layouts(250000.0, "default"),
    "longrope": layouts(10000.0, "longrope", factors=(SHORT, LONG)),
    "partial": layouts(10000.0, "longrope", 0.75, (SHORT[:6], LONG[:6])),
}


@pytest.mark.parametrize("layout", ["old", "new"])
@pytest.mark.parametrize("case", CASES)
def test_rope_settings_of_both_layouts(tmp_path, case, layout):
    fields = {**FIELDS, **CASES[case][layout]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    if case == "partial" and VERSION < PARTIAL_ROTARY_SINCE:
        with pytest.raises(ValueError, match=r"needs transformers >= 4\.49"):
            load_config(tmp_path)
        return
    rope = rope_settings(load_config(tmp_path))
    expected = CASES[case]["new"]["rope_parameters"]
    assert rope["type"] == expected["rope_type"] and rope["theta"] == expected["rope_theta"]
    assert rope["partial_rotary_factor"] == expected["partial_rotary_factor"]
    assert rope["short_factor"] == expected.get("short_factor") and rope["long_factor"] == expected.get("long_factor")
    assert rope["original_max_position_embeddings"] == (16 if case != "default" else None)
    assert rope["max_position_embeddings"] == 128


def test_a_checkpoint_from_before_longrope_had_its_name(tmp_path):
    scaling = {"type": "su", "short_factor": SHORT, "long_factor": LONG}
    rope = rope_settings(load_config(write_config(tmp_path, rope_scaling=scaling)))
    assert (rope["type"], rope["short_factor"], rope["long_factor"]) == ("longrope", SHORT, LONG)


@pytest.mark.parametrize("layout", ["old", "new"])
def test_rope_base_reaches_the_model(tmp_path, layout):
    """250000^(-2/16); a default base of 10000 would give 0.31623."""
    write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**FIELDS, **CASES["default"][layout]}))
    model = load_model(tmp_path, **CPU)
    rotary = next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))
    inv_freq = rotary.inv_freq
    if inv_freq is None:  # 4.44 fills it on the first forward
        hf_forward(model, torch.tensor([[1, 2]]))
        inv_freq = rotary.inv_freq
    assert inv_freq[1].item() == pytest.approx(0.21147, abs=1e-5)


def test_no_silent_rope_base():
    with pytest.raises(ValueError, match="rope_theta"):
        rope_settings(SimpleNamespace(max_position_embeddings=128))


def test_early_names_of_longrope():
    scaling = {"type": "su", "short_factor": SHORT, "long_factor": LONG}
    c = SimpleNamespace(
        rope_theta=1e4, rope_scaling=scaling, max_position_embeddings=128, original_max_position_embeddings=16
    )
    assert rope_settings(c)["type"] == "longrope"
    scaling["type"] = "linear"
    with pytest.raises(ValueError, match="'linear'"):
        rope_settings(c)


# --- Checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_checkpoint_weights_and_dtype(tmp_path, shards, stored, tied):
    """Every weight arrives, in the dtype asked for and not the stored one, whatever this version's own default is."""
    write_checkpoint(tmp_path, dtype=stored, shards=shards, tie_word_embeddings=tied)
    model = load_model(tmp_path, **CPU)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) == tied
    stored_weights = {}
    for file in tmp_path.glob("*.safetensors"):
        stored_weights |= load_file(file)
    loaded = model.state_dict()
    for name, weight in stored_weights.items():
        assert torch.equal(loaded[name], weight.float()), name
    assert load_model(tmp_path, dtype=torch.bfloat16, device="cpu").lm_head.weight.dtype == torch.bfloat16


def test_head_dim_of_its_own(tmp_path):
    write_checkpoint(tmp_path, head_dim=24)
    if VERSION < HEAD_DIM_SINCE:
        with pytest.raises(ValueError, match=r"head_dim 24, .* needs transformers >= 4\.48"):
            load_model(tmp_path, **CPU)
        return
    model = load_model(tmp_path, **CPU)
    assert head_dim(model.config) == 24
    logits, cache = hf_forward(model, torch.tensor([[1, 2, 3]]))
    assert cache_layers(cache)[0][0].shape == (1, 2, 3, 24) and logits.isfinite().all()
    assert num_parameters(model.config) == sum(p.numel() for p in model.parameters())


def test_remote_code_checkpoint(tmp_path):
    """An old modeling_phi3.py generates the built-in class's tokens, one position per step; off unless asked for."""
    folder = write_checkpoint(tmp_path / "remote-phi3")
    fields = json.loads((folder / "config.json").read_text())
    fields["auto_map"] = {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    (folder / "config.json").write_text(json.dumps(fields))
    shutil.copy(Path(__file__).parent / "remote_code/modeling_phi3.py", folder)

    built_in = load_model(folder, **CPU)
    assert type(built_in).__module__.startswith("transformers.")
    remote = load_model(folder, **CPU, trust_remote_code=True)
    assert type(remote).__module__.startswith("transformers_modules.")

    for name, expected in built_in.named_parameters():
        assert torch.equal(remote.get_parameter(name), expected), f"{name} is not the file's"

    widths = []
    remote.model.layers[0].register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1]))
    prompt = torch.randint(3, 90, (1, 7))
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    assert remote.generate(prompt, **options).tolist() == built_in.generate(prompt, **options).tolist()
    assert widths == [7] + [1] * 8, "the old code must find its cache under its old name"
    _, cache = hf_forward(remote, prompt)
    assert [tuple(k.shape) for k, v in cache_layers(cache)] == [(1, 2, 7, 16)] * 2


def test_remote_code_that_cannot_run(tmp_path):
    write_checkpoint(tmp_path, auto_map={"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"})
    (tmp_path / "modeling_phi3.py").write_text("from transformers.modeling_utils import gone_since_version_4\n")
    with pytest.raises(ValueError, match="leave trust_remote_code off") as error:
        load_model(tmp_path, **CPU, trust_remote_code=True)
    assert "\n" not in str(error.value)


# --- Calls whose names moved -----------------------------------------------------------------------------------------


def test_hf_forward_with_a_cache_equals_no_cache():
    model = load_model("random:tiny", **CPU)
    ids = torch.randint(3, 500, (2, 9))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    cache = None
    for start, end in ((0, 5), (5, 6), (6, 7), (7, 9)):
        logits, cache = hf_forward(model, ids[:, start:end], cache)
        torch.testing.assert_close(logits, expected[:, end - 1], atol=2e-4, rtol=0)
        layers = cache_layers(cache)
        assert len(layers) == 3
        assert all(k.shape == v.shape == (2, 2, end, 16) for k, v in layers)


def test_hf_cache_keeps_every_position_behind_a_window(tmp_path):
    """The newer default cache of a model with a window forgets what lies before it; this one must not."""
    model = load_model(write_checkpoint(tmp_path, sliding_window=4), **CPU)
    ids = torch.randint(3, 90, (1, 12))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, -1]
    _, cache = hf_forward(model, ids[:, :11])
    logits, cache = hf_forward(model, ids[:, 11:], cache)
    assert cache_layers(cache)[0][0].shape[2] == 12
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("layers", [1, 2])
def test_what_hf_itself_does_with_the_window(tmp_path, layers):
    """HF_APPLIES_WINDOW says whether the first token can move the last logits when the window has passed it."""
    model = load_model(write_checkpoint(tmp_path, sliding_window=7, num_hidden_layers=layers), **CPU)
    ids = torch.randint(3, 90, (1, 20))
    changed = ids.clone()
    changed[0, 0] = 91
    moved = not torch.equal(hf_forward(model, ids)[0], hf_forward(model, changed)[0])
    assert moved != HF_APPLIES_WINDOW


def test_legacy_tuple_cache():
    k, v = torch.zeros(1, 2, 3, 4), torch.ones(1, 2, 3, 4)
    assert cache_layers(((k, v),))[0] == (k, v)


def test_last_logits_keyword_spares_the_lm_head():
    model = load_model("random:tiny", **CPU)
    rows = []
    model.lm_head.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[1]))
    hf_forward(model, torch.randint(3, 500, (1, 64)))
    assert rows == ([1] if last_logits_kwargs(model) else [64])
    assert bool(last_logits_kwargs(model)) == (VERSION >= (4, 45))


def test_layer_output_keeps_the_batch():
    model = load_model("random:tiny", **CPU)
    shapes = []
    model.model.layers[1].register_forward_hook(lambda module, args, out: shapes.append(layer_output(out).shape))
    hf_forward(model, torch.randint(3, 500, (2, 5)))
    assert shapes == [(2, 5, 64)]


def test_no_deprecated_names_are_used(tmp_path, recwarn):
    folder = write_checkpoint(tmp_path)
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        model = load_model(folder, **CPU)
        _, cache = hf_forward(model, torch.tensor([[5, 6]]))
        cache_layers(hf_forward(model, torch.tensor([[7]]), cache)[1])
    finally:
        logger.removeHandler(handler)
    texts = messages + [str(warning.message) for warning in recwarn]
    assert not [text for text in texts if "deprecat" in text.lower()]


@pytest.mark.parametrize(
    ("in_generation_config", "in_config", "expected"),
    [([94, 20], 94, (94, 20)), (7, 94, (7,)), (None, 94, (94,)), (None, [3, 4], (3, 4)), (None, None, ())],
)
def test_eos_token_ids(in_generation_config, in_config, expected):
    model = SimpleNamespace(
        config=SimpleNamespace(eos_token_id=in_config),
        generation_config=SimpleNamespace(eos_token_id=in_generation_config),
    )
    assert eos_token_ids(model) == expected
    assert eos_token_ids(model, SimpleNamespace(eos_token_id=[11, 12])) == (11, 12)
    if in_generation_config is None:
        assert eos_token_ids(model.config) == expected


def test_eos_ids_come_from_the_generation_config(tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [94, 20]}))
    assert eos_token_ids(load_model(tmp_path, **CPU)) == (94, 20)


# --- Errors: one line that names the value and the remedy ------------------------------------------------------------


def not_a_checkpoint(folder):
    folder.mkdir()


def broken_json(folder):
    write_config(folder)
    (folder / "config.json").write_text("{")


def another_architecture(folder):
    write_config(folder, model_type="llama", architectures=["LlamaForCausalLM"])


def no_weights(folder):
    write_config(folder)


def missing_shard(folder):
    write_checkpoint(folder, shards=3)
    next(folder.glob("model-00002*")).unlink()


def missing_weight(folder):
    """transformers itself would fill the gap with random numbers and a warning."""
    write_checkpoint(folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def other_sizes(folder):
    write_checkpoint(folder, intermediate_size=112)
    write_config(folder)


def cut_off(folder):
    write_checkpoint(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def quantised(folder):
    write_checkpoint(folder, quantization_config={"quant_method": "awq", "bits": 4})


def bad_factor_list(folder):
    scaling = {"type": "longrope", "short_factor": SHORT[:3], "long_factor": LONG}
    write_checkpoint(folder, rope_scaling=scaling)


def json_list(folder):
    folder.mkdir()
    (folder / "config.json").write_text("[]")


def index_without_a_map(folder):
    write_checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text("{}")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "does not exist"),
        (json_list, "no JSON object but a list"),
        (index_without_a_map, "is no index of weight files"),
        (not_a_checkpoint, "no config.json"),
        (broken_json, "not JSON"),
        (another_architecture, "'llama' model (LlamaForCausalLM)"),
        (no_weights, "no weights"),
        (missing_shard, "lacks 1 of 3 weight files: model-00002-of-00003.safetensors"),
        (missing_weight, "lacks 1 weights: model.layers.1.mlp.down_proj.weight"),
        (other_sizes, "cannot be loaded"),
        (cut_off, "cannot be loaded"),
        (quantised, "is quantised (awq)"),
        (bad_factor_list, "cannot read its config"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_bad_checkpoints(tmp_path, make, message):
    folder = tmp_path / "model"
    make(folder)
    with pytest.raises(ValueError) as error:
        load_model(folder, **CPU)
    assert message in str(error.value) and str(folder) in str(error.value) and "\n" not in str(error.value)


def test_unknown_preset_lists_the_known():
    with pytest.raises(ValueError, match=r"random:phi-3-mini-4k, .*random:tiny"):
        load_model("random:phi-5")


def test_missing_demo_says_how_to_build_it(monkeypatch, tmp_path):
    monkeypatch.setattr(settings, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"python model/demo_checkpoint\.py"):
        load_model("checkpoints/demo", **CPU)


def test_no_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer"):
        load_tokenizer(write_config(tmp_path / "model"))


def test_broken_tokenizer(tmp_path):
    folder = write_config(tmp_path / "model")
    (folder / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(ValueError, match="its tokenizer cannot be read") as error:
        load_tokenizer(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", ["float64", torch.int8, "fp16"])
def test_unsupported_dtype(dtype):
    with pytest.raises(ValueError, match="dtype must be one of float16, bfloat16, float32"):
        load_model("random:tiny", dtype=dtype, device="cpu")


def test_weights_that_do_not_fit(monkeypatch):
    """Phi-3 Mini on a card with 6.9 GB free: refused before anything is allocated, with both figures."""
    monkeypatch.setattr(loading, "free_memory", lambda device: 6_900_000_000)
    monkeypatch.setattr(loading, "_random_model", None)
    with pytest.raises(ValueError, match=r"7\.64 GB in float16, but cpu has 6\.90 GB free: load_model\(device_map"):
        load_model("random:phi-3-mini-4k", dtype="float16", device="cpu")
    with pytest.raises(ValueError, match=r"15\.28 GB in float32, .* a 16-bit dtype halves that"):
        load_model("random:phi-3-mini-4k", **CPU)


@pytest.mark.parametrize("preset", ["phi-3-mini-4k", "phi-4-mini"])
def test_a_preset_without_values_has_all_shapes(monkeypatch, preset):
    """Of any size, without memory; step 1 counts bytes on it (Phi-4's embedding is tied: read as the LM head)."""
    if preset == "phi-4-mini" and VERSION < PARTIAL_ROTARY_SINCE:
        pytest.skip("this transformers cannot read Phi-4's config")
    monkeypatch.setattr(loading, "free_memory", lambda device: 0)
    model = load_model(f"random:{preset}", dtype="float16", device="cpu", values=False)
    assert all(parameter.is_meta and parameter.dtype == torch.float16 for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters(model.config)
    row = 0 if preset == "phi-4-mini" else 2 * model.config.hidden_size
    assert decode_weight_bytes(model) == counts.decode_step_bytes(model.config, 0) + row


def test_offloaded_weights_are_refused():
    model = load_model("random:tiny", **CPU)
    check_weights_are_here(model)
    layer = model.model.layers[1].mlp
    layer.down_proj = torch.nn.Linear(1, 1, device="meta")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.down_proj\.weight is offloaded"):
        check_weights_are_here(model)
