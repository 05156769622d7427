"""What a torch.profiler trace says about decode steps, every microsecond of the GPU counted once.

A trace tells the same time several times over: operators, kernels and annotations carry it, and kernels overlap. Here
only GPU work counts (kernels, copies, fills); each piece has the time during which nothing that started before it was
still running, so that the groups add up to exactly the time that the GPU was busy. The plain sum of durations is kept
apart.
"""

import gzip
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ATTENTION, PROJECTIONS, MLP, LM_HEAD = "attention", "QKV and O projections", "MLP", "LM head"
ELEMENTWISE, CACHE, COPIES, OTHER = "norm, RoPE, elementwise", "cache writes and cat", "copies", "other"
GROUPS = (ATTENTION, PROJECTIONS, MLP, LM_HEAD, ELEMENTWISE, CACHE, COPIES, OTHER)

# Group of everything launched inside a named range "<stage>" (profiling/decode_profile.py sets them).
STAGES = {
    "attention": ATTENTION, "qkv_proj": PROJECTIONS, "o_proj": PROJECTIONS, "gate_up_proj": MLP, "down_proj": MLP,
    "lm_head": LM_HEAD, "norm": ELEMENTWISE, "rope": ELEMENTWISE, "cache": CACHE,
}  # fmt: skip

# Kernels by name, for work without ranges: launches out of a captured graph, our own kernels. First match wins.
ATTENTION_NAME = re.compile(r"attention|flash|fmha|sdpa|softmax", re.IGNORECASE)
MATMUL_NAME = re.compile(r"gemm|gemv|cutlass|nvjet|cublas|xmma|matvec|matmul|dot_kernel|triton_\w*mm", re.IGNORECASE)
SPLIT_K_NAME = re.compile(r"splitK_?reduce|reduce_1Block", re.IGNORECASE)
CACHE_NAME = re.compile(r"CatArray|index_put|index_copy|scatter", re.IGNORECASE)
ELEMENTWISE_NAME = re.compile(r"elementwise|reduce|norm|rope|rotary|triton_|index|embed|greedy|arange", re.IGNORECASE)

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_NAME = re.compile(r"^(cuda|cu)(LaunchKernel|LaunchCooperativeKernel|GraphLaunch|MemcpyAsync|MemsetAsync)")


class Work(NamedTuple):
    """One piece of GPU work. exclusive_us: the part of it during which no earlier piece was running."""

    category: str
    name: str
    start_us: float
    duration_us: float
    exclusive_us: float
    stage: str | None
    group: str


class Digest(NamedTuple):
    """All per decode step. groups: name -> ms, adding up to busy_ms; sum_ms counts overlapping work twice.

    kernels: on the GPU, launches: calls of the host that start work (a captured graph is one), names: kernel -> ms.
    host_copy_ms: copies between host and device.
    """

    steps: int
    busy_ms: float
    sum_ms: float
    groups: dict[str, float]
    kernels: float
    launches: float
    names: dict[str, float]
    host_copy_ms: float


def read_trace(path):
    """The events of a trace file, ``.json`` or ``.json.gz``."""
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        return json.load(file)["traceEvents"]


def digest(events, steps, num_layers):
    """Digest of a trace that holds ``steps`` decode steps of a model with ``num_layers`` layers, and nothing else."""
    work = gpu_work(events, num_layers)
    groups, names = dict.fromkeys(GROUPS, 0.0), defaultdict(float)
    for piece in work:
        groups[piece.group] += piece.exclusive_us / 1e3 / steps
        if piece.category == "kernel":
            names[piece.name] += piece.exclusive_us / 1e3 / steps
    host_copies = [p for p in work if p.category == "gpu_memcpy" and re.search("HtoD|DtoH", p.name)]
    return Digest(
        steps=steps,
        busy_ms=sum(groups.values()),
        sum_ms=sum(piece.duration_us for piece in work) / 1e3 / steps,
        groups=groups,
        kernels=sum(piece.category == "kernel" for piece in work) / steps,
        launches=sum(1 for event in events if _is_launch(event)) / steps,
        names=dict(sorted(names.items(), key=lambda item: -item[1])),
        host_copy_ms=sum(piece.duration_us for piece in host_copies) / 1e3 / steps,
    )


def gpu_work(events, num_layers):
    """The GPU work of a trace in order of start, each piece with its exclusive time and its group -> list of Work."""
    stage_of = _stages_by_correlation(events)
    found = sorted((e for e in events if e.get("cat") in GPU_CATEGORIES), key=lambda e: (e["ts"], e.get("dur", 0)))
    stages = [stage_of.get(event.get("args", {}).get("correlation")) for event in found]
    groups = [_group(event, stage) for event, stage in zip(found, stages, strict=True)]
    _name_matmuls(found, groups, num_layers)
    work, covered_until = [], float("-inf")
    for event, stage, group in zip(found, stages, groups, strict=True):
        start, duration = event["ts"], event.get("dur", 0)
        exclusive = max(0.0, start + duration - max(start, covered_until))
        covered_until = max(covered_until, start + duration)
        work.append(Work(event["cat"], event["name"], start, duration, exclusive, stage, group))
    return work


