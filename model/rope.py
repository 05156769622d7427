"""The one implementation of Phi-3's rotary position embedding: default, longrope, and partial (Phi-4-mini).

Dimension i of the first half of the rotary part turns together with dimension i of its second half ("rotate_half", the
Hugging Face convention). Angles, cosines and sines are float32 whatever the model's dtype: at position 4095 a bfloat16
frequency is wrong by more than half a turn.

Sources: RoFormer (arXiv 2104.09864) for the rotation, LongRoPE (arXiv 2402.13753) for the two factor lists.
"""

import math
import weakref

import torch

from model.load_model import head_dim, rope_settings


def rotary_dim(config):
    """How many of a head's dimensions rotate; the rest pass unchanged."""
    return int(head_dim(config) * rope_settings(config)["partial_rotary_factor"])


def longrope_border(config):
    """The total length above which longrope's long factors hold for every position; None without longrope."""
    settings = rope_settings(config)
    return settings["original_max_position_embeddings"] if settings["type"] == "longrope" else None


def uses_long_factors(config, total_length):
    """Whether a sequence of ``total_length`` positions (its real length, not a capacity) takes the long factors."""
    border = longrope_border(config)
    return border is not None and total_length > border


def inverse_frequencies(config, *, long=False):
    """(frequencies [rotary_dim / 2] float32 in radians per position, the factor on cos and sin)."""
    settings = rope_settings(config)
    dim = rotary_dim(config)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    if settings["type"] == "default":
        return 1.0 / settings["theta"] ** exponents, 1.0
    factors = torch.tensor(settings["long_factor" if long else "short_factor"], dtype=torch.float32)
    if len(factors) != dim // 2:
        raise ValueError(f"longrope has {len(factors)} factors for {dim // 2} rotary frequencies")
    return 1.0 / (factors * settings["theta"] ** exponents), attention_factor(settings)


def attention_factor(settings):
    """Longrope's factor on cos and sin: the config's own, else sqrt(1 + ln(extension) / ln(original length))."""
    if settings["attention_factor"] is not None:
        return settings["attention_factor"]
    original = settings["original_max_position_embeddings"]
    extension = settings["factor"] or settings["max_position_embeddings"] / original
    return math.sqrt(1 + math.log(extension) / math.log(original)) if extension > 1 else 1.0


def rope_cos_sin(config, positions, *, long=False):
    """(cos, sin) float32 [*positions.shape, rotary_dim / 2] at integer ``positions``, longrope's scaling included."""
    frequencies, scaling = inverse_frequencies(config, long=long)
    # Autocast would take the product in half precision.
    with torch.autocast(positions.device.type, enabled=False):
        angles = positions[..., None].float() * frequencies.to(positions.device)
        return angles.cos() * scaling, angles.sin() * scaling


class RotaryTables:
    """cos and sin of positions 0 to max_seq_len - 1, made once: [max_seq_len, rotary_dim / 2] float32 on the device."""

    def __init__(self, config, max_seq_len, device):
        positions = torch.arange(max_seq_len, device=device)
        self.border = longrope_border(config)
        self.short = rope_cos_sin(config, positions)
        self.long = rope_cos_sin(config, positions, long=True) if self.border is not None else None

    def for_length(self, total_length):
        """The (cos, sin) tables that hold for a sequence of ``total_length`` positions."""
        return self.long if self.border is not None and total_length > self.border else self.short


_tables_of_model = weakref.WeakKeyDictionary()


def rotary_tables(model, max_seq_len):
    """RotaryTables of a Hugging Face model for caches of ``max_seq_len`` positions, made once per model.

    Their length is the next power of two, so that a cache of its own size for each prompt makes a few of them, not one
    each. None is ever dropped: a captured CUDA graph holds the address of the one it was captured with.
    """
    tables = _tables_of_model.setdefault(model, {})
    key = 1 << (max_seq_len - 1).bit_length(), model.device
    if key not in tables:
        tables[key] = RotaryTables(model.config, *key)
    return tables[key]


def apply_rope(x, cos, sin):
    """Rotate the first ``2 * cos.shape[-1]`` dimensions of x [B, H, S, D]; cos, sin broadcast to [B, H, S, half].

    Computed in float32 and rounded once to x's dtype; the remaining dimensions are passed on bit for bit.
    """
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    first, second = first.float(), second.float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def same_factors_for_all(config, lengths):
    """ValueError where padded sequences of ``lengths`` would lie on both sides of longrope's border."""
    if len({uses_long_factors(config, int(length)) for length in lengths}) > 1:
        raise ValueError(
            f"lengths {sorted(set(map(int, lengths)))} lie on both sides of longrope's border "
            f"{longrope_border(config)}, which a padded batch cannot cross; generate them one by one"
        )
