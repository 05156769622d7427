"""How a kernel is judged: against float64, by the error of an ordinary PyTorch program in the same dtype."""

import torch
import torch.nn.functional as F

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
    """``out``'s error against the float64 ``reference`` is at most ``factor`` times that of ``native``.

    native: the same quantity computed by an ordinary PyTorch program in out's dtype. Both the largest absolute and the
    relative (Frobenius) error count; one rounding band of the dtype is granted, so that an exact ``native`` is no trap.
    """
    assert out.dtype == native.dtype, f"{what}: dtype {out.dtype}, expected {native.dtype}"
    assert torch.isfinite(out).all(), f"{what} is not finite"
    out64, native64, reference = out.double(), native.double(), reference.double()
    band = torch.finfo(out.dtype).eps
    error, native_error = (out64 - reference).abs().max(), (native64 - reference).abs().max()
    limit = factor * native_error + band * reference.abs().max()
    assert error <= limit, f"{what}: max error {error:.3e}, native {native_error:.3e}, limit {limit:.3e}"
    norm = reference.norm()
    error, native_error = (out64 - reference).norm(), (native64 - reference).norm()
    limit = factor * native_error + band * norm
    assert error <= limit, f"{what}: relative error {error / norm:.3e}, native {native_error / norm:.3e}"


def attention_reference64(q, k, v, **kwargs):
    """R1: the inputs, already rounded to the dtype under test, promoted to float64."""
    return attention_ref(q.double(), k.double(), v.double(), **kwargs)
