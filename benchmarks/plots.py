"""Plots of the result files, written beside them: results/<gpu>/<script>.png.

Drawn to be read at a README's width (about 830 pixels). Needs matplotlib, which nothing else here does.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common, compare_decode_latency, contenders, counts, decode_ladder

# isort: split
import cli
from profiling.digest import GROUPS

WIDTH_INCHES, DPI = 8.3, 200

# Okabe and Ito's colours, told apart by most kinds of colour vision.
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, RED, PINK, GREY = "#0072B2", "#D55E00", "#CC79A7", "#999999"
OURS_COLOR, FLOOR_COLOR = RED, "black"
BACKEND_COLORS = {
    "cudnn": BLUE, "flash": GREEN, "efficient": ORANGE, "math": GREY, "grouped matmul": PINK, "reference": SKY,
}  # fmt: skip


def pyplot():
    """matplotlib.pyplot, drawing to files; UsageError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise cli.UsageError("plots need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
    return plt


def passed(content):
    return [row for row in content["rows"] if row["status"] == common.PASSED]


def conditions(content):
    """One line under a title: where and when the numbers were taken."""
    environment = content["environment"]
    return (
        f"{environment['gpu']}, {content['date'][:10]}, torch {environment['torch'].split('+')[0]}, "
        f"triton {environment['triton']}, commit {environment['commit']}"
    )


def finish(figure, content, title, path):
    """Title and conditions in a band above the panels; save."""
    height = figure.get_figheight()
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - 0.42 / height))
    figure.text(0.01, 1 - 0.06 / height, title, va="top", fontsize=11, fontweight="bold")
    figure.text(0.01, 1 - 0.27 / height, conditions(content), va="top", fontsize=7.5, color="#555555")
    figure.savefig(path, dpi=DPI)
    pyplot().close(figure)
    return path


