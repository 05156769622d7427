"""What the measuring scripts share: timing, the memory's own speed, checks before speed, and result files.

Method. Kernels are timed as CUDA-graph replays that run over several input sets in turn, together at least four times
the L2, so that every launch finds its inputs in memory and not in the cache ("cold L2"). Contenders alternate within
one process; the median counts and all samples are kept. The first call, which compiles, is listed apart.
A result file is written only on a CUDA device: results/<gpu>/<script>.json, schema below.
"""

import argparse
import datetime
import functools
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

import kernels  # noqa: F401  decides about the interpreter before triton is imported

# isort: split
import triton
import triton.language as tl
from triton.errors import TritonError

import cli
import config
from benchmarks import counts
from model.decode_attention_ref import decode_attention_ref

# How a script took its times, as its result file and the README say it.
COLD_GRAPHS = "CUDA-graph replays over input sets beyond the L2 (cold), median"
WARM_EVENTS = "CUDA events around each call, warm caches, median"
HOST_CLOCK = "host clock, every token handed to the host, median of alternating or repeated runs, the first apart"

# Version of the result file's layout; readers refuse any other.
SCHEMA = 1

# Status of a row. INCORRECT rows carry no times: no speed without a right answer.
PASSED, INCORRECT, OOM, SKIPPED = "PASSED", "INCORRECT", "OOM", "SKIPPED"

# What a contender raises that this machine cannot run. Triton's own errors (too much shared memory, say) derive from
# none of Python's.
DOES_NOT_RUN = (RuntimeError, ValueError, NotImplementedError, TritonError)

# Input sets together take this many times the L2.
COLD_L2_FACTOR = 4

# Launches of one replay at least: the start of a graph takes microseconds, which they share.
MIN_LAUNCHES = 16

# A rate this far over the measured bandwidth cannot come from memory.
IMPOSSIBLE_SHARE = 1.05


# --- Timing ----------------------------------------------------------------------------------------------------------


class Timing(NamedTuple):
    """Milliseconds of each timed call, and of the first one (compilation included), which is not among them."""

    samples_ms: list[float]
    first_call_ms: float

    @property
    def median_ms(self):
        return statistics.median(self.samples_ms)

    def per(self, count):
        """The same timing for one of ``count`` equal parts of a call (launches of a graph, tokens of a run)."""
        return Timing([sample / count for sample in self.samples_ms], self.first_call_ms)

    def numbers(self):
        """The fields of a result row."""
        ordered = sorted(self.samples_ms)
        return {
            "median_ms": self.median_ms,
            "p20_ms": ordered[int(0.2 * (len(ordered) - 1))],
            "p80_ms": ordered[math.ceil(0.8 * (len(ordered) - 1))],
            "std_ms": statistics.pstdev(ordered),
            "first_call_ms": self.first_call_ms,
            "samples_ms": self.samples_ms,
        }


def spread(row):
    """The samples of a timed row from least to most, in ms: "27.85 to 80.75"."""
    return f"{min(row['samples_ms']):.2f} to {max(row['samples_ms']):.2f}"


class EventClock:
    """GPU time between two CUDA events; the events are read only once the device is synchronised."""

    synchronize = staticmethod(torch.cuda.synchronize)

    def record(self, function):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        stop.record()
        return lambda: start.elapsed_time(stop)


class WallClock:
    """Time on the host's clock, with the device synchronised before the start and before the stop."""

    def __init__(self, device, *, synchronize=None, now=time.perf_counter):
        cuda = torch.device(device).type == "cuda"
        self.synchronize = synchronize or (torch.cuda.synchronize if cuda else lambda: None)
        self.now = now

    def record(self, function):
        self.synchronize()
        start = self.now()
        function()
        self.synchronize()
        elapsed_ms = (self.now() - start) * 1e3
        return lambda: elapsed_ms


def measure(contenders, clock, *, warmup, samples, now=time.perf_counter):
    """Time each of ``contenders`` (name -> function), alternating between them -> name -> Timing."""
    first_call_ms, pending = {}, {name: [] for name in contenders}
    for name, function in contenders.items():
        first_call_ms[name] = WallClock("cpu", synchronize=clock.synchronize, now=now).record(function)()
        for _ in range(warmup):
            function()
    clock.synchronize()
    for _ in range(samples):
        for name, function in contenders.items():
            pending[name].append(clock.record(function))
    clock.synchronize()
    return {name: Timing([read() for read in reads], first_call_ms[name]) for name, reads in pending.items()}


