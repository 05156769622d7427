"""[step 5] Hugging Face generate end to end: time to first token and ms per token, two caches.

The same prompt and the same number of new tokens as step 6, end-of-text ignored, each token handed to the host as it
comes. DynamicCache is what ``generate`` does by itself; StaticCache with torch.compile is the fastest that it offers.
The first generation is listed apart (first call): compilation, and what attention plans for each new cache length.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import common, end_to_end

# isort: split
import cli
from model.load_model import load_model
from model.phi3_decode import hf_generate

CACHES = {"dynamic": "DynamicCache", "static": "StaticCache + torch.compile"}
# Tokens over which the two caches must agree before any is timed.
CHECKED_TOKENS = 8


def check_static(model, input_ids, new_tokens):
    """TokenCheck of the static cache against the dynamic one.

    It generates ``new_tokens``, as in the timing: the cache has that size, and another size would compile once more.
    """
    reference = hf_generate(model, input_ids, min(CHECKED_TOKENS, new_tokens))
    other = hf_generate(model, input_ids, new_tokens, cache="static")
    return end_to_end.check_until_parting(model, input_ids, *reference, *other)


def measure_cache(model, input_ids, cache, args, floor, results):
    """Time one cache; its row goes to ``results`` -> the row."""
    case = {"contender": f"HF generate, {CACHES[cache]}", "prompt": args.prompt_tokens, "new_tokens": args.new_tokens}
    try:
        if cache == "static":
            clock = common.WallClock(model.device)
            checks = []
            first_ms = clock.record(lambda: checks.append(check_static(model, input_ids, args.new_tokens)))()
            if not checks[0].ok:
                return results.add(case, common.INCORRECT, reason=str(checks[0]))
        else:
            # In full, as the runs: SDPA may plan anew for each cache length that it has not seen (cuDNN's does).
            first_ms = end_to_end.run_hf(model, input_ids, args.new_tokens, cache).total_ms
        runs, memory = [], []
        for _ in common.progress(range(args.runs), CACHES[cache]):
            memory.append(
                common.peak_memory_bytes(
                    lambda: runs.append(end_to_end.run_hf(model, input_ids, args.new_tokens, cache))
                )
            )
    except Exception as error:
        return results.add_error(case, error)  # a baseline that this stack cannot run is a row, not the end
    return end_to_end.add_runs(results, case, runs, first_ms, floor, memory[0])


def check_tiny(model, args):
    """Without a GPU: do both caches give the same tokens? -> whether they do."""
    input_ids = common.random_prompt(model.config.vocab_size, 12, args.seed, model.device)
    try:
        found = check_static(model, input_ids, 8)
    except ValueError as error:
        print(f"{common.SKIPPED}: {CACHES['static']}: {error}")  # this transformers has no static cache for Phi-3
        return True
    print(f"{CACHES['dynamic']} against {CACHES['static']} (compiled on a GPU only): {found}\n")
    return found.ok


def main():
    parser = cli.parser(__doc__, "DTYPE", "NEW_TOKENS", "SEED", "RESULTS_DIR")
    end_to_end.add_arguments(parser)
    args = parser.parse_args()
    cli.header("step 5", "Hugging Face generate end to end, the baseline")
    device, dtype = common.resolve(args)
    model = load_model(args.model_path, dtype=dtype, device=device)
    if not torch.cuda.is_available():
        return common.finish(None, check_tiny(model, args), "the caches that run here give the same tokens")

    bandwidth = common.read_bandwidth_gb_per_s()
    floor = common.print_floor(model.config, args.prompt_tokens + args.new_tokens // 2, dtype, bandwidth)
    print()
    results = common.Results("baseline_latency", vars(args), common.HOST_CLOCK)
    results.numbers |= {"bandwidth_gb_per_s": bandwidth, "floor_ms": floor}
    input_ids = common.random_prompt(model.config.vocab_size, args.prompt_tokens, args.seed, device)
    rows = [measure_cache(model, input_ids, cache, args, floor, results) for cache in CACHES]
    end_to_end.show(rows)
    passed = [row for row in rows if row["status"] == common.PASSED]
    text = ", ".join(f"{row['case']['contender']}: {row['median_ms']:.2f} ms/token" for row in passed)
    ok = bool(passed) and all(row["status"] != common.INCORRECT for row in rows)
    return common.finish(results, ok, text or "nothing was measured", args.results_dir)


if __name__ == "__main__":
    cli.run(main)
