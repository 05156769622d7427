"""Prefill attention, forward and backward: the Triton FlashAttention kernels against SDPA's fused backends.

Causal and full, batch 2. Attention over long sequences is bound by the tensor cores, so the figure is TFLOP/s by the
usual count (4 B H S^2 D, half of it causal, 2.5 times that backward). Event times, contenders alternating, caches warm;
the memory is what a call takes at its peak on top of its inputs (backward: forward and backward together). Output and
gradients are checked on the inputs that are timed. "gain" is the time of the fastest backend over the kernels', "gain
over flash" that of PyTorch's own FlashAttention backend.
"""

import functools
import itertools
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

MASKS = ("causal", "full")
PASSES = ("forward", "backward")
OURS = "triton"


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


def reference_parts(inputs, grad, causal):
    """``checked_parts`` of attention_ref in float64 (float32 beyond 2048 positions), one query head at a time."""
    q, k, v = (tensor.detach() for tensor in inputs)
    group_size = q.shape[1] // k.shape[1]
    wide = torch.float64 if q.shape[2] <= 2048 else torch.float32
    function = functools.partial(attention_ref, causal=causal)
    outs, dqs, dks, dvs = [], [], [], []
    for b, heads, kv in ((0, range(group_size), 0), (-1, range(-group_size, 0), -1)):
        dk_sum, dv_sum = 0, 0
        for head in heads:
            one = [x.to(wide)[None, None].requires_grad_() for x in (q[b, head], k[b, kv], v[b, kv])]
            out, dq, dk, dv = forward_and_backward(function, one, grad[b, head].to(wide)[None, None])
            outs.append(out[0, 0])
            dqs.append(dq[0, 0])
            dk_sum, dv_sum = dk_sum + dk[0, 0], dv_sum + dv[0, 0]
        dks.append(dk_sum)
        dvs.append(dv_sum)
    return [torch.stack(parts) for parts in (outs, dqs, dks, dvs)]


def native(q, k, v, causal):
    """PyTorch's own choice of SDPA backend: its error is the bar."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def check(function, inputs, grad, reference, native_parts, factor):
    """Accuracy of each of out, dq, dk, dv."""
    parts = checked_parts(forward_and_backward(function, inputs, grad), inputs[0].shape[1] // inputs[1].shape[1])
    return {
        name: judge(part, wanted, bar, factor=factor)
        for name, part, wanted, bar in zip(("out", "dq", "dk", "dv"), parts, reference, native_parts, strict=True)
    }


def bars(inputs, grad, causal):
    """The reference and PyTorch's own answer for ``check``."""
    group_size = inputs[0].shape[1] // inputs[1].shape[1]
    answer = forward_and_backward(functools.partial(native, causal=causal), inputs, grad)
    return reference_parts(inputs, grad, causal), checked_parts(answer, group_size)


def check_tiny(device, dtype):
    """Without a GPU: are output and gradients right? -> whether all small cases are."""
    rows = []
    for shape, mask, length in itertools.product(TINY_SHAPES, MASKS, TINY_LENGTHS):
        inputs, grad = make_inputs(shape, length, dtype, device)
        causal = mask == "causal"
        function = functools.partial(flash_attention, causal=causal)
        for name, found in check(function, inputs, grad, *bars(inputs, grad, causal), common.OURS_FACTOR).items():
            rows.append(
                (shape.name, mask, length, name, f"{found.max_error:.1e}", f"{found.native_max_error:.1e}", found.ok)
            )
    cli.table(("shape", "mask", "S", "tensor", "max error", "PyTorch's", "right"), rows)
    return all(row[-1] for row in rows)


def case_of(shape, mask, length, direction, contender):
    """The identity of a row."""
    return {"shape": shape.name, "mask": mask, "seq_len": length, "pass": direction, "contender": contender}


def measure_length(shape, mask, length, dtype, device, samples, results):
    """Check and time forward and backward of every contender; rows go to ``results`` -> (pass, name) -> row."""
    inputs, grad = make_inputs(shape, length, dtype, device)
    detached = [tensor.detach() for tensor in inputs]
    causal = mask == "causal"
    reference, native_parts = bars(inputs, grad, causal)
    functions = {OURS: functools.partial(flash_attention, causal=causal)}
    functions |= contenders.prefill_contenders(shape.num_heads, shape.num_kv_heads, causal=causal)
    checks, errors, memory = {}, {}, {}
    for name, function in functions.items():
        factor = common.OURS_FACTOR if name == OURS else common.CONTENDER_FACTOR
        try:
            checks[name] = check(function, inputs, grad, reference, native_parts, factor)
            memory["forward", name] = common.peak_memory_bytes(functools.partial(function, *detached))
            memory["backward", name] = common.peak_memory_bytes(
                functools.partial(forward_and_backward, function, inputs, grad)
            )
        except common.DOES_NOT_RUN as error:
            errors[name] = error
    right = {
        name: functions[name]
        for name, found in checks.items()
        if name not in errors and all(c.ok for c in found.values())
    }
    timed = {
        "forward": {name: functools.partial(function, *detached) for name, function in right.items()},
        "backward": {
            name: functools.partial(torch.autograd.grad, function(*inputs), inputs, grad, retain_graph=True)
            for name, function in right.items()
        },
    }
    size = (shape.batch, shape.num_heads, length, length, shape.head_dim)
    rows = {}
    for direction in PASSES:
        timings = common.measure(timed[direction], common.EventClock(), warmup=2, samples=samples)
        flops = counts.attention_flops(*size, causal=causal, backward=direction == "backward")
        for name in functions:
            case = case_of(shape, mask, length, direction, name)
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


