"""Checkpoints, random-weight presets, and every difference between transformers versions.

The model is transformers' own ``Phi3ForCausalLM`` everywhere in this repository. Names moved between transformers 4.44
and today (``torch_dtype``/``dtype``, ``past_key_values``/``cache``, ``rope_theta``/``rope_parameters``, the insides of
``DynamicCache``); no other file needs to know.
"""

import functools
import inspect
import json
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, Phi3Config, Phi3ForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import cli
import config as settings

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])

# What transformers' own Phi-3 does in this version. Where one of these is False, its generate is no reference there.
HF_APPLIES_WINDOW = VERSION >= (4, 46)

# Phi-4-mini rotates three quarters of each head; older Phi3Config classes refuse its factor lists.
PARTIAL_ROTARY_SINCE = (4, 49)

# Older Phi-3 classes compute head_dim and ignore the config's own.
HEAD_DIM_SINCE = (4, 48)

# What the first Phi-3 checkpoints called longrope; transformers 5 fails on what it expects beside the name.
EARLY_LONGROPE_NAMES = ("su", "yarn")

DTYPE_KEYWORD = "dtype" if VERSION >= (4, 56) else "torch_dtype"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

# Longrope factor lists of the presets: of the right length and about the right range. The published values were found
# by search and belong to the trained weights; random weights have no use for them.
_HALF_ROTARY = 48
_SHORT_FACTORS = [1.0] * _HALF_ROTARY
_LONG_FACTORS = [64.0 ** (i / (_HALF_ROTARY - 1)) for i in range(_HALF_ROTARY)]
_LONGROPE = {"type": "longrope", "short_factor": _SHORT_FACTORS, "long_factor": _LONG_FACTORS}

_MINI = {
    "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "original_max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000,
}  # fmt: skip

# Published shapes (the config.json of each model); "tiny" is our own: GQA 2:1, head_dim 16, and weights large enough
# that a fault in attention moves the logits (at the usual 0.02 a model this small hardly listens to its attention).
PRESETS = {
    "phi-3-mini-4k": {**_MINI, "max_position_embeddings": 4096, "sliding_window": 2047},
    "phi-3-mini-128k": {
        **_MINI, "max_position_embeddings": 131072, "sliding_window": 262144, "rope_scaling": _LONGROPE,
    },
    "phi-3-medium-4k": {
        **_MINI, "hidden_size": 5120, "intermediate_size": 17920, "num_hidden_layers": 40, "num_attention_heads": 40,
        "num_key_value_heads": 10, "max_position_embeddings": 4096, "sliding_window": 2047,
    },
    "phi-4-mini": {
        **_MINI, "vocab_size": 200064, "num_attention_heads": 24, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "sliding_window": 262144, "rope_scaling": _LONGROPE,
        "partial_rotary_factor": 0.75, "tie_word_embeddings": True,
        "bos_token_id": 199999, "eos_token_id": 199999, "pad_token_id": 199999,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "sliding_window": None,
        "initializer_range": 0.25, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    },
}  # fmt: skip


# --- Loading ---------------------------------------------------------------------------------------------------------


def load_model(
    path=None, *, dtype=None, device=None, device_map=None, trust_remote_code=False, attn_implementation=None,
    seed=None, values=True,
):  # fmt: skip
    """The Hugging Face ``Phi3ForCausalLM`` at ``path``, in eval mode, without gradients.

    path: a checkpoint directory (relative to the repository's root if not absolute) or ``random:<preset>``; default
    ``config.MODEL_PATH``. dtype: torch.dtype or its name, default ``config.DTYPE``; never the checkpoint's, so that
    every transformers version gives the same. device: default ``config.DEVICE``. device_map: handed to transformers
    (``"auto"`` offloads what does not fit; only Hugging Face's own loop can run such a model). trust_remote_code: run
    the checkpoint's own ``modeling_phi3.py``. seed: of random weights, default ``config.SEED``. values: False leaves
    random weights on the meta device, where they have shapes and bytes but take no memory and no time.

    Raises ValueError, in one line, where the path is no Phi-3 checkpoint, this transformers cannot read it, or its
    weights do not fit the free memory of the device.
    """
    path = settings.MODEL_PATH if path is None else str(path)
    device = cli.resolve_device(settings.DEVICE if device is None else str(device))
    dtype = _resolve_dtype(dtype, device)
    model_config = load_config(path, trust_remote_code=trust_remote_code)
    if path.startswith("random:") and not values:
        device = torch.device("meta")
    elif device_map is None:
        _check_fits(model_config, dtype, device, path)
    if path.startswith("random:"):
        model = _random_model(model_config, dtype, device, attn_implementation, settings.SEED if seed is None else seed)
    else:
        model = _checkpoint_model(path, model_config, dtype, device, device_map, trust_remote_code, attn_implementation)
    return model.eval().requires_grad_(False)


