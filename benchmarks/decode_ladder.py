"""The ladder: what each idea buys, from Hugging Face generate to fused kernels, in one process on the same work.

Every rung decodes the same prompt (batch 1) at several context lengths, rungs alternating, each token handed to the
host as it comes. ms/token is that wall time, the first tokens still at the clock that a long prefill leaves behind; GPU
busy is what the device worked per token by its own trace, the rest it waited. The floor is the time to read the weights
and the KV cache once at the measured bandwidth. A rung is timed only after its logits agreed with Hugging Face's at the
same context; one that is not there or not possible on this GPU is a SKIPPED row with its reason. "bought" is the time
saved against the rung before; the parts add up to the whole. Where the host decides the speed, runs differ: a "~" marks
what is not resolved, because the runs of the two rungs overlap.
"""

import functools
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import common, end_to_end

# isort: split
import cli
from kv_cache.kv_layout import KVCache
from model.generate import greedy
from model.load_model import load_model
from model.phi3_decode import hf_generate
from model.phi3_prefill import prefill
from profiling.digest import digest
from profiling.tracing import trace_events


class Rung(NamedTuple):
    """number: place on the ladder ("0s" stands beside it); path: of model/generate.py, or Hugging Face's cache."""

    number: str
    name: str
    path: str
    options: dict


RUNGS = (
    Rung("0", "HF generate, DynamicCache", "dynamic", {}),
    Rung("0s", "HF generate, StaticCache + torch.compile", "static", {}),
    Rung("1", "own loop, torch.cat cache", "cat", {}),
    Rung("2", "preallocated KV cache", "prealloc", {}),
    Rung("3", "Triton decode attention", "triton", {}),
    Rung("4", "CUDA graph", "graph", {}),
    Rung("5", "fused Triton kernels", "fused", {"pdl": False}),
    Rung("6", "programmatic dependent launch", "fused", {"pdl": True}),
)
CONTEXTS = [128, 512, 2048]
# Tokens with which a rung must agree with Hugging Face before it is timed.
CHECKED_TOKENS = 8


class GpuWork(NamedTuple):
    """Per token: time that the GPU worked, kernels on it, and the host's calls that started them."""

    busy_ms: float
    kernels: float
    launches: float


class HuggingFace:
    """Rung 0 at one context."""

    def __init__(self, rung, model, input_ids, new_tokens):
        self.model, self.input_ids, self.new_tokens, self.cache = model, input_ids, new_tokens, rung.path

    def check(self, reference):
        # One length for every call: a StaticCache of another size would be compiled anew.
        other = hf_generate(self.model, self.input_ids, self.new_tokens, cache=self.cache)
        return end_to_end.check_until_parting(self.model, self.input_ids, *reference, *other)

    def run(self):
        return end_to_end.run_hf(self.model, self.input_ids, self.new_tokens, self.cache)

    def gpu_work(self, steps):
        """From two traces, of ``steps`` tokens more and of two: what is left is decoding."""

        def trace(tokens):
            call = functools.partial(end_to_end.run_hf, self.model, self.input_ids, tokens, self.cache)
            return digest(trace_events(call), 1, self.model.config.num_hidden_layers)

        both, prompt = trace(2 + steps), trace(2)
        return GpuWork(*((getattr(both, name) - getattr(prompt, name)) / steps for name in GpuWork._fields))


class Ours:
    """Rungs 1 to 6 at one context."""

    def __init__(self, rung, model, input_ids, new_tokens):
        self.model, self.input_ids, self.new_tokens, self.rung = model, input_ids, new_tokens, rung
        self.kv_cache = KVCache.from_config(
            model.config, input_ids.shape[1] + new_tokens, dtype=model.dtype, device=input_ids.device
        )
        self.decoder = end_to_end.decoder_source(rung.path, model, self.kv_cache, **rung.options)

    def check(self, reference):
        return end_to_end.check_decoder(
            self.model, self.input_ids, *reference, self.kv_cache, path=self.rung.path, decoder=self.decoder
        )

    def run(self):
        return end_to_end.run_ours(
            self.model, self.input_ids, self.new_tokens, self.kv_cache, path=self.rung.path, decoder=self.decoder()
        )

    @torch.no_grad()
    def gpu_work(self, steps):
        self.kv_cache.reset()
        decoder = self.decoder()
        token = greedy(prefill(self.model, self.input_ids, self.kv_cache))
        token = greedy(decoder.step(token))  # the first step of a rung may set things up

        events = trace_events(functools.partial(end_to_end.decode_steps, decoder, token, steps))
        found = digest(events, steps, self.model.config.num_hidden_layers)
        return GpuWork(found.busy_ms, found.kernels, found.launches)


