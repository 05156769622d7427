"""Small launches of every kernel, answers checked, for `make sanitize` (compute-sanitizer, needs a CUDA device)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from kernels.decode_attention_wrapper import choose_launch, decode_attention_with_lse
from kernels.device import device_info, pdl_supported, prefetch_supported, tma_fits
from kernels.flash_attention_wrapper import flash_attention
from kernels.fused_decode_wrapper import MatvecConfig, Prefetch, matvec
from kv_cache.kv_layout import KVCache
from model.decode_attention_ref import attention_ref, decode_attention_ref
from model.generate import generate, make_decoder
from tests.tiny import prompt, tiny_model

DEVICE = torch.device("cuda")


def check(out, expected):
    """float16 results around 1, within four of their rounding steps."""
    torch.testing.assert_close(out.double(), expected.double(), rtol=0, atol=4e-3)


def decode_attention_cases():
    """One program per head, more splits than keys, shares that cross heads, an empty sequence, a window."""
    device = device_info(DEVICE)
    cases = ((4, 4, 96, [130, 65], None), (8, 2, 128, [90, 0], 50), (3, 1, 80, [33, 100], None))
    for Hq, Hkv, D, lengths, window in cases:
        q = torch.randn(2, Hq, D, dtype=torch.float16, device=DEVICE)
        k, v = (torch.randn(2, Hkv, 140, D, dtype=torch.float16, device=DEVICE) for _ in range(2))
        lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        expected = decode_attention_ref(q.double(), k.double(), v.double(), lengths, window=window)
        choice = choose_launch(2, Hkv, Hq // Hkv, D, 2, 140, device, block_t=32)
        for num_programs in (0, 5, 40, None):
            options = {"window": window, "choice": choice, "num_programs": num_programs}
            check(decode_attention_with_lse(q, k, v, lengths, **options)[0], expected)


def one_sequence_cases():
    """Whole splits, as batch 1 takes them: in turn and in runs, the next launch soon, by tensor descriptors."""
    device = device_info(DEVICE)
    for Hq, Hkv, D in ((4, 4, 96), (8, 2, 128)):
        q = torch.randn(1, Hq, D, dtype=torch.float16, device=DEVICE)
        k, v = (torch.randn(1, Hkv, 300, D, dtype=torch.float16, device=DEVICE) for _ in range(2))
        choice = choose_launch(1, Hkv, Hq // Hkv, D, 2, 300, device, block_t=32)._replace(min_tiles=1, few_splits=4)
        soon = ("keys", "partials") if choice.pdl else ("end", "end")
        choices = [choice._replace(interleaved=n == 0, next_after=soon[n]) for n in range(2)]
        if Hq == Hkv and tma_fits(device, k, v):
            choices += [one._replace(tma=True) for one in choices]
        for one in choices:
            for length in (1, 64, 257, 290):
                expected = decode_attention_ref(q.double(), k.double(), v.double(), length)
                options = {"choice": one, "num_programs": 4 * Hkv}
                check(decode_attention_with_lse(q, k, v, length, **options)[0], expected)


def flash_attention_cases():
    for S, T, D, causal in ((70, 70, 64, True), (33, 130, 96, False)):
        q = torch.randn(1, 4, S, D, dtype=torch.float16, device=DEVICE, requires_grad=True)
        k, v = (torch.randn(1, 2, T, D, dtype=torch.float16, device=DEVICE, requires_grad=True) for _ in range(2))
        out = flash_attention(q, k, v, causal=causal)
        out.sum().backward()
        check(out, attention_ref(q.double(), k.double(), v.double(), causal=causal))
        assert all(bool(x.grad.isfinite().all()) for x in (q, k, v))


def prefetch_cases():
    """Products that ask L2 for their own second tiles and for another weight, up to the last byte of both."""
    if not prefetch_supported(device_info(DEVICE)):
        return
    x = torch.randn(256, dtype=torch.float16, device=DEVICE)
    weight = torch.randn(512, 256, dtype=torch.float16, device=DEVICE) / 16
    out = torch.empty(512, dtype=torch.float16, device=DEVICE)
    for early in (True, False):
        for pdl in {False, pdl_supported(device_info(DEVICE))}:
            ahead = Prefetch(weight, weight.nbytes, parts=2, skip=4096, early=early)
            matvec(x, weight, out, pdl=pdl, prefetch=ahead, config=MatvecConfig(1, 256, 1, 256, look_ahead=256))
            check(out, weight.double() @ x.double())


def tokens_of(model, ids, path, **options):
    cache = KVCache.from_config(model.config, 40, dtype=model.dtype, device=DEVICE)
    decoder = make_decoder(path, model, cache, **options)
    return generate(model, ids, 12, decoder=decoder, eos_token_ids=())


def generation_cases():
    """The same tokens from every path: prefill, captured steps, fused kernels with and without PDL.

    In float16, where K and V go straight to the tensor cores, paths may part at a near tie; the fused ones may not.
    """
    heads_of_96 = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 192}
    for dtype, shape in ((torch.float32, {}), (torch.float16, heads_of_96)):
        model = tiny_model(device="cuda", dtype=dtype, num_hidden_layers=2, **shape)
        ids = prompt(20)
        expected = tokens_of(model, ids, "fused", pdl=False)
        if pdl_supported(device_info(DEVICE)):
            assert torch.equal(tokens_of(model, ids, "fused", pdl=True), expected), dtype
        if dtype == torch.float32:
            for path in ("triton", "graph"):
                assert torch.equal(tokens_of(model, ids, path), expected), path


if __name__ == "__main__":
    torch.manual_seed(0)
    decode_attention_cases()
    one_sequence_cases()
    flash_attention_cases()
    prefetch_cases()
    generation_cases()
    torch.cuda.synchronize()
    print("PASS: every kernel's answers are right")
