"""[step 7] Where the time of a decode step goes: torch.profiler over a few steps, for any rung and for Hugging Face.

Per token: wall time, GPU busy and idle, kernels and launches, and the busy time split into groups that add up to it.
The verdict says what bounds the step. Wall times are taken before the first trace, over positions that the path has
been through once: PyTorch's SDPA may plan anew for each cache length that it has not seen (cuDNN's does), so the
first pass stands apart. Each trace is kept as
results/<gpu>/decode_profile_<path>.pt.trace.json.gz: open it at https://ui.perfetto.dev or in chrome://tracing.
"""

import functools
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch.profiler import record_function

from benchmarks import common, counts, end_to_end

# isort: split
import transformers
from transformers.models.phi3 import modeling_phi3

import cli
from kv_cache.kv_layout import KVCache
from model import phi3_decode_triton, phi3_layers
from model.generate import PATHS, greedy
from model.load_model import hf_forward, load_model
from model.phi3_decode import CatDecoder, hf_generate
from model.phi3_prefill import prefill
from profiling.digest import GROUPS, STAGES, digest, judge
from profiling.tracing import trace_events

HF = "hf"
CHECKED_TOKENS = 8
TOP_KERNELS = 12

# Functions that get a range: (where it is looked up, its name, the stage).
FUNCTION_RANGES = (
    (modeling_phi3, "apply_rotary_pos_emb", "rope"),
    (phi3_layers, "apply_rope", "rope"),
    (F, "scaled_dot_product_attention", "attention"),
    (phi3_decode_triton, "decode_attention", "attention"),
    (KVCache, "append", "cache"),
    (CatDecoder, "_append", "cache"),
    (transformers.DynamicCache, "update", "cache"),
)
LAYER_MODULES = {
    "self_attn.qkv_proj": "qkv_proj", "self_attn.o_proj": "o_proj", "mlp.gate_up_proj": "gate_up_proj",
    "mlp.down_proj": "down_proj", "input_layernorm": "norm", "post_attention_layernorm": "norm",
}  # fmt: skip


@contextmanager
def named_ranges(model):
    """Within the block layers and stages of ``model`` are named ranges: ``layer 3``, ``layer 3: qkv_proj``, ``rope``.

    What runs inside a captured graph has no ranges; its kernels are told apart by name and order (digest.py).
    """
    with ExitStack() as stack:
        for index, layer in enumerate(model.model.layers):
            _range_around(stack, layer, f"layer {index}")
            for path, stage in LAYER_MODULES.items():
                _range_around(stack, layer.get_submodule(path), f"layer {index}: {stage}")
        _range_around(stack, model.model.norm, "norm")
        _range_around(stack, model.lm_head, "lm_head")
        for owner, name, stage in FUNCTION_RANGES:
            stack.enter_context(_replaced(owner, name, stage))
        yield


def _range_around(stack, module, name):
    ranges = []

    def enter(*_):
        ranges.append(record_function(name))
        ranges[-1].__enter__()

    def leave(*_):
        ranges.pop().__exit__(None, None, None)

    stack.callback(module.register_forward_pre_hook(enter).remove)
    stack.callback(module.register_forward_hook(leave).remove)


@contextmanager
def _replaced(owner, name, stage):
    original = getattr(owner, name)

    @functools.wraps(original)
    def with_range(*args, **kwargs):
        with record_function(stage):
            return original(*args, **kwargs)

    setattr(owner, name, with_range)
    try:
        yield
    finally:
        setattr(owner, name, original)


class HuggingFaceDecoder:
    """Hugging Face's forward with its DynamicCache, a step at a time."""

    def __init__(self, model, input_ids):
        self.model = model
        logits, self.cache = hf_forward(model, input_ids)
        self.first_token = greedy(logits)

    def step(self, token_ids):
        """Logits [1, vocab] after ``token_ids`` [1]."""
        logits, self.cache = hf_forward(self.model, token_ids[:, None], self.cache)
        return logits


class WrongLogits(Exception):
    """A rung that does not agree with Hugging Face gets no profile."""


# What a path raises where this machine cannot run it.
UNABLE = (ImportError, ValueError, NotImplementedError, cli.UsageError, torch.OutOfMemoryError)