def prepare(rung, model, input_ids, new_tokens, reference):
    """(contender, None) once the rung's logits are right, else (None, the row's status and reason)."""
    hugging_face = rung.path in ("dynamic", "static")
    try:
        contender = (HuggingFace if hugging_face else Ours)(rung, model, input_ids, new_tokens)
        if rung.path == "dynamic":
            return contender, None  # this is the reference
        found = contender.check(reference)
        return (contender, None) if found.ok else (None, (common.INCORRECT, str(found)))
    except torch.OutOfMemoryError as error:
        return None, (common.OOM, first_line(error))
    except (ImportError, ValueError, NotImplementedError, cli.UsageError) as error:
        return None, (common.SKIPPED, first_line(error))
    except Exception as error:
        # A baseline that this stack cannot run is left out. A rung of this project that breaks is a fault to report,
        # and no reason to lose what the others measured.
        status = common.SKIPPED if hugging_face else common.INCORRECT
        return None, (status, f"{type(error).__name__}: {first_line(error)}")


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def measure_context(rungs, model, context, args, bandwidth, results):
    """Check, then time ``rungs`` at one context, alternating; rows go to ``results`` -> the rows."""
    input_ids = common.random_prompt(model.config.vocab_size, context, args.seed, model.device)
    reference = hf_generate(model, input_ids, min(CHECKED_TOKENS, args.new_tokens))
    contenders, failures, first_ms = {}, {}, {}
    for rung in common.progress(rungs, f"context {context}: checking"):
        if rung.path == "static" and context not in args.static_contexts:
            reason = f"compiling takes long; --static-contexts {context} adds it"
            failures[rung.number] = (common.SKIPPED, reason)
            continue
        started = time.perf_counter()
        contender, failure = prepare(rung, model, input_ids, args.new_tokens, reference)
        first_ms[rung.number] = 1e3 * (time.perf_counter() - started)  # the check has read its results: nothing pends
        if failure is None:
            contenders[rung.number] = contender
        else:
            failures[rung.number] = failure
    runs = {number: [] for number in contenders}
    # The first round stands apart: SDPA may plan anew for each cache length that it has not seen (cuDNN's does).
    for _ in common.progress(range(1 + args.rounds), f"context {context}: timing"):
        for number, contender in contenders.items():
            runs[number].append(contender.run())
    # The next context is timed behind a profiler that was here; it was no slower for that (LOG.md, "The host").
    work = {}
    for number, contender in contenders.items():
        try:
            work[number] = contender.gpu_work(args.profile_steps)
        except ValueError as error:  # longrope's border lies among the steps of the trace
            failures[number] = (common.SKIPPED, first_line(error))

    # While N tokens are decoded the context grows; the floor is that of its middle.
    floor = common.print_floor(model.config, context + args.new_tokens // 2, model.dtype, bandwidth)
    rows = []
    for rung in rungs:
        case = {"context": context, "rung": rung.number, "name": rung.name}
        if rung.number in failures:
            status, reason = failures[rung.number]
            rows.append(results.add(case, status, reason=reason))
            continue
        first_run, *timed = runs[rung.number]
        timing = common.Timing([run.ms_per_token for run in timed], first_ms[rung.number])
        wall, gpu = timing.median_ms, work[rung.number]
        rows.append(
            results.add(
                case, timing=timing, tokens_per_s=1e3 / wall, floor_ms=floor, share_of_floor=floor / wall,
                gpu_busy_ms=gpu.busy_ms, gpu_idle_ms=max(0.0, wall - gpu.busy_ms), kernels_per_token=gpu.kernels,
                launches_per_token=gpu.launches, ttft_ms=min(run.ttft_ms for run in timed),
                first_run_ms=first_run.ms_per_token,
            )
        )  # fmt: skip
    add_bought(rows)
    return rows


def with_rung_before(rows):
    """(row, the PASSED row that it is held against, or None) for each PASSED row: the one before it on the ladder;
    "0s" stands apart, against rung 0."""
    start, before = None, None
    for row in rows:
        if row["status"] != common.PASSED:
            continue
        if row["case"]["rung"] == "0s":
            yield row, start
            continue
        yield row, before
        start, before = start or row, row


def add_bought(rows):
    """Set ``bought_ms``: the time that a rung saves against the one that it is held against."""
    for row, before in with_rung_before(rows):
        row["bought_ms"] = before["median_ms"] - row["median_ms"] if before is not None else 0.0


def unresolved(rows):
    """Rungs whose runs overlap those of the rung that they are held against: noise may be all that they bought."""
    return {
        row["case"]["rung"]
        for row, before in with_rung_before(rows)
        if before is not None
        and min(row["samples_ms"]) <= max(before["samples_ms"])
        and min(before["samples_ms"]) <= max(row["samples_ms"])
    }


COLUMNS = (
    "rung", "what it adds", "ms/token", "min to max", "tokens/s", "% of floor", "GPU busy", "GPU idle", "kernels",
    "launches", "bought",
)  # fmt: skip
UNRESOLVED = "~: not resolved, the runs of the two rungs overlap."


def table_lines(rows, failed):
    """Lines under ``COLUMNS`` for the rows of one context; a row without times says ``failed(row)`` instead."""
    lines, noise = [], unresolved(rows)
    for row in rows:
        rung, name = row["case"]["rung"], row["case"]["name"]
        if row["status"] != common.PASSED:
            lines.append((rung, name, failed(row), *["-"] * (len(COLUMNS) - 3)))
            continue
        lines.append((
            rung, name, f"{row['median_ms']:.3f}", common.spread(row), f"{row['tokens_per_s']:.0f}",
            f"{100 * row['share_of_floor']:.0f}", f"{row['gpu_busy_ms']:.3f}", f"{row['gpu_idle_ms']:.3f}",
            f"{row['kernels_per_token']:.0f}", f"{row['launches_per_token']:.0f}",
            f"{row['bought_ms']:.3f}" + (" ~" if rung in noise else ""),
        ))  # fmt: skip
    return lines


def show(context, rows):
    print(f"Context {context}, times in ms per token:")
    cli.table(COLUMNS, table_lines(rows, lambda row: row["status"]))
    if unresolved(rows):
        print(UNRESOLVED)
    for row in rows:
        if row["status"] != common.PASSED:
            print(f"rung {row['case']['rung']} {row['status']}: {row['reason']}")
    print()


def check_tiny(rungs, model, args):
    """Without a GPU: which rungs run here, and do they agree with Hugging Face? -> whether those that run do."""
    input_ids = common.random_prompt(model.config.vocab_size, 12, args.seed, model.device)
    reference = hf_generate(model, input_ids, 4)
    lines = []
    for rung in rungs:
        contender, failure = prepare(rung, model, input_ids, 4, reference)
        status, reason = (common.PASSED, "") if contender is not None else failure
        lines.append((rung.number, rung.name, status, reason))
    cli.table(("rung", "what it adds", "status", "reason"), lines)
    return all(line[2] != common.INCORRECT for line in lines)


def verdict(results):
    """What the ladder brought at each context, in words."""
    parts = []
    for context in dict.fromkeys(row["case"]["context"] for row in results.rows):
        chain = [
            row for row in results.rows
            if row["case"]["context"] == context and row["status"] == common.PASSED and row["case"]["rung"] != "0s"
        ]  # fmt: skip
        if len(chain) > 1:
            first, last = chain[0], min(chain, key=lambda row: row["median_ms"])
            parts.append(
                f"context {context}: {first['median_ms']:.2f} to {last['median_ms']:.2f} ms/token "
                f"({first['median_ms'] / last['median_ms']:.1f}x, {100 * last['share_of_floor']:.0f} % of the floor)"
            )
    return "; ".join(parts) or "nothing to compare"


def main():
    parser = cli.parser(__doc__, "DTYPE", "SEED", "RESULTS_DIR")
    common.add_model_argument(parser)
    common.add_numbers_argument(parser, "--contexts", CONTEXTS, "prompt lengths")
    parser.add_argument("--new-tokens", type=cli.count, default=48, help="tokens per run")
    parser.add_argument("--rounds", type=cli.count, default=5, help="timed runs of each rung")
    parser.add_argument("--profile-steps", type=cli.count, default=4, help="decode steps in the trace of each rung")
    common.add_numbers_argument(parser, "--static-contexts", [128], "contexts at which rung 0s is compiled")
    common.add_choices_argument(parser, "--rungs", {rung.number: rung.name for rung in RUNGS}, "which rungs")
    args = parser.parse_args()
    if args.new_tokens < 2:
        raise cli.UsageError("--new-tokens must be at least 2: the first token is the prefill's")
    cli.header("further step", "The decode ladder: what each idea buys, on the same work")
    device, dtype = common.resolve(args)
    rungs = [rung for rung in RUNGS if rung.number in args.rungs]
    model = load_model(args.model_path, dtype=dtype, device=device)
    if not torch.cuda.is_available():
        ok = check_tiny(rungs, model, args)
        return common.finish(None, ok, "every rung that runs without a GPU gives Hugging Face's tokens")

    bandwidth = common.read_bandwidth_gb_per_s()
    results = common.Results("decode_ladder", vars(args), common.HOST_CLOCK)
    results.numbers["bandwidth_gb_per_s"] = bandwidth
    for context in args.contexts:
        show(context, measure_context(rungs, model, context, args, bandwidth, results))
    wrong = [row for row in results.rows if row["status"] == common.INCORRECT]
    return common.finish(results, not wrong, verdict(results), args.results_dir)


if __name__ == "__main__":
    cli.run(main)
