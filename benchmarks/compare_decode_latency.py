"""[step 4] Decode attention of one layer and one token: the Triton kernel against everything PyTorch offers.

Each launch attends from one new token to ``cache_len`` cached positions, batch 1. The work is to read K and V once, so
the measured read bandwidth is the ceiling and GB/s the figure that carries from one GPU to another. Inputs rotate over
at least four times the L2 (cold), launches are replayed as CUDA graphs, contenders alternate. Each contender's answer
is checked on inputs that it is timed on, the first and the last few. A plain read of the same K and V stands beside
them: what no attention kernel launched alone can be expected to beat by much.
"""

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
from kernels.device import pow2_floor
from model.accuracy import judge


class Shape(NamedTuple):
    """Heads of one attention layer."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


SHAPES = (
    Shape("Phi-3 Mini 32/32 D=96", 32, 32, 96),
    Shape("32/8 D=128", 32, 8, 128),
    Shape("Phi-3 Medium 40/10 D=128", 40, 10, 128),
)
LENGTHS = [2**power for power in range(7, 18)]
TINY_SHAPES = (Shape("4/4 D=24", 4, 4, 24), Shape("4/2 D=32", 4, 2, 32))
TINY_LENGTHS = [1, 40, 130]

OURS = "triton"
OURS_ON_DEVICE = "triton, length on the device"
READ = "plain read"


def make_inputs(shape, cache_len, sets, dtype, device):
    """``sets`` times (q [1, Hq, D], k and v [1, Hkv, T, D]), and the sets' k and v in memory [sets, elements]."""
    q = torch.randn(sets, 1, shape.num_heads, shape.head_dim, dtype=dtype, device=device)
    kv = torch.randn(sets, 2, 1, shape.num_kv_heads, cache_len, shape.head_dim, dtype=dtype, device=device)
    return list(zip(q, kv[:, 0], kv[:, 1], strict=True)), kv.flatten(1)


def triton_contenders(cache_len, device):
    """The kernel with the length as an int, and as a device tensor (the form that one CUDA graph replays)."""
    length = torch.tensor([cache_len], dtype=torch.int32, device=device)
    return {
        OURS: lambda q, k, v: decode_attention(q, k, v, cache_len),
        OURS_ON_DEVICE: lambda q, k, v: decode_attention(q, k, v, length),
    }


def bars(inputs):
    """What the answers are judged by, on the first and the last few input sets: (inputs, float64 reference, SDPA's)."""
    checked = inputs[:4] + inputs[4:][-4:]
    references = [common.decode_reference64(q, k, v, k.shape[2]) for q, k, v in checked]
    # Query heads of a group as rows: see contenders.sdpa_decode.
    natives = [
        F.scaled_dot_product_attention(q.view(1, k.shape[1], -1, q.shape[2]), k, v).reshape(q.shape)
        for q, k, v in checked
    ]
    return checked, torch.cat(references), torch.cat(natives)


def check(function, bars, factor):
    """Accuracy of ``function`` on the inputs of ``bars``."""
    inputs, reference, native = bars
    found = torch.cat([function(q, k, v).reshape(q.shape) for q, k, v in inputs])
    return judge(found, reference, native, factor=factor)


