"""Step 1: what the attention of this checkpoint looks like, and the least time a token can take.

Shapes and head counts, rotary embedding, sliding window, the bytes of weights and KV cache, and the bandwidth floor:
every weight and every cached key and value has to be read once per token.

    python model/inspect_attention.py
    python model/inspect_attention.py --model-path random:phi-3-mini-4k --bandwidth 4660

Of a random preset only the shapes are made: any of them can be looked at on any machine.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cli
from kernels.decode_attention_wrapper import split_head_dim
from kv_cache.kv_layout import KVCache
from model.load_model import eos_token_ids, head_dim, load_model, rope_settings
from model.rope import attention_factor, rotary_dim


def kv_bytes_per_position(config, element_size):
    """Bytes of K and V that one position takes over all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim(config) * element_size


def decode_weight_bytes(model):
    """Bytes of weights that one decode step reads: all of them, but of an untied embedding only one row."""
    embedding = model.model.embed_tokens.weight
    total = sum(p.nbytes for p in model.parameters())
    if model.lm_head.weight is not embedding:
        total -= embedding.nbytes - embedding[0].nbytes
    return total


def describe_head_dim(dim):
    """One line about the head dimension, and what the kernels make of it."""
    padded, (low, high) = 1 << (dim - 1).bit_length(), split_head_dim(dim)
    decode = f"{low} + {high}" if high else f"{low}"
    return f"{dim} ({decode} in decode, padded to {padded} in prefill)" if padded != dim else f"{dim}"


def describe_rope(config):
    """One line about the rotary embedding."""
    settings = rope_settings(config)
    text = f"{settings['type']}, base {settings['theta']:g}, {rotary_dim(config)} of {head_dim(config)} dimensions"
    if settings["type"] == "longrope":
        border = settings["original_max_position_embeddings"]
        text += f", long factors above {border} positions, scaling {attention_factor(settings):.4f}"
    return text


def main():
    arguments = cli.parser(__doc__, "MODEL_PATH", "DTYPE", "DEVICE", "MAX_SEQ_LEN")
    arguments.add_argument("--bandwidth", type=float, help="memory bandwidth in GB/s, e.g. 272 (RTX 4060)")
    args = arguments.parse_args()
    if args.bandwidth is not None and not 0 < args.bandwidth < math.inf:
        raise cli.UsageError(f"--bandwidth must be above 0 and finite, got {args.bandwidth:g}")
    cli.header("step 1", "inspect the attention of a Phi-3 checkpoint: shapes, bytes, bandwidth floor")
    device = cli.resolve_device(args.device)
    dtype = cli.resolve_dtype(args.dtype, device)
    model = load_model(args.model_path, dtype=dtype, device=device, values=False)
    config = model.config
    layer = model.model.layers[0].self_attn
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, head_dim(config)
    kind = "MHA" if heads == kv_heads else "MQA" if kv_heads == 1 else "GQA"
    cache = KVCache.from_config(config, args.max_seq_len, dtype=dtype, device=device)
    window = getattr(config, "sliding_window", None)

    weight_bytes = sum(p.nbytes for p in model.parameters())
    per_position = kv_bytes_per_position(config, dtype.itemsize)
    cli.table(
        ("what", "value"),
        [
            ("checkpoint", args.model_path),
            ("layers", config.num_hidden_layers),
            ("hidden size, MLP size", f"{config.hidden_size}, {config.intermediate_size}"),
            ("attention", f"{kind}: {heads} query heads, {kv_heads} KV heads, group size {heads // kv_heads}"),
            ("head_dim", describe_head_dim(dim)),
            ("qkv_proj", f"{list(layer.qkv_proj.weight.shape)}: q {heads * dim}, k and v {kv_heads * dim} rows each"),
            ("o_proj", list(layer.o_proj.weight.shape)),
            ("RoPE", describe_rope(config)),
            ("sliding window", f"{window} positions, the current one included" if window else "none"),
            ("vocabulary", f"{config.vocab_size}, end of text {list(eos_token_ids(model))}"),
            ("weights", f"{weight_bytes:,} bytes ({weight_bytes / 2**20:,.1f} MiB, {cli.dtype_name(dtype)})"),
            ("KV cache", f"{list(cache.k.shape)} for K and for V"),
            ("KV cache bytes", f"{cache.nbytes:,} ({cache.nbytes / 2**20:,.1f} MiB), {per_position:,} per position"),
        ],
    )

    read = decode_weight_bytes(model)
    full = read + per_position * args.max_seq_len
    print(f"One token reads {read:,} bytes of weights and {per_position:,} bytes of cache per position before it.")
    print(f"With a full cache of {args.max_seq_len} positions that is {full:,} bytes.")
    if args.bandwidth:
        floor = full / (args.bandwidth * 1e9) * 1e3
        print(f"At {args.bandwidth:g} GB/s no implementation takes less than {floor:.3f} ms per token.")
    else:
        print("Divide by the memory bandwidth for the least time per token (--bandwidth GB/s does).")
    consistent = layer.qkv_proj.weight.shape[0] == (heads + 2 * kv_heads) * dim
    consistent &= cache.nbytes == per_position * args.max_seq_len
    return cli.verdict(consistent, "head counts, projection shapes and cache size agree")


if __name__ == "__main__":
    cli.run(main)