def _is_launch(event):
    return event.get("cat") in ("cuda_runtime", "cuda_driver") and bool(LAUNCH_NAME.match(event["name"]))


def _stages_by_correlation(events):
    """correlation id of a launch -> the innermost named stage around it on its thread."""
    per_thread = defaultdict(list)
    for event in events:
        if (event.get("cat") == "user_annotation" and _stage_name(event["name"])) or _is_launch(event):
            per_thread[event.get("tid")].append(event)
    found = {}
    for timeline in per_thread.values():
        open_ranges = []  # nested, the innermost last
        for event in sorted(timeline, key=lambda e: (e["ts"], -e.get("dur", 0))):
            while open_ranges and open_ranges[-1]["ts"] + open_ranges[-1].get("dur", 0) < event["ts"]:
                open_ranges.pop()
            if event["cat"] == "user_annotation":
                open_ranges.append(event)
            elif open_ranges:
                found[event.get("args", {}).get("correlation")] = _stage_name(open_ranges[-1]["name"])
    return found


def _stage_name(annotation):
    """``layer 3: qkv_proj`` -> ``qkv_proj``; None for a range that is no stage."""
    name = annotation.rsplit(": ", 1)[-1]
    return name if name in STAGES else None


def _group(event, stage):
    """Group of a piece of work; None for a matrix product whose place in the layer must come from its order."""
    name = event["name"]
    if event["cat"] != "kernel":
        return COPIES
    if ATTENTION_NAME.search(name):
        return ATTENTION
    if stage is not None:
        return STAGES[stage]
    if MATMUL_NAME.search(name) or SPLIT_K_NAME.search(name):
        return None
    if CACHE_NAME.search(name):
        return CACHE
    return ELEMENTWISE if ELEMENTWISE_NAME.search(name) else OTHER


def _name_matmuls(events, groups, num_layers):
    """Fill in the groups that are None: a step runs qkv, o, gate_up, down per layer, and then the LM head.

    A split-K reduction belongs to the product before it. Where the number of products is not a whole number of steps
    (another program), they go to "other".
    """
    products = [
        i for i, group in enumerate(groups) if group is None and not SPLIT_K_NAME.search(events[i]["name"])
    ]  # fmt: skip
    per_step = 4 * num_layers + 1
    regular = len(products) % per_step == 0
    for order, index in enumerate(products):
        place = order % per_step
        if not regular:
            groups[index] = OTHER
        elif place == per_step - 1:
            groups[index] = LM_HEAD
        else:
            groups[index] = PROJECTIONS if place % 4 < 2 else MLP
    last = OTHER
    for index, event in enumerate(events):
        if groups[index] is None:
            groups[index] = last
        elif MATMUL_NAME.search(event["name"]):
            last = groups[index]


# --- What it means ---------------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """kind: launch-bound, bandwidth-bound, spilling to host, or kernel-bound; text: the figures that it rests on."""

    kind: str
    text: str


def judge(result, wall_ms, step_bytes, bandwidth_gb_per_s, *, weight_bytes=0, memory_bytes=float("inf")):
    """Verdict on a Digest. wall_ms: per step, measured without the profiler; step_bytes: what a step has to read.

    weight_bytes, memory_bytes: of the model and of the GPU; a model larger than the memory can only run by spilling.
    """
    idle = max(0.0, 1 - result.busy_ms / wall_ms)
    rate = step_bytes / result.busy_ms / 1e6
    share = rate / bandwidth_gb_per_s
    figures = (
        f"wall {wall_ms:.2f} ms per token, GPU busy {result.busy_ms:.2f} ms ({100 * (1 - idle):.0f} %), "
        f"{result.kernels:.0f} kernels from {result.launches:.0f} launches, {step_bytes / 1e9:.2f} GB to read: "
        f"{rate:.0f} GB/s while busy, {100 * share:.0f} % of the measured bandwidth"
    )
    if weight_bytes > memory_bytes or result.host_copy_ms > 0.3 * wall_ms:
        return Verdict(
            "spilling to host",
            f"{weight_bytes / 1e9:.2f} GB of weights against {memory_bytes / 1e9:.2f} GB of memory, "
            f"{result.host_copy_ms:.2f} ms of copies between host and device; {figures}",
        )
    if idle > 0.3:
        return Verdict("launch-bound", f"the GPU waits for the host {100 * idle:.0f} % of the time; {figures}")
    if share > 0.6:
        return Verdict("bandwidth-bound", figures)
    return Verdict("kernel-bound", f"the GPU is busy but its kernels do not reach the memory's speed; {figures}")
