"""Write the README's result tables from the result files, or check that they agree (``--check``, exit 1 if not).

A table stands between ``<!-- results:NAME -->`` and ``<!-- /results:NAME -->``; what is between them is replaced. What
has no result file says so, with the command that measures it. Without ``--check`` the plots are drawn anew as well.
"""

import difflib
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common, compare_decode_latency, decode_ladder, plots, prefill_vs_sdpa, roofline
from benchmarks import kernel_resources as resources

# isort: split
import cli
import config
from profiling.digest import GROUPS

MARKER = re.compile(r"<!-- results:(?P<name>[\w-]+) -->\n(?P<body>.*?)<!-- /results:(?P=name) -->", re.DOTALL)
ANY_MARKER = re.compile(r"<!-- /?results:[\w-]+ -->")


def markdown(columns, rows):
    """A Markdown table: the first column to the left, numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    right = [
        index > 0 and all(re.match(r"^[-+(]?[\d.,]+\D{0,3}$|^-?$", row[index]) for row in cells)
        for index in range(len(columns))
    ]
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---:' if one else '---' for one in right)} |"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in cells])


def by_status(row, cells):
    """``cells()``, or, for a row that was not measured, its status in their place."""
    if row["status"] == common.PASSED:
        return cells()
    return [status_text(row)]


def status_text(row):
    """Why a row has no times, as a cell."""
    reason = f": {row['reason']}" if row.get("reason") else ""
    return f"{row['status']}{reason}".replace("|", "/")


def padded(cells, width):
    return [*cells, *["-"] * (width - len(cells))]


def caption(content):
    """The passport of a table: script, machine, versions, commit, date."""
    e = content["environment"]
    place = f"{e['gpu']}, driver {e['driver']}, " if "gpu" in e else ""
    return (
        f"`{content['script']}.py` on {place}torch {e['torch']}, Triton {e['triton']}, "
        f"transformers {e['transformers']}, commit {e['commit']}, {content['date'][:10]}; {content['method']}."
    )


# --- One function per table: result file -> Markdown -----------------------------------------------------------------


def headline(content):
    """The ladder's ends at its first context, each against rung 0 and against the fastest Hugging Face rung."""
    context = content["rows"][0]["case"]["context"]
    rows = [row for row in plots.passed(content) if row["case"]["context"] == context]
    base = next((row for row in rows if row["case"]["rung"] == "0"), None)
    chain = [row for row in rows if row["case"]["rung"] not in ("0", "0s")]
    if base is None or not chain:
        return "The ladder has no baseline or no rung of its own."
    best = min(chain, key=lambda row: row["median_ms"])
    chosen = [row for row in rows if row["case"]["rung"] in ("0", "0s", "3")]
    chosen += [] if best in chosen else [best]
    hugging_face = [row for row in rows if row["case"]["rung"] in ("0", "0s")]
    fastest = min(hugging_face, key=lambda row: row["median_ms"])
    bases = [base] if fastest is base else [base, fastest]
    lines = [
        (
            f"{row['case']['rung']}: {row['case']['name']}", f"{row['median_ms']:.2f}", common.spread(row),
            f"{row['tokens_per_s']:.0f}", *(f"{one['median_ms'] / row['median_ms']:.1f}x" for one in bases),
            f"{100 * row['share_of_floor']:.0f} %",
        )
        for row in chosen
    ]  # fmt: skip
    columns = (
        "rung", "ms/token", "min to max", "tokens/s", *(f"speed-up over rung {one['case']['rung']}" for one in bases),
        "of the floor's speed",
    )  # fmt: skip
    model = content["configuration"]["model_path"].removeprefix("random:")
    return f"{model}, {content['configuration']['dtype']}, batch 1, context {context}:\n\n{markdown(columns, lines)}"


