"""Prefill attention, forward and backward: the Triton FlashAttention kernels against every SDPA backend.

Causal, batch 2. Attention over long sequences is bound by the tensor cores, so the figure is TFLOP/s by the usual count
(4 B H S^2 D, half of it causal, 2.5 times that backward). Event times, contenders alternating, caches warm; the memory
is what a call takes at its peak on top of its inputs (backward: forward and backward together). Output and gradients
are checked on the inputs that are timed.
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
from kernels.flash_attention_wrapper import flash_attention
from model.accuracy import judge
from model.decode_attention_ref import attention_ref


class Shape(NamedTuple):
    """One attention layer over ``batch`` sequences."""

    name: str
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


SHAPES = (Shape("32/8 D=128", 2, 32, 8, 128), Shape("Phi-3 Mini 32/32 D=96", 2, 32, 32, 96))
LENGTHS = [2048, 4096, 8192]
TINY_SHAPES = (Shape("4/2 D=16", 2, 4, 2, 16), Shape("2/2 D=24", 1, 2, 2, 24))
TINY_LENGTHS = [33, 64]

OURS = "triton"
# A call slower than this gets SLOW_SAMPLES samples: it is out of the race, and the machine's time is better spent.
SLOW_MS, SLOW_SAMPLES = 20, 5


def make_inputs(shape, length, dtype, device):
    """q, k, v that require a gradient, and the gradient of the output."""

    def randn(heads):
        return torch.randn(shape.batch, heads, length, shape.head_dim, dtype=dtype, device=device)

    q, k, v = (randn(heads).requires_grad_() for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads))
    return (q, k, v), randn(shape.num_heads)


def forward_and_backward(function, inputs, grad):
    """(out, dq, dk, dv) of ``function``."""
    out = function(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, grad)


def checked_parts(tensors, group_size):
    """What is compared: the first KV head of the first sequence and the last one of the last, with their queries."""
    out, dq, dk, dv = tensors
    first, last = slice(0, group_size), slice(-group_size, None)
    queries = [torch.cat((x[0, first], x[-1, last])) for x in (out, dq)]
    return [*queries, *(torch.stack((x[0, 0], x[-1, -1])) for x in (dk, dv))]


def reference_parts(inputs, grad):
    """``checked_parts`` of attention_ref in float64 (float32 beyond 2048 positions), one query head at a time."""
    q, k, v = (tensor.detach() for tensor in inputs)
    group_size = q.shape[1] // k.shape[1]
    wide = torch.float64 if q.shape[2] <= 2048 else torch.float32
    outs, dqs, dks, dvs = [], [], [], []
    for b, heads, kv in ((0, range(group_size), 0), (-1, range(-group_size, 0), -1)):
        dk_sum, dv_sum = 0, 0
        for head in heads:
            one = [x.to(wide)[None, None].requires_grad_() for x in (q[b, head], k[b, kv], v[b, kv])]
            out, dq, dk, dv = forward_and_backward(attention_ref, one, grad[b, head].to(wide)[None, None])
            outs.append(out[0, 0])
            dqs.append(dq[0, 0])
            dk_sum, dv_sum = dk_sum + dk[0, 0], dv_sum + dv[0, 0]
        dks.append(dk_sum)
        dvs.append(dv_sum)
    return [torch.stack(parts) for parts in (outs, dqs, dks, dvs)]


def native(q, k, v):
    """PyTorch's own choice of SDPA backend: its error is the bar."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def check(function, inputs, grad, reference, native_parts, factor):
    """Accuracy of each of out, dq, dk, dv."""
    parts = checked_parts(forward_and_backward(function, inputs, grad), inputs[0].shape[1] // inputs[1].shape[1])
    return {
        name: judge(part, wanted, bar, factor=factor)
        for name, part, wanted, bar in zip(("out", "dq", "dk", "dv"), parts, reference, native_parts, strict=True)
    }


def bars(inputs, grad):
    """The reference and PyTorch's own answer for ``check``."""
    group_size = inputs[0].shape[1] // inputs[1].shape[1]
    return reference_parts(inputs, grad), checked_parts(forward_and_backward(native, inputs, grad), group_size)


def check_tiny(device, dtype):
    """Without a GPU: are output and gradients right? -> whether all small cases are."""
    rows = []
    for shape in TINY_SHAPES:
        for length in TINY_LENGTHS:
            inputs, grad = make_inputs(shape, length, dtype, device)
            for name, found in check(flash_attention, inputs, grad, *bars(inputs, grad), common.OURS_FACTOR).items():
                rows.append(
                    (shape.name, length, name, f"{found.max_error:.1e}", f"{found.native_max_error:.1e}", found.ok)
                )
    cli.table(("shape", "S", "tensor", "max error", "PyTorch's", "right"), rows)
    return all(row[-1] for row in rows)


def measure(functions, samples):
    """name -> Timing of each function; slow ones are timed apart with fewer samples."""
    clock = common.EventClock()
    quick = common.measure(functions, clock, warmup=1, samples=1)
    slow = {name for name, timing in quick.items() if timing.median_ms > SLOW_MS}
    timings = common.measure({n: f for n, f in functions.items() if n not in slow}, clock, warmup=2, samples=samples)
    timings |= common.measure({n: f for n, f in functions.items() if n in slow}, clock, warmup=0, samples=SLOW_SAMPLES)
    return {name: common.Timing(timing.samples_ms, quick[name].first_call_ms) for name, timing in timings.items()}


def measure_length(shape, length, dtype, device, samples, results):
    """Check and time forward and backward of every contender; rows go to ``results`` -> (pass, name) -> row."""
    inputs, grad = make_inputs(shape, length, dtype, device)
    detached = [tensor.detach() for tensor in inputs]
    reference, native_parts = bars(inputs, grad)
    functions = {OURS: flash_attention} | contenders.prefill_contenders(shape.num_heads, shape.num_kv_heads)
    checks, errors, memory = {}, {}, {}
    for name, function in functions.items():
        factor = common.OURS_FACTOR if name == OURS else common.CONTENDER_FACTOR
        try:
            checks[name] = check(function, inputs, grad, reference, native_parts, factor)
            memory["forward", name] = common.peak_memory_bytes(functools.partial(function, *detached))
            memory["backward", name] = common.peak_memory_bytes(
                functools.partial(forward_and_backward, function, inputs, grad)
            )
        except (RuntimeError, ValueError) as error:
            errors[name] = error
    right = {
        name: functions[name]
        for name, found in checks.items()
        if name not in errors and all(c.ok for c in found.values())
    }
    forward = measure({name: functools.partial(function, *detached) for name, function in right.items()}, samples)
    outputs = {name: function(*inputs) for name, function in right.items()}
    backward = measure(
        {
            name: functools.partial(torch.autograd.grad, out, inputs, grad, retain_graph=True)
            for name, out in outputs.items()
        },
        samples,
    )
    rows = {}
    for direction, timings in (("forward", forward), ("backward", backward)):
        flops = counts.attention_flops(
            shape.batch, shape.num_heads, length, length, shape.head_dim, causal=True, backward=direction == "backward"
        )
        for name in functions:
            case = {"shape": shape.name, "seq_len": length, "pass": direction, "contender": name}
            if name in errors:
                row = results.add_error(case, errors[name])
            elif name not in right:
                wrong = {
                    key: f"{c.max_error:.1e} against {c.native_max_error:.1e}"
                    for key, c in checks[name].items()
                    if not c.ok
                }
                row = results.add(case, common.INCORRECT, reason=f"errors, and PyTorch's own: {wrong}")
            else:
                row = results.add(
                    case, timing=timings[name], tflop_per_s=counts.tflop_per_s(flops, timings[name].median_ms),
                    peak_memory_bytes=memory[direction, name],
                )  # fmt: skip
            rows[direction, name] = row
    return rows


def table_line(length, direction, rows):
    """One line of the printed table: ours, and the best of the others -> (line, ours / best in speed or None)."""
    ours = rows[direction, OURS]
    others = [
        row for (way, name), row in rows.items()
        if way == direction and name != OURS and row["status"] == common.PASSED
    ]  # fmt: skip
    best = min(others, key=lambda row: row["median_ms"], default=None)
    if ours["status"] != common.PASSED or best is None:
        return (length, direction, ours["status"], *["-"] * 7), None
    gain = best["median_ms"] / ours["median_ms"]
    return (
        length, direction, f"{ours['median_ms']:.3f}", f"{ours['std_ms']:.3f}", f"{ours['tflop_per_s']:.0f}",
        f"{ours['peak_memory_bytes'] / 1e6:.0f}", f"{best['median_ms']:.3f}", f"{best['tflop_per_s']:.0f}",
        best["case"]["contender"], f"{gain:.2f}x",
    ), gain  # fmt: skip


COLUMNS = ("S", "pass", "triton ms", "std", "TFLOP/s", "memory MB", "best ms", "TFLOP/s", "best other", "gain")


def main():
    parser = cli.parser(__doc__, "DTYPE", "SEED", "RESULTS_DIR")
    common.add_numbers_argument(parser, "--lengths", LENGTHS, "sequence lengths")
    common.add_shapes_argument(parser, SHAPES)
    parser.add_argument("--samples", type=int, default=30, help="timed calls per row")
    args = parser.parse_args()
    cli.header("further step", "Prefill attention, forward and backward: Triton against SDPA")
    device, dtype = common.resolve(args)
    torch.manual_seed(args.seed)
    if not torch.cuda.is_available():
        ok = check_tiny(device, dtype)
        return common.finish(None, ok, "output and gradients agree with the float64 reference on small cases")

    print(
        f"Ceiling: the best SDPA backend on this GPU, timed in the same run. {dtype}, causal, batch 2, warm caches.\n"
    )
    results = common.Results("prefill_vs_sdpa", vars(args), common.WARM_EVENTS)
    gains = []
    for shape in (SHAPES[index] for index in args.shapes):
        lines = []
        for length in common.progress(args.lengths, shape.name):
            try:
                rows = measure_length(shape, length, dtype, device, args.samples, results)
            except torch.OutOfMemoryError as error:
                results.add_error({"shape": shape.name, "seq_len": length, "contender": OURS}, error)
                lines.append((length, "both", common.OOM, *["-"] * 7))
                continue
            for direction in ("forward", "backward"):
                line, gain = table_line(length, direction, rows)
                lines.append(line)
                gains.append(gain)
        print(shape.name)
        cli.table(COLUMNS, lines)
    wrong = False
    for row in results.rows:
        if row["status"] in (common.INCORRECT, common.OOM):
            print(f"{row['status']}: {row['case']} {row['reason']}")
            wrong |= row["status"] == common.INCORRECT and row["case"]["contender"] == OURS
    known = [gain for gain in gains if gain is not None]
    text = "no row to compare"
    if known:
        text = f"{min(known):.2f} to {max(known):.2f} times the speed of the best SDPA backend, {len(known)} rows"
    return common.finish(results, not wrong, text, args.results_dir)


if __name__ == "__main__":
    cli.run(main)
