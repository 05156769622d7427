"""Step 2: is the Triton decode attention right? Its error against float64, beside that of PyTorch's SDPA.

Each row is one set of heads, head_dim and dtype over several cache lengths; the worst length counts. The bar is not a
fixed tolerance but SDPA's own error in the same dtype on the same inputs, times the factor in the row's column "bar":
1.5, but 3 for float32 on a GPU, and 4.5 for bfloat16 in the interpreter, which truncates (model/accuracy.py). The cache
behind cache_len and the output are filled with NaN first. Exits 1 when a row fails.

    python model/validate_decode_attention_triton.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import cli
from kernels.decode_attention_wrapper import decode_attention
from model.accuracy import bar, judge
from model.decode_attention_ref import decode_attention_ref
from model.phi3_layers import sdpa_attention

# (query heads, KV heads, head_dim, whose shape it is)
SHAPES = (
    (32, 32, 96, "Phi-3 Mini"),
    (40, 10, 128, "Phi-3 Medium"),
    (24, 8, 128, "Phi-4 Mini"),
    (9, 3, 64, "demo checkpoint"),
    (8, 1, 80, "MQA"),
)
LENGTHS = (1, 17, 63, 64, 65, 200, 511, 512, 2049, 4096)
LENGTHS_INTERPRETED = (1, 17, 64, 65, 200)


def validate(attention, shape, dtype, lengths, device, *, window=None):
    """The worst Accuracy of ``attention`` over ``lengths`` for ``shape`` = (Hq, Hkv, D)."""
    Hq, Hkv, D = shape
    results = []
    for length in lengths:
        # The largest error of few elements scatters: several sequences where kernels are not interpreted.
        B = 8 if device.type == "cuda" else 1
        q = torch.randn(B, Hq, D, device=device).to(dtype)
        k, v = (torch.randn(B, Hkv, length + 64, D, device=device).to(dtype) for _ in range(2))
        k[:, :, length:], v[:, :, length:] = float("nan"), float("nan")
        out = torch.full_like(q, float("nan"))
        attention(q, k, v, length, window=window, out=out)
        written = (k[:, :, :length], v[:, :, :length])
        native = sdpa_attention(q[:, :, None], *written, window=window)[:, :, 0]
        reference = decode_attention_ref(q.double(), *(x.double() for x in written), length, window=window)
        results.append(judge(out, reference, native))
    return max(results, key=lambda a: (not a.ok, a.max_error / (a.native_max_error or 1.0)))


def main():
    args = cli.parser(__doc__, "DEVICE", "SEED").parse_args()
    cli.header("step 2", "validate the Triton decode attention against float64, SDPA's own error as the bar")
    device = cli.resolve_device(args.device)
    torch.manual_seed(args.seed)
    lengths = LENGTHS if device.type == "cuda" else LENGTHS_INTERPRETED
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        dtypes.remove(torch.bfloat16)
    rows, ok = [], True
    for Hq, Hkv, D, name in SHAPES:
        for dtype in dtypes:
            for window in (None, 100) if (Hq, dtype) == (32, torch.float16) else (None,):
                worst = validate(decode_attention, (Hq, Hkv, D), dtype, lengths, device, window=window)
                ok &= worst.ok
                errors = (f"{error:.2e}" for error in worst[1:])
                verdict = "ok" if worst.ok else "WRONG"
                factor = f"{bar(dtype)[0]:g}x"
                rows.append((f"{Hq}/{Hkv}", D, cli.dtype_name(dtype), window or "-", *errors, factor, verdict, name))
    print(f"cache lengths {', '.join(map(str, lengths))}; per row the worst of them")
    columns = ("heads", "D", "dtype", "window", "max err", "SDPA's", "rel err", "SDPA's", "bar", "verdict", "shape of")
    cli.table(columns, rows)
    factors = ", ".join(f"{cli.dtype_name(dtype)} {bar(dtype)[0]:g}" for dtype in dtypes)
    return cli.verdict(ok, f"every row's errors are within its bar, SDPA's own times {factors} (and rounding)")


if __name__ == "__main__":
    cli.run(main)