def lessons(content):
    """What the ladder's first context says, a line per rung."""
    context = content["rows"][0]["case"]["context"]
    rows = [
        row for row in plots.passed(content)
        if row["case"]["context"] == context and row["case"]["rung"] != "0s"
    ]  # fmt: skip
    if len(rows) < 2:
        return "The ladder has too few rungs to compare."
    first, last = rows[0], rows[-1]
    saved, noise = first["median_ms"] - last["median_ms"], decode_ladder.unresolved(rows)
    lines = [
        f"- {first['case']['name']} at context {context}: {first['median_ms']:.2f} ms per token, of which the GPU "
        f"works {first['gpu_busy_ms']:.2f} ms and waits {first['gpu_idle_ms']:.2f} ms."
    ]
    for row in rows[1:]:
        share = 100 * row["bought_ms"] / saved
        doubt = ", not resolved: the runs overlap" if row["case"]["rung"] in noise else ""
        lines.append(
            f"- Rung {row['case']['rung']}, {row['case']['name']}: {-row['bought_ms']:+.2f} ms "
            f"({share:.0f} % of all that the ladder saves{doubt}); launches per token: {row['launches_per_token']:.0f}."
        )
    lines.append(
        f"- What is left: {last['median_ms']:.2f} ms against a floor of {last['floor_ms']:.2f} ms "
        f"({100 * last['share_of_floor']:.0f} %)."
    )
    return "\n".join(lines)


def ladder(content):
    parts = []
    for context in dict.fromkeys(row["case"]["context"] for row in content["rows"]):
        rows = [row for row in content["rows"] if row["case"]["context"] == context]
        floor = next((row["floor_ms"] for row in rows if "floor_ms" in row), None)
        table = markdown(decode_ladder.COLUMNS, decode_ladder.table_lines(rows, status_text))
        title = f"Context {context}" + (f", floor {floor:.3f} ms per token" if floor else "")
        parts.append(f"{title} (times in ms per token):\n\n{table}")
        if decode_ladder.unresolved(rows):
            parts.append(decode_ladder.UNRESOLVED)
    return "\n\n".join(parts)


def end_to_end(content):
    lines = []
    for row in content["rows"]:
        cells = by_status(row, lambda row=row: [
            f"{row['ttft_ms']:.1f}", f"{row['median_ms']:.2f}", common.spread(row), f"{row['tokens_per_s']:.0f}",
            f"{100 * row['share_of_floor']:.0f} %", f"{row['peak_memory_bytes'] / 1e6:.0f}",
        ])  # fmt: skip
        lines.append((row["case"]["contender"], *padded(cells, 6)))
    case = content["rows"][0]["case"]
    columns = ("", "first token, ms", "ms/token", "min to max", "tokens/s", "of the floor's speed", "memory MB")
    table = markdown(columns, lines)
    return f"Prompt of {case['prompt']}, {case['new_tokens']} new tokens:\n\n{table}"


def decode_attention(content):
    bandwidth = content["bandwidth_gb_per_s"]
    parts = [f"Memory reads at {bandwidth:.0f} GB/s (measured in the same run)."]
    for shape in dict.fromkeys(row["case"]["shape"] for row in content["rows"]):
        lines = []
        for length in dict.fromkeys(row["case"]["cache_len"] for row in content["rows"]):
            rows = {
                row["case"]["contender"]: row
                for row in content["rows"]
                if row["case"]["shape"] == shape and row["case"]["cache_len"] == length
            }
            if compare_decode_latency.OURS in rows and compare_decode_latency.OURS_ON_DEVICE in rows:
                line, _ = compare_decode_latency.table_line(length, rows, bandwidth)
                lines.append(line)
        parts.append(f"{shape}:\n\n{markdown(compare_decode_latency.COLUMNS, lines)}")
    return "\n\n".join(parts)