def capture(functions):
    """One CUDA graph that runs ``functions`` in order -> its replay function."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in functions:
            function()
    return graph.replay


def measure_cold(contenders, *, warmup, samples):
    """Time contenders, each a list of functions that do the same work on another input set, as CUDA-graph replays that
    go round them.

    -> name -> Timing of one launch, or, where a contender does not run, the exception that says why.
    """
    outcome, replays, rounds = {}, {}, {}
    for name, functions in contenders.items():
        try:
            first_call_ms = WallClock("cuda").record(functions[0])()
            with torch.cuda.stream(torch.cuda.Stream()):
                functions[-1]()
            torch.cuda.synchronize()
            rounds[name] = math.ceil(MIN_LAUNCHES / len(functions))
            replays[name] = capture(functions * rounds[name])
            outcome[name] = first_call_ms
        except DOES_NOT_RUN as error:
            outcome[name] = error
    timings = measure(replays, EventClock(), warmup=warmup, samples=samples)
    for name, timing in timings.items():
        launches = len(contenders[name]) * rounds[name]
        outcome[name] = Timing(timing.per(launches).samples_ms, outcome[name])
    return outcome


def input_sets(bytes_per_set, l2_bytes):
    """How many input sets make a cold L2; at least two."""
    return max(2, math.ceil(COLD_L2_FACTOR * l2_bytes / bytes_per_set))


def peak_memory_bytes(function):
    """Most memory that a call of ``function`` takes on top of what is allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# --- The memory's own speed ------------------------------------------------------------------------------------------


@triton.jit
def _read_kernel(source_ptr, out_ptr, BLOCK: tl.constexpr):
    # One program = one block, read once. The sum keeps the loads alive; its one store per 32 KiB is not counted.
    pid = tl.program_id(0)
    offsets = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + pid, tl.sum(tl.load(source_ptr + offsets)))


# Elements (int32) per program and warps: the best of them is the device's read bandwidth.
READ_CONFIGS = ((4096, 4), (8192, 8), (8192, 4))


