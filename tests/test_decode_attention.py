"""Decode attention against float64, judged by SDPA's own error in the same dtype; then one test per property.

On the CPU the kernels run interpreted on a thinned matrix; ``make test-gpu`` runs the whole of it on the device.
"""

import ast
import os
import random
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import config
from kernels import decode_attention_wrapper as wrapper
from kernels.decode_attention_triton import HOLE, LOWEST, STATE_WIDTH, collect_ptx
from kernels.decode_attention_wrapper import (
    choose_launch,
    choose_num_programs,
    decode_attention,
    decode_attention_with_lse,
    split_head_dim,
)
from kernels.device import (
    NO_GPU,
    TRITON_HAS_PDL,
    DeviceInfo,
    TensorDescriptor,
    device_info,
    pdl_supported,
    pretend_device,
)
from model.decode_attention_ref import attention_ref, decode_attention_ref
from tests.oracles import assert_close_to_reference, sdpa_explicit

ROOT = Path(__file__).resolve().parent.parent
H200 = DeviceInfo((9, 0), 132, 232448)
ON_GPU = torch.cuda.is_available()
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def make_inputs(B, Hq, Hkv, D, T_max, *, dtype=torch.float32, device="cpu"):
    q = torch.randn(B, Hq, D, device=device).to(dtype)
    k_cache, v_cache = (torch.randn(B, Hkv, T_max, D, device=device).to(dtype) for _ in range(2))
    return q, k_cache, v_cache


def poison(cache, lengths, window=None):
    """NaN wherever the query of each sequence must not look."""
    for b, length in enumerate(lengths):
        cache[b, :, length:] = float("nan")
        if window is not None:
            cache[b, :, : max(length - window, 0)] = float("nan")


def as_cache_len(lengths, device):
    """An int where all sequences have one length, else the tensor form."""
    same = len(set(lengths)) == 1
    return lengths[0] if same else torch.tensor(lengths, dtype=torch.int32, device=device)


def small_tiles(q, k_cache):
    """The launch choice at tiles of 16 keys, a program for each if there are enough: many borders in few keys."""
    (B, Hq, D), (Hkv, T_max) = q.shape, k_cache.shape[1:3]
    choice = choose_launch(B, Hkv, Hq // Hkv, D, q.element_size(), T_max, device_info(q.device), block_t=16)
    return choice._replace(min_tiles=1)


def split_attention(q, k_cache, v_cache, cache_len, num_programs, *, interleaved=True, choice=None, **kwargs):
    """(out, lse) of the split kernel (0 programs: the single pass), by default in small tiles, with a workspace full of
    NaN (which holes are, too).
    """
    choice = (choice or small_tiles(q, k_cache))._replace(interleaved=interleaved)
    for workspace in wrapper._workspaces.get((q.device, False), ()):
        workspace.partial.fill_(float("nan"))
    result = decode_attention_with_lse(
        q, k_cache, v_cache, cache_len, choice=choice, num_programs=num_programs, **kwargs
    )
    for workspace in wrapper._workspaces.get((q.device, False), ()):
        assert not workspace.arrived.any(), "a launch must leave its counters at 0 for the next"
    for workspace in wrapper._workspaces.get((q.device, True), ()):
        assert (workspace.partial.view(torch.int32) == HOLE.value).all(), "a launch that collects must leave holes"
    return result


def check(q, k_cache, v_cache, lengths, *, num_programs=None, window=None, scale=None, **kwargs):
    """A kernel over poisoned caches against float64, by the error of SDPA on the visible keys alone.

    num_programs: None is decode_attention itself, a number split_attention (with ``kwargs``); or several of these.
    """
    poison(k_cache, lengths, window)
    poison(v_cache, lengths, window)
    arguments = q, k_cache, v_cache, as_cache_len(lengths, q.device)
    outs = {}
    for programs in num_programs if isinstance(num_programs, tuple) else (num_programs,):
        if programs is None:
            outs[programs] = decode_attention(*arguments, window=window, scale=scale)
        else:
            outs[programs], _ = split_attention(*arguments, programs, window=window, scale=scale, **kwargs)
    for b, length in enumerate(lengths):
        first = 0 if window is None else max(length - window, 0)
        k, v = k_cache[b : b + 1, :, first:length], v_cache[b : b + 1, :, first:length]
        row = q[b : b + 1, :, None]
        reference = attention_ref(row.double(), k.double(), v.double(), scale=scale)[:, :, 0]
        native = sdpa_explicit(row, k, v, scale=scale)[:, :, 0] if length else torch.zeros_like(row[:, :, 0])
        for programs, out in outs.items():
            what = f"out[{b}], length {length}, {programs} programs"
            assert_close_to_reference(out[b : b + 1], reference, native, what=what)


# --- Right answers ---------------------------------------------------------------------------------------------------

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 200, 1000)
HEAD_DIMS = (16, 40, 64, 72, 80, 96, 112, 128, 160, 256)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", (1, 17, 63, 64, 65, 129, 200))
def test_lengths(length, dtype, device):
    inputs = make_inputs(2, 4, 2, 96, length + 5, dtype=dtype, device=device)
    check(*inputs, [length] * 2)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(head_dim, device):
    check(*make_inputs(2, 4, 2, head_dim, 80, device=device), [17, 70])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("Hq, Hkv", ((4, 4), (4, 2), (40, 10), (8, 1), (48, 2)))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_whole_matrix(Hq, Hkv, head_dim, dtype, device):
    for length in (*LENGTHS, 333, 4096, 5000):
        for window in (None, 100):
            inputs = make_inputs(2, Hq, Hkv, head_dim, length + 70, dtype=dtype, device=device)
            check(*inputs, [length, length + 70], window=window, num_programs=(None, 0, 7, 500))