@torch.no_grad()
def prepare(path, model, input_ids, steps):
    """A function ``start()`` -> (decoder, token) with the prompt and one token more in the cache, the same each time;
    ``steps`` more fit. WrongLogits where the path's are."""
    if path == HF:

        def first():
            decoder = HuggingFaceDecoder(model, input_ids)
            return decoder, decoder.first_token
    else:
        room = input_ids.shape[1] + max(1 + steps, CHECKED_TOKENS)
        cache = KVCache.from_config(model.config, room, dtype=model.dtype, device=input_ids.device)
        reference = hf_generate(model, input_ids, CHECKED_TOKENS)
        source = end_to_end.decoder_source(path, model, cache)
        found = end_to_end.check_decoder(model, input_ids, *reference, cache, path=path, decoder=source)
        if not found.ok:
            raise WrongLogits(str(found))

        def first():
            cache.reset()
            return source(), greedy(prefill(model, input_ids, cache))

    @torch.no_grad()
    def start():
        decoder, token = first()
        return decoder, end_to_end.decode_steps(decoder, token, 1)  # the first step may set things up

    return start


def time_path(start, steps, runs, clock):
    """Timing of ``steps`` steps, ``runs`` times over the same positions; the first pass over them is ``first_call``."""
    samples = []
    for _ in range(1 + runs):
        decoder, token = start()
        samples.append(clock.record(functools.partial(end_to_end.decode_steps, decoder, token, steps))() / steps)
    return common.Timing(samples[1:], samples[0])


def trace_path(path, start, model, args):
    """Digest of the steps that ``time_path`` times, and the trace's file."""
    trace = common.results_dir(args.results_dir) / common.slug(torch.cuda.get_device_name())
    trace.mkdir(parents=True, exist_ok=True)
    trace /= f"decode_profile_{path}.pt.trace.json.gz"
    decoder, token = start()
    with named_ranges(model):
        decode = functools.partial(end_to_end.decode_steps, decoder, token, args.steps)
        events = trace_events(decode, ranges=True, path=trace)
    return digest(events, args.steps, model.config.num_hidden_layers), trace


def profile_paths(model, input_ids, args, bandwidth, results):
    """Check and time every path, then trace them; rows go to ``results`` -> path -> Verdict, of those profiled."""
    starts, timings, failures, verdicts = {}, {}, {}, {}
    clock = common.WallClock(model.device)
    # Ranges slow the host down, and a profiler may, even one that has stopped: no trace before the last wall time.
    for path in common.progress(args.path, "decode_profile: timing"):
        try:
            starts[path] = prepare(path, model, input_ids, args.steps)
            timings[path] = time_path(starts[path], args.steps, args.runs, clock)
        except (*UNABLE, WrongLogits) as error:
            failures[path] = error
    context = args.prompt_tokens + 1 + args.steps // 2
    step_bytes = counts.decode_step_bytes(model.config, context, itemsize=model.dtype.itemsize)
    for path in common.progress(args.path, "decode_profile: tracing"):
        case = {"path": path, "context": args.prompt_tokens}
        if path not in failures:
            try:
                found, trace = trace_path(path, starts[path], model, args)
            except UNABLE as error:
                failures[path] = error
        if isinstance(failures.get(path), WrongLogits):
            results.add(case, common.INCORRECT, reason=str(failures[path]))
        elif path in failures:
            results.add_error(case, failures[path])
        else:
            timing = timings[path]
            wall = timing.median_ms
            verdict = verdicts[path] = judge(
                found, wall, step_bytes, bandwidth,
                weight_bytes=counts.resident_bytes(model.config, model.dtype.itemsize),
                memory_bytes=torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory,
            )  # fmt: skip
            results.add(
                case, timing=timing, gpu_busy_ms=found.busy_ms, gpu_sum_ms=found.sum_ms,
                gpu_idle_ms=max(0.0, wall - found.busy_ms), kernels_per_token=found.kernels,
                launches_per_token=found.launches, groups_ms=found.groups, verdict=verdict.kind,
                verdict_text=verdict.text, trace=trace.name,
                top_kernels_ms={name[:160]: ms for name, ms in list(found.names.items())[:TOP_KERNELS]},
            )  # fmt: skip
    return verdicts