def plain_reads(caches):
    """A function per cache [elements] that reads it whole, but for less than a block, and nothing else."""
    sources = caches.view(torch.int32)
    block = min(8192, pow2_floor(sources.shape[1]))
    sources = sources[:, : sources.shape[1] // block * block]
    sums = torch.empty(sources.shape[1] // block, dtype=torch.int32, device=caches.device)
    common.read_sum(sources[-1], sums, block, num_warps=4)
    if not torch.equal(sums, sources[-1].view(-1, block).sum(1, dtype=torch.int32)):
        raise RuntimeError("the plain read reads something else")
    return [lambda source=source: common.read_sum(source, sums, block, num_warps=4) for source in sources]


def check_all(functions, bars, is_ours):
    """name -> Accuracy of each function, or the exception that says why it does not run."""
    outcomes = {}
    for name, function in functions.items():
        try:
            outcomes[name] = check(function, bars, common.OURS_FACTOR if is_ours(name) else common.CONTENDER_FACTOR)
        except common.DOES_NOT_RUN as error:
            outcomes[name] = error
    return outcomes


def check_tiny(functions_of, device, dtype):
    """Without a GPU: are the kernels ``functions_of(cache_len, device)`` right? -> whether all small cases are."""
    rows = []
    for shape in TINY_SHAPES:
        for cache_len in TINY_LENGTHS:
            bar = bars(make_inputs(shape, cache_len, 8, dtype, device)[0])
            for name, found in check_all(functions_of(cache_len, device), bar, lambda name: True).items():
                if isinstance(found, Exception):
                    rows.append((shape.name, cache_len, name, type(found).__name__, "-", False))
                    continue
                errors = f"{found.max_error:.1e}", f"{found.native_max_error:.1e}"
                rows.append((shape.name, cache_len, name, *errors, found.ok))
    cli.table(("shape", "cache_len", "kernel", "max error", "PyTorch's", "right"), rows)
    return all(row[-1] for row in rows)


def measure_shape(shape, cache_len, functions, is_ours, dtype, device, bandwidth, args, results):
    """Check and time ``functions`` (name -> of q, k, v) and a plain read on one shape and length.

    Rows go to ``results`` -> name -> result row.
    """
    num_bytes = counts.attention_decode_bytes(
        1, shape.num_heads, shape.num_kv_heads, cache_len, shape.head_dim, dtype.itemsize
    )
    inputs, caches = make_inputs(shape, cache_len, common.input_sets(num_bytes, common.l2_bytes()), dtype, device)
    checks = check_all(functions, bars(inputs), is_ours)
    errors = {name: found for name, found in checks.items() if isinstance(found, Exception)}
    timed = {
        name: [lambda one=one, f=functions[name]: f(*one) for one in inputs]
        for name, found in checks.items()
        if name not in errors and found.ok
    }
    timed[READ] = plain_reads(caches)
    outcomes = common.measure_cold(timed, warmup=args.warmup, samples=args.samples) | errors
    rows = {}
    for name in (*functions, READ):
        case = {"shape": shape.name, "cache_len": cache_len, "contender": name}
        outcome = outcomes.get(name)
        if outcome is None:
            reason = f"max error {checks[name].max_error:.2e}, PyTorch's own {checks[name].native_max_error:.2e}"
            rows[name] = results.add(case, common.INCORRECT, reason=reason)
        elif isinstance(outcome, Exception):
            rows[name] = results.add_error(case, outcome)
        else:
            rate = counts.gb_per_s(num_bytes, outcome.median_ms)
            accuracy = {"max_error": checks[name].max_error} if name in checks else {}
            rows[name] = results.add(
                case, timing=outcome, bytes=num_bytes, gb_per_s=rate, share=rate / bandwidth, input_sets=len(inputs),
                **accuracy,
            )  # fmt: skip
    return rows


def is_ours(name):
    return name in (OURS, OURS_ON_DEVICE)


def best_contender(rows):
    """The fastest PASSED row of an attention that is not ours, or None."""
    passed = [
        row for name, row in rows.items()
        if row["status"] == common.PASSED and name != READ and not is_ours(name)
    ]  # fmt: skip
    return min(passed, key=lambda row: row["median_ms"], default=None)


def table_line(cache_len, rows, bandwidth):
    """One line of the printed table, and how many times faster than the best contender the kernel is (or None)."""
    ours, best = rows[OURS], best_contender(rows)
    floor_us = 1e3 * counts.floor_ms(rows[OURS].get("bytes", 0), bandwidth)

    def us(row):
        return f"{1e3 * row['median_ms']:.1f}" if row["status"] == common.PASSED else row["status"]

    if ours["status"] != common.PASSED or best is None:
        return (cache_len, "-", us(rows[READ]), us(ours), us(rows[OURS_ON_DEVICE]), "-", "-", "-", "-", "-"), None
    share = common.share_text(ours["gb_per_s"], bandwidth)
    # A rate that memory cannot deliver is a fault of the measurement, not a win.
    gain = best["median_ms"] / ours["median_ms"] if ours["share"] <= common.IMPOSSIBLE_SHARE else None
    return (
        cache_len, f"{floor_us:.1f}", us(rows[READ]), us(ours), us(rows[OURS_ON_DEVICE]), f"{ours['gb_per_s']:.0f}",
        share, us(best), best["case"]["contender"], f"{gain:.2f}x" if gain is not None else "-",
    ), gain  # fmt: skip


COLUMNS = (
    "cache_len", "floor us", "read us", "triton us", "on device", "GB/s", "% of memory", "best us", "best other",
    "gain",
)  # fmt: skip


def main():
    parser = cli.parser(__doc__, "DTYPE", "SEED", "WARMUP", "RESULTS_DIR")
    common.add_numbers_argument(parser, "--lengths", LENGTHS, "cache lengths")
    common.add_shapes_argument(parser, SHAPES)
    parser.add_argument("--samples", type=cli.count, default=config.ITERATIONS, help="timed graph replays per row")
    args = parser.parse_args()
    cli.header("step 4", "Decode attention, one layer, one token: Triton against PyTorch")
    device, dtype = common.resolve(args)
    torch.manual_seed(args.seed)
    if not torch.cuda.is_available():
        ok = check_tiny(triton_contenders, device, dtype)
        return common.finish(None, ok, "the kernel agrees with the float64 reference on small cases")

    bandwidth = common.read_bandwidth_gb_per_s()
    print(f"Ceiling: memory reads at {bandwidth:.0f} GB/s (measured). Cold L2, CUDA graphs, {dtype}, batch 1.\n")
    results = common.Results("compare_decode_latency", vars(args), common.COLD_GRAPHS)
    results.numbers["bandwidth_gb_per_s"] = bandwidth
    gains = {}
    for shape in (SHAPES[index] for index in args.shapes):
        lines = []
        for cache_len in common.progress(args.lengths, shape.name):
            functions = triton_contenders(cache_len, device)
            functions |= contenders.decode_contenders(shape.num_heads, shape.num_kv_heads)
            try:
                rows = measure_shape(shape, cache_len, functions, is_ours, dtype, device, bandwidth, args, results)
            except torch.OutOfMemoryError as error:
                results.add_error({"shape": shape.name, "cache_len": cache_len, "contender": OURS}, error)
                lines.append((cache_len, *["-"] * (len(COLUMNS) - 2), common.OOM))
                continue
            line, gains[shape.name, cache_len] = table_line(cache_len, rows, bandwidth)
            lines.append(line)
        print(shape.name)
        cli.table(COLUMNS, lines)
    wrong = common.print_failures(results.rows, is_ours)
    known = {key: gain for key, gain in gains.items() if gain is not None}
    slower = [f"{name} at {length}" for (name, length), gain in known.items() if gain < 1]
    text = f"as fast as the best PyTorch contender or faster in {len(known) - len(slower)} of {len(gains)} rows"
    if slower:
        text += f"; slower: {', '.join(slower)}"
    return common.finish(results, not wrong, text, args.results_dir)


if __name__ == "__main__":
    cli.run(main)