def draw_ladder(content, path):
    """A waterfall at the first context that was measured: what is left of the time per token with the range of its
    runs, and what each rung took away."""
    context = passed(content)[0]["case"]["context"]
    rows = [row for row in passed(content) if row["case"]["context"] == context]
    noise = decode_ladder.unresolved(rows)
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(WIDTH_INCHES, 0.42 * len(rows) + 1.5), layout="constrained")
    for y, row in enumerate(rows):
        wall, bought = row["median_ms"], row["bought_ms"]
        axes.barh(y, wall, color=SKY if row["case"]["rung"] == "0s" else BLUE, height=0.62)
        axes.barh(y, max(bought, 0), left=wall, color="#DDDDDD", height=0.62)
        axes.plot([min(row["samples_ms"]), max(row["samples_ms"])], [y, y], color="black", linewidth=1, marker="|")
        change = f"  ({-bought:+.2f}{' ~' if row['case']['rung'] in noise else ''})" if y else ""
        axes.text(1.01, y, f"{wall:.2f} ms{change}", va="center", fontsize=9, transform=axes.get_yaxis_transform())
    floor = rows[-1]["floor_ms"]
    axes.axvline(floor, color=FLOOR_COLOR, linestyle="--", linewidth=1)
    axes.text(floor, -0.62, f" floor {floor:.2f} ms", va="bottom", fontsize=8)
    axes.set_yticks(range(len(rows)), [f"{row['case']['rung']}  {row['case']['name']}" for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel(
        "ms per token; line: range of the runs; grey: saved against the rung before (0s: against rung 0)\n"
        + decode_ladder.UNRESOLVED
    )
    return finish(
        figure, content, f"The decode ladder: {content['configuration']['model_path']}, context {context}", path
    )


def best_by(rows, x, value, better):
    """name -> {x: best value}: each backend in whichever form suits it best at that x."""
    found = {}
    for row in rows:
        name = contenders.backend_of(row["case"]["contender"]) or row["case"]["contender"]
        points = found.setdefault(name, {})
        position = row["case"][x]
        points[position] = better(points.get(position, row[value]), row[value])
    return found


def style_of(name):
    ours = name == "triton"
    color = OURS_COLOR if name.startswith("triton") else BACKEND_COLORS.get(name, GREY)
    if name == compare_decode_latency.READ:
        return {"color": FLOOR_COLOR, "linewidth": 1, "linestyle": ":", "zorder": 2}
    return {
        "color": color, "linewidth": 2 if ours else 1.2, "marker": "o", "markersize": 3.5 if ours else 2.5,
        "zorder": 3 if ours else 2,
    }  # fmt: skip


def label_of(name):
    return f"SDPA {name}" if name in contenders.BACKENDS else name


def thousands(length):
    """``8192`` -> ``8K``."""
    return str(length) if length % 1024 else f"{length // 1024}K"


def draw_decode(content, path):
    """Latency against cache length, log-log, one panel per shape, with the line that the bandwidth draws."""
    rows = [row for row in passed(content) if row["case"]["contender"] != "triton, length on the device"]
    shapes = list(dict.fromkeys(row["case"]["shape"] for row in rows))
    plt = pyplot()
    figure, panels = plt.subplots(
        1, len(shapes), figsize=(WIDTH_INCHES, 4.0), sharey=True, layout="constrained", squeeze=False
    )
    for axes, shape in zip(panels[0], shapes, strict=True):
        own = [row for row in rows if row["case"]["shape"] == shape]
        for name, points in best_by(own, "cache_len", "median_ms", min).items():
            lengths = sorted(points)
            axes.plot(lengths, [1e3 * points[length] for length in lengths], label=label_of(name), **style_of(name))
        moved = {row["case"]["cache_len"]: row["bytes"] for row in own}
        floor_us = [1e3 * counts.floor_ms(moved[length], content["bandwidth_gb_per_s"]) for length in sorted(moved)]
        label = f"memory at {content['bandwidth_gb_per_s']:.0f} GB/s"
        axes.plot(sorted(moved), floor_us, color=FLOOR_COLOR, linestyle="--", linewidth=1, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = [length for length in sorted(moved) if length.bit_length() % 2 == 0]
        axes.set_xticks(ticks, [thousands(length) for length in ticks])
        axes.set_title(shape, fontsize=9)
        axes.set_xlabel("cache length (tokens)")
        axes.grid(alpha=0.25, which="major")
    panels[0][0].set_ylabel("us per layer and token")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    return finish(figure, content, "Decode attention: latency against cache length (cold L2, CUDA graphs)", path)


def draw_prefill(content, path):
    """TFLOP/s against sequence length: a row of panels per shape, in it a panel per pass and mask."""
    rows = passed(content)
    shapes = list(dict.fromkeys(row["case"]["shape"] for row in rows))
    masks = dict.fromkeys(row["case"]["mask"] for row in rows)
    columns = [(direction, mask) for direction in ("forward", "backward") for mask in masks]
    plt = pyplot()
    figure, panels = plt.subplots(
        len(shapes), len(columns), figsize=(WIDTH_INCHES, 2.5 * len(shapes) + 1.2), sharex=True, sharey=True,
        layout="constrained", squeeze=False,
    )  # fmt: skip
    for line, shape in zip(panels, shapes, strict=True):
        for axes, (direction, mask) in zip(line, columns, strict=True):
            panel = {"shape": shape, "mask": mask, "pass": direction}
            own = [row for row in rows if panel.items() <= row["case"].items()]
            for name, points in best_by(own, "seq_len", "tflop_per_s", max).items():
                lengths = sorted(points)
                axes.plot(lengths, [points[length] for length in lengths], label=label_of(name), **style_of(name))
            axes.set_title(f"{direction}, {mask}", fontsize=9)
            axes.grid(alpha=0.25)
        line[0].set_ylabel(f"{shape}\nTFLOP/s")
    lengths = sorted({row["case"]["seq_len"] for row in rows})
    for axes in panels[-1]:
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [thousands(length) for length in lengths])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("sequence length (tokens)")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
    return finish(figure, content, "Prefill attention, batch 2", path)


GROUP_COLORS = dict(zip(GROUPS, (RED, BLUE, SKY, PINK, ORANGE, GREEN, YELLOW, GREY), strict=True))


def draw_profile(content, path):
    """Shares of a decode step's wall time by group, one bar per path, the GPU's idle time in white."""
    rows = passed(content)
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(WIDTH_INCHES, 0.5 * len(rows) + 2.0), layout="constrained")
    for y, row in enumerate(rows):
        left, wall = 0.0, max(row["median_ms"], row["gpu_busy_ms"])
        for group in GROUPS:
            share = 100 * row["groups_ms"][group] / wall
            axes.barh(y, share, left=left, color=GROUP_COLORS[group], height=0.66, label=group if y == 0 else None)
            if share >= 5:
                axes.text(left + share / 2, y, f"{share:.0f} %", ha="center", va="center", fontsize=8)
            left += share
        idle = max(0.0, 100 - left)
        axes.barh(
            y, idle, left=left, color="white", edgecolor=GREY, hatch="//", height=0.66, linewidth=0.5,
            label="GPU idle" if y == 0 else None,
        )  # fmt: skip
        if idle >= 8:
            axes.text(
                left + idle / 2, y, f"idle {idle:.0f} %", ha="center", va="center", fontsize=8, backgroundcolor="white"
            )
        axes.text(101, y, f"{row['median_ms']:.2f} ms", va="center", fontsize=9)
    names = {"hf": "Hugging Face"}
    axes.set_yticks(range(len(rows)), [names.get(row["case"]["path"], row["case"]["path"]) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the wall time of one decode step (%)")
    figure.legend(loc="outside lower center", ncols=5, fontsize=8)
    context = rows[0]["case"]["context"]
    return finish(
        figure,
        content,
        f"Where a decode step's time goes: {content['configuration']['model_path']}, context {context}",
        path,
    )


PLOTS = {
    "decode_ladder": draw_ladder,
    "compare_decode_latency": draw_decode,
    "prefill_vs_sdpa": draw_prefill,
    "decode_profile": draw_profile,
}


def draw_folder(folder):
    """Draw every plot that ``folder`` has a result file for -> the pictures' paths."""
    pictures = []
    for name, draw in PLOTS.items():
        source = folder / f"{name}.json"
        if source.exists():
            content = common.load_results(source)
            if passed(content):
                pictures.append(draw(content, source.with_suffix(".png")))
    return pictures


def draw_all(directory=None):
    """Draw the plots of every GPU under the results folder -> the pictures' paths."""
    root = common.results_dir(directory)
    return [picture for folder in sorted(root.glob("*/")) for picture in draw_folder(folder)]


def main():
    args = cli.parser(__doc__, "RESULTS_DIR").parse_args()
    pictures = draw_all(args.results_dir)
    for picture in pictures:
        print(picture)
    return cli.verdict(True, f"{len(pictures)} plots drawn")


if __name__ == "__main__":
    cli.run(main)
