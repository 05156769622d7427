"""Every contender computes the same attention: a comparison of speeds compares the same work."""

import pytest
import torch

from benchmarks import contenders
from benchmarks.common import decode_reference64


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
def test_decode_contenders_agree(num_heads, num_kv_heads):
    q, k, v = torch.randn(2, num_heads, 16), *torch.randn(2, 2, num_kv_heads, 37, 16)
    reference = decode_reference64(q, k, v, 37).float()
    found = contenders.decode_contenders(num_heads, num_kv_heads) | {"eager": contenders.eager_decode}
    agreeing = set()
    for name, function in found.items():
        try:
            out = function(q, k, v)
        except RuntimeError:
            continue  # a backend that this machine has not
        torch.testing.assert_close(out, reference)
        agreeing.add(name)
    assert {"sdpa math", "grouped matmul", "eager"} <= agreeing
