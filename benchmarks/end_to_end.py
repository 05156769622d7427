"""Whole generations on one clock: when tokens reach the host, for Hugging Face and for this project alike.

Both hand every token to the host as it comes (a streamer there, ``on_token`` here), so that time to first token
(prefill) and time per further token (decode) come from the same run and mean the same for all.
"""

import statistics
import time
from typing import NamedTuple

import torch
from torch.profiler import record_function

import cli
from benchmarks import common
from model.generate import generate, greedy, make_decoder
from model.token_check import check_tokens


class Run(NamedTuple):
    """One generation. ttft_ms: until the first token. ms_per_token: mean over the others. ids: int64 [N] on the CPU."""

    ttft_ms: float
    ms_per_token: float
    total_ms: float
    ids: torch.Tensor


class TokenTimes:
    """Notes when tokens arrive; is a Hugging Face streamer and an ``on_token`` function."""

    def __init__(self, now=time.perf_counter):
        self.now = now
        self.started = now()
        self.seconds = []

    def __call__(self, tokens):
        self.seconds.append(self.now())

    def put(self, tokens):
        """Streamer: the first call carries the prompt, not a token."""
        if tokens.dim() == 1 and tokens.numel() == 1:
            self(tokens)

    def end(self):
        """Streamer: nothing to do at the end."""

    def run(self, ids):
        """The Run of ``ids`` [1, N]; ValueError unless every one of these tokens was seen arriving."""
        if len(self.seconds) != ids.shape[1] or ids.shape[1] < 2:
            raise ValueError(
                f"{len(self.seconds)} tokens arrived, {ids.shape[1]} were generated; at least 2 are needed"
            )
        first, last = self.seconds[0], self.seconds[-1]
        return Run(
            ttft_ms=1e3 * (first - self.started),
            ms_per_token=1e3 * (last - first) / (len(self.seconds) - 1),
            total_ms=1e3 * (last - self.started),
            ids=ids[0].cpu(),
        )


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@torch.no_grad()
def run_hf(model, input_ids, new_tokens, cache="dynamic"):
    """Greedy Hugging Face ``generate`` of exactly ``new_tokens`` -> Run. cache: "dynamic", or "static" (compiled)."""
    options = {"cache_implementation": "static"} if cache == "static" else {}
    synchronize()
    times = TokenTimes()
    output = model.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=new_tokens, do_sample=False,
        eos_token_id=None, pad_token_id=0, streamer=times, **options,
    )  # fmt: skip
    return times.run(output[:, input_ids.shape[1] :])


def run_ours(model, input_ids, new_tokens, kv_cache, *, path="triton", decoder=None):
    """This project's ``generate`` of exactly ``new_tokens`` into the emptied ``kv_cache`` -> Run."""
    kv_cache.reset()
    synchronize()
    times = TokenTimes()
    ids = generate(
        model, input_ids, new_tokens, path=path, kv_cache=kv_cache, eos_token_ids=(), on_token=times, decoder=decoder
    )
    return times.run(ids)


def decoder_source(path, model, kv_cache, **options):
    """A function that gives a decoder for the emptied ``kv_cache``: the same captured graph again and again where the
    rung has one, else a new one (those belong to one sequence and cost nothing to make)."""
    captured = []

    def decoder():
        if captured:
            return captured[0]
        new = make_decoder(path, model, kv_cache, **options)
        if hasattr(new, "run"):
            captured.append(new)
        return new

    return decoder


@torch.no_grad()
def decode_steps(decoder, token_ids, steps):
    """Let a decoder choose ``steps`` tokens after ``token_ids`` [1] -> the last one [1], on the device.

    A decoder that feeds itself does; for the others the loop is here, with a named range per step for the profiler.
    """
    if hasattr(decoder, "run"):
        return decoder.run(token_ids, steps)[:, -1]
    for number in range(steps):
        with record_function(f"decode step {number}"):
            token_ids = greedy(decoder.step(token_ids))
    return token_ids


