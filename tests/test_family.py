"""Generation over the shapes that the Phi-3 family really has, in small, token for token and logit for logit.

The judge is the whole sequence recomputed without a cache (R2), and Hugging Face ``generate`` where it is a reference.
"""

import pytest
import torch

from model.generate import generate
from model.load_model import PARTIAL_ROTARY_SINCE, VERSION, load_model
from model.phi3_decode import hf_generate
from model.token_check import forced_logits
from tests.tiny import DEVICE, LONGROPE, prompt, recomputed_generation, tiny_model

PHI_4_MINI = {
    "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96, "partial_rotary_factor": 0.75,
    "tie_word_embeddings": True, "max_position_embeddings": 128, "original_max_position_embeddings": 16,
    "rope_scaling": {**LONGROPE, "short_factor": [1.0 + 0.1 * i for i in range(6)],
                     "long_factor": [2.0 + i for i in range(6)]},
}  # fmt: skip

FAMILY = {
    "phi-3-mini-4k": {"num_key_value_heads": 4, "sliding_window": 9},
    "phi-3-mini-128k": {
        "num_key_value_heads": 4, "rope_scaling": LONGROPE, "original_max_position_embeddings": 16,
        "max_position_embeddings": 128, "sliding_window": 262144,
    },
    "phi-3-medium": {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 128, "sliding_window": 9},
    "phi-4-mini": PHI_4_MINI,
    "another-base-and-eps": {"rope_theta": 250000.0, "rms_norm_eps": 1e-2},
}  # fmt: skip


def family_model(name):
    if name == "phi-4-mini" and VERSION < PARTIAL_ROTARY_SINCE:
        pytest.skip("this transformers refuses partial rotary factor lists")
    return tiny_model(**FAMILY[name])


@pytest.mark.parametrize("path", ["cat", "prealloc", "triton"])
@pytest.mark.parametrize("name", FAMILY)
def test_generation_equals_recomputation(name, path):
    """12 prompt tokens and 10 new: the window of 9 is left behind and the border of 16 crossed on the way."""
    model = family_model(name)
    ids = prompt(12)
    expected, expected_logits = recomputed_generation(model, ids, 10)
    assert torch.equal(generate(model, ids, 10, path=path, eos_token_ids=()), expected)
    assert torch.allclose(forced_logits(model, ids, expected, path=path), expected_logits, atol=1e-4)


@pytest.mark.parametrize("name", FAMILY)
def test_a_saved_checkpoint_generates_what_hugging_face_does(name, tmp_path):
    """Through the files: whatever layout this transformers saves, sharded, stored in bfloat16, loaded in float32."""
    model = family_model(name)
    stored = type(model)(model.config)
    stored.load_state_dict(model.state_dict())
    stored.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="60KB")
    loaded = load_model(tmp_path, dtype=torch.float32, device=DEVICE)
    assert loaded.model.embed_tokens.weight.dtype == torch.float32
    ids = prompt(12)
    out = generate(loaded, ids, 10, eos_token_ids=())
    assert torch.equal(out, recomputed_generation(loaded, ids, 10)[0])
    if "rope_scaling" not in FAMILY[name] and FAMILY[name].get("sliding_window") is None:
        assert torch.equal(out, hf_generate(loaded, ids, 10)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["cat", "prealloc", "triton", "graph", "fused"])
@pytest.mark.parametrize(
    "fields, length",
    [
        ({"sliding_window": 2047}, 2040),
        (
            {"rope_scaling": LONGROPE, "original_max_position_embeddings": 4096, "max_position_embeddings": 131072},
            4090,
        ),
    ],
    ids=["window-2047", "longrope-4096"],
)
def test_the_borders_at_their_real_place(fields, length, path):
    """Across the window of Phi-3-mini-4k and the longrope border of the 128k models, too long for the interpreter."""
    model = tiny_model(**fields)
    ids = prompt(length)
    expected, expected_logits = recomputed_generation(model, ids, 12)
    assert torch.equal(generate(model, ids, 12, path=path, eos_token_ids=()), expected)
    assert torch.allclose(forced_logits(model, ids, expected, path=path), expected_logits, atol=1e-3)
