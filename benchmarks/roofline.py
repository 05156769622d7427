"""The floor: how fast a decode step can be on a given GPU, and whether the model fits it at all. No GPU needed.

One token at batch 1 reads every weight and the keys and values in view once, and computes next to nothing, so the least
time per token is bytes / bandwidth. Bandwidths are the vendors' figures; what a program can really read is some percent
less (the other benchmarks measure it; where a GPU is present its measured row is added here).
"""

import argparse
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import common, counts

# isort: split
import cli
from model.load_model import PRESETS, load_config


class Gpu(NamedTuple):
    """memory_gib: as sold ("8 GB" of video memory are 8 GiB); bandwidth in GB/s (1e9); source: where both stand."""

    name: str
    memory_gib: float
    bandwidth_gb_per_s: float
    source: str


GPUS = (
    Gpu("Jetson Orin NX 16GB", 16, 102.4, "NVIDIA Jetson Orin NX Series Data Sheet: 128-bit LPDDR5"),
    Gpu("Jetson AGX Xavier 32GB", 32, 136.5, "NVIDIA Jetson AGX Xavier Series Data Sheet: 256-bit LPDDR4x"),
    Gpu("GeForce RTX 4060 8GB", 8, 272, "NVIDIA GeForce RTX 4060 specifications: 128-bit GDDR6 at 17 Gbps"),
    Gpu("L4 24GB", 24, 300, "NVIDIA L4 Tensor Core GPU datasheet"),
    Gpu("GeForce RTX 4090 24GB", 24, 1008, "NVIDIA Ada GPU Architecture whitepaper: 384-bit GDDR6X at 21 Gbps"),
    Gpu("A100 SXM 80GB", 80, 2039, "NVIDIA A100 Tensor Core GPU datasheet"),
    Gpu("H100 SXM 80GB", 80, 3350, "NVIDIA H100 Tensor Core GPU datasheet"),
    Gpu("H200 SXM 141GB", 141, 4800, "NVIDIA H200 Tensor Core GPU datasheet"),
)
MODELS = ("random:phi-3-mini-4k", "random:phi-3-mini-128k", "random:phi-3-medium-4k", "random:phi-4-mini")
CONTEXTS = [128, 2048, 4096]

# Memory that weights and cache cannot have: CUDA context, libraries' workspaces, activations, the allocator's slack. An
# assumption; a desktop on the same card takes more.
RESERVED_BYTES = 1_000_000_000


class Floor(NamedTuple):
    """One GPU and model; the lists have an entry per context. needed_bytes: weights, KV cache and reserve."""

    gpu: Gpu
    model: str
    weight_bytes: int
    needed_bytes: list[int]
    fits: list[bool]
    floors_ms: list[float]


def floor(gpu, model, model_config, contexts, itemsize=2):
    """Floor of ``model`` on ``gpu``."""
    weights = counts.resident_bytes(model_config, itemsize)
    position = counts.kv_bytes_per_position(model_config, itemsize)
    needed = [weights + context * position + RESERVED_BYTES for context in contexts]
    floors_ms = [
        counts.floor_ms(counts.decode_step_bytes(model_config, context, itemsize=itemsize), gpu.bandwidth_gb_per_s)
        for context in contexts
    ]
    fits = [one <= gpu.memory_gib * 2**30 for one in needed]
    return Floor(gpu, model.removeprefix("random:"), weights, needed, fits, floors_ms)


def shape_of(model):
    """The config of a checkpoint; of a preset its sizes alone, which need no transformers that can run it."""
    preset = PRESETS.get(model.removeprefix("random:"))
    if preset is None:
        return load_config(model)
    return SimpleNamespace(**{"tie_word_embeddings": False, **preset})


def floors(gpus=GPUS, models=MODELS, contexts=CONTEXTS, itemsize=2):
    """Floor of every model on every GPU."""
    configs = {model: shape_of(model) for model in models}
    return [floor(gpu, model, configs[model], contexts, itemsize) for model in models for gpu in gpus]


def columns(contexts):
    return (
        "model",
        "GPU",
        "GB/s",
        "weights GB",
        "needs GiB",
        *(f"ms at {context}" for context in contexts),
        "tokens/s",
    )


def table_lines(found):
    """Lines under ``columns``; in parentheses what the bandwidth alone would allow where the model does not fit."""
    lines = []
    for one in found:
        cells = [f"{ms:.2f}" if fits else f"({ms:.2f})" for ms, fits in zip(one.floors_ms, one.fits, strict=True)]
        rate = f"{1e3 / one.floors_ms[0]:.0f}" if one.fits[0] else "does not fit"
        sizes = (f"{one.weight_bytes / 1e9:.2f}", f"{one.needed_bytes[0] / 2**30:.1f}")
        lines.append((one.model, one.gpu.name, f"{one.gpu.bandwidth_gb_per_s:g}", *sizes, *cells, rate))
    return lines


def own_gpu(text):
    """argparse type: ``RTX 4070=504,12`` -> Gpu; without the memory every model fits."""
    name, _, numbers = text.partition("=")
    try:
        bandwidth, *memory = (float(part) for part in numbers.split(","))
        memory_gib = memory[0] if memory else math.inf
        if not name or len(memory) > 1 or not 0 < bandwidth < math.inf or not memory_gib > 0:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected NAME=GB/s[,GB], such as 'RTX 4070=504,12', got {text!r}") from None
    return Gpu(name, memory_gib, bandwidth, "--gpu")


def main():
    parser = cli.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="presets or checkpoint directories")
    parser.add_argument(
        "--gpu", type=own_gpu, action="append", metavar="NAME=GB/s[,GB]", help="one more GPU: bandwidth and memory"
    )
    common.add_numbers_argument(parser, "--contexts", CONTEXTS, "context lengths")
    args = parser.parse_args()
    print(f"[further step] The least time per token that memory allows, by GPU (float16, batch 1)\n{cli.machine()}\n")
    gpus = (*GPUS, *(args.gpu or ()))
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        measured = Gpu(torch.cuda.get_device_name(), total / 2**30, common.read_bandwidth_gb_per_s(), "measured here")
        gpus = (*gpus, measured._replace(bandwidth_gb_per_s=round(measured.bandwidth_gb_per_s)))
    found = floors(gpus, args.models, args.contexts)
    cli.table(columns(args.contexts), table_lines(found))
    print(f"ms per token by context; needs GiB and tokens/s at {args.contexts[0]}, with 1 GB of reserve.")
    for gpu in gpus:
        memory = f"{gpu.memory_gib:.0f} GiB" if gpu.memory_gib < math.inf else "memory not given"
        print(f"{gpu.name}: {gpu.bandwidth_gb_per_s:g} GB/s, {memory}. Source: {gpu.source}")
    return cli.verdict(True, "arithmetic only, nothing was timed")


if __name__ == "__main__":
    cli.run(main)