def decode_vs_eager(content):
    lengths = list(dict.fromkeys(row["case"]["cache_len"] for row in content["rows"]))
    rows = {(row["case"]["contender"], row["case"]["cache_len"]): row for row in content["rows"]}
    names = dict.fromkeys(name for name, _ in rows)

    def lines(cell):
        table = []
        for name in names:
            own = [rows[name, length] for length in lengths]
            cells = (cell(row) if row["status"] == common.PASSED else row["status"] for row in own)
            table.append((name, *cells))
        return table

    columns = ("contender", *(str(length) for length in lengths))
    times = markdown(columns, lines(lambda row: f"{1e3 * row['median_ms']:.1f} ({1e3 * row['call_median_ms']:.0f})"))
    memory = markdown(columns, lines(lambda row: f"{row['peak_memory_bytes'] / 1e6:.2f}"))
    return (
        f"GPU time in us by cache length (in parentheses: the call as Python makes it):\n\n{times}\n\n"
        f"Memory of a step in MB:\n\n{memory}"
    )


def prefill(content):
    parts = []
    for shape, mask in dict.fromkeys((row["case"]["shape"], row["case"]["mask"]) for row in content["rows"]):
        found = {}
        for row in content["rows"]:
            case = row["case"]
            if (case["shape"], case["mask"]) == (shape, mask):
                found.setdefault(case["seq_len"], {})[case["pass"], case["contender"]] = row
        lines = [
            prefill_vs_sdpa.table_line(length, direction, rows)[0]
            for length, rows in found.items()
            for direction in prefill_vs_sdpa.PASSES
        ]
        parts.append(f"{shape}, {mask}, batch 2:\n\n{markdown(prefill_vs_sdpa.COLUMNS, lines)}")
    return "\n\n".join(parts)


def profile(content):
    rows = plots.passed(content)
    if not rows:
        return "No path could be profiled."
    lines = []
    for group in GROUPS:
        times = [(row["groups_ms"][group], 100 * row["groups_ms"][group] / row["gpu_busy_ms"]) for row in rows]
        lines.append((group, *(f"{ms:.3f} ({share:.0f} %)" for ms, share in times)))
    for label, field in (("**GPU busy**", "gpu_busy_ms"), ("GPU idle", "gpu_idle_ms"), ("**wall**", "median_ms")):
        lines.append((label, *(f"{row[field]:.3f}" for row in rows)))
    for label, field in (("kernels per token", "kernels_per_token"), ("launches per token", "launches_per_token")):
        lines.append((label, *(f"{row[field]:.0f}" for row in rows)))
    table = markdown(("ms per token", *(row["case"]["path"] for row in rows)), lines)
    verdicts = "\n".join(f"- {row['case']['path']}: **{row['verdict']}**. {row['verdict_text']}." for row in rows)
    return f"Context {rows[0]['case']['context']}; percentages are of the busy time:\n\n{table}\n\n{verdicts}"


def kernel_resources(content):
    def table(rows):
        lines = []
        for row in rows:
            case = row["case"]
            what = case["what"]
            if case["block_t"]:
                what += f", BLOCK_T={resources.tile_text(case)}"
            if case["cache_len"]:
                what += f", cache {case['cache_len']}"
            cells = by_status(row, lambda row=row: [
                str(row["registers"]), str(row["spill_bytes"]), f"{row['shared_memory_bytes'] / 1024:.1f}",
                str(row["num_warps"]), f"{100 * row['occupancy']:.0f} %", row["limited_by"],
            ])  # fmt: skip
            lines.append((f"sm_{case['capability'].replace('.', '')}", what, f"`{case['kernel']}`", *padded(cells, 6)))
        columns = ("GPU", "what", "kernel", "registers", "spill B", "shared KiB", "warps", "occupancy", "limited by")
        return markdown(columns, lines)

    rows = resources.merged(content["rows"])
    swept = [row for row in rows if row["case"]["block_t"] is not None]
    others = [row for row in rows if row["case"]["block_t"] is None]
    forced = "forced: more keys than the wrapper takes there; 0 %: does not fit."
    return "\n\n".join([table(swept), forced] + ([folded("Other kernels", table(others))] if others else []))


def roofline_table(models):
    columns = roofline.columns(roofline.CONTEXTS)
    return markdown(columns, roofline.table_lines(roofline.floors(models=models)))


def folded(summary, text):
    """A part of the page that opens at a click."""
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"


