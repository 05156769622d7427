"""A checkpoint's own Phi-3 code in the style of early 2024, for tests: it speaks to the cache as transformers 4.40 did.

Written for the test suite; the attribute names are Phi-3's, so that its weights are those of the built-in class.
"""

import torch
from torch import nn
from transformers import Phi3Config, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast


class Phi3RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Phi3MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(nn.functional.silu(gate) * up)


class Phi3Attention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.hidden_size // self.heads
        self.theta = getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]
        self.qkv_proj = nn.Linear(config.hidden_size, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, x, position_ids, past_key_value):
        B, S, _ = x.shape
        widths = [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (
            part.view(B, S, -1, self.head_dim).transpose(1, 2) for part in self.qkv_proj(x).split(widths, dim=-1)
        )
        q, k = self.rotate(q, position_ids), self.rotate(k, position_ids)
        T = S
        if past_key_value is not None:
            T += past_key_value.get_usable_length(S, self.layer_idx)
            k, v = past_key_value.update(k, v, self.layer_idx)
        visible = torch.ones(S, T, dtype=torch.bool, device=x.device).tril(T - S)
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.o_proj(out.transpose(1, 2).reshape(B, S, -1))

    def rotate(self, x, position_ids):
        exponents = torch.arange(0, self.head_dim, 2, device=x.device).float() / self.head_dim
        angles = position_ids[:, None, :, None].float() / self.theta**exponents
        cos, sin = (torch.cat((part, part), dim=-1) for part in (angles.cos(), angles.sin()))
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin


class Phi3DecoderLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.self_attn = Phi3Attention(config, layer_idx)
        self.mlp = Phi3MLP(config)
        self.input_layernorm = Phi3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Phi3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, position_ids, past_key_value):
        x = x + self.self_attn(self.input_layernorm(x), position_ids, past_key_value)
        return (x + self.mlp(self.post_attention_layernorm(x)),)


class Phi3PreTrainedModel(PreTrainedModel):
    config_class = Phi3Config
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_cache_class = True

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(std=self.config.initializer_range)


class Phi3Model(Phi3PreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Phi3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Phi3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(self, input_ids, position_ids=None, past_key_values=None, use_cache=None):
        legacy = use_cache and not isinstance(past_key_values, Cache)
        if legacy:
            past_key_values = DynamicCache.from_legacy_cache(past_key_values)
        past = past_key_values.get_usable_length(input_ids.shape[1]) if use_cache else 0
        if position_ids is None:
            position_ids = torch.arange(past, past + input_ids.shape[1], device=input_ids.device)[None]
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, position_ids, past_key_values)[0]
        if legacy:
            past_key_values = past_key_values.to_legacy_cache()
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), past_key_values=past_key_values)


class Phi3ForCausalLM(Phi3PreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = Phi3Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None,
        return_dict=None, output_attentions=None, output_hidden_states=None,
    ):  # fmt: skip
        output = self.model(input_ids, position_ids, past_key_values, use_cache)
        return CausalLMOutputWithPast(
            logits=self.lm_head(output.last_hidden_state).float(), past_key_values=output.past_key_values
        )

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, attention_mask=None, **kwargs):
        if isinstance(past_key_values, Cache):
            assert past_key_values.get_max_length() is None
            input_ids = input_ids[:, past_key_values.seen_tokens :]
        elif past_key_values is not None:
            input_ids = input_ids[:, past_key_values[0][0].shape[2] :]
        return {
            "input_ids": input_ids,
            "past_key_values": past_key_values,
            "use_cache": kwargs.get("use_cache"),
            "attention_mask": attention_mask,
        }