def gate(found):
    """TokenCheck ``found`` with the verdict that counts before a timing.

    The tokens agree up to near ties and the logits' error is not far from Hugging Face's own. Step 3 and the tests hold
    the error to a stricter bar on more tokens; a handful of logits make a noisy one.
    """
    a = found.accuracy
    near = (
        a.relative_error <= common.OURS_FACTOR * a.native_relative_error
        and a.max_error <= 2 * common.OURS_FACTOR * a.native_max_error
    )
    return found._replace(ok=near and not found.unexplained)


def check_decoder(model, input_ids, reference_ids, reference_logits, kv_cache, *, path="triton", decoder):
    """TokenCheck of a rung with Hugging Face's tokens fed in; not ok either where its ``run`` and ``step`` disagree.

    reference_ids [1, N] and reference_logits [1, N, vocab] come from ``hf_generate``; ``decoder()`` gives a
    decoder for the emptied ``kv_cache`` (``decoder_source``).
    """

    def run(**options):
        kv_cache.reset()
        return generate(
            model, input_ids, reference_ids.shape[1], path=path, kv_cache=kv_cache, eos_token_ids=(),
            decoder=decoder(), **options,
        )  # fmt: skip

    steps = []

    def force(ids, logits):
        steps.append(logits.float())
        return reference_ids[:, len(steps) - 1]

    run(sampler=force)
    found = gate(check_tokens(model, input_ids, reference_ids, reference_logits, torch.stack(steps, dim=1)))
    # Without a sampler a decoder that can feeds itself: those tokens are the ones that get timed.
    same = torch.equal(run(), run(sampler=lambda ids, logits: greedy(logits)))
    return found if same else found._replace(ok=False)


def check_until_parting(model, input_ids, reference_ids, reference_logits, ids, logits):
    """TokenCheck of another free-running generation, over the steps that still had the same input."""
    steps = min(reference_ids.shape[1], ids.shape[1])
    differs = (reference_ids[0, :steps] != ids[0, :steps].to(reference_ids.device)).nonzero().flatten().tolist()
    same = differs[0] + 1 if differs else steps
    found = check_tokens(model, input_ids, reference_ids[:, :same], reference_logits[:, :same], logits[:, :same])
    return gate(found)


# --- What steps 5 and 6 share ----------------------------------------------------------------------------------------


def add_arguments(parser):
    """Flags of a whole-model script."""
    common.add_model_argument(parser)
    parser.add_argument("--prompt-tokens", type=cli.count, default=128, help="length of the prompt")
    parser.add_argument("--runs", type=cli.count, default=3, help="timed generations of each contender")


def add_runs(results, case, runs, first_call_ms, floor_ms, peak_memory_bytes):
    """The result row of several Runs. Prefill (ttft) and decode (per token) are apart; both keep their samples."""
    timing = common.Timing([run.ms_per_token for run in runs], first_call_ms)
    return results.add(
        case, timing=timing, tokens_per_s=1e3 / timing.median_ms, share_of_floor=floor_ms / timing.median_ms,
        ttft_ms=statistics.median(run.ttft_ms for run in runs), ttft_samples_ms=[run.ttft_ms for run in runs],
        total_ms=statistics.median(run.total_ms for run in runs), peak_memory_bytes=peak_memory_bytes,
    )  # fmt: skip


COLUMNS = (
    "contender", "TTFT ms", "ms/token", "min to max", "tokens/s", "% of floor", "total ms", "memory MB",
    "first call ms",
)  # fmt: skip


def show(rows):
    """Print the rows of ``add_runs``; those that were not measured with their reason."""
    lines = []
    for row in rows:
        if row["status"] != common.PASSED:
            lines.append((row["case"]["contender"], row["status"], *["-"] * (len(COLUMNS) - 2)))
            continue
        lines.append((
            row["case"]["contender"], f"{row['ttft_ms']:.1f}", f"{row['median_ms']:.3f}", common.spread(row),
            f"{row['tokens_per_s']:.0f}", f"{100 * row['share_of_floor']:.0f}", f"{row['total_ms']:.0f}",
            f"{row['peak_memory_bytes'] / 1e6:.0f}", f"{row['first_call_ms']:.0f}",
        ))  # fmt: skip
    cli.table(COLUMNS, lines)
    for row in rows:
        if row["status"] != common.PASSED:
            print(f"{row['status']}: {row['case']['contender']}: {row['reason']}")
