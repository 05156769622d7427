"""model/decode_attention_ref.py, the oracle, against SDPA in float64 and against answers known without computing."""

import pytest
import torch
import torch.nn.functional as F

from model.accuracy import bar, judge
from model.decode_attention_ref import attention_ref, decode_attention_ref
from model.phi3_layers import sdpa_attention
from tests.oracles import sdpa_explicit


def random_qkv(Hq, Hkv, S, T, D=16, dtype=torch.float64):
    return torch.randn(2, Hq, S, D, dtype=dtype), *(torch.randn(2, Hkv, T, D, dtype=dtype) for _ in range(2))


@pytest.mark.parametrize("Hq, Hkv", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("S, T", [(7, 7), (1, 9), (3, 9)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 4])
def test_equals_sdpa_in_float64(Hq, Hkv, S, T, causal, window):
    q, k, v = random_qkv(Hq, Hkv, S, T)
    expected = sdpa_explicit(q, k, v, causal=causal, window=window)
    assert torch.allclose(attention_ref(q, k, v, causal=causal, window=window), expected, atol=1e-13)
    if causal:
        assert torch.allclose(sdpa_attention(q, k, v, window=window), expected, atol=1e-13)


def test_lengths_in_one_batch():
    q, k, v = random_qkv(4, 2, 1, 9)
    out = decode_attention_ref(q[:, :, 0], k, v, torch.tensor([3, 9]))
    masked = sdpa_attention(q, k, v, lengths=torch.tensor([3, 9]))[:, :, 0]
    assert torch.allclose(out, masked, atol=1e-13)
    alone = F.scaled_dot_product_attention(q[:1], *(x[:1, :, :3].repeat_interleave(2, dim=1) for x in (k, v)))
    assert torch.allclose(out[:1], alone[:, :, 0], atol=1e-13)


@pytest.mark.parametrize(
    "S, T, expected",
    [(1, 5, [2.0]), (2, 5, [1.5, 2.0]), (5, 2, [0.0, 0.0, 0.0, 0.0, 0.5])],
)
def test_the_last_query_sees_the_last_key(S, T, expected):
    """Zero keys weigh all visible values alike, so the output is their mean index. A row without keys gives 0."""
    q, k = torch.randn(1, 1, S, 16, dtype=torch.float64), torch.zeros(1, 1, T, 16, dtype=torch.float64)
    v = torch.arange(T, dtype=torch.float64)[None, None, :, None].expand(1, 1, T, 16)
    out, lse = attention_ref(q, k, v, return_lse=True)
    assert out[0, 0, :, 0].tolist() == expected
    assert torch.isinf(lse[0, 0]).tolist() == [S - i > T for i in range(S)]


def test_judge_fails_on_nan_dtype_and_excess():
    reference = torch.randn(100, dtype=torch.float64)
    native = (reference + 1e-3 * torch.randn(100)).half()
    assert judge(native, reference, native).ok
    assert not judge((reference + 4e-3).half(), reference, native).ok
    assert not judge(native.float(), reference, native).ok
    broken = native.clone()
    broken[3] = float("nan")
    assert not judge(broken, reference, native).ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_bar_is_the_one_that_judge_applies(dtype):
    """Errors in whole rounding steps: the factor's worth passes, one step more does not."""
    factor, _ = bar(dtype)
    step = torch.finfo(dtype).eps
    reference = torch.ones(100, dtype=torch.float64)
    native, at_the_bar, above = ((reference + n * step).to(dtype) for n in (8, 8 * factor, 8 * factor + 1))
    assert judge(at_the_bar, reference, native).ok
    assert not judge(above, reference, native).ok


def test_judge_refuses_shapes_that_would_broadcast():
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"one shape, got \[1, 3\], \[2, 3\], \[2, 3\]"):
        judge(x[:1], x.double(), x)
