"""Sampling for the generation loop, by transformers' own logits processors."""

import math

import torch
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


def make_sampler(*, temperature=1.0, top_k=None, top_p=None, seed=None):
    """A function (ids [B, L], logits [B, vocab]) -> ids [B] that draws the next tokens, for ``generate(sampler=...)``.

    temperature > 0; top_k >= 1 keeps that many tokens; 0 < top_p <= 1 keeps the smallest set of that probability. With
    ``seed`` the draws have a generator of their own, else torch's global one is used, as Hugging Face does. ValueError
    for values out of range.
    """
    if not 0 < temperature < math.inf:
        raise ValueError(
            f"temperature must be above 0 and finite, got {temperature:g} (greedy decoding takes no sampler)"
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p:g}")
    processors = LogitsProcessorList()
    if temperature != 1.0:
        processors.append(TemperatureLogitsWarper(temperature))
    if top_k is not None:
        processors.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    generators = {}

    def sample(ids, logits):
        if seed is not None and logits.device not in generators:
            generators[logits.device] = torch.Generator(logits.device).manual_seed(seed)
        # multinomial wants float32: in 16 bit the rarest tokens would have probability 0.
        probabilities = processors(ids, logits.float()).softmax(dim=-1)
        return torch.multinomial(probabilities, 1, generator=generators.get(logits.device))[:, 0]

    return sample
