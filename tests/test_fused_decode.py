"""The fused decode kernels, each against plain PyTorch in float64 with the error of the same program in its own dtype.

One case: pytest tests/test_fused_decode.py -k "matvec and tail". Launch choices and code generation need no GPU.
"""

import ctypes
import os
import re
import subprocess
import sys

import pytest
import torch

from kernels import fused_decode_wrapper
from kernels.decode_attention_triton import HOLE
from kernels.device import (
    DeviceInfo,
    _cuda_driver,
    device_info,
    pdl_supported,
    prefer_carveout,
    pretend_device,
)
from kernels.fused_decode_wrapper import (
    AttentionConfig,
    MatvecConfig,
    Prefetch,
    attention_config,
    attention_workspace,
    embed,
    greedy_choice,
    matvec,
    matvec_config,
    rope_attention,
)
from model.decode_attention_ref import attention_ref
from tests.conftest import ROOT
from tests.oracles import assert_close_to_reference

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
EPS = 1e-5


def rms_norm(x, gain):
    return x * torch.rsqrt(x.pow(2).mean() + EPS) * gain


def layer_part(x, weight, *, gain=None, gated=False, residual=None):
    """What matvec computes, in x's dtype."""
    if gain is not None:
        x = rms_norm(x, gain)
    y = weight @ x
    if gated:
        gate, up = y.chunk(2)
        y = torch.nn.functional.silu(gate) * up
    return y if residual is None else residual + y


