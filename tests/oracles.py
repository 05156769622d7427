"""How a kernel is judged: against float64, by the error of an ordinary PyTorch program in the same dtype."""

import torch
import torch.nn.functional as F

from model.accuracy import judge
from model.decode_attention_ref import attention_ref


def sdpa_explicit(q, k, v, *, causal=True, scale=None, window=None):
    """scaled_dot_product_attention with an explicit bottom-right mask and expanded KV heads (never ``is_causal``)."""
    S, T = q.shape[2], k.shape[2]
    group_size = q.shape[1] // k.shape[1]
    query_position = torch.arange(T - S, T, device=q.device)[:, None]
    key_position = torch.arange(T, device=q.device)[None, :]
    visible = torch.ones(S, T, dtype=torch.bool, device=q.device)
    if causal:
        visible &= key_position <= query_position
    if window is not None:
        visible &= key_position > query_position - window
    k, v = (x.repeat_interleave(group_size, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)


def assert_close_to_reference(out, reference, native, *, factor=1.5, what="out"):
    """``out`` is as near to the float64 ``reference`` as ``factor`` times ``native`` is (see model/accuracy.py)."""
    assert reference.dtype == torch.float64, f"{what}: the reference was rounded to {reference.dtype}"
    accuracy = judge(out, reference, native, factor=factor)
    assert accuracy.ok, f"{what}: {accuracy}"


def attention_reference64(q, k, v, **kwargs):
    """R1: the inputs, already rounded to the dtype under test, promoted to float64."""
    return attention_ref(q.double(), k.double(), v.double(), **kwargs)
