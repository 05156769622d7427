"""The preallocated KV cache: one allocation for all layers, written in place, never concatenated.

Layout ``[num_layers, 2, B, num_kv_heads, max_seq_len, head_dim]``: the positions of one head are contiguous, which is
how decode attention reads them. The order of a step is append, get, and, once all layers are written, advance.
"""

import math

import torch


def update_kv_cache(k_cache, v_cache, k_new, v_new, position):
    """Write ``k_new``, ``v_new`` [B, Hkv, S, D] into the caches [B, Hkv, T_max, D] at ``position``, in place.

    position: an int for all sequences, or an integer tensor [B] on the caches' device (it may change between replays of
    a CUDA graph). ValueError where an int position would write past the end; a tensor's values are the caller's to
    check, since looking at them would wait for the GPU.
    """
    S, T_max = k_new.shape[2], k_cache.shape[2]
    if isinstance(position, int):
        if position < 0 or position + S > T_max:
            raise ValueError(f"positions {position} to {position + S - 1} do not fit a cache of {T_max} positions")
        k_cache[:, :, position : position + S] = k_new
        v_cache[:, :, position : position + S] = v_new
    else:
        sequence = torch.arange(k_new.shape[0], device=k_new.device)[:, None]
        positions = position[:, None] + torch.arange(S, device=k_new.device)
        k_cache[sequence, :, positions] = k_new.transpose(1, 2)
        v_cache[sequence, :, positions] = v_new.transpose(1, 2)


class KVCache:
    """Keys and values of ``batch_size`` sequences, ``max_seq_len`` positions each, in one tensor.

    Attributes: ``cur_pos``, the number of positions written (of the longest sequence); ``lengths``, the same per
    sequence as an int32 tensor [B] on the device, for kernels and captured graphs; ``k``, ``v``, the whole caches
    [num_layers, B, Hkv, max_seq_len, D] as views. What lies behind the written part is uninitialised, never read.
    """

    def __init__(self, num_layers, num_kv_heads, head_dim, max_seq_len, *, batch_size=1, dtype, device):
        shape = (num_layers, 2, batch_size, num_kv_heads, max_seq_len, head_dim)
        if min(shape) < 1:
            raise ValueError(f"a KV cache needs sizes of at least 1, got {list(shape)} (max_seq_len {max_seq_len})")
        self.max_seq_len = max_seq_len
        try:
            self._storage = torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError:  # each device has its own words for "out of memory"
            gib = math.prod(shape) * dtype.itemsize / 2**30
            raise ValueError(
                f"a KV cache of {max_seq_len} positions takes {gib:,.1f} GiB, which {device} cannot give: "
                "lower MAX_SEQ_LEN"
            ) from None
        self.k, self.v = self._storage[:, 0], self._storage[:, 1]
        self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.resets = 0
        self.reset()

    @classmethod
    def from_config(cls, config, max_seq_len, *, batch_size=1, dtype, device):
        """A cache with the sizes of a Hugging Face Phi-3 config."""
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            config.num_hidden_layers, config.num_key_value_heads, head_dim, max_seq_len,
            batch_size=batch_size, dtype=dtype, device=device,
        )  # fmt: skip

    @property
    def num_layers(self):
        return self._storage.shape[0]

    @property
    def batch_size(self):
        return self._storage.shape[2]

    @property
    def nbytes(self):
        """Bytes of the one allocation."""
        return self._storage.nbytes

    def check_fits(self, S):
        """Raise ValueError, with the memory that a larger cache would take, unless ``S`` more positions fit."""
        needed = self.cur_pos + S
        if needed > self.max_seq_len:
            mib = self.nbytes / self.max_seq_len * needed / 2**20
            raise ValueError(
                f"{needed} positions do not fit a KV cache of {self.max_seq_len}; "
                f"raise MAX_SEQ_LEN to {needed} ({mib:,.1f} MiB) or shorten the prompt or the output"
            )

    def append(self, layer, k, v, positions=None):
        """Write k, v [B, Hkv, S, D] of ``layer`` behind what is there. ValueError, and nothing written, if it is full.

        positions: int tensor [B] on the device with the first slot of each sequence; by default ``cur_pos``, and
        ``lengths`` where the sequences differ in length.
        """
        expected = (self.batch_size, self.k.shape[2], k.shape[2], self.k.shape[4])
        if tuple(k.shape) != expected or k.shape != v.shape:
            raise ValueError(f"k and v must be {list(expected)}, got {list(k.shape)} and {list(v.shape)}")
        self.check_fits(k.shape[2])
        if positions is None:
            positions = self.lengths if self.ragged else self.cur_pos
        update_kv_cache(self.k[layer], self.v[layer], k, v, positions)
        self._end[layer] = self.cur_pos + k.shape[2]

    def get(self, layer):
        """Views (k, v) [B, Hkv, T, D] of what is written, the positions just appended to this layer included."""
        end = self._end[layer]
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]

    def advance(self, S):
        """Move on by ``S`` positions; ValueError unless every layer was written that far."""
        if any(end != self.cur_pos + S for end in self._end):
            missing = [layer for layer, end in enumerate(self._end) if end != self.cur_pos + S]
            raise ValueError(f"advance({S}) before layers {missing} were written up to position {self.cur_pos + S}")
        self.lengths += S
        self.cur_pos += S

    def note_written(self, S):
        """Bookkeeping for a program that wrote ``S`` positions and moved ``lengths`` itself, on the device."""
        self.cur_pos += S
        self._end = [self.cur_pos] * self.num_layers

    def set_lengths(self, lengths):
        """Declare sequences of differing lengths: ``lengths`` holds B ints, the largest equal to ``cur_pos``."""
        lengths = [int(length) for length in lengths]
        if len(lengths) != self.batch_size or max(lengths) != self.cur_pos or min(lengths) < 1:
            raise ValueError(f"lengths {lengths} do not describe {self.batch_size} sequences of up to {self.cur_pos}")
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        self.ragged = min(lengths) != max(lengths)

    def reset(self):
        """Forget everything written; the memory stays. ``resets`` counts the calls, for whoever keeps a copy."""
        self.resets += 1
        self.cur_pos = 0
        self.ragged = False
        self._end = [0] * self.num_layers
        self.lengths.zero_()
