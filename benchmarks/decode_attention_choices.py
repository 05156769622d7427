"""Launch choices of decode attention beside the one that it takes: is another faster on this GPU?

Each argument is a contender: fields of DecodeLaunch (kernels/decode_attention_wrapper.py, which says what they mean)
that replace the choice's own, and ``splits``, the programs that share the keys of a head. Inputs, check and clock are
those of step 4; contenders alternate.

    python benchmarks/decode_attention_choices.py --shapes 1 --lengths 2048,8192 splits=12 next_after=end,num_stages=6
"""

import argparse
import sys
from pathlib import Path
from typing import get_args, get_type_hints

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import common
from benchmarks import compare_decode_latency as step4

# isort: split
import cli
import config
from kernels.decode_attention_wrapper import (
    DecodeLaunch,
    _launch,
    choose_num_programs,
    default_launch,
)
from kernels.device import device_info

TAKEN = "as chosen"
FIELDS = get_type_hints(DecodeLaunch) | {"splits": int}
CHANGES = [
    "next_after=keys", "next_after=partials", "next_after=end", "interleaved=0", "interleaved=1", "collects=0",
    "num_stages=3", "num_stages=5",
]  # fmt: skip
LENGTHS = [512, 2048, 8192, 32768]
TINY_CHANGES = ["splits=1", "splits=3,interleaved=0"]


def changes(text):
    """argparse type: ``interleaved=1,splits=6`` -> {"interleaved": True, "splits": 6}."""
    found = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in FIELDS:
            raise argparse.ArgumentTypeError(f"{part!r} sets none of {', '.join(FIELDS)}")
        kind = FIELDS[name]
        words = get_args(kind)
        try:
            found[name] = value if value in words else kind(float(value) if kind is float else int(value))
        except (TypeError, ValueError):
            expected = ", ".join(words[:-1]) + f" or {words[-1]}" if words else "a number"
            raise argparse.ArgumentTypeError(f"{part!r}: expected {expected} after {name}=") from None
    return found


def label(changed):
    """``changed`` as an argument names it."""
    return ",".join(f"{name}={value if isinstance(value, str) else f'{value:g}'}" for name, value in changed.items())


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
        # Not decode_attention_with_lse: that stores one more output, and groups are up to 0.8 us slower with it.
        return _launch(q, k, v, cache_len, None, None, None, choice=choice, num_programs=programs)

    return attend


def cell(row, taken):
    """Microseconds of a row, "*" where all its samples lie below those of the choice; its status without times."""
    if row["status"] != common.PASSED:
        return row["status"]
    faster = "samples_ms" in taken and max(row["samples_ms"]) < min(taken["samples_ms"])
    return f"{1e3 * row['median_ms']:.2f}" + ("*" if faster else "")


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
        functions[label(changed)] = contender(changed)
    if not has_gpu:
        ok = step4.check_tiny(lambda cache_len, device: functions, device, dtype)
        return common.finish(None, ok, "every choice agrees with the float64 reference on small cases")

    bandwidth = common.read_bandwidth_gb_per_s()
    results = common.Results("decode_attention_choices", vars(args), common.COLD_GRAPHS)
    results.numbers["bandwidth_gb_per_s"] = bandwidth
    faster = []
    for shape in (step4.SHAPES[index] for index in args.shapes):
        columns = {}
        for cache_len in common.progress(args.lengths, shape.name):
            try:
                rows = step4.measure_shape(
                    shape, cache_len, functions, lambda name: True, dtype, device, bandwidth, args, results
                )
            except torch.OutOfMemoryError as error:
                row = results.add_error({"shape": shape.name, "cache_len": cache_len, "contender": TAKEN}, error)
                rows = dict.fromkeys((*functions, step4.READ), row)
            columns[cache_len] = {name: cell(row, rows[TAKEN]) for name, row in rows.items() if name in functions}
            faster += [f"{name} ({shape.name}, {cache_len})" for name, us in columns[cache_len].items() if "*" in us]
            columns[cache_len][step4.READ] = cell(rows[step4.READ], {})
        print(f"{shape.name}, us (*: every sample below those of the choice)")
        cli.table(
            ("launch", *map(str, columns)),
            [(name, *(column[name] for column in columns.values())) for name in (*functions, step4.READ)],
        )
    wrong = common.print_failures(results.rows, lambda name: name == TAKEN)
    text = f"faster than the choice: {'; '.join(faster)}" if faster else "nothing is faster than the choice"
    return common.finish(results, not wrong, text, args.results_dir)


if __name__ == "__main__":
    cli.run(main)
