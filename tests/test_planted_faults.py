"""The checks can fail: every fault that such code has had is planted, and the verdict of step 2 or step 3 catches it.

A fixed tolerance does not: the first three faults stay under 0.01 on a long cache.
"""

import pytest
import torch

import model.phi3_decode_triton as rung3
import model.validate_decode_attention_triton as step2
import run_baseline
from model.decode_attention_ref import decode_attention_ref
from model.phi3_decode import hf_generate
from model.token_check import check_tokens, forced_logits
from model.validate_decode_attention_triton import validate
from tests.tiny import prompt, tiny_model


def healthy(q, k_cache, v_cache, cache_len, *, scale=None, window=None, out=None):
    """The right answer, rounded once."""
    wide = (x.double() for x in (q, k_cache, v_cache))
    result = decode_attention_ref(*wide, cache_len, scale=scale, window=window).to(q.dtype)
    return result if out is None else out.copy_(result)


def newest_token_skipped(q, k_cache, v_cache, cache_len, **kwargs):
    return healthy(q, k_cache, v_cache, max(cache_len - 1, 1), **kwargs)


def phantom_keys_counted(q, k_cache, v_cache, cache_len, **kwargs):
    """The tail of the last tile loaded as zeros, and its scores of 0 kept in the softmax."""
    tail = -cache_len % 64
    padded = (torch.nn.functional.pad(x[:, :, :cache_len], (0, 0, 0, tail)) for x in (k_cache, v_cache))
    return healthy(q, *padded, cache_len + tail, **kwargs)


def scale_of_the_padded_head_dim(q, k_cache, v_cache, cache_len, **kwargs):
    padded = 1 << (q.shape[-1] - 1).bit_length()
    return healthy(q, k_cache, v_cache, cache_len, scale=(padded * 1.001) ** -0.5, **kwargs)


def kv_heads_interleaved(q, k_cache, v_cache, cache_len, **kwargs):
    """kv_head = q_head % Hkv instead of q_head // group_size."""
    groups = q.shape[1] // k_cache.shape[1]
    mapped = (x.repeat(1, groups, 1, 1) for x in (k_cache, v_cache))
    return healthy(q, *mapped, cache_len, **kwargs)


def window_one_too_long(q, k_cache, v_cache, cache_len, *, window=None, **kwargs):
    return healthy(q, k_cache, v_cache, cache_len, window=window and window + 1, **kwargs)


FAULTS = [newest_token_skipped, phantom_keys_counted, scale_of_the_padded_head_dim, kv_heads_interleaved]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
by_name = pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
CPU = torch.device("cpu")


@by_dtype
def test_step_2_passes_the_reference_itself(dtype):
    assert validate(healthy, (8, 2, 96), dtype, (1, 65, 1000), CPU).ok
    assert validate(healthy, (8, 2, 96), dtype, (65, 300), CPU, window=100).ok


@by_name
@by_dtype
def test_step_2_catches(fault, dtype):
    assert not validate(fault, (8, 2, 96), dtype, (1, 65, 1000), CPU).ok


def test_step_2_catches_a_window_that_is_one_too_long():
    assert not validate(window_one_too_long, (8, 2, 96), torch.float16, (65, 300), CPU, window=100).ok


@pytest.mark.parametrize("fault", FAULTS[:2], ids=lambda f: f.__name__)
def test_a_fixed_tolerance_would_pass_them(fault):
    """On 4,000 keys the skipped or phantom key weighs too little for 0.01; the verdict still sees it."""
    q = torch.randn(1, 8, 96) * 0.5
    k, v = torch.randn(2, 1, 8, 4000, 96)
    assert (fault(q, k, v, 4000) - healthy(q, k, v, 4000)).abs().max() < 0.01
    assert not validate(fault, (8, 8, 96), torch.float32, (4000,), CPU).ok


def test_step_2_exits_1_on_a_fault(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["step2", "--device", "cpu"])
    monkeypatch.setattr(step2, "decode_attention", healthy)
    assert step2.main()
    monkeypatch.setattr(step2, "decode_attention", newest_token_skipped)
    assert not step2.main()
    assert "WRONG" in capsys.readouterr().out


def check(monkeypatch, dtype, attention=healthy, window=None):
    """Step 3's verdict on a tiny model whose decode steps use ``attention``."""
    monkeypatch.setattr(rung3, "decode_attention", attention)
    model = tiny_model(dtype=dtype, sliding_window=window)
    ids = prompt(13)
    expected, expected_logits = hf_generate(model, ids, 24)
    return check_tokens(model, ids, expected, expected_logits, forced_logits(model, ids, expected, path="triton"))


@by_dtype
def test_step_3_passes_the_reference_itself(monkeypatch, dtype):
    result = check(monkeypatch, dtype)
    assert result.ok, str(result)


# The tiny model's head_dim 16 needs no padding: the scale fault is step 2's to catch.
@pytest.mark.parametrize("fault", [FAULTS[0], FAULTS[1], FAULTS[3]], ids=lambda f: f.__name__)
@by_dtype
def test_step_3_catches(monkeypatch, fault, dtype):
    result = check(monkeypatch, dtype, fault)
    assert not result.ok, str(result)


@by_dtype
@pytest.mark.parametrize("fault", ["left out", "off by one"])
def test_step_3_catches_a_wrong_rotation(monkeypatch, fault, dtype):
    """Only the decode steps are faulty, as in a loop that counts positions wrongly; the prefill is right."""
    tables = rung3.rotary_tables

    class Wrong:
        def __init__(self, model, max_seq_len):
            self.right = tables(model, max_seq_len)

        def for_length(self, total_length):
            cos, sin = self.right.for_length(total_length)
            if fault == "left out":
                return torch.ones_like(cos), torch.zeros_like(sin)
            return cos.roll(1, dims=0), sin.roll(1, dims=0)

    monkeypatch.setattr(rung3, "rotary_tables", Wrong)
    result = check(monkeypatch, dtype)
    assert not result.ok, str(result)


def test_step_3_exits_1_on_a_fault(monkeypatch, capsys):
    arguments = ["step3", "--model-path", "random:tiny", "--dtype", "float32", "--new-tokens", "6", "--prompt", "abc"]
    monkeypatch.setattr("sys.argv", arguments)
    monkeypatch.setattr(rung3, "decode_attention", healthy)
    assert run_baseline.main()
    monkeypatch.setattr(rung3, "decode_attention", newest_token_skipped)
    assert not run_baseline.main()
    assert "FAIL: " in capsys.readouterr().out
