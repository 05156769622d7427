"""One decode step of one layer, cache update included: the Triton kernel against plain PyTorch, time and memory.

Each contender appends the new token's key and value and attends to all positions (batch 1, 32/8 heads, D=128). "eager
slice" reads a preallocated cache and repeats K and V for every query head, as model code does; "eager dynamic" also
grows the cache with torch.cat. "grouped matmul" and "sdpa" are the fair ones: the preallocated cache, no copies.
GPU time: CUDA-graph replays over inputs beyond the L2. Call: one step as Python launches it, host time included.
Memory: what a step takes at its peak on top of the cache.
"""

import functools
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F

from benchmarks import common, contenders, counts

# isort: split
import cli
import config
from kernels.decode_attention_wrapper import decode_attention
from model.accuracy import judge

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
LENGTHS = [512, 1024, 2048, 4096, 8192]
TINY_LENGTHS = [1, 40, 100]
# Positions that the preallocated cache has beyond the ones in use.
SPARE = 128

OURS = "triton"


class Step(NamedTuple):
    """Inputs of one step. q [1, Hq, D]; k_new, v_new [1, Hkv, 1, D]; k_cache, v_cache [1, Hkv, T + SPARE, D], the last
    of the T positions not yet written; k_old, v_old [1, Hkv, T - 1, D], the same past as tensors of their own."""

    q: torch.Tensor
    k_new: torch.Tensor
    v_new: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_old: torch.Tensor
    v_old: torch.Tensor


def make_step(cache_len, dtype, device):
    def randn(*shape):
        return torch.randn(1, *shape, HEAD_DIM, dtype=dtype, device=device)

    k_cache, v_cache = randn(NUM_KV_HEADS, cache_len + SPARE), randn(NUM_KV_HEADS, cache_len + SPARE)
    return Step(
        randn(NUM_HEADS), randn(NUM_KV_HEADS, 1), randn(NUM_KV_HEADS, 1), k_cache, v_cache,
        k_cache[:, :, : cache_len - 1].clone(), v_cache[:, :, : cache_len - 1].clone(),
    )  # fmt: skip


def on_preallocated_cache(attend):
    """A contender that writes the new position in place and calls ``attend(q, k, v)`` on views of what is written."""

    def run(step):
        position = step.k_old.shape[2]
        step.k_cache[:, :, position : position + 1] = step.k_new
        step.v_cache[:, :, position : position + 1] = step.v_new
        return attend(step.q, step.k_cache[:, :, : position + 1], step.v_cache[:, :, : position + 1])

    return run


def eager_dynamic(step):
    """The cache grown by torch.cat: every step copies all of it."""
    k, v = torch.cat([step.k_old, step.k_new], dim=2), torch.cat([step.v_old, step.v_new], dim=2)
    return contenders.eager_decode(step.q, k, v)


def sdpa(q, k, v):
    """PyTorch's own choice of backend; query heads of a group as rows (see contenders.sdpa_decode)."""
    return F.scaled_dot_product_attention(q.view(1, k.shape[1], -1, q.shape[2]), k, v).reshape(q.shape)


CONTENDERS = {
    OURS: on_preallocated_cache(lambda q, k, v: decode_attention(q, k, v, k.shape[2])),
    "eager slice": on_preallocated_cache(contenders.eager_decode),
    "eager dynamic": eager_dynamic,
    "grouped matmul": on_preallocated_cache(contenders.grouped_matmul_decode),
    "sdpa": on_preallocated_cache(sdpa),
}


def check_all(step):
    """name -> Accuracy of every contender against float64, SDPA's error being the bar."""
    k, v = torch.cat([step.k_old, step.k_new], dim=2), torch.cat([step.v_old, step.v_new], dim=2)
    reference, native = common.decode_reference64(step.q, k, v, k.shape[2]), sdpa(step.q, k, v)
    return {
        name: judge(
            function(step), reference, native, factor=common.OURS_FACTOR if name == OURS else common.CONTENDER_FACTOR
        )
        for name, function in CONTENDERS.items()
    }


def check_tiny(device, dtype):
    """Without a GPU: does every contender compute the same? -> whether all do."""
    rows = []
    for cache_len in TINY_LENGTHS:
        for name, found in check_all(make_step(cache_len, dtype, device)).items():
            rows.append((cache_len, name, f"{found.max_error:.1e}", found.ok))
    cli.table(("cache_len", "contender", "max error", "right"), rows)
    return all(row[-1] for row in rows)


