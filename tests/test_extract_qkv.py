"""model/extract_qkv.py: the widths follow the head counts, not thirds; and the MLP's gate comes before up."""

import pytest
import torch

from model.extract_qkv import extract_qkv
from tests.tiny import DEVICE, tiny_model


@pytest.mark.parametrize(
    "heads, kv_heads, head_dim", [(32, 32, 96), (24, 8, 128), (40, 10, 128)], ids=["mini", "phi-4-mini", "medium"]
)
def test_each_head_gets_its_own_rows(heads, kv_heads, head_dim):
    """Row r of the projection gives feature r: q is 0 to Hq*D - 1, then k, then v, head by head."""
    width = (heads + 2 * kv_heads) * head_dim
    q, k, v = extract_qkv(torch.arange(width).view(1, 1, width), heads, kv_heads, head_dim)
    assert q.shape == (1, heads, 1, head_dim) and k.shape == v.shape == (1, kv_heads, 1, head_dim)
    assert torch.equal(q.flatten(), torch.arange(heads * head_dim))
    assert torch.equal(k.flatten(), torch.arange(heads * head_dim, (heads + kv_heads) * head_dim))
    assert torch.equal(v.flatten(), torch.arange((heads + kv_heads) * head_dim, width))
    assert k[0, 1, 0, 0] == heads * head_dim + head_dim


def test_views_not_copies():
    qkv = torch.randn(2, 3, 16 * 8)
    assert all(x.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr() for x in extract_qkv(qkv, 4, 2, 16))


def test_a_width_that_does_not_add_up_is_refused():
    with pytest.raises(ValueError, match="qkv has 96 features, not the 128 of 4 query and 2 x 2 KV heads of 16"):
        extract_qkv(torch.randn(1, 1, 96), 4, 2, 16)


def test_gate_comes_before_up():
    mlp = tiny_model().model.layers[0].mlp
    gate_and_up = torch.cat((torch.ones(96), torch.full((96,), 2.0))).to(DEVICE)
    seen = {}
    hook = mlp.gate_up_proj.register_forward_hook(lambda m, i, o: gate_and_up.expand_as(o))
    hook_down = mlp.down_proj.register_forward_pre_hook(lambda m, i: seen.update(x=i[0]))
    mlp(torch.zeros(1, 1, 64, device=DEVICE))
    hook.remove()
    hook_down.remove()
    assert seen["x"].flatten()[0].item() == pytest.approx(1.462117, abs=1e-6), "swapped, it would be 1.761594"
