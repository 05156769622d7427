"""Launch choices of decode attention beside the one that it takes: is another faster on this GPU?

Each argument is a contender: fields of DecodeLaunch (kernels/decode_attention_wrapper.py, which says what they mean)
that replace the choice's own, and ``splits``, the programs that share the keys of a head. Inputs, check and clock are
those of step 4; contenders alternate.

    python benchmarks/decode_attention_choices.py --shapes 1 --lengths 2048,8192 splits=12 early=1,num_stages=6
"""

import argparse
import sys
from pathlib import Path
from typing import get_type_hints

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import common
from benchmarks import compare_decode_latency as step4

# isort: split
import cli
import config
from kernels.decode_attention_wrapper import (
    DecodeLaunch,
    choose_num_programs,
    decode_attention_with_lse,
    default_launch,
)
from kernels.device import device_info

TAKEN = "as chosen"
FIELDS = get_type_hints(DecodeLaunch) | {"splits": int}
CHANGES = ["early=0", "early=1", "interleaved=0", "interleaved=1", "num_stages=3", "num_stages=4", "num_stages=5"]
LENGTHS = [512, 2048, 8192, 32768]
TINY_LENGTHS = [130]
TINY_CHANGES = ["splits=1", "splits=3,interleaved=0"]


def changes(text):
    """argparse type: ``early=1,splits=6`` -> {"early": True, "splits": 6}."""
    found = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in FIELDS:
            raise argparse.ArgumentTypeError(f"{part!r} sets none of {', '.join(FIELDS)}")
        try:
            found[name] = FIELDS[name](float(value) if FIELDS[name] is float else int(value))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r}: expected a number after {name}=") from None
    return found


