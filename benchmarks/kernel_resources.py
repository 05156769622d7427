"""Registers, spills, shared memory and occupancy of each kernel on GPUs that need not be here.

Kernels are compiled ahead of time with the very arguments of a launch (kernels/aot.py). Spilled registers live in local
memory: a kernel whose one job is to read memory fast should have none. The decode kernels are compiled for a short and
a long cache and for grouped heads, over tiles of BLOCK_T keys: as the wrapper takes them, and past that ("forced") with
warps in proportion, up to eight, and as many bytes on their way. Occupancy 0 means that a block does not fit the GPU at
all.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if __name__ in ("__main__", "__mp_main__"):
    os.environ["TRITON_INTERPRET"] = "0"  # compiling needs real kernels, with or without a GPU

import torch

from benchmarks import common

# isort: split
import cli
import config
from kernels.aot import compile_only
from kernels.device import SHARED_MEMORY, device_info, pdl_supported

BLOCK_TS = [16, 32, 64, 128]
KERNELS = ("decode", "flash", "fused")


class DecodeCase(NamedTuple):
    """A layer and the length of its cache: both decide the tile that the wrapper takes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    cache_len: int


DECODE_CASES = (DecodeCase(32, 32, 96, 4096), DecodeCase(32, 32, 96, 65536), DecodeCase(32, 8, 128, 4096))
FUSED_CACHES = (512, 4096)


class Limits(NamedTuple):
    """Per multiprocessor: warps, blocks, bytes of shared memory; and bytes that the system takes per block."""

    warps: int
    blocks: int
    shared_memory: int
    shared_memory_per_block: int


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
LIMITS = {
    (7, 5): Limits(32, 16, 64 * 1024, 0),
    (8, 0): Limits(64, 32, 164 * 1024, 1024),
    (8, 9): Limits(48, 24, 100 * 1024, 1024),
    (9, 0): Limits(64, 32, 228 * 1024, 1024),
    (12, 0): Limits(48, 24, 100 * 1024, 1024),
}
REGISTERS, REGISTERS_PER_WARP_STEP = 65536, 256