def load_tokenizer(path=None, *, trust_remote_code=False):
    """The tokenizer at ``path`` (default ``config.MODEL_PATH``).

    A random-weight preset has none; it gets one whose token ids are the UTF-8 bytes (ids from 256 on give no text).
    """
    path = settings.MODEL_PATH if path is None else str(path)
    load_config(path, trust_remote_code=trust_remote_code)  # its complaints come first
    if path.startswith("random:"):
        return _byte_tokenizer()
    folder = _checkpoint_folder(path)
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        raise ValueError(f"MODEL_PATH {path!r} has no tokenizer (tokenizer.json); copy it from the original model")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raises bare Exceptions, and transformers whatever it stumbles over
        reason = " ".join(str(error).split())
        raise ValueError(f"MODEL_PATH {path!r}: its tokenizer cannot be read ({reason})") from None


def load_config(path=None, *, trust_remote_code=False):
    """The ``Phi3Config`` at ``path`` (a checkpoint directory or ``random:<preset>``; default ``config.MODEL_PATH``)."""
    path = settings.MODEL_PATH if path is None else str(path)
    if path.startswith("random:"):
        return _make_config(path, _preset(path))
    folder = _checkpoint_folder(path)
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"MODEL_PATH {path!r}: config.json is not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError(f"MODEL_PATH {path!r}: config.json is no JSON object but a {type(fields).__name__}")
    kind = fields.get("model_type")
    if kind != "phi3":
        architecture = ", ".join(fields.get("architectures") or ["no architecture named"])
        raise ValueError(f"MODEL_PATH {path!r} is a {kind!r} model ({architecture}); only 'phi3' is supported")
    if fields.get("quantization_config"):
        method = fields["quantization_config"].get("quant_method", "unnamed method")
        raise ValueError(f"MODEL_PATH {path!r} is quantised ({method}): the kernels read 16- or 32-bit weights only")
    if trust_remote_code and "AutoConfig" in fields.get("auto_map", {}):
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=True)
    return _make_config(path, fields)


def _make_config(path, fields):
    if VERSION < (5, 0):
        fields = _old_rope_layout(fields)
    if (fields.get("rope_scaling") or {}).get("type") in EARLY_LONGROPE_NAMES:
        fields = {**fields, "rope_scaling": {**fields["rope_scaling"], "type": "longrope"}}
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    partial = scaling.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
    if partial != 1.0 and VERSION < PARTIAL_ROTARY_SINCE:
        raise ValueError(
            f"MODEL_PATH {path!r} has partial_rotary_factor {partial:g}, which needs transformers >= "
            f"{'.'.join(map(str, PARTIAL_ROTARY_SINCE))}; this is {transformers.__version__}"
        )
    own = fields.get("head_dim")
    if own and own * fields["num_attention_heads"] != fields["hidden_size"] and VERSION < HEAD_DIM_SINCE:
        raise ValueError(
            f"MODEL_PATH {path!r} has head_dim {own}, not hidden_size / num_attention_heads, which needs "
            f"transformers >= {'.'.join(map(str, HEAD_DIM_SINCE))}; this is {transformers.__version__}"
        )
    try:
        with _quiet():
            return Phi3Config.from_dict(fields)
    except Exception as error:  # each version has its own classes for a config that it does not accept
        reason = " ".join(str(error).split())
        raise ValueError(
            f"MODEL_PATH {path!r}: transformers {transformers.__version__} cannot read its config ({reason}); "
            "use the transformers version it was saved with, or a newer one"
        ) from None


