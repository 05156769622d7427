"""model/rope.py against Hugging Face's rotary module and against angles computed by hand in float64."""

import math

import pytest
import torch
from transformers import Phi3Config

from model.load_model import PARTIAL_ROTARY_SINCE, VERSION
from model.rope import (
    apply_rope,
    inverse_frequencies,
    rope_cos_sin,
    rotary_dim,
    rotary_tables,
    same_factors_for_all,
    uses_long_factors,
)
from tests.tiny import LONGROPE, longrope_model, tiny_model


def config(**fields):
    defaults = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 10000.0}
    return Phi3Config(**(defaults | {"pad_token_id": 0} | fields))


@pytest.mark.parametrize("base", [10000.0, 250000.0])
def test_frequencies_take_the_configured_base(base):
    frequencies, scaling = inverse_frequencies(config(rope_theta=base))
    assert frequencies[1].item() == pytest.approx(base ** (-2 / 16), rel=1e-6)
    assert scaling == 1.0


@pytest.mark.parametrize("position", [257, 4095, 100_000])
@pytest.mark.parametrize("autocast", [False, True])
def test_tables_stay_exact_when_the_model_is_bfloat16(position, autocast):
    """Frequencies or positions in bfloat16 are off by 0.87 to 1.96 at position 4095; in float16 100000 is infinite.

    The bound is float32's own: the rounding of the frequency and of the angle, in radians.
    """
    c = config(hidden_size=384)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        cos, sin = rope_cos_sin(c, torch.tensor([position]))
    exponents = torch.arange(0, 96, 2, dtype=torch.float64) / 96
    angles = position / 10000.0**exponents
    assert cos.dtype == torch.float32
    bound = position * torch.finfo(torch.float32).eps
    assert (cos[0].double() - angles.cos()).abs().max() < bound
    assert (sin[0].double() - angles.sin()).abs().max() < bound


@pytest.mark.parametrize(
    "position, length, angle",
    [(15, 16, -1.970989), (16, 17, 1.686548), (15, 17, 1.581139)],
    ids=["short", "long", "long-holds-for-every-position"],
)
def test_longrope_angle_depends_on_the_real_length(position, length, angle):
    """Capacity 128 and the position itself say nothing; the sequence's length against 16 does. Angle of frequency 1."""
    model = longrope_model()
    long = uses_long_factors(model.config, length)
    frequencies, _ = inverse_frequencies(model.config, long=long)
    turned = position * frequencies[1].item()
    assert math.remainder(turned, 2 * math.pi) == pytest.approx(math.remainder(angle, 2 * math.pi), abs=2e-5)


def test_longrope_scaling_is_on_cos_and_sin():
    model = longrope_model()
    cos, sin = rope_cos_sin(model.config, torch.arange(4))
    expected = math.sqrt(1 + math.log(128 / 16) / math.log(16))
    assert torch.allclose(cos**2 + sin**2, torch.tensor(expected**2))


@pytest.mark.skipif(VERSION < PARTIAL_ROTARY_SINCE, reason="this transformers refuses such a config")
def test_partial_rotary_turns_the_first_dimensions_only():
    c = config(
        partial_rotary_factor=0.75,
        rope_scaling={**LONGROPE, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6},
        max_position_embeddings=64,
        original_max_position_embeddings=64,
    )
    assert rotary_dim(c) == 12
    x = torch.randn(1, 2, 1, 16)
    cos, sin = rope_cos_sin(c, torch.tensor([7]))
    out = apply_rope(x, cos, sin)
    assert torch.equal(out[..., 12:], x[..., 12:]), "bit for bit"
    frequencies = 10000.0 ** -(torch.arange(6, dtype=torch.float64) * 2 / 12)
    a, b = x[..., :6].double(), x[..., 6:12].double()
    angle = 7 * frequencies
    expected = torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)
    assert torch.allclose(out[..., :12].double(), expected, atol=1e-6)


def test_rotation_equals_hugging_faces():
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    model = tiny_model(device="cpu")
    q, k = torch.randn(1, 4, 9, 16), torch.randn(1, 2, 9, 16)
    positions = torch.arange(9)
    cos, sin = rope_cos_sin(model.config, positions)
    hf_cos, hf_sin = (torch.cat((x, x), dim=-1)[None] for x in (cos, sin))
    hf_q, hf_k = apply_rotary_pos_emb(q, k, hf_cos, hf_sin)
    assert torch.equal(apply_rope(q, cos, sin), hf_q) and torch.equal(apply_rope(k, cos, sin), hf_k)
    if hasattr(model.model, "rotary_emb"):  # older versions keep it in the attention, with another signature
        module_cos, module_sin = model.model.rotary_emb(q, positions[None])
        assert torch.equal(module_cos, hf_cos) and torch.equal(module_sin, hf_sin)


def test_factor_lists_of_the_wrong_length_are_refused():
    model = longrope_model()
    wrong = model.config.__class__.from_dict(model.config.to_dict())
    for name in ("rope_parameters", "rope_scaling"):
        if getattr(wrong, name, None):
            getattr(wrong, name)["short_factor"] = [1.0] * 5
    with pytest.raises(ValueError, match="longrope has 5 factors for 8 rotary frequencies"):
        inverse_frequencies(wrong)


def test_a_padded_batch_across_the_border_is_refused():
    with pytest.raises(ValueError, match="both sides of longrope's border 16"):
        same_factors_for_all(longrope_model().config, [16, 17])
    same_factors_for_all(longrope_model().config, [9, 16])
    same_factors_for_all(tiny_model().config, [1, 400])


def test_bfloat16_rotation_rounds_once():
    x = torch.randn(1, 1, 3, 16)
    cos, sin = rope_cos_sin(tiny_model().config, torch.arange(3) + 5)
    once = apply_rope(x.bfloat16().float(), cos, sin).bfloat16()
    assert torch.equal(apply_rope(x.bfloat16(), cos, sin), once)


def test_tables_of_many_cache_sizes_are_few():
    """A cache made to measure for each prompt would otherwise leave tables behind for each length."""
    model = tiny_model(max_position_embeddings=300)
    tables = {id(rotary_tables(model, size)) for size in range(1, 301)}
    assert len(tables) == 10, "1, 2, 4, ... 512"
    assert all(len(rotary_tables(model, size).short[0]) >= size for size in (1, 2, 3, 64, 65, 300))
