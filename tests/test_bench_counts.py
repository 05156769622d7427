"""Byte and operation counts against sums done by hand."""

from types import SimpleNamespace

import pytest

from benchmarks import counts

PHI3_MINI = SimpleNamespace(
    hidden_size=3072, intermediate_size=8192, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32,
    vocab_size=32064, tie_word_embeddings=False, sliding_window=None,
)  # fmt: skip


def test_decode_attention_bytes_of_one_phi3_layer():
    q_and_out = 2 * 32 * 96 * 2
    assert counts.attention_decode_bytes(1, 32, 32, 4096, 96, itemsize=2) == 50_331_648 + q_and_out


def test_decode_attention_bytes_count_each_kv_head_once():
    mha = counts.attention_decode_bytes(2, 32, 32, 1000, 128, itemsize=2)
    gqa = counts.attention_decode_bytes(2, 32, 8, 1000, 128, itemsize=2)
    assert mha - gqa == 2 * 2 * 24 * 1000 * 128 * 2


def test_attention_flops():
    full = counts.attention_flops(2, 32, 2048, 2048, 128, causal=False)
    assert full == 4 * 2 * 32 * 2048 * 2048 * 128
    assert counts.attention_flops(2, 32, 2048, 2048, 128, causal=True) == full / 2
    assert counts.attention_flops(2, 32, 2048, 2048, 128, causal=True, backward=True) == full / 2 * 2.5


def test_phi3_mini_weights_are_7_64_gb():
    assert counts.resident_bytes(PHI3_MINI) == pytest.approx(7.642e9, rel=1e-3)
    assert counts.weight_bytes(PHI3_MINI).qkv == 32 * 9216 * 3072 * 2
    assert counts.resident_bytes(PHI3_MINI, itemsize=4) == 2 * counts.resident_bytes(PHI3_MINI)


def test_tied_embeddings_are_resident_once_and_still_read_by_the_head():
    tied = SimpleNamespace(**{**vars(PHI3_MINI), "tie_word_embeddings": True})
    table = 32064 * 3072 * 2
    assert counts.resident_bytes(PHI3_MINI) - counts.resident_bytes(tied) == table
    assert counts.decode_step_bytes(tied, 1) == counts.decode_step_bytes(PHI3_MINI, 1)


def test_decode_step_reads_weights_and_the_keys_in_view():
    weights = 7.445e9
    assert counts.kv_bytes_per_position(PHI3_MINI) == 393_216
    assert counts.decode_step_bytes(PHI3_MINI, 128) == pytest.approx(weights + 128 * 393_216, rel=1e-4)
    windowed = SimpleNamespace(**{**vars(PHI3_MINI), "sliding_window": 2047})
    assert counts.decode_step_bytes(windowed, 4096) == counts.decode_step_bytes(windowed, 2047)
    difference = counts.decode_step_bytes(PHI3_MINI, 8, batch=3) - counts.decode_step_bytes(PHI3_MINI, 8)
    assert difference == 2 * 8 * 393_216


def test_rates_are_decimal():
    assert counts.gb_per_s(4_660_000_000, 1.0) == pytest.approx(4660)
    assert counts.floor_ms(7_445_000_000, 4660) == pytest.approx(1.598, abs=1e-3)
    assert counts.tflop_per_s(10**12, 2.0) == pytest.approx(500)
