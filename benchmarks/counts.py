"""Bytes and operations that the work must move and do: the one place where they are counted.

Decimal units throughout: GB = 1e9 bytes, TFLOP = 1e12 operations, a multiply-add is two operations. ``config`` is a
Hugging Face Phi-3 config (or anything with its attributes).
"""

from typing import NamedTuple

from model.load_model import head_dim


def attention_decode_bytes(batch, num_heads, num_kv_heads, cache_len, head_dim, itemsize):
    """Bytes that one decode attention must move: K and V read once, q read, the output written."""
    kv = 2 * batch * num_kv_heads * cache_len * head_dim
    q_and_out = 2 * batch * num_heads * head_dim
    return (kv + q_and_out) * itemsize


def attention_flops(batch, num_heads, queries, keys, head_dim, *, causal, backward=False):
    """Operations of attention by the convention of the FlashAttention papers.

    Two matrix products forward, five backward (one of them recomputes the scores), so 2.5 times as many; a causal mask
    halves both.
    """
    forward = 4 * batch * num_heads * queries * keys * head_dim
    if causal:
        forward //= 2
    return forward * 5 // 2 if backward else forward


class ModelBytes(NamedTuple):
    """qkv, o, gate_up, down: weights of all layers; lm_head; embedding: the table; norms: all of them. Bytes."""

    qkv: int
    o: int
    gate_up: int
    down: int
    lm_head: int
    embedding: int
    norms: int


def weight_bytes(config, itemsize=2):
    """ModelBytes of a Phi-3 model."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    q_size = config.num_attention_heads * head_dim(config)
    kv_size = config.num_key_value_heads * head_dim(config)
    table = config.vocab_size * hidden
    return ModelBytes(
        qkv=layers * (q_size + 2 * kv_size) * hidden * itemsize,
        o=layers * q_size * hidden * itemsize,
        gate_up=layers * 2 * config.intermediate_size * hidden * itemsize,
        down=layers * config.intermediate_size * hidden * itemsize,
        lm_head=table * itemsize,
        embedding=table * itemsize,
        norms=(2 * layers + 1) * hidden * itemsize,
    )


def resident_bytes(config, itemsize=2):
    """Memory that the weights take. Tied embeddings share one table with the LM head."""
    parts = weight_bytes(config, itemsize)
    return sum(parts) - (parts.embedding if config.tie_word_embeddings else 0)


def kv_bytes_per_position(config, itemsize=2):
    """Bytes that the KV cache takes per position, all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim(config) * itemsize


def decode_step_bytes(config, context, *, batch=1, itemsize=2):
    """Bytes that one decode step must read: every weight but the embedding table, and the keys and values in view.

    ``context``: positions that attention sees, the new one included; a sliding window limits them.
    """
    weights = sum(weight_bytes(config, itemsize)) - weight_bytes(config, itemsize).embedding
    window = getattr(config, "sliding_window", None) or context
    return weights + batch * min(context, window) * kv_bytes_per_position(config, itemsize)


def gb_per_s(num_bytes, ms):
    """Rate in GB/s (1e9)."""
    return num_bytes / ms / 1e6


def tflop_per_s(flops, ms):
    """Rate in TFLOP/s."""
    return flops / ms / 1e9


def floor_ms(num_bytes, bandwidth_gb_per_s):
    """The least time in ms in which ``num_bytes`` can be moved."""
    return num_bytes / bandwidth_gb_per_s / 1e6