def fastest(rows, direction, backends):
    """The fastest PASSED row of these SDPA backends, in whichever form, or None."""
    found = [
        row for (way, name), row in rows.items()
        if way == direction and contenders.backend_of(name) in backends and row["status"] == common.PASSED
    ]  # fmt: skip
    return min(found, key=lambda row: row["median_ms"], default=None)


def table_line(length, direction, rows):
    """One line of the table, and the gains over the best backend and over FlashAttention (each None where unknown)."""
    ours = rows[direction, OURS]
    best, flash = (fastest(rows, direction, backends) for backends in (contenders.BACKENDS, ("flash",)))
    cells, gains = [ours["status"], *["-"] * 3], [None, None]
    if ours["status"] == common.PASSED:
        cells = [f"{ours['median_ms']:.3f}", f"{ours['std_ms']:.3f}", *rate_and_memory(ours)]
        gains = [None if other is None else other["median_ms"] / ours["median_ms"] for other in (best, flash)]
    if best is None:
        cells += ["-"] * 4
    else:
        cells += [best["case"]["contender"], f"{best['median_ms']:.3f}", *rate_and_memory(best)]
    return (length, direction, *cells, *("-" if gain is None else f"{gain:.2f}x" for gain in gains)), gains


def rate_and_memory(row):
    return f"{row['tflop_per_s']:.0f}", f"{row['peak_memory_bytes'] / 1e6:.0f}"


COLUMNS = (
    "S", "pass", "triton ms", "std", "TFLOP/s", "MB", "best other", "ms", "TFLOP/s", "MB", "gain", "gain over flash",
)  # fmt: skip


def spans(gains):
    """pass -> gains, each from least to most as text: "forward 0.85x to 0.89x, backward unknown"."""
    parts = []
    for direction, found in gains.items():
        known = [gain for gain in found if gain is not None]
        parts.append(f"{direction} " + (f"{min(known):.2f}x to {max(known):.2f}x" if known else "unknown"))
    return ", ".join(parts)


def main():
    parser = cli.parser(__doc__, "DTYPE", "SEED", "RESULTS_DIR")
    common.add_numbers_argument(parser, "--lengths", LENGTHS, "sequence lengths")
    common.add_shapes_argument(parser, SHAPES)
    parser.add_argument("--samples", type=cli.count, default=30, help="timed calls per row")
    args = parser.parse_args()
    cli.header("further step", "Prefill attention, forward and backward: Triton against SDPA")
    device, dtype = common.resolve(args)
    torch.manual_seed(args.seed)
    if not torch.cuda.is_available():
        ok = check_tiny(device, dtype)
        return common.finish(None, ok, "output and gradients agree with the float64 reference on small cases")

    print(f"Ceiling: the best SDPA backend on this GPU, timed in the same run. {dtype}, batch 2, warm caches.\n")
    results = common.Results("prefill_vs_sdpa", vars(args), common.WARM_EVENTS)
    over_best, over_flash = ({direction: [] for direction in PASSES} for _ in range(2))
    for shape, mask in itertools.product((SHAPES[index] for index in args.shapes), MASKS):
        lines = []
        for length in common.progress(args.lengths, f"{shape.name}, {mask}"):
            try:
                rows = measure_length(shape, mask, length, dtype, device, args.samples, results)
            except torch.OutOfMemoryError as error:
                rows = {
                    (direction, OURS): results.add_error(case_of(shape, mask, length, direction, OURS), error)
                    for direction in PASSES
                }
            for direction in PASSES:
                line, gains = table_line(length, direction, rows)
                lines.append(line)
                over_best[direction].append(gains[0])
                over_flash[direction].append(gains[1])
        print(f"{shape.name}, {mask}")
        cli.table(COLUMNS, lines)
    wrong = common.print_failures(results.rows, lambda name: name == OURS)
    text = f"gain over the best SDPA backend: {spans(over_best)}; over its FlashAttention: {spans(over_flash)}"
    return common.finish(results, not wrong, text, args.results_dir)


if __name__ == "__main__":
    cli.run(main)
