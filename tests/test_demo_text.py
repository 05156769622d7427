"""The demo checkpoint: sensible text, and 64 tokens for each of three prompts equal to Hugging Face's."""

import pytest
import torch

import config
import kernels
import run_baseline
from kernels import decode_attention_wrapper, flash_attention_wrapper
from model.generate import generate
from model.load_model import load_model, load_tokenizer
from model.phi3_decode import hf_generate
from tests.tiny import DEVICE

PROMPTS = (
    "Explain in simple words why the sky is blue.",
    "Write a short poem about the sea.",
    "List three things that a cat likes.",
)


@pytest.fixture(scope="module")
def demo():
    if not (config.ROOT / "checkpoints/demo/config.json").exists():
        pytest.skip("no demo checkpoint (make setup builds it)")
    path = "checkpoints/demo"
    return load_model(path, dtype=torch.float32, device=DEVICE), load_tokenizer(path)


@pytest.fixture
def one_tile(monkeypatch):
    """The interpreter's time goes by tiles, not by their size: one for the whole prompt, one for the whole cache."""
    if kernels.INTERPRETED:
        decode, prefill = decode_attention_wrapper, flash_attention_wrapper
        launch, tiles = decode.choose_launch, prefill.choose_tiles
        monkeypatch.setattr(decode, "choose_launch", lambda *a, **kw: launch(*a, **kw)._replace(block_t=128))
        monkeypatch.setattr(prefill, "choose_tiles", lambda *a, **kw: tiles(*a, **kw)._replace(block_m=64, block_n=64))


@pytest.mark.parametrize("text", PROMPTS)
def test_64_tokens_equal_hugging_faces(demo, text, one_tile):
    model, tokenizer = demo
    ids = run_baseline.encode(tokenizer, text).to(DEVICE)
    out = generate(model, ids, 64)
    expected, _ = hf_generate(model, ids, out.shape[1])
    assert torch.equal(out, expected)
    words = tokenizer.decode(out[0], skip_special_tokens=True).split()
    assert len(words) > 12 and all(word.isascii() for word in words)


def test_prompt_is_tokenised_inside_the_chat_template(demo):
    _, tokenizer = demo
    text = tokenizer.decode(run_baseline.encode(tokenizer, "Hello there")[0])
    assert "Hello there" in text and text.count("<|im_start|>") >= 2 and text.endswith("assistant\n")


def test_streaming_never_splits_a_character(demo, capsys):
    """A token may end in the middle of a UTF-8 character; what is printed is whole characters, the same text in all."""
    from transformers import TextStreamer

    _, tokenizer = demo
    text = "Zażółć gęślą jaźń: 東京 🙂 naïve"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) > len(text.split()), "several tokens per word"
    printed = []
    streamer = TextStreamer(tokenizer, skip_special_tokens=True)
    streamer.on_finalized_text = lambda piece, stream_end=False: printed.append(piece)
    for token in ids:
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert "".join(printed) == text
    assert not any("\ufffd" in piece for piece in printed)
