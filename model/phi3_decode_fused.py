"""Rungs 5 and 6: the step as five fused Triton kernels per layer, and their overlap by programmatic dependent launch.

The Hugging Face model's weights are read where they are, nothing is repacked. The residual stream is kept in the
model's dtype, rounded once per projection; everything inside a kernel is float32.
"""

import torch

from kernels import INTERPRETED
from kernels.device import TRITON_VERSION, device_info, pdl_supported, prefetch_supported
from kernels.fused_decode_wrapper import (
    Prefetch,
    attention_workspace,
    embed,
    greedy_choice,
    matvec,
    matvec_config,
    rope_attention,
)
from model.load_model import head_dim
from model.phi3_decode_graph import CapturedDecoder
from model.rope import rotary_tables


class FusedDecoder(CapturedDecoder):
    """One sequence, one token at a time, through the fused kernels; a CUDA graph on a GPU, interpreted on the CPU.

    pdl: programmatic dependent launch between the kernels (rung 6); by default wherever the GPU (compute capability
    9.0 or newer) and Triton have it. ValueError for what the kernels do not cover, naming the path to use.
    """

    def __init__(self, model, kv_cache, *, pdl=None):
        super().__init__(model, kv_cache)
        available = pdl_supported(device_info(self.device))
        if pdl and not available:
            raise ValueError("pdl=True needs a GPU of compute capability 9.0 and Triton 3.6, or newer; use pdl=False")
        self.pdl = available if pdl is None else pdl
        _check_supported(model, kv_cache)
        config, dtype = model.config, kv_cache.k.dtype
        D, Hq, Hkv = head_dim(config), config.num_attention_heads, config.num_key_value_heads
        self.window = getattr(config, "sliding_window", None)
        # Row p serves the step at position p, whose sequence is p + 1 long: one table holds longrope's short factors up
        # to the border and the long ones behind it.
        tables = rotary_tables(model, kv_cache.max_seq_len)
        if self.border is None:
            self.cos, self.sin = tables.short
        else:
            self.cos, self.sin = (
                torch.cat((short[: self.border], long[self.border :]))
                for short, long in zip(tables.short, tables.long, strict=True)
            )

        def buffer(size):
            return torch.empty(size, dtype=dtype, device=self.device)

        self.hidden = buffer(config.hidden_size)
        self.qkv = buffer((Hq + 2 * Hkv) * D)
        self.attended = buffer(Hq * D)
        self.activated = buffer(config.intermediate_size)
        self.logits = buffer(config.vocab_size)[None]
        self.history = torch.empty(kv_cache.max_seq_len, dtype=torch.int64, device=self.device)
        self.choice = greedy_choice(self.token, self.history, kv_cache.lengths)
        self.workspace = attention_workspace(Hq, D, kv_cache.max_seq_len, dtype, self.device)

    def _launch(self):
        model, pdl = self.model.model, self.pdl
        hidden, lengths = self.hidden, self.kv_cache.lengths
        embed(self.token, model.embed_tokens.weight, hidden, pdl=pdl)
        for index, layer in enumerate(model.layers):
            attention, mlp = layer.self_attn, layer.mlp
            ahead = self._prefetches(index)
            self._normed(layer.input_layernorm, attention.qkv_proj.weight, self.qkv, prefetch=ahead["o"])
            rope_attention(
                self.qkv, self.cos, self.sin, lengths, self.kv_cache.k[index, 0], self.kv_cache.v[index, 0],
                self.attended, self.workspace, window=self.window, pdl=pdl,
            )  # fmt: skip
            matvec(
                self.attended, attention.o_proj.weight, hidden, residual=True, pdl=pdl, early=True,
                prefetch=ahead["gate_up"],
            )  # fmt: skip
            self._normed(
                layer.post_attention_layernorm, mlp.gate_up_proj.weight, self.activated, gated=True, early=True,
                prefetch=ahead["down"],
            )  # fmt: skip
            matvec(
                self.activated, mlp.down_proj.weight, hidden, residual=True, pdl=pdl, early=True,
                prefetch=ahead["following"],
            )  # fmt: skip
        self._normed(model.norm, self.model.lm_head.weight, self.logits[0], choice=self.choice)

    def _normed(self, norm, weight, out, **options):
        matvec(self.hidden, weight, out, gain=norm.weight, eps=norm.variance_epsilon, pdl=self.pdl, **options)

    def _run(self, num_steps):
        start = self.kv_cache.cur_pos
        for _ in range(num_steps):
            self._advance()
        return self.history[None, start : start + num_steps].clone()

    def _advance(self):
        if self.device.type == "cuda":
            super()._advance()
        else:
            self._launch()
            self.kv_cache.note_written(1)

    def _prefetches(self, index):
        """What each projection of a layer asks L2 for: a Prefetch by the name of the next one, or None.

        ``following`` is the next layer's QKV, or the LM head (against nothing there -1 to -3, with and without PDL).
        See prefetch_supported for where. Microseconds per token of Phi-3-mini in float16, at context 128 unless said
        otherwise (one H200 for each sentence, 2026-11).

        Without PDL memory idles between two kernels, and the first bytes of the next one, which it loads as well, fill
        the gap, asked for once the projection has its own: none 2094, 1 MiB for each 2083, 1.5 MiB 2080, 2 MiB
        2081, 3 MiB 2093. Of O 2 MiB instead of 1 MiB +4; of QKV 3 MiB instead of 2 MiB -3; of down 1 MiB instead of
        2 MiB -5. With programs of one tile each (see matvec_config), of O 1 MiB and of gate/up, down, QKV 3, 1, 3 MiB
        2045, 4, 2, 4 2039, 4, 4, 4 2034, 5, 3, 5 2035, 6, 2, 6 2038, 8, 2, 8 2051; at 512 2079, 2075, 2073, 2071, 2075,
        at 2048 2247, 2240, 2241, 2242, 2243. Later rows 0 to +8, before x is asked for +2 to +15.

        With PDL kernels load their first tiles early by themselves. Of O and QKV the first bytes again; of down what is
        needed first after what its first programs load; of gate/up, which takes nine rounds of its programs, what the
        seventh begins with: those reads are then spared while memory is busy. Gate/up and down are asked for even
        before the projection has its input.

        - Gate/up by O: none 1898, 2 MiB 1889, 3 MiB 1888, 5 MiB 1891, 4 MiB that the first programs load too 1895.
          3 MiB of its second round 1836, 5th 1835, 6th and 7th 1832, 8th 1834; at 512 1896, 1899, 1896, 1895, 1894,
          at 2048 2072, 2073, 2070, 2070, 2071.
        - Down by gate/up: none 1899, 2 MiB 1892, 4 MiB 1889, 6 MiB 1897; later rounds 1848 to 1864 (1835). At 512 /
          2048, once gate/up has its input, 3 MiB 1899 / 2070, none 1893 / 2067, 6 MiB 1915 / 2087; before, 3 MiB 1882 /
          2055.
        - QKV by down: none 1887, 2 MiB 1883; later rounds 1839 to 1850 (1835); before its input +9 to +19.
        - O by QKV, at 128 / 512 / 2048: none 1818 / 1868 / 2033, 0.5 MiB 1814 / 1862 / 2030, 1 MiB 1811 / 1862 / 2030,
          2 MiB no gain, 4 MiB +15 to +25; before its input +100.
        """
        device = device_info(self.device)
        if not prefetch_supported(device):
            return dict.fromkeys(("o", "gate_up", "down", "following"))
        layers = self.model.model.layers
        mlp = layers[index].mlp
        gate_up, down = mlp.gate_up_proj.weight, mlp.down_proj.weight
        last = index + 1 == len(layers)
        following = self.model.lm_head if last else layers[index + 1].self_attn.qkv_proj
        hints = {
            "o": Prefetch(layers[index].self_attn.o_proj.weight, 1 << 20),
            "following": Prefetch(following.weight, (2 if self.pdl else 4) << 20),
        }
        if not self.pdl:
            return {**hints, "gate_up": Prefetch(gate_up, 4 << 20, parts=2), "down": Prefetch(down, 4 << 20)}
        sm_count = device.sm_count

        def first_wave_bytes(weight, parts):
            rows, columns = weight.shape[0] // parts, weight.shape[1]
            config = matvec_config(rows, columns, weight.itemsize, sm_count, gated=parts == 2, pdl=True)
            return config.first_wave_rows(sm_count) * columns * weight.itemsize

        gate_up_round = first_wave_bytes(gate_up, 2)
        rounds_ahead = max(1, round(gate_up.nbytes // 2 / gate_up_round * 2 / 3))
        return {
            **hints,
            "gate_up": Prefetch(gate_up, 3 << 20, parts=2, skip=rounds_ahead * gate_up_round, early=True),
            "down": Prefetch(down, 3 << 20, skip=first_wave_bytes(down, 1), early=True),
        }


def _check_supported(model, kv_cache):
    """Raise ValueError, naming what and the path to use instead, unless the kernels cover this model and cache."""

    def refuse(what):
        raise ValueError(f'path "fused" {what}; use path="graph" or path="triton"')

    if TRITON_VERSION < (3, 3) and not INTERPRETED:
        refuse(f"needs Triton 3.3 or newer, this is {'.'.join(map(str, TRITON_VERSION))}")  # tuples in a kernel
    if kv_cache.batch_size != 1:
        refuse(f"decodes one sequence at a time, got a batch of {kv_cache.batch_size}")
    if model.config.hidden_act != "silu":
        refuse(f"has silu as its only activation, the model has {model.config.hidden_act}")
    linears = {"lm_head": model.lm_head}
    for index, layer in enumerate(model.model.layers):
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
            linears[f"model.layers.{index}.{name}"] = layer.get_submodule(name)
    for name, linear in linears.items():
        # Not isinstance: adapters and quantised layers derive from Linear and compute something else.
        if type(linear) is not torch.nn.Linear or linear.bias is not None:
            refuse(f"reads plain weights without bias, {name} is {linear}")
    for name, parameter in model.named_parameters():
        if parameter.device != kv_cache.k.device:
            refuse(f"needs all weights beside the cache on {kv_cache.k.device}, {name} is on {parameter.device}")
        if parameter.dtype != kv_cache.k.dtype:
            refuse(f"needs one dtype, the cache has {kv_cache.k.dtype} and {name} {parameter.dtype}")
