"""Is it the same text that Hugging Face ``generate`` gives? The check behind step 3, strict in every dtype.

float32: every token is equal. In float16 and bfloat16 two correct programs may part at a near tie, so the reference's
tokens are fed to both (teacher forcing) and the logits compared at each position: a differing argmax passes only where
the reference's top two are nearer than the largest logit difference there. A grossly wrong program would excuse itself
with its own large differences, so its error is bounded as well: against logits recomputed in a wider dtype without any
cache, by the error that Hugging Face's own 16-bit run has there (model/accuracy.py).
"""

from contextlib import contextmanager
from typing import NamedTuple

import torch

from model.accuracy import Accuracy, judge
from model.generate import generate, greedy
from model.load_model import last_logits_kwargs
from model.rope import longrope_border


class TokenCheck(NamedTuple):
    """ok: the verdict. The rest is what it rests on; steps count from 0, differences are in logits."""

    ok: bool
    tokens: int
    first_difference: int | None
    unexplained: tuple[int, ...]
    max_logit_difference: float
    accuracy: Accuracy

    def __str__(self):
        if self.first_difference is None:
            text = f"all {self.tokens} tokens equal Hugging Face's"
        elif self.unexplained:
            steps = ", ".join(map(str, self.unexplained[:5]))
            text = f"tokens part from Hugging Face's at step {self.first_difference}, no near tie at steps {steps}"
        else:
            text = f"{self.tokens} tokens agree up to near ties, the first at step {self.first_difference}"
        a = self.accuracy
        return (
            f"{text}; logits differ by at most {self.max_logit_difference:.2e}, error {a.max_error:.2e} "
            f"(Hugging Face's own {a.native_max_error:.2e}), relative {a.relative_error:.2e} "
            f"({a.native_relative_error:.2e})"
        )


def forced_logits(model, input_ids, forced_ids, *, path, kv_cache=None, decoder=None):
    """Logits [B, N, vocab] float32 of this project's ``path``, fed with ``forced_ids`` [B, N] whatever it chooses."""
    steps = []

    def force(ids, logits):
        steps.append(logits.float())
        return forced_ids[:, len(steps) - 1].to(logits.device)

    options = {"path": path, "kv_cache": kv_cache, "decoder": decoder}
    generate(model, input_ids, forced_ids.shape[1], eos_token_ids=(), sampler=force, **options)
    return torch.stack(steps, dim=1)


@contextmanager
def computing_in(model, dtype):
    """Let the Hugging Face model compute in ``dtype`` without a second copy of it: each module's weights are converted
    for the length of its own call, so that the largest one bounds the extra memory."""
    handles, kept = [], {}

    def widen(module, inputs):
        kept[module] = {name: p.data for name, p in module.named_parameters(recurse=False)}
        for name, p in module.named_parameters(recurse=False):
            p.data = kept[module][name].to(dtype)

    def restore(module, inputs, output):
        for name, data in kept.pop(module).items():
            getattr(module, name).data = data

    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            handles += [module.register_forward_pre_hook(widen), module.register_forward_hook(restore)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in list(kept):  # left over where a call raised (out of memory, Ctrl-C)
            restore(module, None, None)


@torch.no_grad()
def wide_logits(model, ids, last):
    """Logits [B, last, vocab] of the end of ``ids``, no cache: float32, or float64 for a float32 model.

    Each position counts as the end of its own sequence: those up to longrope's border come from a pass of that length.
    """
    dtype = torch.float64 if model.model.embed_tokens.weight.dtype == torch.float32 else torch.float32
    length, border = ids.shape[1], longrope_border(model.config)
    passes = [(ids, last)]
    if border is not None and length - last < border < length:
        passes = [(ids[:, :border], border - (length - last)), (ids, length - border)]
    with computing_in(model, dtype):
        logits = [
            model(part, use_cache=False, **dict.fromkeys(last_logits_kwargs(model), n)).logits[:, -n:]
            for part, n in passes
        ]
    return torch.cat(logits, dim=1)


def check_tokens(model, input_ids, reference_ids, reference_logits, logits):
    """Judge ``logits`` [B, N, vocab], computed with the reference's tokens fed in -> TokenCheck.

    reference_ids [B, N] and reference_logits [B, N, vocab] are ``hf_generate``'s.
    """
    dtype = model.model.embed_tokens.weight.dtype
    reference_ids = reference_ids.to(input_ids.device)
    difference = (logits - reference_logits).abs().amax(dim=-1)
    top_two = reference_logits.topk(2, dim=-1).values
    gap = top_two[..., 0] - top_two[..., 1]
    differs = greedy(logits.flatten(0, 1)).view_as(reference_ids) != reference_ids
    # NaN makes no comparison true, so "explained" is asked for, never "unexplained".
    explained = gap < difference if dtype != torch.float32 else torch.zeros_like(differs)
    unexplained = (differs & ~explained).any(dim=0).nonzero().flatten().tolist()
    parted = differs.any(dim=0).nonzero().flatten().tolist()

    ids = torch.cat((input_ids, reference_ids[:, :-1]), dim=1)
    wide = wide_logits(model, ids, reference_ids.shape[1])
    # Two correct programs' errors through a whole model scatter more than one kernel's: twice, not 1.5 times.
    accuracy = judge(logits, wide, reference_logits, factor=2.0, computed_in=dtype)
    return TokenCheck(
        ok=not unexplained and accuracy.ok,
        tokens=reference_ids.shape[1],
        first_difference=parted[0] if parted else None,
        unexplained=tuple(unexplained),
        max_logit_difference=float(difference.max()),
        accuracy=accuracy,
    )