@pytest.mark.parametrize("num_programs", (0, 7))
@pytest.mark.parametrize("Hq, Hkv", ((4, 4), (24, 8), (40, 10), (48, 2), (24, 1), (32, 1), (71, 1), (128, 1)))
def test_each_query_head_reads_its_own_kv_head(Hq, Hkv, num_programs, device):
    """V is the KV head's number everywhere, so the output names the head that was read; NaN around it stays."""
    D, length = 16, 21
    q, k_cache, v_cache = make_inputs(2, Hq, Hkv, D, 32, device=device)
    v_cache[:] = torch.arange(Hkv, device=device)[None, :, None, None]
    guarded = torch.full((2, Hq + 2, D), float("nan"), device=device)
    split_attention(q, k_cache, v_cache, length, num_programs, out=guarded[:, 1:-1])
    expected = (torch.arange(Hq, device=device) // (Hq // Hkv)).float()
    torch.testing.assert_close(guarded[:, 1:-1], expected[None, :, None].expand(2, Hq, D), rtol=0, atol=1e-5)
    assert guarded[:, (0, -1)].isnan().all()


@pytest.mark.parametrize("num_programs", (0, 5))
def test_random_values_with_an_odd_group(num_programs, device):
    for Hq, Hkv in ((71, 1), (12, 4)):
        inputs = make_inputs(1, Hq, Hkv, 64, 70, dtype=torch.float16, device=device)
        check(*inputs, [37], num_programs=num_programs)


def mean_position(length, window, device):
    """Equal scores and V[t] = t: the output is the mean visible position."""
    q, k_cache, v_cache = make_inputs(1, 2, 1, 16, length + 1, device=device)
    k_cache[:] = 0
    v_cache[:] = torch.arange(length + 1, device=device)[:, None]
    return decode_attention(q, k_cache, v_cache, length, window=window)


@pytest.mark.parametrize("length, mean", ((2048, 1024.0), (2047, 1023.0), (2046, 1022.5)))
def test_window_counts_the_newest_position(length, mean, device):
    out = mean_position(length, 2047, device)
    torch.testing.assert_close(out, torch.full_like(out, mean), rtol=0, atol=0.01)


def test_query_sees_the_last_key(device):
    """PyTorch's is_causal would align one query with the first key and give 0."""
    out = mean_position(5, None, device)
    torch.testing.assert_close(out, torch.full_like(out, 2.0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", (1, 5, 64, 65, 300))
def test_window(window, device):
    check(*make_inputs(2, 4, 2, 64, 200, device=device), [30, 199], window=window)


def test_length_zero(device):
    q, k_cache, v_cache = make_inputs(2, 4, 2, 64, 8, device=device)
    poison(k_cache, [0, 0])
    assert (decode_attention(q, k_cache, v_cache, 0) == 0).all()


def test_device_lengths_are_clamped_to_the_cache(device):
    q, k_cache, v_cache = make_inputs(2, 2, 1, 32, 20, device=device)
    beyond = torch.tensor([1000, -3], dtype=torch.int32, device=device)
    out = decode_attention(q, k_cache, v_cache, beyond)
    assert torch.equal(out[0], decode_attention(q, k_cache, v_cache, 20)[0])
    assert (out[1] == 0).all()


def test_scale(device):
    check(*make_inputs(1, 4, 4, 96, 70, device=device), [66], scale=0.3)


def test_large_scores_do_not_overflow(device):
    q, k_cache, v_cache = make_inputs(1, 2, 2, 64, 70, device=device)
    check(q * 100, k_cache, v_cache, [70])


def test_lse_is_natural_and_merges(device):
    q, k_cache, v_cache = make_inputs(1, 4, 2, 64, 256, device=device)
    out, lse = decode_attention_with_lse(q, k_cache, v_cache, 256)
    _, expected = attention_ref(
        q[:, :, None].double(), k_cache.double(), v_cache.double(), causal=False, return_lse=True
    )
    torch.testing.assert_close(lse.double(), expected[:, :, 0], rtol=0, atol=1e-4)
    head, head_lse = decode_attention_with_lse(q, k_cache[:, :, :200], v_cache[:, :, :200], 200)
    tail, tail_lse = decode_attention_with_lse(q, k_cache[:, :, 200:], v_cache[:, :, 200:], 56)
    head_share = torch.sigmoid(head_lse - tail_lse)[..., None]
    torch.testing.assert_close(head * head_share + tail * (1 - head_share), out, rtol=0, atol=1e-5)


def test_autoregressive_steps_equal_the_rows_of_a_prefill(device):
    """Position by position after each cache write, against causal attention over the whole sequence."""
    T = 33
    _, k_cache, v_cache = make_inputs(1, 4, 2, 64, T, device=device)
    queries = torch.randn(1, 4, T, 64, device=device)
    reference = attention_ref(queries.double(), k_cache.double(), v_cache.double())
    written_k, written_v = torch.full_like(k_cache, float("nan")), torch.full_like(v_cache, float("nan"))
    for position in range(T):
        written_k[:, :, position], written_v[:, :, position] = k_cache[:, :, position], v_cache[:, :, position]
        out = decode_attention(queries[:, :, position], written_k, written_v, position + 1)
        torch.testing.assert_close(out.double(), reference[:, :, position], rtol=0, atol=1e-5)


# --- Splitting the keys ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("Hq, Hkv, D", ((2, 2, 96), (4, 2, 80), (6, 2, 64)))
def test_splits(Hq, Hkv, D, dtype, device):
    """As many programs as 3, one per tile, and shares that end inside a head; the second sequence is a tile longer."""
    for num_programs in (3, 100):
        check(*make_inputs(2, Hq, Hkv, D, 80, dtype=dtype, device=device), [34, 49], num_programs=num_programs)


@pytest.mark.parametrize("length", (1, 15, 16, 17, 31, 32, 33, 63, 64, 65))
def test_lengths_around_tile_and_split_borders(length, device):
    """Two heads over 3 programs: from one tile to shares of several, each border one key early, on time, one late."""
    check(*make_inputs(1, 2, 2, 32, 80, device=device), [length], num_programs=3)


@pytest.mark.parametrize("window", (1, 10, 16, 17, 40, 79, 200))
def test_window_inside_and_across_splits(window, device):
    check(*make_inputs(1, 2, 1, 32, 80, device=device), [79], window=window, num_programs=4)


@pytest.mark.parametrize("interleaved", (False, True), ids=("runs of tiles", "tiles in turn"))
@pytest.mark.parametrize("length", (1, 16, 17, 49, 79, 80))
@pytest.mark.parametrize("collects", (False, True), ids=("counted", "collected"))
def test_whole_splits(length, interleaved, collects, device):
    """Two heads in 3 splits each, one of them a tile longer or none, with and without a window."""
    inputs = make_inputs(1, 2, 2, 32, 80, device=device)
    choice = small_tiles(*inputs[:2])._replace(collects=collects)
    for window in (None, 40):
        check(*inputs, [length], window=window, num_programs=6, interleaved=interleaved, choice=choice)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "B, Hq, Hkv, D, splits",
    ((1, 2, 2, 42, 3), (2, 3, 3, 96, 4), (1, 6, 2, 80, 5), (1, 4, 1, 128, 8), (1, 2, 2, 256, 17)),
)
def test_collected_splits(B, Hq, Hkv, D, splits, dtype, device):
    """Rows and columns that only pad, groups, more partials than are loaded at a time, twice in the same memory."""
    T_max = 32 * splits
    inputs = make_inputs(B, Hq, Hkv, D, T_max, dtype=dtype, device=device)
    choice = choose_launch(B, Hkv, Hq // Hkv, D, dtype.itemsize, T_max, device_info(device), block_t=32)
    choice = choice._replace(block_t=32, num_warps=4, min_tiles=1, few_splits=1, collects=True)
    programs = B * Hkv * splits
    assert wrapper._split_options(choice, programs, B, Hq, Hkv, D, False)[-1]["COLLECT"] is not None
    for length in (T_max, T_max // 2 + 1):
        if dtype != torch.float32:
            check(*inputs, [length] * B, num_programs=programs, choice=choice)
        outs, lses = zip(
            *(
                split_attention(*inputs, length, programs, choice=choice._replace(collects=collects))
                for collects in (True, False)
            ),
            strict=True,
        )
        torch.testing.assert_close(*outs, rtol=torch.finfo(dtype).eps, atol=1e-6)
        torch.testing.assert_close(*lses, rtol=1e-6, atol=1e-6)


def run_ptx(text, operands, load):
    """Run collect_ptx's instructions for one thread. operands: values of $0, $1, ... -> the same afterwards.

    load(base, offset, n) gives n words of memory.
    """
    lines = [line.strip() for line in text.splitlines()]
    values = {f"${i}": value for i, value in enumerate(operands)}

    def value(name):
        return values[name] if name in values else int(name) & 0xFFFFFFFF

    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        guard, line = re.fullmatch(r"(?:@(\w+) )?(.*?);?", line).groups()
        if line in ("{", "}", "again:") or line.startswith(".reg") or (guard and not values[guard]):
            continue
        operation, _, rest = line.partition(" ")
        if operation == "bra":
            at = lines.index(rest + ":")
            continue
        if operation.startswith("ld."):
            names, base, offset = re.fullmatch(r"\{(.*)\}, \[(\$\d+)\+(\d+)\]", rest).groups()
            names = names.split(", ")
            assert operation == f"ld.relaxed.gpu.global.v{len(names)}.b32"
            values.update(zip(names, load(values[base], int(offset), len(names)), strict=True))
            continue
        target, *sources = rest.split(", ")
        sources = [value(name) for name in sources]
        compute = {
            "mov.b32": lambda a: a,
            "or.pred": lambda a, b: a or b,
            "setp.gt.s32": lambda a, b: a > b,
            "setp.ne.b32": lambda a, b: a != b,
            "setp.eq.b32": lambda a, b: a == b,
            "setp.eq.or.b32": lambda a, b, c: a == b or c,
        }[operation]
        values[target] = compute(*sources)
    return [values[f"${i}"] for i in range(len(operands))]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("partials, count", ((1, 1), (4, 3), (7, 9), (16, 2), (16, 16)))
def test_the_ptx_waits_for_every_word(partials, count, seed):
    """Executed here, words arriving one by one in any order: out come those of ``count`` partials, and no hole."""
    shuffle = random.Random(seed)
    hole, lowest = HOLE.value & 0xFFFFFFFF, torch.tensor(LOWEST.value).view(torch.int32).item() & 0xFFFFFFFF
    distance, acc, state = 4 * 2 * (16 + STATE_WIDTH.value), 0, 64
    places = [[acc, acc + 4, acc + 8, acc + 12, state, state + 4] for _ in range(count)]
    places = [[distance * i + place for place in row] for i, row in enumerate(places)]
    pending = [place for row in places for place in row]
    memory = dict.fromkeys(pending, hole)
    shuffle.shuffle(pending)
    loads = 0

    def load(base, offset, n):
        nonlocal loads
        loads += 1
        assert loads < 10_000, "it loads for ever"
        assert (base + offset) % (4 * n) == 0, "a vector load must be aligned"
        words = [memory[base + offset + 4 * j] for j in range(n)]
        for _ in range(shuffle.randrange(3)):
            if pending:
                memory[pending.pop()] = shuffle.randrange(hole)
        return words

    results = run_ptx(collect_ptx(partials, distance), [hole] * 6 * partials + [acc, state, count], load)
    for i in range(partials):
        expected = [memory[place] for place in places[i]] if i < count else [0, 0, 0, 0, lowest, 0]
        assert results[6 * i : 6 * i + 6] == expected and hole not in expected


@pytest.mark.parametrize("bits", (-1, 0x7FFFFFFF), ids=hex)
def test_values_that_look_like_holes(bits, device):
    """A NaN whose bits say "not written yet" comes out of the arithmetic as another one: nobody waits for it."""
    q, k_cache, v_cache = make_inputs(1, 2, 2, 32, 80, device=device)
    nan = torch.tensor(bits, dtype=torch.int32, device=device).view(torch.float32)
    k_cache[:, 0, 20], v_cache[:, 1, 20, 5] = nan, nan
    out, _ = split_attention(q, k_cache, v_cache, 80, 6)
    assert out[0, 0].isnan().all() and out[0, 1].isnan().nonzero().tolist() == [[5]]


def written_maxima(device, programs, rows, head_dim):
    """Which softmax maxima of partial results a launch that counts has stored, [programs, 2 slots, rows]."""
    width = head_dim + STATE_WIDTH.value
    partial = wrapper._workspaces[device, False][-1].partial[: programs * 2 * rows * width]
    return ~partial.view(programs, 2, rows, width)[..., head_dim].isnan()


def test_few_splits_need_no_least_share(device):
    """Splits of one tile as long as they are few; more of them have min_tiles each."""
    q, k_cache, v_cache = make_inputs(1, 2, 1, 16, 100, device=device)
    used = []
    for length, few in ((32, 1), (32, 2), (80, 2), (80, 9)):
        choice = small_tiles(q, k_cache)._replace(min_tiles=2, few_splits=few, collects=False)
        split_attention(q, k_cache, v_cache, length, 9, choice=choice)
        used.append(int(written_maxima(q.device, 9, 2, 16)[:, 0, 0].sum()))
    assert used == [0, 2, 3, 5]


@pytest.mark.parametrize("few, programs", ((1, 3), (2, 4), (9, 9)))
def test_few_splits_of_unequal_sequences(few, programs, device):
    """Nine tiles in two sequences: shares of at least min_tiles, or few_splits programs for each."""
    inputs = make_inputs(2, 2, 1, 16, 100, device=device)
    choice = small_tiles(*inputs[:2])._replace(min_tiles=4, few_splits=few)
    split_attention(*inputs, 90, 9, choice=choice)  # the workspace is there now, to be filled with NaN
    check(*inputs, [80, 64], num_programs=9, choice=choice)
    assert int(written_maxima(inputs[0].device, 9, 2, 16)[:, :, 0].any(dim=1).sum()) == programs


@pytest.mark.skipif(TensorDescriptor is None, reason="this Triton has no tensor descriptors")
@pytest.mark.skipif(ON_GPU and torch.cuda.get_device_capability()[0] != 9, reason="needs compute capability 9.x")
@pytest.mark.parametrize("interleaved", (False, True), ids=("runs of tiles", "tiles in turn"))
@pytest.mark.parametrize("head_dim", (40, 96, 128))
def test_tensor_descriptors(head_dim, interleaved, device):
    """The choice of long caches: whole tiles by the copy engine, the last by pointers, nothing behind it used."""
    choice = choose_launch(1, 32, 1, head_dim, 2, 131072, H200, block_t=64, tma=True)
    assert choice.tma and choice.block_t == 128
    small = {"block_t": 32, "num_warps": 2} if not ON_GPU else {}
    next_after = "keys" if ON_GPU else "end"
    choice = choice._replace(min_tiles=1, pdl=pdl_supported(device_info(device)), next_after=next_after, **small)
    tile = choice.block_t
    with nullcontext() if ON_GPU else pretend_device(H200):
        for lengths in ([tile], [1], [2 * tile + 1] * 2, [4 * tile - 1, 3 * tile], [0, 5 * tile]):
            for window in (None, tile + 5):
                inputs = make_inputs(
                    len(lengths), 2, 2, head_dim, 5 * tile + 3, dtype=torch.float16, device=device
                )  # fmt: skip
                check(*inputs, lengths, window=window, num_programs=8, interleaved=interleaved, choice=choice)


def test_more_splits_than_are_merged_at_a_time(device):
    check(*make_inputs(1, 8, 1, 256, 220, dtype=torch.float16, device=device), [210], num_programs=14)


@pytest.mark.parametrize("head_dim", (16, 72, 112, 160, 256))
def test_head_dims_of_the_split_kernel(head_dim, device):
    check(*make_inputs(1, 2, 2, head_dim, 40, device=device), [37], num_programs=5)
    check(*make_inputs(1, 4, 2, head_dim, 40, device=device), [37], num_programs=5)


@pytest.mark.parametrize("Hq, num_programs", ((2, 0), (1, 8), (2, 8), (2, 64)))
def test_empty_and_unequal_sequences(Hq, num_programs, device):
    lengths = [0, 1, 17, 400]
    inputs = make_inputs(4, Hq, 1, 16, 420, device=device)
    check(*inputs, lengths, num_programs=num_programs)
    out, lse = split_attention(*inputs, as_cache_len(lengths, device), num_programs)
    assert (out[0] == 0).all() and (lse[0] == float("-inf")).all()
    reference_lse = torch.logsumexp((inputs[0][3].double() @ inputs[1][3, 0, :400].double().T) * 16**-0.5, dim=-1)
    torch.testing.assert_close(lse[3].double(), reference_lse, rtol=0, atol=1e-4)


def test_more_programs_than_keys(device):
    check(*make_inputs(1, 2, 2, 16, 4, device=device), [1], num_programs=64)


def test_least_share(device):
    """min_tiles keeps programs from starting for less; the answer is the same."""
    q, k_cache, v_cache = make_inputs(1, 2, 1, 32, 80, device=device)
    choice = small_tiles(q, k_cache)
    every = [
        decode_attention_with_lse(
            q, k_cache, v_cache, 77, choice=choice._replace(min_tiles=min_tiles), num_programs=100
        )[0]
        for min_tiles in (1, 2, 4, 9)
    ]
    for out in every[1:]:
        torch.testing.assert_close(out, every[0], rtol=0, atol=1e-6)


def test_split_agrees_with_the_single_pass_on_views(device):
    inputs = make_inputs(2, 4, 2, 64, 70, dtype=torch.float16, device=device)
    expected, _ = split_attention(*inputs, 67, 6)
    single, _ = split_attention(*inputs, 67, 0)
    torch.testing.assert_close(single, expected, rtol=0, atol=2e-3)
    for name, q, k_cache, v_cache in layouts(*inputs):
        assert torch.equal(split_attention(q, k_cache, v_cache, 67, 6)[0], expected), name


def test_workspace_grows_and_keeps_what_a_graph_may_hold(device):
    small = wrapper._workspace(device, 1000, 10, True)
    large = wrapper._workspace(device, 2 * small.partial.numel(), 2 * small.arrived.numel(), True)
    assert large.partial.numel() >= 2 * small.partial.numel() and large.arrived.numel() >= 2 * small.arrived.numel()
    assert wrapper._workspace(device, 1000, 10, True) is large
    assert any(workspace is small for workspace in wrapper._workspaces[device, True])
    assert all(workspace is not large for workspace in wrapper._workspaces.get((device, False), ()))


@pytest.mark.gpu
@pytest.mark.parametrize("Hq, Hkv, D", ((32, 32, 96), (32, 8, 128)))
def test_graph_replays_with_a_growing_length(Hq, Hkv, D, device):
    """10,000 replays of one captured launch, each against the single-pass kernel; twice, with the same bits."""
    T_max = 10_000
    inputs = make_inputs(1, Hq, Hkv, D, T_max, dtype=torch.float16, device=device)
    length = torch.ones(1, dtype=torch.int32, device=device)
    out = torch.full_like(inputs[0], float("nan"))
    decode_attention(*inputs, length, out=out)
    single = [torch.full_like(out, float("nan")), *inputs, length]
    decode_attention_with_lse(*single[1:], num_programs=0, out=single[0])
    graph = torch.cuda.CUDAGraph()
    error, first_run = torch.zeros(1, device=device), torch.empty(T_max, Hq, D, dtype=torch.float16, device=device)
    differing = torch.zeros(1, dtype=torch.int64, device=device)
    with torch.cuda.graph(graph):
        decode_attention(*inputs, length, out=out)
        decode_attention_with_lse(*single[1:], num_programs=0, out=single[0])
        torch.maximum(error, (out.float() - single[0].float()).abs().max(), out=error)
        length.add_(1)
    for run in range(2):
        length.fill_(1)
        for replay in range(T_max):
            out.fill_(float("nan"))
            graph.replay()
            if run == 0:
                first_run[replay] = out[0]
            else:
                differing += (first_run[replay] != out[0]).sum()
    assert error.item() <= 2e-3, "NaN fails too"
    assert differing.item() == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    "Hq, Hkv, D, T_max, next_after",
    (
        (32, 32, 96, 2048, "keys"),
        (32, 8, 128, 2048, "keys"),
        (32, 8, 128, 8192, "partials"),
        (32, 8, 128, 16384, "end"),
    ),
)
def test_launches_that_overlap_in_a_graph(Hq, Hkv, D, T_max, next_after, device):
    """Eight launches behind one another, as the layers of a step, share the workspace while the length grows."""
    layers = [make_inputs(1, Hq, Hkv, D, T_max, dtype=torch.float16, device=device) for _ in range(8)]
    if pdl_supported(device_info(device)) and device_info(device).sm_count == 132:
        assert wrapper.default_launch(*layers[0]).next_after == next_after
    length = torch.ones(1, dtype=torch.int32, device=device)
    outs = [torch.full_like(q, float("nan")) for q, _, _ in layers]
    graph = torch.cuda.CUDAGraph()
    decode_attention(*layers[0], length, out=outs[0])
    with torch.cuda.graph(graph):
        for inputs, out in zip(layers, outs, strict=True):
            decode_attention(*inputs, length, out=out)
    for value in range(1, T_max + 1, T_max // 256):
        length.fill_(value)
        runs = []
        for _ in range(2):
            for out in outs:
                out.fill_(float("nan"))
            graph.replay()
            runs.append(torch.stack(outs))
        singles = [decode_attention_with_lse(*inputs, length, num_programs=0)[0] for inputs in layers]
        assert (runs[0].float() - torch.stack(singles).float()).abs().max() <= 2e-3, f"length {value}; NaN fails too"
        assert torch.equal(*runs), f"length {value}"


@pytest.mark.gpu
def test_capture_before_the_first_call_is_refused(device):
    inputs = make_inputs(1, 4, 4, 64, 128, dtype=torch.float16, device=device)
    decode_attention(*inputs, 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrapper, "_workspaces", {})
        with (
            pytest.raises(RuntimeError, match="before a CUDA graph captures it"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            decode_attention(*inputs, 100)


@pytest.mark.gpu
def test_second_gpu(device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(0):
        check(*make_inputs(2, 4, 2, 64, 400, device="cuda:1"), [399, 20])


# --- Memory layouts --------------------------------------------------------------------------------------------------


def layouts(q, k_cache, v_cache):
    B, Hq, D = q.shape
    T = k_cache.shape[2]
    fused = torch.cat([q, k_cache[:, :, 0], v_cache[:, :, 0]], dim=1).flatten(1)
    yield "q: slice of a fused projection", fused[:, : Hq * D].view(B, Hq, D), k_cache, v_cache
    by_time = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k_cache, v_cache)]
    yield "caches: [B, T, Hkv, D] storage", q, *by_time
    longer = [torch.nn.functional.pad(x, (0, 0, 0, 9), value=float("nan"))[:, :, :T] for x in (k_cache, v_cache)]
    yield "caches: view of a longer buffer", q, *longer
    both = torch.stack([k_cache, v_cache], dim=3)
    yield "caches: interleaved k and v", q, both[:, :, :, 0], both[:, :, :, 1]


def test_views_give_the_same_bits(device):
    inputs = make_inputs(2, 4, 2, 64, 70, dtype=torch.float16, device=device)
    expected = decode_attention(*inputs, 67)
    for name, q, k_cache, v_cache in layouts(*inputs):
        assert torch.equal(decode_attention(q, k_cache, v_cache, 67), expected), name
    q, k_cache, v_cache = inputs
    expanded = [x[:1].expand(2, -1, -1, -1) for x in (k_cache, v_cache)]
    repeated = [x.contiguous() for x in expanded]
    assert torch.equal(decode_attention(q, *expanded, 67), decode_attention(q, *repeated, 67))


def test_out_is_written_through_its_strides(device):
    inputs = make_inputs(2, 4, 2, 64, 40, device=device)
    buffer = torch.full((4, 2, 128), float("nan"), device=device)
    out = buffer.transpose(0, 1)[:, :, :64]
    assert decode_attention(*inputs, 33, out=out) is out
    assert torch.equal(out, decode_attention(*inputs, 33))
    assert buffer[:, :, 64:].isnan().all()


@pytest.mark.parametrize("num_programs", (0, 3))
def test_positions_far_apart(num_programs):
    """From one position to the next 2^28 elements: the ninth of a tile lies 2^31 from the first."""
    run_python(
        f"""
import torch, kernels
from kernels.decode_attention_wrapper import decode_attention_with_lse
from tests.test_decode_attention import small_tiles
T, D = 9, 64
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
storage = torch.empty(2**31 + 2 * D, dtype=torch.float16, device=device)
k, v = (storage[i * D:].as_strided((1, 1, T, D), (0, 0, 2**28, 1)) for i in range(2))
q, small_k, small_v = torch.randn(1, 2, D), *torch.randn(2, 1, 1, T, D)
q, small_k, small_v = (x.half().to(device) for x in (q, small_k, small_v))
k.copy_(small_k), v.copy_(small_v)
choice = small_tiles(q, k)
out, _ = decode_attention_with_lse(q, k, v, T, choice=choice, num_programs={num_programs})
expected, _ = decode_attention_with_lse(q, small_k, small_v, T, choice=choice, num_programs={num_programs})
assert torch.equal(out, expected)
"""
    )


def run_python(code, **environment):
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert result.returncode == 0, f"exit {result.returncode}\n{result.stdout}\n{result.stderr[-2000:]}"
    return result.stdout


def test_offsets_beyond_32_bits():
    """The third sequence lies 2^31 elements into the storage; a wrapped offset dies with a segmentation fault."""
    run_python(
        """
import torch, kernels
from kernels.decode_attention_wrapper import decode_attention
B, Hkv, T, D = 3, 1, 40, 64
device = "cuda" if torch.cuda.is_available() else "cpu"
storage = [torch.empty(2**31 + 4096, dtype=torch.float16, device=device) for _ in range(2)]
caches = [x.as_strided((B, Hkv, T, D), (2**30, T * D, D, 1)) for x in storage]
q = torch.randn(B, 2, D, device=device).half()
small = [torch.randn(1, Hkv, T, D, device=device).half() for _ in range(2)]
for cache, values in zip(caches, small):
    cache[2] = values[0]
lengths = torch.tensor([0, 0, T], dtype=torch.int32, device=device)
out = decode_attention(q, *caches, lengths)
assert torch.equal(out[2:], decode_attention(q[2:], *small, lengths[2:]))
"""
    )


# --- Launch choices and compilation ----------------------------------------------------------------------------------


def launch_choice(
    num_kv_heads, group_size, head_dim, max_len, *, batch=1, dtype_bytes=2, device=H200, block_t=64, tma=False
):
    return choose_launch(
        batch, num_kv_heads, group_size, head_dim, dtype_bytes, max_len, device, block_t=block_t, tma=tma
    )


@pytest.fixture
def launches_next(monkeypatch):
    """Choices as where programmatic dependent launch is there."""
    monkeypatch.setattr(wrapper, "pdl_supported", lambda device: device.capability >= (9, 0))
    wrapper.choose_launch.cache_clear()
    yield
    wrapper.choose_launch.cache_clear()


def test_launch_choices():
    for device in (H200, NO_GPU, DeviceInfo((7, 5), 40, 65536)):
        for group_size in (1, 3, 4, 24, 32, 71, 128):
            for head_dim in (16, 96, 128, 200, 256):
                for dtype_bytes in (2, 4):
                    for max_len in (1, 100_000):
                        choice = launch_choice(
                            2, group_size, head_dim, max_len, dtype_bytes=dtype_bytes, device=device, block_t=128
                        )
                        assert 1 <= choice.rows <= min(32, group_size) and choice.block_t in (16, 32, 64)
                        assert choice.num_warps in (1, 2, 4, 8) and 2 <= choice.num_stages <= 5
                        tile_bytes = 2 * choice.block_t * sum(split_head_dim(head_dim)) * dtype_bytes
                        if dtype_bytes == 4:
                            assert choice.num_stages * tile_bytes <= device.shared_memory
    assert launch_choice(32, 1, 96, 131072, block_t=16).block_t == 16
    assert launch_choice(32, 1, 96, 131072, block_t=16, tma=True)[1:3] == (32, 2), "twice the keys, a warp for each 16"
    assert launch_choice(1, 71, 64, 512).rows == 24


@pytest.mark.parametrize(
    "num_kv_heads, group_size, head_dim, expected",
    (
        (32, 1, 96, ((64, 4, 32), (32, 2, 128), (32, 2, 256), (32, 2, 224), (32, 2, 224), *[(128, 8, 128)] * 2)),
        (8, 4, 128, ((32, 4, 32), (32, 4, 64), (32, 4, 64), (32, 4, 88), (32, 4, 128), (32, 4, 128), (32, 4, 128))),
        (10, 4, 128, ((32, 4, 40), (32, 4, 80), (32, 4, 80), (32, 4, 110), (32, 4, 130), (32, 4, 130), (32, 4, 130))),
        (8, 8, 128, ((32, 4, 32), (32, 4, 64), (32, 4, 64), (32, 4, 64), (64, 8, 128), (64, 8, 128), (64, 8, 128))),
    ),
)
def test_choices_of_the_measured_shapes(num_kv_heads, group_size, head_dim, expected, launches_next):
    """Tile, warps and programs on an H200: from 2048 positions on heads without a group leave the next launch room."""
    lengths = (128, 256, 512, 2048, 8192, 32768, 131072)
    for max_len, (block_t, num_warps, num_programs) in zip(lengths, expected, strict=True):
        choice = launch_choice(num_kv_heads, group_size, head_dim, max_len, tma=True)
        assert (choice.block_t, choice.num_warps, choice.tma) == (block_t, num_warps, block_t == 128), max_len
        assert choose_num_programs(choice, 1, num_kv_heads, group_size, max_len, 132) == num_programs, max_len


def test_tiles_in_turn_in_the_measured_range():
    assert [launch_choice(32, 1, 96, T).interleaved for T in (512, 1024, 2048, 131072)] == [True, True, False, False]
    assert all(launch_choice(8, 4, 128, T).interleaved for T in (512, 2048, 8192, 131072))


def test_when_the_next_launch_comes(launches_next):
    after = [launch_choice(32, 1, 96, T, tma=True).next_after for T in (128, 512, 1024, 2048, 8192, 16384, 131072)]
    assert after == ["keys"] * 7
    assert launch_choice(32, 1, 96, 131072).next_after == "end", "pointers only: two programs fill each multiprocessor"
    assert launch_choice(32, 1, 96, 2048, batch=2).next_after == "end"
    after = [launch_choice(8, 4, 128, T).next_after for T in (128, 2048, 4096, 8192, 16384)]
    assert after == ["keys", "keys", "partials", "partials", "end"]
    assert launch_choice(8, 4, 128, 128, device=NO_GPU).next_after == "end"
    assert launch_choice(1, 33, 256, 65536).next_after == "end", "nothing is collected"


def test_tensor_descriptors_where_they_gain():
    assert launch_choice(32, 1, 96, 16384, tma=True).tma
    assert not launch_choice(32, 1, 96, 16384).tma, "caches that the copy engine cannot read"
    assert not launch_choice(32, 1, 96, 8192, tma=True).tma
    assert not launch_choice(8, 4, 128, 131072, tma=True).tma
    assert not launch_choice(32, 1, 96, 131072, batch=2, tma=True).tma
    assert not launch_choice(32, 1, 200, 131072, tma=True).tma
    assert not launch_choice(32, 1, 96, 131072, dtype_bytes=4, tma=True).tma


def test_number_of_programs(launches_next):
    choice = launch_choice(32, 1, 96, 1024)
    assert (choice.block_t, choice.min_tiles, choice.programs_per_sm) == (32, 2, 2)
    assert choose_num_programs(choice, 1, 32, 1, 0, 132) == 32, "somebody writes the zeros"
    assert choose_num_programs(choice, 1, 32, 1, 64, 132) == 32, "two tiles are one program"
    assert choose_num_programs(choice, 1, 32, 1, 65, 132) == 64
    assert choose_num_programs(choice, 64, 32, 1, 4096, 132) == 264, "more heads than programs: equal shares"
    assert choose_num_programs(choice, 1, 32, 1, 8192, 24) == 48, "32 of 48 would leave a third idle"
    assert choose_num_programs(choice, 1, 32, 1, 8192, 108) == 192, "192 of 216 are whole splits"
    assert [launch_choice(heads, 1, 96, 4096).programs_per_sm for heads in (32, 40, 48, 64)] == [1.75, 2, 2, 2], (
        "shares that cross heads cost more than room for the next launch gains"
    )
    roomy = choice._replace(programs_per_sm=1.75)
    assert choose_num_programs(roomy, 1, 32, 1, 8192, 132) == 224, "seven of the eight splits that there are places for"
    grouped = launch_choice(1, 71, 64, 4096)
    assert (grouped.block_t, grouped.rows, grouped.min_tiles, grouped.few_splits) == (32, 24, 8, 8)
    assert choose_num_programs(grouped, 1, 1, 71, 32, 132) == 3, "blocks of query heads"
    assert choose_num_programs(grouped, 1, 1, 71, 256, 132) == 24, "eight splits of one tile"
    assert choose_num_programs(grouped, 1, 1, 71, 4096, 132) == 48, "16 of eight"


def test_head_dim_in_two_parts():
    for head_dim in range(16, 257):
        low, high = split_head_dim(head_dim)
        assert low >= 16 and low & (low - 1) == 0 and high & (high - 1) == 0 and high != low
        assert head_dim <= low + high <= 2 ** (head_dim - 1).bit_length()
    assert split_head_dim(96) == (64, 32)
    assert split_head_dim(128) == (128, 0)
    assert split_head_dim(112) == (128, 0)


def test_tile_comes_from_the_settings(device, monkeypatch):
    inputs = make_inputs(1, 4, 2, 64, 300, device=device)
    before = decode_attention(*inputs, 290)
    monkeypatch.setattr(config, "BLOCK_T", 16)
    after = decode_attention(*inputs, 290)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)
    assert not torch.equal(after, before), "another tile must sum in another order"


AOT = """
import torch, kernels
from kernels.aot import compile_only
from kernels.decode_attention_wrapper import decode_attention, decode_attention_with_lse
"""


def on_hopper(Hq, Hkv, D, T=2048):
    """Code that compiles one call at T positions for compute capability 9.0, ``compiled``."""
    return (
        AOT
        + f"""
q, cache = torch.empty(1, {Hq}, {D}, dtype=torch.float16), torch.empty(1, {Hkv}, {T}, {D}, dtype=torch.float16)
with compile_only((9, 0)) as compiled:
    decode_attention(q, cache, cache, {T})
"""
    )


@pytest.mark.parametrize("shapes", ("COMMON", "RARE"))
@pytest.mark.parametrize("capability", ((7, 5), (8, 0), (8, 9), (9, 0), (12, 0)), ids=str)
def test_compiles_without_spills(capability, shapes):
    """At the default tiles, for a short and for a long cache. Odd groups, fp32 (for checking only) and, for a batch of
    unequal lengths, what lives across the loop over items may keep a few values in memory; head_dim 256 on Turing many.
    """
    run_python(
        AOT
        + f"""
from kernels.device import SHARED_MEMORY, TRITON_VERSION
capability = {capability}
LENGTHS = torch.zeros(2, dtype=torch.int32)
COMMON = (
    (32, 32, 96, torch.float16, 0),
    (32, 8, 128, torch.float16, 0),
    (64, 8, 128, torch.float16, 0),
)
RARE = (
    (16, 4, 256, torch.float16, 0),
    (8, 8, 256, torch.float16, 0),
    (8, 8, 200, torch.float16, 0),
    (33, 1, 256, torch.float16, 16 if capability == (8, 0) and TRITON_VERSION < (3, 7) else 0),
    (71, 1, 64, torch.float16, 32),
    (32, 32, 96, torch.float32, 32),
    (16, 8, 256, torch.float32, 256),
)
for Hq, Hkv, D, dtype, limit in {shapes}:
    if D >= 200 and capability < (8, 0):
        continue
    for T_max in (64, 65536) if capability >= (8, 0) and (dtype == torch.float16 or D == 256) else (64,):
        q, cache = torch.empty(1, Hq, D, dtype=dtype), torch.empty(1, Hkv, 1, D, dtype=dtype).expand(-1, -1, T_max, -1)
        queries, caches = q.expand(2, -1, -1), cache.expand(2, -1, -1, -1)
        with compile_only(capability) as equal:
            decode_attention(q, cache, cache, 40)
            if D in (96, 128) and Hq == 32:
                decode_attention_with_lse(q, cache, cache, 40, num_programs=0)
        with compile_only(capability) as unequal:
            if (Hq, D) in ((32, 96), (32, 128)) and capability >= (8, 0):
                decode_attention(queries, caches, caches, LENGTHS)
        assert equal
        for kernel in (*equal, *unequal):
            case = Hq, Hkv, D, dtype, T_max, kernel[:5]
            assert kernel.shared_memory <= SHARED_MEMORY[capability], case
            assert kernel.spill_bytes <= (limit if kernel in equal else limit + 32), case
""",
        TRITON_INTERPRET="0",
    )


@pytest.mark.parametrize("heads", ((32, 32, 96), (32, 8, 128)), ids=("one row", "group"))
def test_little_passes_between_threads(heads):
    """Barriers are latency that every call has. On Hopper q needs none, warps meet in two or three exchanges, and the
    merge of partials has none but the one before they are erased.
    """
    run_python(
        on_hopper(*heads)
        + """
(kernel,) = compiled
before, after = kernel.ptx.split("mma.sync", 1)[0], kernel.ptx.rsplit("mma.sync", 1)[1]
assert "atom." not in after and after.count("again:") == 1
merge = after.split("again:", 1)[1]
barriers = [part.count("bar.sync") for part in (before, after, merge)]
assert barriers[0] <= 4 and barriers[1] <= 10 and barriers[2] <= 1, barriers
""",
        TRITON_INTERPRET="0",
    )


@pytest.mark.skipif(not TRITON_HAS_PDL, reason="this Triton has no PDL")
@pytest.mark.parametrize("heads", ((32, 32, 96), (32, 8, 128)), ids=("one row", "group"))
def test_early_launches_wait_before_they_touch_memory(heads):
    """Once, behind the first keys' addresses; where the length is on the device, before it is read."""
    run_python(
        on_hopper(*heads)
        + """
import re
with compile_only((9, 0)) as by_tensor:
    decode_attention(q, cache, cache, torch.zeros(1, dtype=torch.int32))
for kernel, predicate in zip(compiled + by_tensor, ("@p ", ""), strict=True):
    before, after = kernel.ptx.split(predicate + "griddepcontrol.wait")
    assert "griddepcontrol.wait" not in before + after
    touched = r"(ld|st|prefetch|atom|red)\\.global|cp\\.async"
    assert not re.search(touched, before) and re.search(touched, after)
""",
        TRITON_INTERPRET="0",
    )


@pytest.mark.skipif(not TRITON_HAS_PDL, reason="this Triton has no PDL")
@pytest.mark.parametrize("cache_len, expected", ((2048, [1, 0]), (8192, [0, 1]), (65536, [0, 0])))
def test_the_next_launch_comes_before_or_behind_the_merge(cache_len, expected):
    run_python(
        on_hopper(32, 8, 128, cache_len)
        + f"""
before, after = compiled[0].ptx.split("@any bra again;")
assert [part.count("griddepcontrol.launch_dependents") for part in (before, after)] == {expected}
""",
        TRITON_INTERPRET="0",
    )


@pytest.mark.parametrize("num_programs", (None, 0), ids=("split", "single pass"))
def test_one_compilation_serves_every_length(num_programs, tmp_path):
    """Counted in Triton's own cache folder: 64 consecutive lengths, then powers of two up to 131072, windows too."""
    run_python(
        AOT
        + f"""
from pathlib import Path
def compiled_kernels():
    return len(list(Path({str(tmp_path)!r}).rglob("*.ttir")))
q, cache = torch.empty(1, 4, 64, dtype=torch.float16), torch.empty(1, 2, 131072, 64, dtype=torch.float16)
with compile_only((9, 0)):
    for length in [*range(1, 66), *(2**n for n in range(7, 18))]:
        decode_attention_with_lse(q, cache, cache, length, num_programs={num_programs})
        decode_attention_with_lse(q, cache, cache, length, window=length // 2 + 1, num_programs={num_programs})
        assert compiled_kernels() == 1, (length, compiled_kernels())
""",
        TRITON_INTERPRET="0",
        TRITON_CACHE_DIR=str(tmp_path),
    )


def test_fp32_products_use_full_precision():
    out = run_python(
        AOT
        + """
q, cache = torch.empty(1, 8, 64), torch.empty(1, 2, 512, 64)
with compile_only((8, 0)) as compiled:
    decode_attention(q, cache, cache, 100)
print("tf32" in compiled[0].ptx)
""",
        TRITON_INTERPRET="0",
    )
    assert out.strip() == "False"


def triton_functions(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            yield node


KERNEL_FILES = sorted((ROOT / "kernels").glob("*_triton.py"))


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda path: path.name)
def test_masked_loads_say_what_they_give(path):
    """A masked load without ``other`` is 0 in the interpreter and undefined on the GPU."""
    loads = [
        node
        for function in triton_functions(ast.parse(path.read_text()))
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load"
    ]
    assert loads
    for call in loads:
        names = {keyword.arg for keyword in call.keywords}
        assert "mask" not in names or "other" in names, f"{path.name}:{call.lineno}"
        assert len(call.args) == 1, f"{path.name}:{call.lineno}: name the mask"


def test_lengths_are_not_compile_time():
    from kernels import decode_attention_triton as source

    for name in ("_decode_attention_kernel", "_decode_attention_split_kernel"):
        tree = ast.parse(Path(source.__file__).read_text())
        function = next(f for f in triton_functions(tree) if f.name == name)
        annotations = {a.arg: a.annotation for a in function.args.args}
        decorator = ast.unparse(function.decorator_list[0])
        for argument in ("cache_len", "T_max", "window"):
            assert annotations[argument] is None and repr(argument) in decorator, (name, argument)


# --- torch.compile ---------------------------------------------------------------------------------------------------


def test_opcheck(device):
    q, k_cache, v_cache = make_inputs(2, 4, 2, 32, 20, device=device)
    lengths = torch.tensor([3, 20], dtype=torch.int32, device=device)
    op = torch.ops.phi_triton.decode_attention.default
    torch.library.opcheck(op, (q, k_cache, v_cache, 17, None, None, None))
    torch.library.opcheck(op, (q, k_cache, v_cache, None, lengths, 0.1, 9))


def test_compiles_into_one_graph(device):
    q, k_cache, v_cache = make_inputs(2, 4, 2, 32, 20, device=device)
    lengths = torch.tensor([3, 20], dtype=torch.int32, device=device)

    @torch.compile(fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager")
    def doubled(cache_len, out=None):
        return decode_attention(q, k_cache, v_cache, cache_len, window=9, out=out) * 2

    for cache_len in (17, 18, lengths):
        torch.testing.assert_close(doubled(cache_len), decode_attention(q, k_cache, v_cache, cache_len, window=9) * 2)
    out = torch.full_like(q, float("nan"))
    doubled(18, out)
    torch.testing.assert_close(out, decode_attention(q, k_cache, v_cache, 18, window=9))


# --- Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    (
        (lambda a: a.update(q=a["q"][0]), r"q must be \[B, Hq, D\], got shape \[4, 32\]"),
        (lambda a: a.update(q=a["q"][:1]), r"k_cache must be \[B=1, Hkv, T_max, D=32\]"),
        (lambda a: a.update(q=a["q"][..., :16]), r"k_cache must be \[B=2, Hkv, T_max, D=16\]"),
        (lambda a: a.update(v_cache=a["v_cache"][:, :, :5]), r"v_cache must have k_cache's shape"),
        (lambda a: a.update(q=a["q"][:, :3]), r"multiple of KV heads, got 3 and 2"),
        (lambda a: a.update(q=a["q"].half()), r"k_cache must have q's dtype torch.float16, got torch.float32"),
        (lambda a: a.update({n: a[n].double() for n in ("q", "k_cache", "v_cache")}), r"got torch.float64"),
        (lambda a: a.update({n: a[n][..., :8] for n in ("q", "k_cache", "v_cache")}), r"from 16 to 256, got 8"),
        (lambda a: a.update({n: a[n].repeat_interleave(9, -1) for n in ("q", "k_cache", "v_cache")}), r"got 288"),
        (lambda a: a.update({n: a[n][..., ::2] for n in ("q", "k_cache", "v_cache")}), r"q's last dimension .* 2"),
        (lambda a: a.update(cache_len=21), r"from 0 to the cache's 20 positions, got 21"),
        (lambda a: a.update(cache_len=-1), r"from 0 to the cache's 20 positions, got -1"),
        (lambda a: a.update(cache_len=3.0), r"cache_len must be an int or an int32 tensor \[B=2\], got float"),
        (lambda a: a.update(cache_len=torch.tensor([3, 4])), r"contiguous int32 tensor \[B=2\], got torch.int64"),
        (lambda a: a.update(cache_len=torch.zeros(3, dtype=torch.int32)), r"int32 tensor \[B=2\], got torch.int32 \[3"),
        (lambda a: a.update(window=0), r"window must be None or an int of at least 1, got 0"),
        (lambda a: a.update(window=2.5), r"window must be None or an int of at least 1, got 2.5"),
        (lambda a: a.update(window=True), r"window must be None or an int of at least 1, got True"),
        (lambda a: a.update(scale=float("nan")), r"scale must be finite, got nan"),
        (lambda a: a.update(out=torch.empty(2, 4, 16)), r"out must have q's shape \[2, 4, 32\], got \[2, 4, 16\]"),
        (lambda a: a.update(out=torch.empty(2, 4, 32).half()), r"out must have q's dtype"),
        (lambda a: a["q"].requires_grad_(), r"no backward"),
        (lambda a: a.update(k_cache=a["k_cache"].to("meta")), r"one device, got .*k_cache on meta"),
    ),
)
def test_bad_arguments(change, message):
    q, k_cache, v_cache = make_inputs(2, 4, 2, 32, 20)
    arguments = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_len": 7}
    change(arguments)
    with pytest.raises(ValueError, match=message) as error:
        decode_attention(**arguments)
    assert "\n" not in str(error.value)


def test_bfloat16_on_turing_is_refused():
    inputs = make_inputs(1, 2, 2, 32, 8, dtype=torch.bfloat16)
    with pretend_device(DeviceInfo((7, 5), 40, 65536)), pytest.raises(ValueError, match="use float16"):
        decode_attention(*inputs, 5)


def test_reference_agrees_with_sdpa():
    """The oracle itself, in float64, so that the two do not share a fault."""
    q, k_cache, v_cache = (x.double() for x in make_inputs(2, 4, 2, 32, 20))
    reference = decode_attention_ref(q, k_cache, v_cache, 17)
    expected = sdpa_explicit(q[:, :, None], k_cache[:, :, :17], v_cache[:, :, :17])[:, :, 0]
    torch.testing.assert_close(reference, expected)