def show(rows):
    """The profile as tables: one column per path, groups adding up to the busy time."""
    passed = [row for row in rows if row["status"] == common.PASSED]
    if not passed:
        return
    lines = []
    for group in GROUPS:
        cells = [
            f"{row['groups_ms'][group]:.3f} ({100 * row['groups_ms'][group] / row['gpu_busy_ms']:.1f} %)"
            for row in passed
        ]
        lines.append((group, *cells))
    for label, field in (
        ("GPU busy", "gpu_busy_ms"), ("GPU idle", "gpu_idle_ms"), ("wall", "median_ms"),
        ("wall, first pass", "first_call_ms"),
    ):  # fmt: skip
        lines.append((label, *(f"{row[field]:.3f}" for row in passed)))
    lines.append(("sum of durations (overlap counted twice)", *(f"{row['gpu_sum_ms']:.3f}" for row in passed)))
    for label, field in (("kernels per token", "kernels_per_token"), ("launches per token", "launches_per_token")):
        lines.append((label, *(f"{row[field]:.0f}" for row in passed)))
    cli.table(("ms per token", *(row["case"]["path"] for row in passed)), lines)


def check_tiny(paths, model, args):
    """Without a GPU: do the paths agree, and does every stage get its range? -> whether so for those that run."""
    input_ids = common.random_prompt(model.config.vocab_size, 12, args.seed, model.device)
    lines, ok = [], True
    for path in paths:
        try:
            decoder, token = prepare(path, model, input_ids, 1)()
        except WrongLogits as error:
            lines.append((path, common.INCORRECT, str(error)))
            ok = False
            continue
        except UNABLE as error:
            lines.append((path, common.SKIPPED, str(error)))
            continue
        with named_ranges(model):
            events = trace_events(functools.partial(end_to_end.decode_steps, decoder, token, 1), ranges=True)
        names = {e["name"].rsplit(": ", 1)[-1] for e in events if e.get("cat") == "user_annotation"}
        lines.append((path, common.PASSED, f"ranges: {', '.join(sorted(names & STAGES.keys())) or 'none inside'}"))
    cli.table(("path", "status", "what was found"), lines)
    return ok


def main():
    parser = cli.parser(__doc__, "DTYPE", "SEED", "RESULTS_DIR")
    common.add_model_argument(parser)
    parser.add_argument(
        "--path", nargs="+", choices=(HF, *PATHS), default=[HF, "triton", "graph", "fused"], help="what to profile"
    )
    parser.add_argument("--prompt-tokens", type=cli.count, default=128, help="context at which the steps are taken")
    parser.add_argument("--steps", type=cli.count, default=4, help="decode steps in the trace")
    parser.add_argument("--runs", type=cli.count, default=5, help="timed runs over those steps, for the wall time")
    args = parser.parse_args()
    cli.header("step 7", "Where the time of a decode step goes")
    device, dtype = common.resolve(args)
    model = load_model(args.model_path, dtype=dtype, device=device)
    if not torch.cuda.is_available():
        ok = check_tiny(args.path, model, args)
        return common.finish(None, ok, "the paths that run here agree and their stages have named ranges")

    bandwidth = common.read_bandwidth_gb_per_s()
    common.print_floor(model.config, args.prompt_tokens, dtype, bandwidth)
    print()
    results = common.Results("decode_profile", vars(args), "GPU work by torch.profiler, wall by the host clock, median")
    results.numbers["bandwidth_gb_per_s"] = bandwidth
    input_ids = common.random_prompt(model.config.vocab_size, args.prompt_tokens, args.seed, device)
    verdicts = profile_paths(model, input_ids, args, bandwidth, results)
    show(results.rows)
    for row in results.rows:
        if row["status"] != common.PASSED:
            print(f"{row['status']}: {row['case']['path']}: {row['reason']}")
    for path, found in verdicts.items():
        print(f"{path}: {found.kind}: {found.text}")
    ok = all(row["status"] != common.INCORRECT for row in results.rows)
    text = ", ".join(f"{path} is {found.kind}" for path, found in verdicts.items())
    return common.finish(results, ok, text or "nothing was profiled", args.results_dir)


if __name__ == "__main__":
    cli.run(main)
