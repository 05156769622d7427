"""kv_cache/kv_layout.py: in-place writes, nothing else touched, overflow refused with the cache intact."""

import pytest
import torch

from kv_cache.kv_layout import KVCache, update_kv_cache
from model.load_model import load_config

LAYERS, HEADS, DIM = 2, 3, 8


def make_cache(max_seq_len=16, batch_size=1, device="cpu"):
    cache = KVCache(LAYERS, HEADS, DIM, max_seq_len, batch_size=batch_size, dtype=torch.float32, device=device)
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    return cache


def new_kv(S, batch_size=1, device="cpu"):
    return (torch.randn(batch_size, HEADS, S, DIM, device=device) for _ in range(2))


def fill(cache, S):
    written = []
    for layer in range(LAYERS):
        k, v = new_kv(S, cache.batch_size, cache.k.device)
        cache.append(layer, k, v)
        written.append((k, v))
    cache.advance(S)
    return written


def test_phi3_mini_takes_192_mib():
    cache = KVCache.from_config(load_config("random:phi-3-mini-4k"), 512, dtype=torch.float16, device="meta")
    assert cache.nbytes == 201_326_592 == 192 * 2**20
    assert cache.k.untyped_storage().nbytes() == cache.nbytes, "one allocation"
    assert cache.k.shape == (32, 1, 32, 512, 96)


def test_append_then_get_sees_the_new_positions_and_advance_moves():
    cache = make_cache()
    address = cache.k.data_ptr()
    first = fill(cache, 5)
    k, v = new_kv(1)
    cache.append(0, k, v)
    keys, values = cache.get(0)
    assert cache.cur_pos == 5 and keys.shape == (1, HEADS, 6, DIM)
    assert torch.equal(keys, torch.cat((first[0][0], k), dim=2))
    assert torch.equal(values, torch.cat((first[0][1], v), dim=2))
    assert keys.data_ptr() == address, "get gives views, not copies"
    assert torch.equal(cache.get(1)[0], first[1][0]), "the other layer is not written yet"
    cache.append(1, k, v)
    cache.advance(1)
    assert cache.cur_pos == 6 and cache.lengths.tolist() == [6]


def test_advance_before_all_layers_are_written_raises():
    cache = make_cache()
    cache.append(0, *new_kv(2))
    with pytest.raises(ValueError, match=r"layers \[1\]"):
        cache.advance(2)
    assert cache.cur_pos == 0


def test_unaddressed_positions_stay_bitwise_untouched():
    cache = make_cache()
    fill(cache, 4)
    before = cache.k.clone().view(torch.int32)
    cache.append(1, *new_kv(3))
    after = cache.k.view(torch.int32)
    changed = (before != after).any(dim=-1)
    assert not changed[0].any()
    assert changed[1, 0, :, 4:7].all() and changed.sum() == 3 * HEADS


@pytest.mark.parametrize("S", [1, 3])
def test_overflow_raises_and_changes_nothing(S):
    cache = make_cache(max_seq_len=8)
    fill(cache, 8 - S + 1)
    before = cache._storage.clone().view(torch.int32)
    with pytest.raises(ValueError, match=r"9 positions do not fit a KV cache of 8; raise MAX_SEQ_LEN to 9 \(.* MiB\)"):
        cache.append(0, *new_kv(S))
    assert torch.equal(before, cache._storage.view(torch.int32))
    assert cache.cur_pos == 8 - S + 1
    if S > 1:
        fill(cache, S - 1)  # still usable
        assert cache.cur_pos == 8


def test_append_refuses_other_shapes():
    cache = make_cache(batch_size=2)
    with pytest.raises(ValueError, match=r"k and v must be \[2, 3, 1, 8\], got \[1, 3, 1, 8\]"):
        cache.append(0, *new_kv(1, batch_size=1))


def test_update_kv_cache_at_an_int_and_at_device_positions(device):
    k_cache, v_cache = (torch.full((2, HEADS, 10, DIM), float("nan"), device=device) for _ in range(2))
    k, v = new_kv(2, batch_size=2, device=device)
    update_kv_cache(k_cache, v_cache, k, v, torch.tensor([3, 7], dtype=torch.int32, device=device))
    for row, position in enumerate((3, 7)):
        assert torch.equal(k_cache[row, :, position : position + 2], k[row])
        assert torch.equal(v_cache[row, :, position : position + 2], v[row])
    assert int(torch.isfinite(k_cache).all(-1).sum()) == 2 * HEADS * 2
    update_kv_cache(k_cache, v_cache, k, v, 0)
    assert torch.equal(k_cache[:, :, :2], k)
    with pytest.raises(ValueError, match="positions 9 to 10 do not fit a cache of 10 positions"):
        update_kv_cache(k_cache, v_cache, k, v, 9)


def test_sequences_of_differing_lengths_are_written_behind_their_own_end():
    cache = make_cache(batch_size=2)
    fill(cache, 5)
    cache.set_lengths([5, 2])
    k, v = new_kv(1, batch_size=2)
    for layer in range(LAYERS):
        cache.append(layer, k, v)
    cache.advance(1)
    assert torch.equal(cache.k[0, 0, :, 5], k[0, :, 0]) and torch.equal(cache.k[0, 1, :, 2], k[1, :, 0])
    assert cache.lengths.tolist() == [6, 3] and cache.cur_pos == 6
    with pytest.raises(ValueError, match="do not describe"):
        cache.set_lengths([4, 4])


def test_reset_starts_anew_in_the_same_memory():
    cache = make_cache(batch_size=2)
    fill(cache, 7)
    cache.set_lengths([7, 3])
    address = cache.k.data_ptr()
    cache.reset()
    assert cache.cur_pos == 0 and cache.lengths.tolist() == [0, 0] and not cache.ragged
    assert cache.get(0)[0].shape[2] == 0 and cache.k.data_ptr() == address


@pytest.mark.parametrize("positions, message", [(0, "sizes of at least 1"), (10**14, r"GiB, which cpu cannot give")])
def test_a_cache_that_cannot_be_is_refused(positions, message):
    with pytest.raises(ValueError, match=message):
        KVCache(3, 2, 16, positions, dtype=torch.float32, device="cpu")