# NAME -> (script, function, whether the script's picture belongs above the table).
TABLES = {
    "headline": ("decode_ladder", headline, False),
    "lessons": ("decode_ladder", lessons, False),
    "decode_ladder": ("decode_ladder", ladder, True),
    "baseline_latency": ("baseline_latency", end_to_end, False),
    "generate_latency": ("generate_latency", end_to_end, False),
    "compare_decode_latency": ("compare_decode_latency", decode_attention, True),
    "decode_vs_eager": ("decode_vs_eager", decode_vs_eager, False),
    "prefill_vs_sdpa": ("prefill_vs_sdpa", prefill, True),
    "decode_profile": ("decode_profile", profile, True),
    "kernel_resources": ("kernel_resources", kernel_resources, False),
}
NAMES = (*TABLES, "roofline")  # arithmetic: needs no result file


def build(name, root, base):
    """The Markdown of table ``name`` from the result files under ``root``; pictures are linked relative to ``base``."""
    if name == "roofline":
        first, *others = roofline.MODELS
        return f"{roofline_table([first])}\n\n{folded('Other models', roofline_table(others))}"
    if name not in TABLES:
        raise cli.UsageError(f"no table is called {name!r}; there are {', '.join(NAMES)}")
    script, make, has_plot = TABLES[name]
    parts = []
    for source in sorted(root.glob(f"*/{script}.json")):
        content = common.load_results(source)
        picture = source.with_suffix(".png")
        if has_plot and picture.exists():
            parts.append(f"![{script} on {source.parent.name}]({os.path.relpath(picture, base).replace(os.sep, '/')})")
        parts += [make(content), caption(content)]
    folder = "profiling" if script == "decode_profile" else "benchmarks"
    where = "" if script == "kernel_resources" else " on a GPU"
    return "\n\n".join(parts) or f"*Not measured yet: `python {folder}/{script}.py`{where}, then `make report`.*"


def render(text, root, base):
    """``text`` with every marked table replaced; UsageError for a marker without its partner or of an unknown name."""
    rendered = MARKER.sub(
        lambda found: (
            f"<!-- results:{found['name']} -->\n{build(found['name'], root, base)}\n<!-- /results:{found['name']} -->"
        ),
        text,
    )
    pairs = sum(2 for _ in MARKER.finditer(text))
    if len(ANY_MARKER.findall(text)) != pairs:
        raise cli.UsageError(
            "a results marker has no partner; each table needs <!-- results:X --> and <!-- /results:X -->"
        )
    return rendered


def main():
    parser = cli.parser(__doc__, "RESULTS_DIR")
    parser.add_argument("--readme", type=Path, default=config.ROOT / "README.md", help="the file with the markers")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the tables differ")
    args = parser.parse_args()
    try:
        text = args.readme.read_text(encoding="utf-8")
    except OSError as error:
        raise cli.UsageError(f"{args.readme}: {error.strerror}") from None
    root = common.results_dir(args.results_dir)
    if not args.check:
        try:
            for picture in plots.draw_all(args.results_dir):
                print(picture)
        except cli.UsageError as error:
            print(f"plots left as they are: {error}")
    rendered = render(text, root, args.readme.resolve().parent)
    tables = len(MARKER.findall(text))
    if args.check:
        difference = difflib.unified_diff(
            text.splitlines(), rendered.splitlines(), "README", "results", lineterm="", n=0
        )
        for line in list(difference)[:40]:
            print(line)
        both = zip(MARKER.finditer(text), MARKER.finditer(rendered), strict=True)
        differing = [old["name"] for old, new in both if old["body"] != new["body"]]
        if differing:
            names = ", ".join(differing)
            return cli.verdict(False, f"tables of {args.readme.name} that differ from {root.name}/: {names}")
        return cli.verdict(True, f"{tables} tables of {args.readme.name} agree with {root.name}/")
    try:
        args.readme.write_text(rendered, encoding="utf-8")
    except OSError as error:
        raise cli.UsageError(f"{args.readme}: {error.strerror}") from None
    return cli.verdict(True, f"{tables} tables of {args.readme.name} written from {root.name}/")


if __name__ == "__main__":
    cli.run(main)
