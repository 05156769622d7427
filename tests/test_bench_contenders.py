"""Every contender computes the same attention: a comparison of speeds compares the same work."""

import re

import pytest
import torch

from benchmarks import contenders
from benchmarks.common import decode_reference64
from model.decode_attention_ref import attention_ref


def agreeing(functions, inputs, reference):
    """Names of the functions that run on this machine; each of those must match the reference."""
    names = set()
    for name, function in functions.items():
        try:
            out = function(*inputs)
        except RuntimeError as error:
            assert re.search("No (available kernel|viable backend)", str(error)), (name, error)
            continue  # a backend that this machine has not
        torch.testing.assert_close(out.reshape(reference.shape), reference)
        names.add(name)
    return names


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
def test_decode_contenders_agree(num_heads, num_kv_heads, device):
    q, k, v = torch.randn(2, num_heads, 16, device=device), *torch.randn(2, 2, num_kv_heads, 37, 16, device=device)
    reference = decode_reference64(q, k, v, 37).float()
    found = contenders.decode_contenders(num_heads, num_kv_heads) | {"eager": contenders.eager_decode}
    expected = {"sdpa math", "grouped matmul", "reference", "eager"}
    if device.type == "cuda":
        expected.add("sdpa efficient")
    assert expected <= agreeing(found, (q, k, v), reference)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2)], ids=["mha", "gqa"])
def test_prefill_contenders_agree(num_heads, num_kv_heads, causal):
    q, k, v = torch.randn(2, num_heads, 19, 16), *torch.randn(2, 2, num_kv_heads, 19, 16)
    found = contenders.prefill_contenders(num_heads, num_kv_heads, causal=causal)
    names = agreeing(found, (q, k, v), attention_ref(q, k, v, causal=causal))
    assert "sdpa flash" in names
    assert ("sdpa flash repeated" in names) == (num_heads != num_kv_heads)


def test_the_backend_in_a_name():
    names = ("sdpa cudnn", "sdpa flash repeated", "sdpa efficient gqa", "grouped matmul", "triton", "sdpa")
    assert [contenders.backend_of(name) for name in names] == ["cudnn", "flash", "efficient", None, None, None]
