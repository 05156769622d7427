"""The captured step: one graph for every position, reset and reuse, several models, and what it refuses."""

import pytest
import torch

from kv_cache.kv_layout import KVCache
from model.generate import generate, make_decoder
from model.phi3_decode_graph import GraphDecoder
from model.phi3_decode_triton import decode_step
from model.phi3_prefill import prefill
from tests.tiny import longrope_model, prompt, recomputed_generation, tiny_model

PATHS = ("graph", "fused")


def cache_for(model, length, batch_size=1):
    weight = model.lm_head.weight
    cache = KVCache.from_config(
        model.config, length, batch_size=batch_size, dtype=weight.dtype, device=weight.device
    )  # fmt: skip
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    return cache


def test_without_cuda_the_graph_path_is_refused():
    model = tiny_model(device="cpu")
    with pytest.raises(ValueError, match=r'path "graph" needs a CUDA device, the cache is on cpu; use path="triton"'):
        make_decoder("graph", model, cache_for(model, 8))


@pytest.mark.gpu
def test_replays_equal_eager_steps():
    """Captured at position 10, replayed 50 times: logits of eager steps, slots 10 to 59 written, none behind."""
    model = tiny_model(device="cuda")
    ids = prompt(10).cuda()
    eager, captured = cache_for(model, 80), cache_for(model, 80)
    for cache in (eager, captured):
        prefill(model, ids, cache)
    decoder = GraphDecoder(model, captured)
    token = torch.tensor([7], device="cuda")
    for _ in range(50):
        expected = decode_step(model, token, eager)
        assert torch.allclose(decoder.step(token), expected, atol=1e-5)
        token = expected.argmax(dim=-1)
    assert captured.cur_pos == captured.lengths.item() == 60
    assert torch.isfinite(captured.k[..., :60, :]).all() and torch.isnan(captured.k[..., 60:, :]).all()