def occupancy(capability, registers, shared_memory, num_warps):
    """Share of a multiprocessor's warps that blocks of this kernel can fill, and what limits it -> (share, limit)."""
    limits = LIMITS[capability]
    per_warp = -(-registers * 32 // REGISTERS_PER_WARP_STEP) * REGISTERS_PER_WARP_STEP
    blocks = {
        "warps": limits.warps // num_warps,
        "blocks": limits.blocks,
        "registers": REGISTERS // per_warp // num_warps,
        "shared memory": limits.shared_memory // max(1, shared_memory + limits.shared_memory_per_block),
    }
    if shared_memory > SHARED_MEMORY[capability]:
        blocks["shared memory"] = 0
    limit = min(blocks, key=blocks.get)
    return blocks[limit] * num_warps / limits.warps, limit


def half(*shape):
    return torch.empty(shape, dtype=torch.float16)


def launch_decode(case, block_t, num_programs=None):
    """A decode kernel on a DecodeCase: the wrapper's choice where that is at least ``block_t`` keys per tile, else that
    many, forced -> (keys per tile, whether forced). num_programs: as decode_attention_with_lse has it.
    """
    from kernels.decode_attention_wrapper import decode_attention_with_lse, default_launch

    config.BLOCK_T = block_t
    heads, kv_heads, head_dim, length = case
    q, cache = half(1, heads, head_dim), half(1, kv_heads, length, head_dim)
    choice = default_launch(q, cache, cache)
    forced = choice.block_t < block_t
    if forced:
        num_warps = min(8, choice.num_warps * block_t // choice.block_t)
        q_columns = min(256, choice.q_columns * num_warps // choice.num_warps)
        tiles = math.ceil((choice.num_stages - 1) * choice.block_t / block_t)  # as many bytes on their way
        choice = choice._replace(block_t=block_t, num_warps=num_warps, num_stages=tiles + 1, q_columns=q_columns)
    decode_attention_with_lse(q, cache, cache, length, choice=choice, num_programs=num_programs)
    return choice.block_t, forced


def launch_flash():
    """The prefill kernels, forward and backward, on Phi-3 Mini's head."""
    from kernels.flash_attention_wrapper import flash_attention

    q, k, v = (half(1, 2, 256, 96).requires_grad_() for _ in range(3))
    flash_attention(q, k, v).sum().backward()


def pdl():
    """Whether the GPU that is compiled for launches the fused kernels dependently, as rung 6 does."""
    return pdl_supported(device_info(torch.device("cpu")))


def launch_matvec(rows, columns, **options):
    """A fused projection of one Phi-3 Mini layer: weight [rows, columns]."""
    from kernels.fused_decode_wrapper import matvec

    out = half(rows // 2 if options.get("gated") else rows)
    matvec(half(columns), half(rows, columns), out, pdl=pdl(), **options)


def launch_rope_attention(length):
    """The fused step's attention on one Phi-3 Mini layer, with RoPE and the cache write."""
    from kernels.fused_decode_wrapper import attention_workspace, rope_attention

    cache, out, table = half(32, length, 96), half(32 * 96), torch.empty(length, 48)
    workspace = attention_workspace(32, 96, length, torch.float16, torch.device("cpu"))
    lengths = torch.zeros(1, dtype=torch.int32)
    rope_attention(half(3 * 32 * 96), table, table, lengths, cache, cache, out, workspace, pdl=pdl())


class Launch(NamedTuple):
    """What ``function()`` launches; the BLOCK_T asked for belongs to decode attention alone."""

    what: str
    function: Callable
    cache_len: int | None = None
    block_t: int | None = None


def launches(kernels, block_ts):
    """A Launch for everything that is asked for."""
    found = []
    if "decode" in kernels:
        for case in DECODE_CASES:
            what = f"decode attention {case.num_heads}/{case.num_kv_heads} D={case.head_dim}"
            found += [Launch(what, partial(launch_decode, case, size), case.cache_len, size) for size in block_ts]
        what, case = "decode attention, single pass, 32/32 D=96", DECODE_CASES[0]
        found += [Launch(what, partial(launch_decode, case, size, 0), case.cache_len, size) for size in block_ts]
    if "flash" in kernels:
        found.append(Launch("prefill attention", launch_flash))
    if "fused" in kernels:
        norm = {"gain": half(3072), "eps": 1e-5}
        found += [
            Launch("norm + QKV projection", partial(launch_matvec, 9216, 3072, **norm)),
            *(Launch("RoPE + attention", partial(launch_rope_attention, length), length) for length in FUSED_CACHES),
            Launch("O projection", partial(launch_matvec, 3072, 3072, residual=True)),
            Launch("norm + gate, up", partial(launch_matvec, 16384, 3072, gated=True, **norm)),
            Launch("down projection", partial(launch_matvec, 3072, 8192, residual=True)),
            Launch("norm + LM head", partial(launch_matvec, 32064, 3072, **norm)),
        ]
    return found


def compile_for(capability, kernels, block_ts):
    """Compile for one GPU -> result rows as dictionaries. Runs in a process of its own."""
    rows, seen = [], set()
    for what, function, cache_len, block_t in launches(kernels, block_ts):
        case = {
            "capability": "{}.{}".format(*capability), "what": what, "cache_len": cache_len, "block_t": block_t,
        }  # fmt: skip
        try:
            with compile_only(capability) as compiled:
                case["block_t"], case["forced"] = function() or (None, False)
        except Exception as error:
            # One kernel that does not compile for one GPU is a finding, not the end of the table.
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            rows.append({"case": {**case, "kernel": "-"}, "status": common.SKIPPED, "reason": reason})
            continue
        launched = what, cache_len, case["block_t"]
        if launched in seen:
            continue  # the wrapper's tile is larger than what was asked for, and as before
        seen.add(launched)
        for kernel in dict.fromkeys(compiled):
            share, limit = occupancy(capability, kernel.registers, kernel.shared_memory, kernel.num_warps)
            rows.append({
                "case": {**case, "kernel": kernel.name}, "status": common.PASSED, "registers": kernel.registers,
                "spill_bytes": kernel.spill_bytes, "shared_memory_bytes": kernel.shared_memory,
                "num_warps": kernel.num_warps, "occupancy": share, "limited_by": limit,
            })  # fmt: skip
    return rows


def merged(rows):
    """``rows`` for a table: those that differ in the length of the cache alone are one, with all their lengths."""
    found = {}
    for row in rows:
        case = {key: value for key, value in row["case"].items() if key != "cache_len"}
        key = str((case, {name: value for name, value in row.items() if name != "case"}))
        found.setdefault(key, ({**row, "case": case}, []))[1].append(row["case"].get("cache_len"))
    for row, lengths in found.values():
        row["case"]["cache_len"] = ", ".join(str(length) for length in lengths if length is not None)
    return [row for row, _ in found.values()]


def largest_without_spills(rows):
    """capability -> the largest BLOCK_T at which every decode kernel fits and none spills (None: no such)."""
    good = {}
    for row in rows:
        if row["status"] == common.PASSED and row["case"]["block_t"] is not None:
            key = row["case"]["capability"], row["case"]["block_t"]
            good[key] = good.get(key, True) and row["spill_bytes"] == 0 and row["occupancy"] > 0
    return {
        capability: max((block_t for (c, block_t), ok in good.items() if c == capability and ok), default=None)
        for capability in dict.fromkeys(capability for capability, _ in good)
    }


def verdict(rows):
    """How many kernels are as they should be, of those that get launched, and the largest tile of decode attention."""
    passed = [row for row in rows if row["status"] == common.PASSED and not row["case"].get("forced")]
    good = [row for row in passed if row["spill_bytes"] == 0 and row["occupancy"] > 0]
    text = f"{len(good)} of {len(passed)} kernels, as they are launched, fit without spills"
    largest = largest_without_spills(rows)
    if largest:
        tiles = ", ".join(f"sm_{c.replace('.', '')}: {block_t or 'none'}" for c, block_t in largest.items())
        text += f"; the largest tile that all decode kernels take so, forced or not, in keys: {tiles}"
    return text


COLUMNS = (
    "GPU", "what", "cache", "kernel", "BLOCK_T", "registers", "spill B", "shared B", "warps", "occupancy %",
    "limited by",
)  # fmt: skip


def tile_text(case):
    """Keys per tile of a decode kernel, and whether the wrapper would take that many; empty for other kernels."""
    return f"{case['block_t']}{' forced' if case.get('forced') else ''}" if case["block_t"] else ""


def table_line(row):
    case = row["case"]
    gpu = f"sm_{case['capability'].replace('.', '')}"
    head = (gpu, case["what"], case["cache_len"], case["kernel"], tile_text(case))
    if row["status"] != common.PASSED:
        return (*head, row["status"], "-", "-", "-", "-", row["reason"])
    return (
        *head, row["registers"], row["spill_bytes"], row["shared_memory_bytes"], row["num_warps"],
        f"{100 * row['occupancy']:.0f}", row["limited_by"],
    )  # fmt: skip


def capability(text):
    """argparse type: ``8.9`` -> (8, 9)."""
    names = {"{}.{}".format(*known): known for known in LIMITS}
    if text not in names:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
    return names[text]


def main():
    parser = cli.parser(__doc__, "RESULTS_DIR")
    parser.add_argument("--capabilities", nargs="+", type=capability, help="such as 7.5 8.9; all known ones by default")
    common.add_numbers_argument(parser, "--block-t", BLOCK_TS, "keys per tile of decode attention")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS), help="which kernels")
    args = parser.parse_args()
    for block_t in args.block_t:
        config.check("BLOCK_T", block_t)
    args.capabilities = args.capabilities or list(LIMITS)
    print(f"[further step] What each kernel takes on each GPU, compiled ahead of time, nothing run\n{cli.machine()}\n")
    results = common.Results("kernel_resources", vars(args), "compiled ahead of time, not run")
    compile_one = partial(compile_for, kernels=args.kernels, block_ts=args.block_t)
    workers = min(len(args.capabilities), os.cpu_count() or 1)
    if workers == 1:
        found = map(compile_one, args.capabilities)
        results.rows = [row for rows in common.progress(found, "compiling") for row in rows]
    else:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            found = pool.map(compile_one, args.capabilities)
            results.rows = [row for rows in common.progress(found, "compiling") for row in rows]
    cli.table(COLUMNS, [table_line(row) for row in merged(results.rows)])
    print(f"results: {results.write_as('compiled', args.results_dir)}")
    ok = any(row["status"] == common.PASSED for row in results.rows)
    return cli.verdict(ok, verdict(results.rows))


if __name__ == "__main__":
    cli.run(main)