def read_sum(source, out, block=8192, num_warps=8):
    """Sum of each ``block`` elements of ``source`` (int32, a multiple of ``block`` long) into ``out``."""
    _read_kernel[(source.numel() // block,)](source, out, BLOCK=block, num_warps=num_warps)


@functools.cache
def read_bandwidth_gb_per_s():
    """The bandwidth of the current GPU's memory, measured: the best of a few large read-only kernels, in GB/s."""
    free_bytes, _ = torch.cuda.mem_get_info()
    elements = min(2**29, free_bytes // 16) // 8192 * 8192
    source = torch.randint(-(2**31), 2**31 - 1, (elements,), dtype=torch.int32, device="cuda")
    out = torch.empty(elements // 4096, dtype=torch.int32, device="cuda")
    contenders = {
        setting: functools.partial(read_sum, source, out, *setting) for setting in READ_CONFIGS
    }  # fmt: skip
    timings = measure(contenders, EventClock(), warmup=3, samples=20)
    return source.nbytes / min(timing.median_ms for timing in timings.values()) / 1e6


def l2_bytes():
    """Size of the current GPU's L2 cache."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size


def share_text(rate_gb_per_s, bandwidth_gb_per_s):
    """The rate in % of the measured bandwidth; flagged where memory cannot have delivered it."""
    share = rate_gb_per_s / bandwidth_gb_per_s
    return f"{100 * share:.1f}" if share <= IMPOSSIBLE_SHARE else f"{100 * share:.0f} (cache)"


# --- Checks before speed ---------------------------------------------------------------------------------------------


# How much farther from the reference than PyTorch an answer may be before it is refused a time. Tests hold this
# project's kernels to 1.5 on many inputs; few inputs make a noisier maximum. For PyTorch's own backends the check only
# has to catch a contender that does other work.
OURS_FACTOR, CONTENDER_FACTOR = 2.0, 8.0


def decode_reference64(q, k_cache, v_cache, cache_len):
    """decode_attention_ref in float64, one KV head at a time so that long caches fit -> [B, Hq, D] float64."""
    groups = q.double().chunk(k_cache.shape[1], dim=1)
    heads = (
        decode_attention_ref(group, k_cache[:, h : h + 1].double(), v_cache[:, h : h + 1].double(), cache_len)
        for h, group in enumerate(groups)
    )
    return torch.cat(list(heads), dim=1)


# --- Result files ----------------------------------------------------------------------------------------------------

SMI_FIELDS = (
    "driver_version", "power.limit", "power.draw", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem",
    "temperature.gpu",
)  # fmt: skip


def _smi():
    """What nvidia-smi says about the current GPU (read only); empty where it is not there or refuses."""
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    if uuid is not None:
        command.append(f"--id=GPU-{uuid}")
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in answer.splitlines()[0].split(",")]
    return dict(zip(SMI_FIELDS, values, strict=True))


def _commit():
    """PHI_TRITON_COMMIT where it is set (a copy without its history), else git's word, "-dirty" where files differ."""
    if os.environ.get("PHI_TRITON_COMMIT"):
        return os.environ["PHI_TRITON_COMMIT"]
    command = ["git", "-C", str(config.ROOT), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _cpu():
    """The processor's name: what launches from Python depends on it."""
    try:
        names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else platform.processor() or "unknown"


def environment():
    """Where and with what the numbers were taken; clocks and power as they are at the moment of asking."""
    import transformers

    block = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "cpu": _cpu(),
        "platform": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "commit": _commit(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        smi = _smi()
        block |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "sm_count": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "cuda": torch.version.cuda,
            "driver": smi.pop("driver_version", "unknown"),
            "clocks_and_power": smi,
        }
    return block


def slug(name):
    """``NVIDIA H200`` -> ``nvidia-h200``: the name of a GPU's folder under results/."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


class Results:
    """The rows of one run of one script, and the file that they go to.

    configuration: what the run was asked to do (flags, sizes; not where it writes). method: how it was timed, caches
    warm or cold. Each row has a ``case`` (what was measured, the row's identity when two files are compared), a
    ``status``, and numbers with their unit in the name.
    """

    def __init__(self, script, configuration, method):
        self.script = script
        check_writable(results_dir(configuration.get("results_dir")))
        self.configuration = {name: value for name, value in configuration.items() if name != "results_dir"}
        self.method = method
        self.rows = []
        self.numbers = {}

    def add(self, case, status=PASSED, *, timing=None, reason=None, **numbers):
        """Append a row and return it. Only a PASSED row may carry a timing."""
        if timing is not None and status != PASSED:
            raise ValueError(f"a {status} row carries no times")
        row = {"case": case, "status": status}
        if reason is not None:
            row["reason"] = reason
        row |= numbers | (timing.numbers() if timing is not None else {})
        self.rows.append(row)
        return row

    def add_error(self, case, error):
        """A row for a contender that did not run: OOM, or SKIPPED with the first line of the reason."""
        status = OOM if isinstance(error, torch.OutOfMemoryError) else SKIPPED
        return self.add(case, status, reason=(str(error).strip() or type(error).__name__).splitlines()[0][:200])

    def write(self, directory=None):
        """Write results/<gpu>/<script>.json and return its path; RuntimeError without a CUDA device."""
        if not torch.cuda.is_available():
            raise RuntimeError("results are measured on a CUDA device; interpreter times mean nothing")
        return self.write_as(torch.cuda.get_device_name(), directory)

    def write_as(self, place, directory=None):
        """Write results/<place>/<script>.json and return its path (for what no GPU has to run: compiled code)."""
        content = {
            "schema": SCHEMA,
            "script": self.script,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": [Path(sys.argv[0]).name, *_without_results_dir(sys.argv[1:])],
            "environment": environment(),
            "configuration": self.configuration,
            "method": self.method,
            **self.numbers,
            "rows": self.rows,
        }
        path = results_dir(directory) / slug(place) / f"{self.script}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_json(content))
        return path


def _without_results_dir(arguments):
    """A command's arguments but for ``--results-dir PATH``: where a file once lay is nobody's business."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and not argument.startswith("--results-dir"):
            kept.append(argument)
        skip = argument == "--results-dir"
    return kept


def results_dir(directory=None):
    """The folder of result files: ``directory``, or config.RESULTS_DIR; relative to the repository's root."""
    return config.ROOT / (directory or config.RESULTS_DIR)


def check_writable(folder):
    """UsageError unless result files can be written under ``folder``: before measuring, not after."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise cli.UsageError(f"results cannot be written to {folder}: {there} is no folder that can be written to")


def _json(content):
    text = json.dumps(_rounded(content), indent=1)
    # One line per list of samples, so that a file can be read and compared by eye.
    return re.sub(r"\[[-+\d.e,\s]+\]", lambda found: " ".join(found[0].split()), text) + "\n"


def _rounded(value):
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def load_results(path):
    """Read a result file; UsageError where it is missing, no result file, or of another schema."""
    try:
        content = json.loads(Path(path).read_text())
    except OSError as error:
        raise cli.UsageError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise cli.UsageError(f"{path} is not JSON") from None
    needed = {"script", "date", "environment", "configuration", "method", "rows"}
    if not isinstance(content, dict) or content.get("schema") != SCHEMA or not needed <= content.keys():
        raise cli.UsageError(f"{path} is not a result file of schema {SCHEMA}; run its script again")
    return content


def print_failures(rows, is_ours):
    """Print the rows that are wrong or ran out of memory, and those of this project that did not run; return what of
    this project failed. A contender that this machine lacks is no failure, a kernel of ours that raises is one.

    is_ours: of a contender's name, whether it is this project's.
    """
    failed = []
    for row in rows:
        ours = is_ours(row["case"]["contender"])
        if row["status"] in (INCORRECT, OOM) or (ours and row["status"] != PASSED):
            print(f"{row['status']}: {row['case']} {row['reason']}")
        if ours and row["status"] not in (PASSED, OOM):
            failed.append(row)
    return failed


def finish(results, ok, text, directory=None):
    """Write the result file where there is a GPU, print the verdict, return ``ok``."""
    if torch.cuda.is_available():
        print(f"results: {results.write(directory)}")
    else:
        print("No result file: there is no GPU to measure.")
    return cli.verdict(ok, text)


# --- Small things ----------------------------------------------------------------------------------------------------


def progress(items, description):
    """``items`` with a progress bar on stderr; without one where that is no terminal."""
    return tqdm(items, desc=description, disable=None, leave=False)


def number_list(text):
    """argparse type: ``128,512`` -> [128, 512]."""
    try:
        return [cli.count(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"expected comma-separated numbers of at least 1, such as 128,2048, got {text!r}"
        ) from None


def choice_list(text, choices):
    """argparse type (with ``choices`` bound): ``0,0s`` -> ["0", "0s"], each of which has to be among ``choices``."""
    known = {str(choice): choice for choice in choices}
    parts = text.split(",")
    for part in parts:
        if part not in known:
            raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(known)} (comma-separated)")
    return [known[part] for part in parts]


def add_numbers_argument(parser, flag, default, what):
    """Add a flag that takes comma-separated whole numbers."""
    parser.add_argument(flag, type=number_list, default=default, metavar="N,N", help=f"{what}, comma-separated")


def add_choices_argument(parser, flag, names, what):
    """Add a flag that takes comma-separated keys of ``names`` (key -> what it stands for); all by default."""
    listed = "; ".join(f"{key}: {name}" for key, name in names.items())
    parser.add_argument(
        flag, type=functools.partial(choice_list, choices=list(names)), default=list(names),
        metavar=flag[2:].upper(), help=f"{what}, comma-separated, of {listed}",
    )  # fmt: skip


def add_shapes_argument(parser, shapes):
    """Add ``--shapes``, which gives indices into ``shapes``."""
    names = {index: shape.name for index, shape in enumerate(shapes)}
    add_choices_argument(parser, "--shapes", names, "which shapes")


def resolve(args):
    """(device, dtype) to measure on and in; fills in what ``args`` left open, so that a result file names it."""
    device = cli.resolve_device("auto")
    dtype = cli.resolve_dtype(args.dtype, device)
    args.dtype = cli.dtype_name(dtype)
    if "model_path" in args and args.model_path is None:
        # Speed does not depend on the weights' values: random ones need no download.
        args.model_path = "random:phi-3-mini-4k" if torch.cuda.is_available() else "random:tiny"
    return device, dtype


def add_model_argument(parser):
    """Add ``--model-path``, which ``resolve`` fills in."""
    parser.add_argument(
        "--model-path",
        metavar="PATH",
        help="checkpoint or random:<preset>; default random:phi-3-mini-4k, on the CPU tiny",
    )


def random_prompt(vocab_size, length, seed, device):
    """Token ids [1, length], the same for every contender and device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (1, length), generator=generator).to(device)


def print_floor(model_config, context, dtype, bandwidth_gb_per_s):
    """Print what bounds a decode step at ``context`` from below, and return it in ms."""
    num_bytes = counts.decode_step_bytes(model_config, context, itemsize=dtype.itemsize)
    kv_bytes = num_bytes - counts.decode_step_bytes(model_config, 0, itemsize=dtype.itemsize)
    floor = counts.floor_ms(num_bytes, bandwidth_gb_per_s)
    print(
        f"Ceiling at context {context}: {(num_bytes - kv_bytes) / 1e9:.3f} GB of weights and {kv_bytes / 1e9:.3f} GB "
        f"of KV cache at {bandwidth_gb_per_s:.0f} GB/s: {floor:.3f} ms per token, {1e3 / floor:.0f} tokens/s."
    )
    return floor
