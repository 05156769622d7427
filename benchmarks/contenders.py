"""What a user could call instead of this project's kernels, in the form that suits each best."""

import functools
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.decode_attention_ref import decode_attention_ref

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def backend_of(name):
    """``sdpa cudnn gqa`` -> ``cudnn``; None for what is no contender of SDPA."""
    return name.split()[1] if name.startswith("sdpa ") else None


def sdpa(backend, q, k, v, **kwargs):
    """scaled_dot_product_attention on one backend; RuntimeError where it does not take these inputs."""
    with warnings.catch_warnings(), sdpa_kernel(BACKENDS[backend]):
        warnings.simplefilter("ignore")  # a backend that refuses warns once per reason before it raises
        return F.scaled_dot_product_attention(q, k, v, **kwargs)


def sdpa_decode(backend, q, k, v):
    """One query per sequence: q [B, Hq, D], k and v [B, Hkv, T, D] -> [B, Hkv, Hq / Hkv, D], in the backend's layout.

    The query heads that share a KV head go in as query rows of that head: without a mask that is the same attention,
    every backend takes it, and K and V are read once per group. Some lay their output out such that heads and rows make
    one dimension only by a copy, which would not be attention's time.
    """
    return sdpa(backend, q.view(q.shape[0], k.shape[1], -1, q.shape[2]), k, v)


def sdpa_decode_gqa(backend, q, k, v):
    """The same, with the grouping left to the backend (``enable_gqa``)."""
    return sdpa(backend, q[:, :, None], k, v, enable_gqa=True)[:, :, 0]


def grouped_matmul_decode(q, k, v):
    """Plain PyTorch without copies: batched products per KV head, softmax in float32."""
    grouped = q.view(q.shape[0], k.shape[1], -1, q.shape[2])
    scores = grouped @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    return (torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v).view(q.shape)


def reference_decode(q, k, v):
    """What the kernels are compared with, written to be read: K and V repeated, a mask, an explicit softmax."""
    return decode_attention_ref(q, k, v, k.shape[2])


def eager_decode(q, k, v):
    """Plain PyTorch as model code has it: K and V repeated for every query head, then two products."""
    group_size = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group_size, dim=1) for x in (k, v))
    return grouped_matmul_decode(q, k, v)


def decode_contenders(num_heads, num_kv_heads):
    """name -> function(q, k, v): every SDPA backend (both forms where heads are grouped), and plain PyTorch."""
    found = {f"sdpa {backend}": functools.partial(sdpa_decode, backend) for backend in BACKENDS}
    if num_heads != num_kv_heads:
        found |= {f"sdpa {backend} gqa": functools.partial(sdpa_decode_gqa, backend) for backend in BACKENDS}
    return found | {"grouped matmul": grouped_matmul_decode, "reference": reference_decode}


def prefill_contenders(num_heads, num_kv_heads, *, causal):
    """name -> function(q, k, v): every fused SDPA backend; grouped heads by ``enable_gqa`` and repeated.

    "math" is not among them: it stores all scores, and took at least 15 times as long as the best, causal, on an H200.
    """
    grouped = num_heads != num_kv_heads
    fused = [backend for backend in BACKENDS if backend != "math"]

    def plain(backend, q, k, v):
        return sdpa(backend, q, k, v, is_causal=causal, enable_gqa=grouped)

    def repeated(backend, q, k, v):
        k, v = (x.repeat_interleave(num_heads // num_kv_heads, dim=1) for x in (k, v))
        return sdpa(backend, q, k, v, is_causal=causal)

    found = {f"sdpa {backend}": functools.partial(plain, backend) for backend in fused}
    if grouped:
        found |= {f"sdpa {backend} repeated": functools.partial(repeated, backend) for backend in fused}
    return found
