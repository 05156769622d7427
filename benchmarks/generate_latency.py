"""[step 6] This project end to end: time to first token and ms per token on the rungs that matter.

The same prompt, number of new tokens and clock as step 5. A rung is timed only after its logits agreed with Hugging
Face's on this prompt; one that this GPU cannot run is a SKIPPED row with its reason.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import common, end_to_end

# isort: split
import cli
from kv_cache.kv_layout import KVCache
from model.generate import PATHS
from model.load_model import load_model
from model.phi3_decode import hf_generate

# Tokens over which a rung must agree with Hugging Face before it is timed.
CHECKED_TOKENS = 8


def measure_path(model, input_ids, path, args, floor, reference, results):
    """Check and time one rung; its row goes to ``results`` -> the row."""
    case = {"contender": f"phi-triton, {path}", "prompt": args.prompt_tokens, "new_tokens": args.new_tokens}

    def build():
        length = args.prompt_tokens + args.new_tokens
        cache = KVCache.from_config(model.config, length, dtype=model.dtype, device=input_ids.device)
        return cache, end_to_end.decoder_source(path, model, cache)

    def generate(cache, decoder):
        return end_to_end.run_ours(model, input_ids, args.new_tokens, cache, path=path, decoder=decoder())

    try:
        cache, decoder = build()
        found = end_to_end.check_decoder(model, input_ids, *reference, cache, path=path, decoder=decoder)
        if not found.ok:
            return results.add(case, common.INCORRECT, reason=str(found))

        first = generate(cache, decoder)
        runs = [generate(cache, decoder) for _ in common.progress(range(args.runs), path)]
        # Of all that it takes beside the weights: cache, buffers and captured graph as well.
        memory = common.peak_memory_bytes(lambda: generate(*build()))
    except (ImportError, ValueError, NotImplementedError, cli.UsageError, torch.OutOfMemoryError) as error:
        return results.add_error(case, error)
    return end_to_end.add_runs(results, case, runs, first.total_ms, floor, memory)


def check_tiny(model, args):
    """Without a GPU: do the rungs agree with Hugging Face? -> whether those that run here do."""
    input_ids = common.random_prompt(model.config.vocab_size, 12, args.seed, model.device)
    reference, lines, ok = hf_generate(model, input_ids, 4), [], True
    for path in args.paths:
        cache = KVCache.from_config(model.config, 20, dtype=model.dtype, device=model.device)
        try:
            found = end_to_end.check_decoder(
                model, input_ids, *reference, cache, path=path, decoder=end_to_end.decoder_source(path, model, cache)
            )
            lines.append((path, common.PASSED if found.ok else common.INCORRECT, str(found)))
            ok &= found.ok
        except (ImportError, ValueError, NotImplementedError, cli.UsageError) as error:
            lines.append((path, common.SKIPPED, str(error)))
    cli.table(("path", "status", "what was found"), lines)
    return ok


def main():
    parser = cli.parser(__doc__, "DTYPE", "NEW_TOKENS", "SEED", "RESULTS_DIR")
    end_to_end.add_arguments(parser)
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=["triton", "graph", "fused"], help="which rungs")
    args = parser.parse_args()
    cli.header("step 6", "This project's generate end to end")
    device, dtype = common.resolve(args)
    model = load_model(args.model_path, dtype=dtype, device=device)
    if not torch.cuda.is_available():
        return common.finish(None, check_tiny(model, args), "the rungs that run here give Hugging Face's tokens")

    bandwidth = common.read_bandwidth_gb_per_s()
    floor = common.print_floor(model.config, args.prompt_tokens + args.new_tokens // 2, dtype, bandwidth)
    print()
    results = common.Results("generate_latency", vars(args), common.HOST_CLOCK)
    results.numbers |= {"bandwidth_gb_per_s": bandwidth, "floor_ms": floor}
    input_ids = common.random_prompt(model.config.vocab_size, args.prompt_tokens, args.seed, device)
    reference = hf_generate(model, input_ids, min(CHECKED_TOKENS, args.new_tokens))
    rows = [measure_path(model, input_ids, path, args, floor, reference, results) for path in args.paths]
    end_to_end.show(rows)
    passed = [row for row in rows if row["status"] == common.PASSED]
    text = ", ".join(f"{row['case']['contender']}: {row['median_ms']:.2f} ms/token" for row in passed)
    ok = bool(passed) and all(row["status"] != common.INCORRECT for row in rows)
    return common.finish(results, ok, text or "nothing was measured", args.results_dir)


if __name__ == "__main__":
    cli.run(main)
