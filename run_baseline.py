"""Step 3: generate text with the Triton decode path, then with Hugging Face, and compare token by token.

Streams the text of this project's loop, prints its time per token, then Hugging Face's, and ends with the verdict: in
float32 the tokens have to be equal, in 16 bit they may part at a near tie (model/token_check.py). Exits 1 otherwise.

    python run_baseline.py
    python run_baseline.py --prompt "Write a haiku about caches." --new-tokens 100
    python run_baseline.py --temperature 0.7 --top-p 0.9
    python run_baseline.py --model-path random:phi-3-mini-4k --path graph

With --temperature, --top-k or --top-p the streamed text is sampled; the comparison stays greedy.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch

import cli
from kv_cache.kv_layout import KVCache
from model.generate import PATHS, generate, greedy, make_decoder
from model.load_model import HF_APPLIES_WINDOW, load_model, load_tokenizer
from model.phi3_decode import hf_generate
from model.rope import longrope_border
from model.sampling import make_sampler
from model.token_check import check_tokens, forced_logits


def encode(tokenizer, prompt):
    """Token ids [1, S] of ``prompt``, inside the checkpoint's chat template where it has one.

    Tokenised once: the same ids go to both programs, since decoding and encoding again need not give them back.
    """
    if not prompt.strip():
        raise cli.UsageError("PROMPT is empty: give at least one word")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise cli.UsageError("PROMPT is not text in this terminal's encoding (UTF-8, say)") from None
    text, special = prompt, True
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        text, special = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), False
    return tokenizer(text, add_special_tokens=special, return_tensors="pt").input_ids


def stream_generation(model, tokenizer, input_ids, args, kv_cache, sampler):
    """Generate on ``args.path`` with the text printed as it comes -> (ids [1, N], logits [1, N, vocab], ms per token).

    The logits are None on paths that choose their tokens on the GPU and show none on the way.
    """
    from transformers import TextStreamer

    streamer = TextStreamer(tokenizer, skip_special_tokens=True)
    times = []
    logits = []

    def record(ids, step_logits):
        logits.append(step_logits.float())
        return greedy(step_logits) if sampler is None else sampler(ids, step_logits)

    def on_token(ids):
        times.append(time.perf_counter())
        streamer.put(ids)

    choose = sampler if args.path in ("graph", "fused") else record
    decoder = make_decoder(args.path, model, kv_cache)
    if input_ids.is_cuda:
        # Kernels compile and graphs are captured here, outside the clock.
        generate(model, input_ids, min(3, args.new_tokens), kv_cache=kv_cache, decoder=decoder, sampler=sampler)
        kv_cache.reset()
    ids = generate(
        model, input_ids, args.new_tokens, kv_cache=kv_cache, decoder=decoder, on_token=on_token, sampler=choose
    )
    streamer.end()
    # The first token comes from the prefill; the steps are what lies between the others.
    steps = len(times) - 1
    ms = (times[-1] - times[0]) / steps * 1e3 if steps > 0 else float("nan")
    # Ctrl-C may come between the logits of a token and the token.
    return ids, torch.stack(logits, dim=1)[:, : ids.shape[1]] if logits else None, ms


def main():
    arguments = cli.parser(
        __doc__, "MODEL_PATH", "DTYPE", "DEVICE", "MAX_SEQ_LEN", "PROMPT", "NEW_TOKENS", "SEED",
        without_gpu={"NEW_TOKENS": 32},
    )  # fmt: skip
    arguments.add_argument("--path", choices=PATHS, default="triton", help="the rung of the decode ladder")
    arguments.add_argument("--temperature", type=float, help="sample at this temperature instead of greedily")
    arguments.add_argument("--top-k", type=int, help="sample among this many tokens")
    arguments.add_argument("--top-p", type=float, help="sample among the likeliest tokens of this probability together")
    args = arguments.parse_args()
    sampler = None
    if (args.temperature, args.top_k, args.top_p) != (None, None, None):
        temperature = 1.0 if args.temperature is None else args.temperature
        sampler = make_sampler(temperature=temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    cli.header("step 3", f"generate text on the {args.path} path and compare it with Hugging Face generate")
    cli.report_lowered(args)
    device = cli.resolve_device(args.device)
    dtype = cli.resolve_dtype(args.dtype, device)
    torch.manual_seed(args.seed)
    tokenizer = load_tokenizer(args.model_path)
    input_ids = encode(tokenizer, args.prompt)
    model = load_model(args.model_path, dtype=dtype, device=device, seed=args.seed)
    input_ids = input_ids.to(device)
    kv_cache = KVCache.from_config(model.config, args.max_seq_len, dtype=dtype, device=device)
    kv_cache.check_fits(input_ids.shape[1] + args.new_tokens - 1)
    print(f"{args.model_path}, {cli.dtype_name(dtype)}, prompt of {input_ids.shape[1]} tokens: {args.prompt}\n")

    print(f"--- this project, path {args.path}")
    ids, logits, ms = stream_generation(model, tokenizer, input_ids, args, kv_cache, sampler)
    if ids.shape[1] == 0:
        raise KeyboardInterrupt  # generate keeps what there is: nothing yet, so nothing to compare
    print(f"--- {ids.shape[1]} tokens" + (f", {ms:.2f} ms per token\n" if ids.shape[1] > 1 else "\n"))

    print("--- Hugging Face generate")
    if input_ids.is_cuda:
        # Untimed: PyTorch's attention may plan anew for each cache length that it meets for the first time.
        hf_generate(model, input_ids, ids.shape[1])
    start = time.perf_counter()
    hf_ids, hf_logits = hf_generate(model, input_ids, ids.shape[1])
    seconds = time.perf_counter() - start
    print(tokenizer.decode(hf_ids[0], skip_special_tokens=True))
    print(f"--- {hf_ids.shape[1]} tokens, {seconds / hf_ids.shape[1] * 1e3:.2f} ms per token, prefill included\n")

    window = getattr(model.config, "sliding_window", None)
    if not HF_APPLIES_WINDOW and window and input_ids.shape[1] + ids.shape[1] > window:
        return cli.verdict(
            True, f"not compared: this transformers ignores Phi-3's window of {window} (4.46 applies it)"
        )
    border = longrope_border(model.config)
    if border is not None and input_ids.shape[1] <= border < input_ids.shape[1] + ids.shape[1] - 1:
        # Beyond it generate leaves its own uncached forward in several transformers versions: no reference there.
        compared = border - input_ids.shape[1] + 1
        print(f"compared up to longrope's border of {border} positions, the first {compared} tokens\n")
        ids, hf_ids, hf_logits = ids[:, :compared], hf_ids[:, :compared], hf_logits[:, :compared]
        logits = logits[:, :compared] if logits is not None else None
    same = torch.equal(ids, hf_ids)
    if not same or logits is None:
        kv_cache.reset()
        logits = forced_logits(model, input_ids, hf_ids, path=args.path, kv_cache=kv_cache)
    check = check_tokens(model, input_ids, hf_ids, hf_logits, logits)
    if sampler is None and dtype == torch.float32 and not same:
        return cli.verdict(False, f"the streamed tokens differ from Hugging Face's; {check}")
    return cli.verdict(check.ok, str(check))


if __name__ == "__main__":
    cli.run(main)
