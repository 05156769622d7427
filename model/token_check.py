"""Is it the same text that Hugging Face ``generate`` gives? The check behind step 3, strict in every dtype.

float32: every token is equal. In float16 and bfloat16 two correct programs may part at a near tie, so the reference's
tokens are fed to both (teacher forcing) and the logits compared at each position: a differing argmax passes only where
the reference's top two are nearer than the largest logit difference there. A grossly wrong program would excuse itself
with its own large differences, so those are bounded too: by what separates two correct programs, Hugging Face's
cached steps and its single pass without a cache.
"""

from typing import NamedTuple

import torch

from model.generate import generate, greedy
from model.phi3_decode import hf_full_logits
from model.rope import longrope_border


class TokenCheck(NamedTuple):
    """ok: the verdict. The rest is what it rests on; steps count from 0, differences are in logits."""

    ok: bool
    tokens: int
    first_difference: int | None
    unexplained: tuple[int, ...]
    max_logit_difference: float
    reference_noise: float
    limit: float

    def __str__(self):
        if self.first_difference is None:
            text = f"all {self.tokens} tokens equal Hugging Face's"
        elif self.unexplained:
            steps = ", ".join(map(str, self.unexplained[:5]))
            text = (
                f"tokens part from Hugging Face's at step {self.first_difference}, without a near tie at steps {steps}"
            )
        else:
            text = f"{self.tokens} tokens agree up to near ties, the first at step {self.first_difference}"
        return (
            f"{text}; largest logit difference {self.max_logit_difference:.2e}, limit {self.limit:.2e} "
            f"(Hugging Face's own two ways differ by {self.reference_noise:.2e})"
        )


def forced_logits(model, input_ids, forced_ids, *, path, kv_cache=None):
    """Logits [B, N, vocab] float32 of this project's ``path``, fed with ``forced_ids`` [B, N] whatever it chooses."""
    steps = []

    def force(ids, logits):
        steps.append(logits.float())
        return forced_ids[:, len(steps) - 1]

    generate(
        model, input_ids, forced_ids.shape[1], path=path, kv_cache=kv_cache, eos_token_ids=(), sampler=force
    )  # fmt: skip
    return torch.stack(steps, dim=1)


def reference_noise(model, input_ids, reference_ids, reference_logits):
    """Largest logit difference between Hugging Face's cached steps and its one pass over the same sequence.

    Across longrope's border the single pass is another computation; only positions on the prompt's side count then.
    """
    border = longrope_border(model.config)
    steps = reference_ids.shape[1]
    if border is not None and input_ids.shape[1] <= border:
        steps = min(steps, border - input_ids.shape[1] + 1)
    ids = torch.cat((input_ids, reference_ids[:, : steps - 1]), dim=1)
    return float((hf_full_logits(model, ids, steps) - reference_logits[:, :steps]).abs().max())


def check_tokens(model, input_ids, reference_ids, reference_logits, logits):
    """Judge ``logits`` [B, N, vocab], computed with the reference's tokens fed in -> TokenCheck.

    reference_ids [B, N] and reference_logits [B, N, vocab] are ``hf_generate``'s.
    """
    dtype = model.model.embed_tokens.weight.dtype
    difference = (logits - reference_logits).abs().amax(dim=-1)
    top_two = reference_logits.topk(2, dim=-1).values
    gap = top_two[..., 0] - top_two[..., 1]
    differs = greedy(logits.flatten(0, 1)).view_as(reference_ids) != reference_ids
    # NaN makes no comparison true, so "explained" is asked for, never "unexplained".
    explained = gap < difference if dtype != torch.float32 else torch.zeros_like(differs)
    unexplained = (differs & ~explained).any(dim=0).nonzero().flatten().tolist()

    noise = reference_noise(model, input_ids, reference_ids, reference_logits)
    rounding = torch.finfo(dtype).eps * float(reference_logits.abs().max())
    limit = 2 * noise + 4 * rounding
    max_difference = float(difference.max())
    parted = differs.any(dim=0).nonzero().flatten().tolist()
    return TokenCheck(
        ok=not unexplained and max_difference <= limit,
        tokens=reference_ids.shape[1],
        first_difference=parted[0] if parted else None,
        unexplained=tuple(unexplained),
        max_logit_difference=max_difference,
        reference_noise=noise,
        limit=limit,
    )