@pytest.mark.gpu
def test_a_graph_owns_its_cublas_workspace():
    """torch.compile frees PyTorch's cuBLAS workspaces when it captures: a replay must not write where they were."""
    model = tiny_model(
        device="cuda", dtype=torch.float16, hidden_size=3072, intermediate_size=8192, num_attention_heads=32,
        num_key_value_heads=32, num_hidden_layers=2, initializer_range=0.02,
    )  # fmt: skip
    decoder = GraphDecoder(model, cache_for(model, 64))

    def run():
        decoder.kv_cache.reset()
        prefill(model, prompt(20), decoder.kv_cache)
        return decoder.run(torch.tensor([7], device="cuda"), 30)

    expected = run()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    others = [torch.full((size,), float("nan"), device="cuda") for size in (2**20, 2**21, 2**22, 2**23)]
    assert torch.equal(run(), expected)
    assert all(bool(other.isnan().all()) for other in others)


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
def test_generation_equals_recomputation(path):
    model = tiny_model(device="cuda", sliding_window=11)
    ids = prompt(9).cuda()
    expected, _ = recomputed_generation(model, ids, 40)
    assert torch.equal(generate(model, ids, 40, path=path, eos_token_ids=()), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("length", [10, 15, 16, 17])
def test_longropes_border(path, length):
    model = longrope_model(device="cuda")
    ids = prompt(length).cuda()
    expected, _ = recomputed_generation(model, ids, 14)
    assert torch.equal(generate(model, ids, 14, path=path, eos_token_ids=()), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
def test_capture_leaves_cache_and_lengths_alone(path):
    model = tiny_model(device="cuda")
    cache = cache_for(model, 16)
    prefill(model, prompt(5).cuda(), cache)
    before = cache.k.clone()
    decoder = make_decoder(path, model, cache)
    decoder._graph()
    torch.cuda.synchronize()
    assert cache.lengths.item() == cache.cur_pos == 5
    # Row 5 belongs to the step that comes next.
    before[..., 5, :], cache.k[..., 5, :] = 0, 0
    assert torch.equal(cache.k.nan_to_num(7), before.nan_to_num(7))


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
def test_the_graph_survives_a_reset(path):
    model = tiny_model(device="cuda")
    a, b = prompt(20, seed=1).cuda(), prompt(6, seed=2).cuda()
    cache = cache_for(model, 64)
    decoder = make_decoder(path, model, cache)
    fresh = generate(model, b, 10, kv_cache=cache, decoder=decoder, eos_token_ids=())
    graphs = dict(decoder._graphs)
    cache.reset()
    generate(model, a, 40, kv_cache=cache, decoder=decoder, eos_token_ids=())
    cache.reset()
    cache.k[..., 6:, :], cache.v[..., 6:, :] = float("nan"), float("nan")
    assert torch.equal(generate(model, b, 10, kv_cache=cache, decoder=decoder, eos_token_ids=()), fresh)
    assert decoder._graphs == graphs and len(graphs) == 1, "one capture serves every position"


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
def test_two_models_alive_at_once(path):
    models = [tiny_model(device="cuda"), tiny_model(device="cuda", num_attention_heads=8, hidden_size=128)]
    ids = prompt(9).cuda()
    alone = [generate(model, ids, 20, path=path, eos_token_ids=()) for model in models]
    caches = [cache_for(model, 32) for model in models]
    decoders = [make_decoder(path, model, cache) for model, cache in zip(models, caches, strict=True)]
    tokens = [[prefill(model, ids, cache).argmax(-1)] for model, cache in zip(models, caches, strict=True)]
    for _ in range(19):
        for decoder, chosen in zip(decoders, tokens, strict=True):
            chosen.append(decoder.step(chosen[-1]).argmax(-1))
    for expected, chosen in zip(alone, tokens, strict=True):
        assert torch.equal(torch.stack(chosen, dim=1), expected)


@pytest.mark.gpu
def test_batch_with_padding():
    model = tiny_model(device="cuda")
    lengths = [15, 9, 1]
    ids, mask = torch.zeros(3, 15, dtype=torch.long), torch.zeros(3, 15, dtype=torch.long)
    expected = []
    for row, n in enumerate(lengths):
        p = prompt(n, seed=n)
        ids[row, 15 - n :], mask[row, 15 - n :] = p[0], 1
        expected.append(recomputed_generation(model, p.cuda(), 12)[0][0])
    out = generate(model, ids.cuda(), 12, path="graph", attention_mask=mask.cuda(), eos_token_ids=())
    assert torch.equal(out, torch.stack(expected))


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
def test_run_does_not_wait_for_the_gpu(path):
    model = tiny_model(device="cuda")
    cache = cache_for(model, 64)
    prefill(model, prompt(5).cuda(), cache)
    decoder = make_decoder(path, model, cache)
    token = torch.tensor([7], device="cuda")
    decoder.run(token, 2)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.current_stream()):
        torch.cuda._sleep(2_000_000_000)
        ids = decoder.run(token, 8)
        event = torch.cuda.Event()
        event.record()
    assert not event.query(), "the steps were queued behind a second of sleep"
    assert ids.shape == (1, 8) and bool((ids < 96).all())


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
def test_a_capture_around_the_capture_is_refused(path):
    model = tiny_model(device="cuda")
    cache = cache_for(model, 16)
    prefill(model, prompt(5).cuda(), cache)
    decoder = make_decoder(path, model, cache)
    token = torch.tensor([7], device="cuda")
    with pytest.raises(RuntimeError, match="call it once before capturing"):  # noqa: SIM117
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            decoder.step(token)


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
def test_a_whole_cache_of_a_thousand_tokens(path):
    """Every position from the prompt to the last slot, float32 tokens equal to a pass without a cache."""
    model = tiny_model(device="cuda", num_hidden_layers=2, max_position_embeddings=2048)
    ids = prompt(5).cuda()
    cache = cache_for(model, 1004)
    tokens = generate(model, ids, 1000, path=path, kv_cache=cache, eos_token_ids=())
    assert cache.cur_pos == cache.lengths.item() == 1004
    whole = torch.cat((ids, tokens.cuda()), dim=1)
    logits = model(whole[:, :-1], use_cache=False).logits[:, 4:]
    top = logits.topk(2, dim=-1)
    differs = top.indices[..., 0] != tokens.cuda()
    assert not bool((differs & (top.values[..., 0] - top.values[..., 1] > 1e-3)).any())