def contender(changed):
    """decode_attention(q, k, v) over the whole cache, launched as chosen but for what ``changed`` (see above) says."""
    fields = {name: value for name, value in changed.items() if name != "splits"}

    def attend(q, k, v):
        num_heads, num_kv_heads, cache_len = q.shape[1], k.shape[1], k.shape[2]
        choice = default_launch(q, k, v)._replace(**fields)
        group_size = num_heads // num_kv_heads
        if "splits" in changed:
            programs = changed["splits"] * num_kv_heads * -(-group_size // choice.rows)
        else:
            sm_count = device_info(q.device).sm_count
            programs = choose_num_programs(choice, 1, num_kv_heads, group_size, cache_len, sm_count)
        return decode_attention_with_lse(q, k, v, cache_len, choice=choice, num_programs=programs)[0]

    return attend


def check_all(functions, bar):
    """name -> Accuracy of each function, or the exception of a launch that this GPU does not take."""
    outcomes = {}
    for name, function in functions.items():
        try:
            outcomes[name] = step4.check(function, bar, common.OURS_FACTOR)
        except (RuntimeError, ValueError) as error:
            outcomes[name] = error
    return outcomes


def measure_shape(shape, cache_len, functions, dtype, device, args, results):
    """Check and time the contenders on one shape and length; rows go to ``results`` -> name -> result row."""
    num_bytes = step4.counts.attention_decode_bytes(
        1, shape.num_heads, shape.num_kv_heads, cache_len, shape.head_dim, dtype.itemsize
    )
    sets = common.input_sets(num_bytes, common.l2_bytes())
    inputs, _ = step4.make_inputs(shape, cache_len, sets, dtype, device)
    outcomes = check_all(functions, step4.bars(inputs))
    timed = {
        name: [lambda one=one, f=functions[name]: f(*one) for one in inputs]
        for name, found in outcomes.items()
        if not isinstance(found, Exception) and found.ok
    }
    outcomes |= common.measure_cold(timed, warmup=args.warmup, samples=args.samples)
    rows = {}
    for name, outcome in outcomes.items():
        case = {"shape": shape.name, "cache_len": cache_len, "contender": name}
        if isinstance(outcome, Exception):
            rows[name] = results.add_error(case, outcome)
        elif name not in timed:
            reason = f"max error {outcome.max_error:.2e}, PyTorch's own {outcome.native_max_error:.2e}"
            rows[name] = results.add(case, common.INCORRECT, reason=reason)
        else:
            rows[name] = results.add(case, timing=outcome, bytes=num_bytes, input_sets=sets)
    return rows


def cell(row, taken):
    """Microseconds of a row, "*" where all its samples lie below those of the choice; its status without times."""
    if row["status"] != common.PASSED:
        return row["status"]
    faster = "samples_ms" in taken and max(row["samples_ms"]) < min(taken["samples_ms"])
    return f"{1e3 * row['median_ms']:.2f}" + ("*" if faster else "")


def check_tiny(functions, device, dtype):
    """Without a GPU: are the contenders right? -> whether all small cases are."""
    lines = []
    for shape in step4.TINY_SHAPES:
        for cache_len in TINY_LENGTHS:
            inputs, _ = step4.make_inputs(shape, cache_len, 2, dtype, device)
            for name, found in check_all(functions, step4.bars(inputs)).items():
                right = not isinstance(found, Exception) and found.ok
                lines.append((shape.name, cache_len, name, right, found if isinstance(found, Exception) else "-"))
    cli.table(("shape", "cache_len", "choice", "right", "error"), lines)
    return all(line[3] for line in lines)


def main():
    parser = cli.parser(__doc__, "DTYPE", "SEED", "WARMUP", "RESULTS_DIR")
    parser.add_argument("changes", nargs="*", type=changes, metavar="FIELD=VALUE,...", help="what to try")
    common.add_numbers_argument(parser, "--lengths", LENGTHS, "cache lengths")
    common.add_shapes_argument(parser, step4.SHAPES)
    parser.add_argument("--samples", type=cli.count, default=config.ITERATIONS, help="timed graph replays per row")
    args = parser.parse_args()
    cli.header("further step", "Decode attention: other launches beside the one that is taken")
    device, dtype = common.resolve(args)
    torch.manual_seed(args.seed)
    has_gpu = torch.cuda.is_available()
    args.changes = args.changes or [changes(text) for text in (CHANGES if has_gpu else TINY_CHANGES)]
    functions = {TAKEN: contender({})}
    for changed in args.changes:
        functions[",".join(f"{name}={value:g}" for name, value in changed.items())] = contender(changed)
    if not has_gpu:
        ok = check_tiny(functions, device, dtype)
        return common.finish(None, ok, "every choice agrees with the float64 reference on small cases")

    results = common.Results("decode_attention_choices", vars(args), common.COLD_GRAPHS)
    faster = []
    for shape in (step4.SHAPES[index] for index in args.shapes):
        columns = {}
        for cache_len in common.progress(args.lengths, shape.name):
            try:
                rows = measure_shape(shape, cache_len, functions, dtype, device, args, results)
            except torch.OutOfMemoryError as error:
                results.add_error({"shape": shape.name, "cache_len": cache_len, "contender": TAKEN}, error)
                columns[cache_len] = dict.fromkeys(functions, common.OOM)
                continue
            columns[cache_len] = {name: cell(row, rows[TAKEN]) for name, row in rows.items()}
            faster += [f"{name} ({shape.name}, {cache_len})" for name, row in columns[cache_len].items() if "*" in row]
        print(f"{shape.name}, us (*: every sample below those of the choice)")
        cli.table(
            ("launch", *map(str, columns)),
            [(name, *(column[name] for column in columns.values())) for name in functions],
        )
    wrong = common.print_failures(results.rows, lambda name: name == TAKEN)
    text = f"faster than the choice: {'; '.join(faster)}" if faster else "nothing is faster than the choice"
    return common.finish(results, not wrong, text, args.results_dir)


if __name__ == "__main__":
    cli.run(main)