def measure_length(cache_len, dtype, device, args, results):
    """Check, then time every contender at one length; rows go to ``results`` -> name -> row."""
    num_bytes = counts.attention_decode_bytes(1, NUM_HEADS, NUM_KV_HEADS, cache_len, HEAD_DIM, dtype.itemsize)
    sets = common.input_sets(num_bytes, common.l2_bytes())
    steps = [make_step(cache_len, dtype, device) for _ in range(sets)]
    checks = check_all(steps[0])
    right = {name: CONTENDERS[name] for name, found in checks.items() if found.ok}
    graphs = {name: [functools.partial(f, step) for step in steps] for name, f in right.items()}
    on_gpu = common.measure_cold(graphs, warmup=args.warmup, samples=args.samples)
    calls = common.measure(
        {name: fs[0] for name, fs in graphs.items()}, common.WallClock(device), warmup=args.warmup, samples=args.samples
    )
    rows = {}
    for name, found in checks.items():
        case = {"cache_len": cache_len, "contender": name}
        if name not in right:
            reason = f"max error {found.max_error:.2e}, SDPA's own {found.native_max_error:.2e}"
            rows[name] = results.add(case, common.INCORRECT, reason=reason)
        elif isinstance(on_gpu[name], Exception):
            rows[name] = results.add_error(case, on_gpu[name])
        else:
            rows[name] = results.add(
                case, timing=on_gpu[name], call_median_ms=calls[name].median_ms, call_samples_ms=calls[name].samples_ms,
                gb_per_s=counts.gb_per_s(num_bytes, on_gpu[name].median_ms), bytes=num_bytes, input_sets=sets,
                peak_memory_bytes=common.peak_memory_bytes(graphs[name][0]),
            )  # fmt: skip
    return rows


def table_line(cache_len, name, row, ours):
    """One line of the printed table; the gain is the other's GPU time over the kernel's."""
    if row["status"] != common.PASSED:
        return (cache_len, name, row["status"], "-", "-", "-", "-")
    gain = f"{row['median_ms'] / ours['median_ms']:.2f}x" if ours["status"] == common.PASSED else "-"
    return (
        cache_len, name, f"{1e3 * row['median_ms']:.1f}", f"{1e3 * row['call_median_ms']:.1f}",
        f"{row['gb_per_s']:.0f}", f"{row['peak_memory_bytes'] / 1e6:.2f}", gain,
    )  # fmt: skip


COLUMNS = ("cache_len", "contender", "GPU us", "call us", "GB/s", "memory MB", "triton is")


def main():
    parser = cli.parser(__doc__, "DTYPE", "SEED", "WARMUP", "RESULTS_DIR")
    common.add_numbers_argument(parser, "--lengths", LENGTHS, "cache lengths")
    parser.add_argument("--samples", type=cli.count, default=config.ITERATIONS, help="timed samples per row")
    args = parser.parse_args()
    cli.header("further step", "One decode step of one layer with its cache: Triton against plain PyTorch")
    device, dtype = common.resolve(args)
    torch.manual_seed(args.seed)
    if not torch.cuda.is_available():
        ok = check_tiny(device, dtype)
        return common.finish(None, ok, "every contender computes the same attention on small cases")

    bandwidth = common.read_bandwidth_gb_per_s()
    print(f"Ceiling: memory reads at {bandwidth:.0f} GB/s (measured). {dtype}, 32/8 heads, D=128, batch 1, cold L2.\n")
    results = common.Results("decode_vs_eager", vars(args), f"{common.COLD_GRAPHS}; calls by the host clock")
    results.numbers["bandwidth_gb_per_s"] = bandwidth
    lines, memory, gains = [], [], []
    for cache_len in common.progress(args.lengths, "decode_vs_eager"):
        try:
            rows = measure_length(cache_len, dtype, device, args, results)
        except torch.OutOfMemoryError as error:
            rows = {OURS: results.add_error({"cache_len": cache_len, "contender": OURS}, error)}
        lines += [table_line(cache_len, name, row, rows[OURS]) for name, row in rows.items()]
        if rows[OURS]["status"] == common.PASSED:
            memory.append(rows[OURS]["peak_memory_bytes"])
            others = [row["median_ms"] for name, row in rows.items() if name != OURS and "median_ms" in row]
            gains.append(min(others, default=float("nan")) / rows[OURS]["median_ms"])
    cli.table(COLUMNS, lines)
    failed = common.print_failures(results.rows, lambda name: name == OURS)
    ok = not failed and all(row["status"] != common.INCORRECT for row in results.rows)
    text = "nothing was measured"
    if gains:
        text = (
            f"{min(gains):.2f} to {max(gains):.2f} times as fast as the best contender; "
            f"memory of a step {min(memory) / 1e3:.0f} to {max(memory) / 1e3:.0f} kB at all lengths"
        )
    return common.finish(results, ok, text, args.results_dir)


if __name__ == "__main__":
    cli.run(main)