def _old_rope_layout(fields):
    """A config.json of transformers 5 in the terms of 4, which would skip ``rope_parameters`` and take its own base."""
    new = fields.get("rope_parameters")
    if new is None:
        return fields
    fields = {name: value for name, value in fields.items() if name != "rope_parameters"}
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if name in new:
            fields[name] = new[name]
    if new.get("rope_type", "default") == "default":
        fields["rope_scaling"] = None
    else:
        # Anything more in it (an explicit factor, say) goes along, for Phi3Config to refuse: 4 has no place for it.
        elsewhere = ("rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
        others = {name: value for name, value in new.items() if name not in elsewhere}
        fields["rope_scaling"] = {"type": new["rope_type"], **others}
    return fields


@contextmanager
def _quiet():
    """Keep transformers from warning that Phi-3's own longrope layout lacks the ``factor`` of other models."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def _preset(path):
    name = path.removeprefix("random:")
    if name not in PRESETS:
        known = ", ".join(f"random:{preset}" for preset in PRESETS)
        raise ValueError(f"MODEL_PATH {path!r} is no preset; choose from {known}")
    return json.loads(json.dumps(PRESETS[name]))  # a deep copy: transformers 5 writes into rope_scaling


def _checkpoint_folder(path):
    folder = settings.ROOT / Path(path).expanduser()
    if not folder.exists():
        remedy = "give a checkpoint directory, or random:tiny for random weights"
        if folder == settings.ROOT / "checkpoints/demo":
            remedy = "build it with `python model/demo_checkpoint.py`, or use random:tiny for random weights"
        raise ValueError(f"MODEL_PATH {path!r} does not exist ({folder}): {remedy}")
    if not (folder / "config.json").is_file():
        raise ValueError(f"MODEL_PATH {path!r} is not a checkpoint: it has no config.json; give the model's directory")
    return folder


def _resolve_dtype(dtype, device):
    if dtype is None:
        return cli.resolve_dtype(settings.DTYPE, device)
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name}")
    return cli.resolve_dtype(name, device)


def _random_model(model_config, dtype, device, attn_implementation, seed):
    """Weights drawn on the device in the dtype: no float32 copy, nothing through the CPU."""
    options = {DTYPE_KEYWORD: dtype}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.device(device):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(model_config, **options)


def _checkpoint_model(path, model_config, dtype, device, device_map, trust_remote_code, attn_implementation):
    folder = _checkpoint_folder(path)
    _check_weight_files(folder, path)
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    options = {DTYPE_KEYWORD: dtype, "config": model_config, "local_files_only": True}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if device_map is not None:
        options["device_map"] = device_map
    elif device.type == "cuda":
        options["device_map"] = {"": device}  # straight to the GPU, without a copy of the model on the CPU
    if trust_remote_code:
        _add_removed_cache_methods()
    try:
        if trust_remote_code:
            _keep_loaded_weights(model_config, folder)
            options["trust_remote_code"] = True
        kind = AutoModelForCausalLM if trust_remote_code else Phi3ForCausalLM
        model, info = kind.from_pretrained(folder, output_loading_info=True, **options)
    except Exception as error:  # whatever the files or their own code hold, and each version says it differently
        reason = " ".join(str(error).split())
        remedy = "leave trust_remote_code off, the built-in Phi-3 reads the same weights"
        raise ValueError(
            f"MODEL_PATH {path!r} cannot be loaded with transformers {transformers.__version__} ({reason})"
            + (f": {remedy}" if trust_remote_code else "")
        ) from None
    if info["missing_keys"]:
        raise ValueError(
            f"MODEL_PATH {path!r} lacks {len(info['missing_keys'])} weights: {sorted(info['missing_keys'])[0]} ..."
        )
    if trust_remote_code:
        _pass_cache_by_its_old_name(model)
    return model


def _check_weight_files(folder, path):
    for index in folder.glob("*.index.json"):
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"MODEL_PATH {path!r}: {index.name} is no index of weight files; copy it anew") from None
        missing = sorted(name for name in shards if not (folder / name).exists())
        if missing:
            raise ValueError(
                f"MODEL_PATH {path!r} lacks {len(missing)} of {len(shards)} weight files: {missing[0]} ..."
            )
    if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        raise ValueError(f"MODEL_PATH {path!r} has a config.json but no weights (model*.safetensors)")


def _byte_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # The byte-level alphabet gives each byte a printable character; bytes that are printable themselves keep theirs.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


# --- Sizes and settings of a config ----------------------------------------------------------------------------------


def head_dim(model_config):
    """Elements per head: ``config.head_dim`` where set, else hidden_size / num_attention_heads."""
    return getattr(model_config, "head_dim", None) or model_config.hidden_size // model_config.num_attention_heads


def num_parameters(model_config):
    """Parameters of a Phi-3 model of this config; tied embeddings count once."""
    c = model_config
    heads = c.num_attention_heads + 2 * c.num_key_value_heads
    attention = c.hidden_size * head_dim(c) * (heads + c.num_attention_heads)
    layer = attention + 3 * c.hidden_size * c.intermediate_size + 2 * c.hidden_size
    embeddings = c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)
    return c.num_hidden_layers * layer + embeddings + c.hidden_size


def rope_settings(model_config):
    """The rotary settings, the same from old configs (rope_theta, rope_scaling) and new ones (rope_parameters).

    Returns a dict: ``type`` ("default" or "longrope"), ``theta``, ``partial_rotary_factor``, ``short_factor`` and
    ``long_factor`` (lists or None), ``original_max_position_embeddings`` (where longrope switches; None for default),
    ``max_position_embeddings``, ``factor`` and ``attention_factor`` (None unless the config sets them).
    ValueError for a config without a theta and for a rope type that Phi-3 does not use.
    """
    scaling = getattr(model_config, "rope_parameters", None) or getattr(model_config, "rope_scaling", None) or {}
    theta = scaling.get("rope_theta", getattr(model_config, "rope_theta", None))
    if theta is None:
        raise ValueError("the config has neither rope_theta nor rope_parameters['rope_theta']: set the rotary base")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    kind = "longrope" if kind in EARLY_LONGROPE_NAMES else kind
    if kind not in ("default", "longrope"):
        raise ValueError(f"rope type {kind!r} is not one that Phi-3 uses (default, longrope)")
    original = getattr(model_config, "original_max_position_embeddings", None)
    if original is None:
        original = scaling.get("original_max_position_embeddings", model_config.max_position_embeddings)
    partial = scaling.get("partial_rotary_factor", getattr(model_config, "partial_rotary_factor", None))
    return {
        "type": kind,
        "theta": float(theta),
        "partial_rotary_factor": 1.0 if partial is None else float(partial),
        "short_factor": scaling.get("short_factor") if kind == "longrope" else None,
        "long_factor": scaling.get("long_factor") if kind == "longrope" else None,
        "original_max_position_embeddings": original if kind == "longrope" else None,
        "max_position_embeddings": model_config.max_position_embeddings,
        "factor": scaling.get("factor"),
        "attention_factor": scaling.get("attention_factor"),
    }


def eos_token_ids(model_or_config, generation_config=None):
    """All token ids that end a generation, as a tuple; () where none is set.

    Chat models name several in their generation config (Phi-3-instruct: 32000, 32001, 32007) and one in their config,
    so the first of these that names any counts: ``generation_config``, the model's own, the model config.
    """
    sources = [
        generation_config,
        getattr(model_or_config, "generation_config", None),
        getattr(model_or_config, "config", model_or_config),
    ]
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
    return ()


# --- Memory ----------------------------------------------------------------------------------------------------------


def free_memory(device):
    """Bytes that can still be allocated on ``device``."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def _check_fits(model_config, dtype, device, path):
    need, free = num_parameters(model_config) * dtype.itemsize, free_memory(device)
    if need > free:
        smaller = "" if dtype.itemsize == 2 else "a 16-bit dtype halves that; "
        raise ValueError(
            f"the weights of {path!r} take {need / 1e9:.2f} GB in {str(dtype).removeprefix('torch.')}, but {device} "
            f"has {free / 1e9:.2f} GB free: {smaller}load_model(device_map='auto') offloads the rest, for Hugging "
            "Face's own loop only"
        )


def check_weights_are_here(model):
    """ValueError naming the first offloaded (meta) weight: code that reads ``.weight`` bypasses accelerate's hooks."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"weight {name} is offloaded (on the meta device), which this path does not support: load the model "
                "without device_map, or use Hugging Face's generate"
            )


# --- Calls into transformers whose names moved -----------------------------------------------------------------------


def cache_keyword(model):
    """The forward argument that takes the KV cache: ``"cache"`` in newer transformers, else ``"past_key_values"``."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def last_logits_kwargs(model):
    """Keyword that makes forward compute the logits of the last position alone; {} where this version has none."""
    parameters = inspect.signature(model.forward).parameters
    for name in ("logits_to_keep", "num_logits_to_keep"):
        if name in parameters:
            return {name: 1}
    return {}


def new_hf_cache():
    """An empty ``DynamicCache`` that keeps every position, whatever the config's sliding window."""
    return DynamicCache()


@torch.no_grad()
def hf_forward(model, input_ids, cache=None, **kwargs):
    """One Hugging Face forward: (logits [B, vocab] of the last position, cache).

    input_ids: [B, S]. ``cache``: what the call before returned; None starts a new one. Other keywords go to the model.
    """
    cache = new_hf_cache() if cache is None else cache
    options = {cache_keyword(model): cache, "use_cache": True, **last_logits_kwargs(model), **kwargs}
    output = model(input_ids, **options)
    return output.logits[:, -1], output["cache"] if "cache" in output else output["past_key_values"]


def cache_layers(cache):
    """[(k, v)] per layer of a Hugging Face cache, each [B, Hkv, T, D], whatever its class keeps inside."""
    if hasattr(cache, "layers"):
        return [(layer.keys, layer.values) for layer in cache.layers]
    if hasattr(cache, "key_cache"):
        return list(zip(cache.key_cache, cache.value_cache, strict=True))
    return [(layer[0], layer[1]) for layer in cache]


def layer_output(output):
    """Hidden states [B, T, hidden] of a decoder layer's output, which is a tuple before transformers 4.57."""
    return output[0] if isinstance(output, tuple) else output


# --- A checkpoint's own old modeling file ----------------------------------------------------------------------------


def _keep_loaded_weights(model_config, folder):
    """Switch the weight initialisation of the checkpoint's own classes off: its files have all weights.

    transformers 5 calls it after loading and protects what is loaded only from functions of its own; old code fills
    ``weight.data`` itself, and in 5.0 that replaces every loaded matrix by random numbers without a word.
    """
    reference = (getattr(model_config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if reference is None:
        return
    model_class = get_class_from_dynamic_module(reference, folder, local_files_only=True)
    for parent in model_class.__mro__:
        if parent.__module__ == model_class.__module__ and "_init_weights" in vars(parent):
            parent._init_weights = lambda self, module: None


def _pass_cache_by_its_old_name(model):
    """Let ``generate`` hand its cache to a model that only knows ``past_key_values``, and hand over a plain one.

    Newer versions say ``cache`` (the old code would swallow it and compute every position anew), and give a model with
    a sliding window a cache that forgets (the old code expects to find every position in it).
    """
    prepare = model.prepare_inputs_for_generation
    if "cache" in inspect.signature(prepare).parameters:
        return

    @functools.wraps(prepare)
    def wrapped(input_ids, cache=None, past_key_values=None, **kwargs):
        cache = past_key_values if cache is None else cache
        if isinstance(cache, DynamicCache) and cache.get_seq_length() == 0:
            cache = new_hf_cache()
        return prepare(input_ids, past_key_values=cache, **kwargs)

    model.prepare_inputs_for_generation = wrapped


def _add_removed_cache_methods():
    """Give ``DynamicCache`` back what old modeling files call and this transformers may lack."""
    for name, method in _REMOVED_CACHE_METHODS.items():
        if not hasattr(DynamicCache, name):
            setattr(DynamicCache, name, method)
    # This name came back in 5.x with another answer for "no limit", -1, which old code takes for a length.
    DynamicCache.get_max_length = lambda self, *args: None


def _from_legacy_cache(cls, past_key_values=None):
    cache = cls()
    for layer, (k, v) in enumerate(past_key_values or ()):
        cache.update(k, v, layer)
    return cache


def _get_usable_length(self, new_seq_length, layer_idx=0):
    return self.get_seq_length(layer_idx)  # a dynamic cache has no limit: all of it stays usable


_REMOVED_CACHE_METHODS = {
    "seen_tokens": property(lambda self: self.get_seq_length()),
    "get_usable_length": _get_usable_length,
    "from_legacy_cache": classmethod(_from_legacy_cache),
    "to_legacy_cache": lambda self: tuple(cache_layers(self)),
}