MATVEC_CASES = {
    "plain": dict(N=24, K=64),
    "norm": dict(N=24, K=64, norm=True),
    "norm-gated": dict(N=24, K=64, norm=True, gated=True),
    "residual": dict(N=24, K=128, residual=True),
    "one-row": dict(N=1, K=48, norm=True),
    "tail-of-rows-and-columns": dict(N=19, K=200, norm=True, gated=True, config=MatvecConfig(4, 64, 4)),
    "column-tail-smaller-than-a-vector": dict(N=37, K=67, config=MatvecConfig(2, 32, 4)),
    "loop": dict(N=24, K=64, norm=True, gated=True, config=MatvecConfig(2, 64, 4, 5)),
    "loop-tail": dict(N=23, K=72, residual=True, config=MatvecConfig(4, 32, 4, 4)),
    "phi-3-mini-width": dict(N=6, K=3072, norm=True),
    "as-many-sums-as-warps": dict(N=10, K=72, norm=True, config=MatvecConfig(2, 128, 16, 3)),
    "more-warps-than-are-added-at-once": dict(N=6, K=70, residual=True, config=MatvecConfig(2, 64, 32)),
    "more-sums-than-are-added-at-once": dict(N=5, K=72, norm=True, gated=True, config=MatvecConfig(2, 128, 16)),
    "fewer-columns-than-warps": dict(N=5, K=2, norm=True, gated=True),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", MATVEC_CASES)
def test_matvec_matches_reference(case, dtype, device):
    options = dict(MATVEC_CASES[case])
    N, K, norm, gated, residual = (options.get(name, 0) for name in ("N", "K", "norm", "gated", "residual"))
    x = torch.randn(K, dtype=dtype, device=device)
    weight = torch.randn(2 * N if gated else N, K, dtype=dtype, device=device) * K**-0.5
    gain = torch.rand(K, dtype=dtype, device=device) + 0.5 if norm else None
    start = torch.randn(N, dtype=dtype, device=device)
    inputs = dict(gain=gain, residual=start if residual else None)
    native = layer_part(x, weight, gated=bool(gated), **inputs)
    inputs = {name: None if value is None else value.double() for name, value in inputs.items()}
    reference = layer_part(x.double(), weight.double(), gated=bool(gated), **inputs)
    # Guard bands: an output in the middle of a larger buffer.
    buffer = torch.full((N + 16,), 7.0, dtype=dtype, device=device)
    out = buffer[8 : 8 + N]
    out.copy_(start if residual else torch.full_like(start, float("nan")))
    matvec(x, weight, out, gain=gain, eps=EPS, gated=bool(gated), residual=bool(residual), config=options.get("config"))
    assert_close_to_reference(out, reference, native, what=case)
    assert (buffer[:8] == 7).all() and (buffer[8 + N :] == 7).all()


def test_norm_does_not_overflow_in_half_precision(device):
    """Squares of 300 exceed float16's range; the norm is taken in float32."""
    x = torch.full((64,), 300.0, dtype=torch.float16, device=device)
    weight = torch.eye(64, dtype=torch.float16, device=device)
    out = matvec(x, weight, torch.empty_like(x), gain=torch.ones_like(x), eps=EPS)
    assert torch.equal(out, torch.ones_like(x))


def rotate(x, cos, sin):
    """RoPE of x [..., D] by cos, sin [rotary / 2]: the half-split convention, the dims behind untouched."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def attention_step(qkv, cos, sin, k_cache, v_cache, position, Hq, window=None):
    """What rope_attention computes, in qkv's dtype: (out [Hq D], new k [Hkv, D], new v [Hkv, D])."""
    Hkv, _, D = k_cache.shape
    q, k, v = (part.view(-1, D) for part in qkv.split([Hq * D, Hkv * D, Hkv * D]))
    cos, sin = cos[position].to(qkv.dtype), sin[position].to(qkv.dtype)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    keys = torch.cat([k_cache[:, :position], k[:, None]], dim=1)
    values = torch.cat([v_cache[:, :position], v[:, None]], dim=1)
    out = attention_ref(q[None, :, None], keys[None], values[None], window=window)
    return out.reshape(-1), k, v


def attention_inputs(Hq, Hkv, D, T_max, position, dtype, device, rotary=None):
    """(qkv, cos, sin, lengths, k_cache, v_cache): the caches are NaN from ``position`` on."""
    qkv = torch.randn((Hq + 2 * Hkv) * D, dtype=dtype, device=device)
    angles = torch.rand(T_max, (rotary or D) // 2, device=device) * 6.28
    lengths = torch.tensor([position], dtype=torch.int32, device=device)
    k_cache, v_cache = (torch.full((Hkv, T_max, D), float("nan"), dtype=dtype, device=device) for _ in range(2))
    k_cache[:, :position].normal_()
    v_cache[:, :position].normal_()
    return qkv, angles.cos(), angles.sin(), lengths, k_cache, v_cache


# (Hq, Hkv, D, position, window, rotary, (splits, block_t, warps)): odd lengths first, tile edges, one split and many,
# warps with keys of their own, warps that share keys.
ATTENTION_CASES = {
    "empty-cache": (2, 2, 16, 0, None, None, (4, 16, 4)),
    "one": (2, 2, 16, 1, None, None, (4, 16, 4)),
    "tile-minus-1": (2, 2, 16, 31, None, None, (4, 32, 2)),
    "tile": (2, 2, 16, 32, None, None, (4, 32, 2)),
    "tile-plus-1": (2, 2, 16, 33, None, None, (4, 32, 2)),
    "warps-without-a-key": (4, 4, 16, 17, None, None, (2, 128, 8)),
    "32-keys-per-warp": (2, 2, 16, 63, None, None, (1, 64, 2)),
    "all-splits": (2, 2, 16, 64, None, None, (4, 16, 4)),
    "two-tiles-per-split": (2, 1, 16, 101, None, None, (2, 32, 2)),
    "three-tiles-or-two": (2, 1, 16, 101, None, None, (3, 16, 1)),
    "two-tiles-or-one": (2, 1, 96, 65, None, None, (3, 16, 1)),
    "window-tiles-in-turn": (2, 1, 16, 101, 90, None, (4, 16, 1)),
    "one-split-many-tiles": (2, 2, 16, 70, None, None, (1, 16, 4)),
    "head-64": (1, 1, 64, 50, None, None, (2, 32, 2)),
    "head-80": (2, 1, 80, 37, None, 32, (4, 32, 8)),
    "head-80-a-warp-per-16-keys": (2, 1, 80, 37, None, 32, (2, 32, 2)),
    "head-96": (2, 2, 96, 37, None, None, (4, 16, 4)),
    "head-96-a-warp-per-32-keys": (2, 2, 96, 77, None, 40, (2, 64, 2)),
    "head-112": (1, 1, 112, 37, None, None, (2, 32, 2)),
    "head-128": (6, 3, 128, 37, None, 96, (2, 64, 4)),
    "head-200": (3, 3, 200, 37, None, None, (2, 32, 2)),
    "head-256": (6, 3, 256, 37, None, None, (2, 64, 8)),
    "gqa-partial-rotary": (6, 2, 16, 45, None, 12, (4, 16, 4)),
    "mqa-5": (5, 1, 16, 20, None, None, (2, 16, 4)),
    "window": (2, 2, 16, 101, 40, None, (4, 16, 4)),
    "window-within-a-tile": (2, 2, 16, 101, 40, None, (2, 64, 4)),
    "window-full": (2, 2, 16, 39, 40, None, (4, 16, 4)),
    "window-plus-1": (2, 2, 16, 40, 40, None, (4, 16, 4)),
    "window-1": (2, 2, 16, 40, 1, None, (4, 16, 4)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ATTENTION_CASES)
def test_rope_attention_matches_reference(case, dtype, device):
    Hq, Hkv, D, position, window, rotary, config = ATTENTION_CASES[case]
    check_rope_attention(case, Hq, Hkv, D, 112, position, window, rotary, AttentionConfig(*config), dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [64, 96, 128, 256])
@pytest.mark.parametrize("T_max, position", [(160, 150), (300, 290)], ids=["short", "long"])
def test_rope_attention_by_its_own_choice_matches_reference(T_max, position, D, dtype, device):
    check_rope_attention("own choice", 6, 3, D, T_max, position, None, None, None, dtype, device)


@pytest.mark.parametrize("position", [17 * 16 + 1, 32 * 16], ids=["18 of 32", "32 of 32"])
def test_more_splits_than_are_merged_at_once(position, device):
    config = AttentionConfig(32, 16, 1)
    check_rope_attention("many splits", 6, 3, 16, 520, position, None, None, config, torch.float32, device)


def check_rope_attention(what, Hq, Hkv, D, T_max, position, window, rotary, config, dtype, device):
    qkv, cos, sin, lengths, k_cache, v_cache = attention_inputs(Hq, Hkv, D, T_max, position, dtype, device, rotary)
    native, _, _ = attention_step(qkv, cos, sin, k_cache, v_cache, position, Hq, window)
    doubles = [t.double() for t in (qkv, cos, sin, k_cache, v_cache)]
    reference, k_new, v_new = attention_step(*doubles, position, Hq, window)
    before = k_cache.clone(), v_cache.clone()
    workspace = attention_workspace(Hq, D, T_max, dtype, device, config)
    out = torch.empty(Hq * D, dtype=dtype, device=device)
    rope_attention(qkv, cos, sin, lengths, k_cache, v_cache, out, workspace, window=window)

    assert_close_to_reference(out, reference, native, what=what)
    torch.testing.assert_close(k_cache[:, position].double(), k_new, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(v_cache[:, position].double(), v_new)
    for cache, old in zip((k_cache, v_cache), before, strict=True):
        cache[:, position] = old[:, position]
        assert torch.equal(cache.nan_to_num(7), old.nan_to_num(7)), "a row of the past or the future was written"
    assert (workspace.partial.view(torch.int32) == HOLE.value).all() and lengths.item() == position


def test_rope_attention_counts_the_window_right(device):
    """K = 0 makes the weights uniform: with V[j] = j the output is the mean visible position (window 7 at 20: 17)."""
    qkv, cos, sin, lengths, k_cache, v_cache = attention_inputs(1, 1, 16, 32, 20, torch.float32, device)
    qkv[:32] = 0
    k_cache[:, :20] = 0
    v_cache[:, :20] = torch.arange(20.0, device=device)[None, :, None]
    qkv[32:] = 20
    workspace = attention_workspace(1, 16, 32, torch.float32, device, AttentionConfig(2, 32, 2))
    out = rope_attention(qkv, cos, sin, lengths, k_cache, v_cache, torch.empty(16, device=device), workspace, window=7)
    torch.testing.assert_close(out, torch.full_like(out, 17.0))


@pytest.mark.parametrize("splits", [1, 4])
def test_an_infinite_new_value_is_infinite_whatever_the_splits(splits, device):
    """Weight 0 in the splits that do not hold the new token is no weight at all: 0 * inf would be NaN."""
    qkv, cos, sin, lengths, k_cache, v_cache = attention_inputs(1, 1, 24, 64, 50, torch.float32, device)
    qkv[2 * 24 + 3] = float("inf")
    workspace = attention_workspace(1, 24, 64, torch.float32, device, AttentionConfig(splits, 16, 1))
    out = rope_attention(qkv, cos, sin, lengths, k_cache, v_cache, torch.empty(24, device=device), workspace)
    assert out[3] == float("inf") and out.isfinite().sum() == 23


@pytest.mark.parametrize("splits", [1, 4])
def test_scores_that_are_all_minus_infinite_give_nan_whatever_the_splits(splits, device):
    qkv, cos, sin, lengths, k_cache, v_cache = attention_inputs(1, 1, 16, 64, 50, torch.float32, device, 2)
    qkv[:16] = 1
    qkv[16:32], qkv[16:18] = float("-inf"), 0  # two dims turn: an infinite one would be NaN then
    k_cache[:], v_cache[:] = float("-inf"), 1
    workspace = attention_workspace(1, 16, 64, torch.float32, device, AttentionConfig(splits, 16, 1))
    out = rope_attention(qkv, cos, sin, lengths, k_cache, v_cache, torch.empty(16, device=device), workspace)
    assert out.isnan().all()


def test_rope_attention_does_not_wait_for_values_that_look_like_holes(device):
    qkv, cos, sin, lengths, k_cache, v_cache = attention_inputs(1, 1, 24, 64, 50, torch.float32, device)
    v_cache.view(torch.int32)[0, (3, 20), 5] = HOLE.value
    qkv.view(torch.int32)[2 * 24 + 7] = HOLE.value
    workspace = attention_workspace(1, 24, 64, torch.float32, device, AttentionConfig(4, 16, 1))
    out = rope_attention(qkv, cos, sin, lengths, k_cache, v_cache, torch.empty(24, device=device), workspace)
    assert out.isnan().nonzero().flatten().tolist() == [5, 7]


def test_rope_attention_reads_the_right_kv_head(device):
    Hq, Hkv, D = 24, 8, 16
    qkv, cos, sin, lengths, k_cache, v_cache = attention_inputs(Hq, Hkv, D, 20, 17, torch.float16, device)
    heads = torch.arange(Hkv, dtype=torch.float16, device=device)
    v_cache[:, :17] = heads[:, None, None]
    qkv[(Hq + Hkv) * D :] = heads.repeat_interleave(D)
    workspace = attention_workspace(Hq, D, 20, torch.float16, device, AttentionConfig(2, 32, 2))
    out = rope_attention(
        qkv, cos, sin, lengths, k_cache, v_cache, torch.empty(Hq * D, dtype=torch.float16, device=device), workspace
    )
    assert torch.equal(out.view(Hq, D), heads.repeat_interleave(3)[:, None].expand(Hq, D))


def test_rope_attention_takes_a_layer_of_a_larger_cache(device):
    """Strided heads, as in a view [Hkv, T_max, D] of a cache [layers, B, Hkv, T_max + pad, D], give the same bits, and
    strided positions, as in one of a cache [T_max, Hkv, D], too."""
    qkv, cos, sin, lengths, k_cache, v_cache = attention_inputs(2, 2, 16, 32, 20, torch.float16, device)
    large = torch.full((2, 2, 2, 40, 16), float("nan"), dtype=torch.float16, device=device)
    large[0, 1, :, :32], large[1, 1, :, :32] = k_cache, v_cache
    workspace = attention_workspace(2, 16, 32, torch.float16, device, AttentionConfig(2, 32, 2))
    out, strided = (torch.empty(32, dtype=torch.float16, device=device) for _ in range(2))
    rope_attention(qkv, cos, sin, lengths, k_cache, v_cache, out, workspace)
    rope_attention(qkv, cos, sin, lengths, large[0, 1, :, :32], large[1, 1, :, :32], strided, workspace)
    assert torch.equal(out, strided)
    by_position = torch.stack((k_cache, v_cache)).transpose(1, 2).contiguous().transpose(1, 2)
    rope_attention(qkv, cos, sin, lengths, *by_position, strided.fill_(float("nan")), workspace)
    assert torch.equal(out, strided)


def test_embed(device):
    table = torch.randn(11, 24, dtype=torch.float16, device=device)
    out = torch.empty(24, dtype=torch.float16, device=device)
    for token in (0, 10):
        assert torch.equal(embed(torch.tensor([token], device=device), table, out), table[token])
    for token in (-1, 11):
        assert embed(torch.tensor([token], device=device), table, out).isnan().all()


NAN, INF = float("nan"), float("inf")
GREEDY_CASES = {
    "largest": ({3: 2.0, 40: 1.0}, 3),
    "tie-takes-the-lowest": ({50: 3.0, 320: 3.0}, 50),
    "tie-within-a-tile": ({5: 3.0, 6: 3.0}, 5),
    "last": ({332: 1.0}, 332),
    "negative-below-zero": ({0: -2.0, 1: -1.0, 2: -3.0}, {0.0: 3, -INF: 1}),
    "zeros-are-equal": ({7: -0.0, 8: 0.0}, {0.0: 0, -INF: 7}),
    "nan-gives-no-token": ({200: NAN, 3: 5.0}, 333),
    "negative-nan": ({200: -NAN, 3: INF}, 333),
    "nan-after-and-before-inf": ({164: NAN, 9: INF, 3: INF}, 333),
    "inf": ({90: INF}, 90),
    "all-equal": ({}, 0),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fill", [0.0, -INF], ids=["zeros", "minus-inf"])
@pytest.mark.parametrize("case", GREEDY_CASES)
def test_greedy_choice(case, fill, dtype, device):
    """x picks the weight's first column, which holds the logits; a second step finds the scratch as the first did."""
    values, expected = GREEDY_CASES[case]
    expected = expected[fill] if isinstance(expected, dict) else expected
    weight = torch.zeros(333, 16, dtype=dtype, device=device)
    weight[:, 0] = fill
    for index, value in values.items():
        weight[index, 0] = value
    x = torch.eye(16, dtype=dtype, device=device)[0]
    token = torch.tensor([-1], device=device)
    history = torch.full((8,), -1, device=device)
    lengths = torch.tensor([5], dtype=torch.int32, device=device)
    choice = greedy_choice(token, history, lengths)
    logits = torch.empty(333, dtype=dtype, device=device)
    for step, config in enumerate((MatvecConfig(4, 16, 4, 5), MatvecConfig(32, 16, 4))):
        matvec(x, weight, logits, config=config, choice=choice)
        assert torch.equal(logits.nan_to_num(7), weight[:, 0].nan_to_num(7)), "the logits are still there"
        assert token.item() == expected
        assert history.tolist() == [-1] * 5 + [expected] * (step + 1) + [-1] * (2 - step)
        assert lengths.item() == 6 + step


def test_wrong_arguments_are_named(device):
    x, weight, out = (torch.zeros(*shape, device=device) for shape in ((16,), (8, 16), (8,)))
    with pytest.raises(ValueError, match=r"weight must have shape \[16, 16\], got \[8, 16\]"):
        matvec(x, weight, out, gated=True)
    with pytest.raises(ValueError, match=r"weight must be torch.float16, got torch.float32"):
        matvec(x.half(), weight, out.half())
    with pytest.raises(ValueError, match="weight must be contiguous"):
        matvec(x, torch.zeros(16, 8, device=device).T, out)
    with pytest.raises(ValueError, match=r"got torch\.float64"):
        matvec(x.double(), weight.double(), out.double())
    qkv, cos, sin, lengths, k_cache, v_cache = attention_inputs(3, 2, 16, 32, 4, torch.float32, device)
    workspace = attention_workspace(3, 16, 32, torch.float32, device)
    with pytest.raises(ValueError, match="no multiple of 2 KV heads"):
        rope_attention(qkv, cos, sin, lengths, k_cache, v_cache, torch.empty(48, device=device), workspace)
    with pytest.raises(ValueError, match=r"cos must have shape \[>= 32"):
        rope_attention(qkv, cos[:31], sin[:31], lengths, k_cache, v_cache, torch.empty(32, device=device), workspace)
    far = torch.empty_strided(k_cache.shape, (16, 2**23, 1), device=device)  # 1 GiB that nobody touches
    with pytest.raises(ValueError, match=r"v_cache must .* less than 2\^23 elements apart, got .* \(16, 8388608, 1\)"):
        rope_attention(qkv[:96], cos, sin, lengths, k_cache, far, torch.empty(32, device=device), workspace)
    with pytest.raises(ValueError, match="window must be None or at least 1, got 0"):
        rope_attention(
            qkv, cos, sin, lengths, k_cache, v_cache, torch.empty(32, device=device), workspace, window=0
        )  # fmt: skip


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("n, k, gated", [
    (9216, 3072, False), (3072, 3072, False), (8192, 3072, True), (3072, 8192, False), (32064, 3072, False),
    (7680, 5120, False), (17920, 5120, True), (5120, 17920, False), (200064, 3072, False), (96, 64, False),
])  # fmt: skip
@pytest.mark.parametrize("pdl", [False, True])
def test_matvec_config_fits_registers(n, k, gated, itemsize, pdl):
    config = matvec_config(n, k, itemsize, 132, gated=gated, pdl=pdl)
    per_thread = config.rows * (2 if gated else 1) * k * itemsize / (32 * config.num_warps)
    assert per_thread <= 384 or config.rows == 1
    assert config.rows & (config.rows - 1) == 0 and config.block_k & (config.block_k - 1) == 0
    # Whole 16-byte loads by every thread, wherever the program's rows are that long.
    assert config.rows * config.block_k * itemsize >= min(16 * 32 * config.num_warps, k * itemsize)


def test_attention_config_covers_the_device_and_the_length():
    assert attention_config(32, 96, 2, 256, 132) == (2, 128, 8)
    assert attention_config(32, 96, 2, 257, 132) == (3, 128, 8), "no split that is always empty"
    assert attention_config(32, 96, 2, 385, 132) == attention_config(32, 96, 2, 512, 132) == (4, 128, 8)
    assert attention_config(32, 96, 2, 513, 132) == (5, 128, 4)
    assert attention_config(32, 96, 2, 641, 132) == attention_config(32, 96, 2, 4096, 132) == (6, 128, 4)
    assert attention_config(40, 96, 2, 257, 132) == (3, 128, 4)
    assert attention_config(8, 128, 2, 131072, 132).splits == 25
    assert attention_config(32, 96, 2, 4096, 24).splits == 1
    assert attention_config(64, 256, 4, 4096, 24) == (1, 16, 8)
    assert attention_config(32, 96, 2, 4096, 40, tensor_cores=False) == (1, 16, 8)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("tensor_cores", [True, False])
@pytest.mark.parametrize("max_seq_len", [1, 256, 4096])
def test_attention_config_gives_every_key_a_warp(itemsize, tensor_cores, max_seq_len):
    for head_dim in range(16, 257, 8):
        config = attention_config(8, head_dim, itemsize, max_seq_len, 132, tensor_cores=tensor_cores)
        assert config.splits > 0 and all(value & (value - 1) == 0 and value > 0 for value in config[1:])
        # At least the 16 keys that a product takes, at most two such sets for each warp.
        assert 16 <= config.block_t <= 32 * config.num_warps


def test_prefetch_shares_are_whole_16_bytes_within_the_weight(device):
    weight = torch.empty(64, 64, dtype=torch.float16, device=device)
    assert Prefetch(weight, 4096, parts=2).share(3) == 672
    assert Prefetch(weight, 1 << 30, parts=2).share(2) == 2048, "half of the weight, half of that per program"
    assert Prefetch(weight, 1 << 30, skip=8000).share(1) == 192, "what is left behind the first 8000 bytes"
    assert Prefetch(weight, 4096, parts=2, skip=4096).share(1) == 0, "nothing is left"
    assert Prefetch(weight.flatten()[1:4001], 4096).share(2) == 0, "not aligned"
    for hint in ({"prefetch": Prefetch(weight, 64)}, {"config": MatvecConfig(1, 64, 1, 8, look_ahead=4)}):
        with (
            pretend_device(DeviceInfo((8, 9), 24, 101376)),
            pytest.raises(ValueError, match="need compute capability 9"),
        ):
            matvec(weight[0], weight, weight[1].clone(), **hint)


@pytest.mark.parametrize("n, k, gated", ((9216, 3072, False), (8192, 3072, True), (32064, 3072, False)))
def test_look_ahead_stays_within_the_weight(n, k, gated):
    config = matvec_config(n, k, 2, 132, gated=gated, pdl=True)
    assert 0 < config.look_ahead <= config.programs
    assert (config.look_ahead + config.programs) * config.rows <= n
    for prefetched, most in ((False, 2), (True, 1)):
        without_pdl = matvec_config(n, k, 2, 132, gated=gated, prefetched=prefetched)
        assert without_pdl.look_ahead == 0
        assert (most - 1) * without_pdl.programs < n / without_pdl.rows <= most * without_pdl.programs
    assert matvec_config(n + 1, k, 2, 132, pdl=True).look_ahead == 0, "its last tile is not whole"
    assert config.first_wave_rows(132) == config.rows * config.programs
    assert MatvecConfig(4, 4096, 16, 768).first_wave_rows(132) == 4 * 264


def test_look_ahead_takes_only_weights_on_16_bytes(monkeypatch, device):
    """The instruction takes no other address: where the weight is a view that starts elsewhere there is no hint."""
    launched = {}
    kernel = type("Kernel", (), {"__getitem__": lambda self, grid: lambda *args, **options: launched.update(options)})
    monkeypatch.setattr(fused_decode_wrapper, "_matvec_kernel", kernel())
    monkeypatch.setattr(fused_decode_wrapper, "prefetch_supported", lambda device: True)
    storage, x = (torch.zeros(n, dtype=torch.float16, device=device) for n in (16 * 64 + 8, 64))
    for offset, hint in ((0, True), (8, True), (1, False)):
        weight = storage[offset : offset + 16 * 64].view(16, 64)
        matvec(x, weight, torch.empty_like(x[:16]), pdl=True, config=MatvecConfig(1, 64, 1, 8, look_ahead=4))
        assert launched["LOOK_AHEAD"] == hint


COMPILE = r"""
import re, sys, torch
from kernels.aot import compile_only
from kernels.fused_decode_wrapper import *
capability = tuple(map(int, sys.argv[1].split(".")))
pdl = capability >= (9, 0)
e = lambda *shape, dtype=torch.float16: torch.empty(*shape, dtype=dtype)
with compile_only(capability) as compiled:
    matvec(e(3072), e(9216, 3072), e(9216), gain=e(3072), eps=1e-5, pdl=pdl)
    ahead = [None, None]
    if pdl:
        ahead = [Prefetch(e(16384, 3072), 3 << 20, 2, 1 << 20, True), Prefetch(e(3072, 8192), 3 << 20, early=True)]
    matvec(e(3072), e(3072, 3072), e(3072), residual=True, pdl=pdl, early=True, prefetch=ahead[0])
    gated = dict(gain=e(3072), eps=1e-5, gated=True)
    matvec(e(3072), e(16384, 3072), e(8192), pdl=pdl, early=True, prefetch=ahead[1], **gated)
    matvec(e(8192), e(3072, 8192), e(3072), residual=True, pdl=pdl, early=True)
    choice = greedy_choice(e(1, dtype=torch.int64), e(4096, dtype=torch.int64), e(1, dtype=torch.int32))
    matvec(e(3072), e(32064, 3072), e(32064), gain=e(3072), eps=1e-5, pdl=pdl, choice=choice)
    for length in (256, 4096):
        for heads, D, dtype in (
            (32, 96, torch.float16), (32, 96, torch.float32), (8, 256, torch.bfloat16), (8, 200, torch.float16)
        ):
            workspace = attention_workspace(heads, D, length, dtype, torch.device("cpu"))
            qkv, out, cache = e(3 * heads * D, dtype=dtype), e(heads * D, dtype=dtype), e(heads, length, D, dtype=dtype)
            table = e(length, D // 2, dtype=torch.float32)
            rope_attention(qkv, table, table, e(1, dtype=torch.int32), cache, cache, out, workspace, pdl=pdl)
for kernel in compiled:
    lines = [line for line in kernel.ptx.splitlines() if "ld.global" in line or "griddepcontrol.wait" in line]
    kinds = ["W" if "wait" in line else "s" if "evict_first" in line else "." for line in lines]
    wide = all(".v4.b32" in line for line in lines if "evict_first" in line)
    barrier = re.search(r"bar\.sync|st\.global", kernel.ptx).start()
    late = len(re.findall(r"ld\.global\.b", kernel.ptx[barrier:]))  # not vectors; the merge's are ld.relaxed
    shared = kernel.shared_memory // kernel.num_warps
    print("KERNEL", kernel.name, kernel.spill_bytes, "".join(kinds), wide, late, shared, kernel.registers)
"""


@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.0"])
def test_code_generation(capability):
    """No spills.

    Weights: 16-byte loads with a streaming hint, those of the first tile ahead of everything else.

    Attention: all of the new token's loads before the first barrier and the first store; of Phi-3 Mini's head in 16
    bits, only the query passes through shared memory, 16 rows of it per warp.

    On Hopper all programs that loop are resident at once.
    """
    result = subprocess.run(
        [sys.executable, "-c", COMPILE, capability],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    kernels = re.findall(r"KERNEL (\w+) (\d+) (\S+) (\w+) (\d+) (\d+) (\d+)", result.stdout)
    assert len(kernels) == 13
    if capability == "9.0":
        loops = (0, 9216, {}), (2, 8192, {"gated": True}), (4, 32064, {"choice": True})
        for kernel, n, options in loops:
            config = matvec_config(n, 3072, 2, 132, pdl=True, prefetched=True, **options)
            places = 65536 // (32 * config.num_warps * (int(kernels[kernel][6]) + 7 >> 3 << 3))
            assert config.programs <= 132 * places, f"{n} rows: {config.programs} programs, {places} places each"
    attention = [kernel for kernel in kernels if kernel[0] == "_rope_attention_kernel"]
    assert [kernel[4] for kernel in attention] == ["0"] * 8
    assert [kernel[5] for kernel in attention[::4]] == [str(16 * 96 * 2)] * 2
    for name, spill_bytes, loads, wide, *_ in kernels:
        assert spill_bytes == "0", f"{name} spills {spill_bytes} bytes per thread"
        assert ("W" in loads) == (capability == "9.0"), f"{name}: {loads}"
        if name == "_matvec_kernel":
            first, rest = re.fullmatch(r"(s+)[.W]+(s*)\.*", loads).groups()
            assert wide == "True" and len(first) >= 4 and len(rest) in (0, len(first)), f"{name}: {loads}"


def test_no_product_is_left_to_one_of_two_lanes():
    """A sum of squares with one of them per thread: each is rounded before lanes add theirs (see _matvec_kernel).

    From 3.7 on Triton sees to that by itself; before, a plain sum fails here.
    """
    code = r"""
import re, torch
from kernels.aot import compile_only
from kernels.fused_decode_wrapper import matvec
x, weight = torch.empty(64), torch.empty(64, 64)
with compile_only((9, 0)) as compiled:
    matvec(x, weight, torch.empty(64), gain=x, eps=1e-5)
squares = re.findall(r"fma.rn.f32 \s*%\w+, (%\w+), \1, (\S+);", compiled[0].ptx)
assert squares and {addend for _, addend in squares} == {"0f00000000"}, squares
"""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)


needs_pdl = pytest.mark.skipif(
    not torch.cuda.is_available() or not pdl_supported(device_info(torch.device("cuda"))), reason="no PDL here"
)


@pytest.mark.gpu
@needs_pdl
def test_the_driver_knows_the_carveout(monkeypatch):
    asked = []

    def asks(kernel, percent):
        prefer_carveout(kernel, percent)
        asked.append((kernel, percent))

    monkeypatch.setattr(fused_decode_wrapper, "prefer_carveout", asks)
    x, weight = (torch.randn(*shape, dtype=torch.float16, device="cuda") for shape in ((256,), (64, 256)))
    matvec(x, weight, torch.empty_like(x[:64]), pdl=True)
    ((kernel, percent),) = asked
    value = ctypes.c_int()
    assert _cuda_driver().cuFuncGetAttribute(ctypes.byref(value), 9, ctypes.c_void_p(kernel.function)) == 0
    assert value.value == percent > 0


@pytest.mark.gpu
@needs_pdl
def test_pdl_gives_the_same_bits():
    """A chain in which every kernel reads what the one before it wrote, with and without PDL, 200 times."""
    device, dtype = torch.device("cuda"), torch.float16
    H, D, Hq, inter, T_max = 1024, 64, 16, 2048, 512
    weights = [
        torch.randn(*shape, dtype=dtype, device=device) * shape[1] ** -0.5
        for shape in ((3 * H, H), (H, H), (2 * inter, H), (H, inter))
    ]
    gain = torch.ones(H, dtype=dtype, device=device)
    _, cos, sin, lengths, k_cache, v_cache = attention_inputs(Hq, Hq, D, T_max, 300, dtype, device)
    start = torch.randn(H, dtype=dtype, device=device)
    workspace = attention_workspace(Hq, D, T_max, dtype, device)
    qkv, attn, act = (torch.empty(n, dtype=dtype, device=device) for n in (3 * H, H, inter))

    def chain(pdl):
        h = start.clone()
        for _ in range(8):
            matvec(h, weights[0], qkv, gain=gain, eps=EPS, pdl=pdl)
            rope_attention(qkv, cos, sin, lengths, k_cache, v_cache, attn, workspace, pdl=pdl)
            ahead = Prefetch(weights[2], 1 << 20, parts=2, skip=4096, early=pdl)
            matvec(attn, weights[1], h, residual=True, pdl=pdl, early=True, prefetch=ahead)
            loop = MatvecConfig(1, 1024, 4, 924, look_ahead=528) if pdl else None
            ahead = Prefetch(weights[3], 1 << 20)
            matvec(h, weights[2], act, gain=gain, eps=EPS, gated=True, pdl=pdl, config=loop, prefetch=ahead)
            matvec(act, weights[3], h, residual=True, pdl=pdl, early=True)
        return h

    expected = chain(False)
    assert expected.isfinite().all()
    for _ in range(200):
        assert torch.equal(chain(True), expected)
