"""Tiny random Phi-3 models that feel a fault in attention, and the no-cache recomputation that judges a loop (R2).

At the usual initializer_range of 0.02 a model this small hardly listens to its attention: a wrong rotation moves the
logits by 5e-3 and no token; at 0.25 it moves them by several units.
"""

import functools
import json

import torch
from transformers import Phi3Config, Phi3ForCausalLM

from model.load_model import HF_APPLIES_WINDOW

VOCAB = 96

# The device under test: the GPU where there is one, else the CPU and interpreted kernels.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# O = 16: factors as in the reports about the switch at the original length.
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}


@functools.lru_cache(maxsize=32)
def _model(fields_json, device, dtype):
    torch.manual_seed(1)
    config = Phi3Config(**json.loads(fields_json), attn_implementation="eager")
    return Phi3ForCausalLM(config).to(device=device, dtype=dtype).eval().requires_grad_(False)


def tiny_model(*, device=DEVICE, dtype=torch.float32, **fields):
    """A Phi3ForCausalLM of the sensitive tiny kind; ``fields`` go to Phi3Config. Tests share it: never change it."""
    fields = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "original_max_position_embeddings": 512, "initializer_range": 0.25, "rope_theta": 10000.0,
        "sliding_window": None, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    } | fields  # fmt: skip
    return _model(json.dumps(fields, sort_keys=True), device, dtype)


def longrope_model(border=16, **fields):
    """A tiny model whose rotary factors switch when a sequence gets longer than ``border``."""
    return tiny_model(
        rope_scaling=LONGROPE, original_max_position_embeddings=border, max_position_embeddings=128, **fields
    )


def prompt(length, *, batch=1, seed=0):
    """Random token ids [batch, length] on DEVICE that avoid the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, length), generator=generator).to(DEVICE)


@torch.no_grad()
def recomputed_logits(model, ids):
    """R2: logits [B, vocab] float32 of the last position, the whole sequence in one pass, no cache."""
    window, options = model.config.sliding_window, {}
    if window is not None and not HF_APPLIES_WINDOW:  # an old Hugging Face model takes the window only as a mask
        position = torch.arange(ids.shape[1], device=ids.device)
        visible = (position <= position[:, None]) & (position > position[:, None] - window)
        mask = torch.zeros(visible.shape, dtype=model.dtype, device=ids.device)
        mask = mask.masked_fill(~visible, torch.finfo(model.dtype).min)
        options["attention_mask"] = mask.expand(ids.shape[0], 1, -1, -1)
    return model(ids, use_cache=False, **options).logits[:, -1].float()


@torch.no_grad()
def recomputed_generation(model, ids, new_tokens):
    """Greedy generation by R2 -> (new ids [B, N], logits [B, N, vocab])."""
    tokens, logits = [], []
    for _ in range(new_tokens):
        step = recomputed_logits(model, ids)
        logits.append(step)
        tokens.append(step.argmax(dim=-1))
        ids = torch.cat((ids, tokens[-1][:, None]), dim=1)
    return torch.stack(tokens, dim=1), torch.stack(logits, dim=1)
