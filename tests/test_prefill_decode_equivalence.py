"""Prefill of a sequence equals decoding it token by token, each after its cache write: two kernels, one meaning.

A prefill and a decode of one family can share a fault, so both are also held against float64 here.
"""

import pytest
import torch

from kernels.decode_attention_wrapper import decode_attention
from kernels.flash_attention_wrapper import flash_attention
from kv_cache.kv_layout import update_kv_cache
from tests.oracles import assert_close_to_reference, attention_reference64, sdpa_explicit

HEADS, DIM = 16, 32


def prefill_and_decode(Hq, Hkv, T, device, dtype=torch.float32, window=None):
    q = torch.randn(1, Hq, T, DIM, device=device, dtype=dtype)
    k, v = torch.randn(2, 1, Hkv, T, DIM, device=device, dtype=dtype)
    caches = torch.full((2, 1, Hkv, T + 3, DIM), float("nan"), device=device, dtype=dtype)
    steps = []
    for t in range(T):
        update_kv_cache(*caches, k[:, :, t : t + 1], v[:, :, t : t + 1], t)
        steps.append(decode_attention(q[:, :, t], *caches, t + 1, window=window))
    prefill = flash_attention(q, k, v, causal=True, window=window)
    decoded = torch.stack(steps, dim=2)
    reference = attention_reference64(q, k, v, window=window)
    native = sdpa_explicit(q, k, v, window=window)
    assert_close_to_reference(prefill, reference, native, what="prefill")
    assert_close_to_reference(decoded, reference, native, what="decode")
    return prefill, decoded


@pytest.mark.parametrize("ratio", [1, 2, 4, 8, 16])
def test_every_head_ratio_at_a_block_aligned_length(ratio, device):
    prefill, decoded = prefill_and_decode(HEADS, HEADS // ratio, 64, device)
    assert torch.allclose(prefill, decoded, atol=2e-6)


@pytest.mark.parametrize("T", [1, 31, 33, 63, 65, 127, 257])
def test_every_length_at_one_ratio(T, device):
    prefill, decoded = prefill_and_decode(4, 1, T, device)
    assert torch.allclose(prefill, decoded, atol=2e-6)


@pytest.mark.parametrize("window", [1, 20, 64])
def test_the_window_has_the_same_edge(window, device):
    prefill, decoded = prefill_and_decode(4, 2, 70, device, window=window)
    assert torch.allclose(prefill, decoded, atol=2e-6)


def test_half_precision(device):
    prefill_and_decode(4, 2, 65, device, dtype=torch.float16)
