"""Tokens are counted and timed alike for Hugging Face and for this project, and a wrong decoder gets no time."""

import pytest
import torch

from benchmarks import end_to_end
from kv_cache.kv_layout import KVCache
from model.accuracy import Accuracy
from model.generate import make_decoder
from model.load_model import load_model
from model.phi3_decode import hf_generate
from model.token_check import TokenCheck


@pytest.fixture(scope="module")
def tiny():
    return load_model("random:tiny", dtype=torch.float32)


@pytest.fixture
def prompt(device):
    return torch.arange(3, 12, device=device)[None]


def make_cache(model):
    return KVCache.from_config(model.config, 64, dtype=torch.float32, device=model.device)


def test_first_token_and_the_others_are_timed_apart():
    clock = iter([10.0, 10.5, 10.6, 10.7, 10.9])
    times = end_to_end.TokenTimes(now=lambda: next(clock))
    times.put(torch.zeros(1, 7))  # the prompt
    for token in (5, 6, 7, 8):
        times.put(torch.tensor([token]))
    run = times.run(torch.tensor([[5, 6, 7, 8]]))
    assert run.ttft_ms == pytest.approx(500)
    assert run.ms_per_token == pytest.approx(400 / 3)
    assert run.total_ms == pytest.approx(900)


def test_an_early_stop_is_no_measurement():
    times = end_to_end.TokenTimes()
    times(torch.tensor([1]))
    with pytest.raises(ValueError, match="arrived"):
        times.run(torch.tensor([[1, 2, 3]]))


def test_hf_and_ours_count_the_same_tokens(tiny, prompt):
    hf = end_to_end.run_hf(tiny, prompt, 5)
    ours = end_to_end.run_ours(tiny, prompt, 5, make_cache(tiny), path="prealloc")
    assert len(hf.ids) == len(ours.ids) == 5
    assert torch.equal(hf.ids, ours.ids)
    assert hf.total_ms > hf.ttft_ms > 0 and ours.total_ms > ours.ttft_ms > 0


def test_static_cache_baseline_gives_the_same_tokens(tiny, prompt):
    reference = hf_generate(tiny, prompt, 4)
    try:
        static = hf_generate(tiny, prompt, 4, cache="static")
    except ValueError as error:
        pytest.skip(f"this transformers: {error}")
    assert end_to_end.check_until_parting(tiny, prompt, *reference, *static).ok


def test_check_until_parting_sees_a_difference_that_no_tie_explains(tiny, prompt):
    ids, logits = hf_generate(tiny, prompt, 4)
    other_ids, other_logits = ids.clone(), logits.clone()
    other_ids[0, 2] = (ids[0, 2] + 1) % 512
    other_logits[0, 2] = other_logits[0, 2].roll(1)
    assert not end_to_end.check_until_parting(tiny, prompt, ids, logits, other_ids, other_logits).ok


class SelfFeeding:
    """A decoder with ``run``; with ``fault`` its run gives other tokens than its steps."""

    def __init__(self, model, cache, fault):
        self.inner, self.fault = make_decoder("prealloc", model, cache), fault
        self.step, self.kv_cache, self.captured = self.inner.step, cache, True

    def run(self, tokens, num_steps):
        columns = []
        for _ in range(num_steps):
            tokens = end_to_end.greedy(self.step(tokens))
            columns.append((tokens + self.fault) % 512)
        return torch.stack(columns, dim=1)


@pytest.mark.parametrize("fault", [0, 1])
def test_run_must_agree_with_step(tiny, prompt, fault):
    reference, cache = hf_generate(tiny, prompt, 5), make_cache(tiny)
    found = end_to_end.check_decoder(tiny, prompt, *reference, cache, decoder=lambda: SelfFeeding(tiny, cache, fault))
    assert found.ok == (fault == 0)
    assert found.unexplained == ()


@pytest.mark.parametrize(
    ("relative", "largest", "unexplained", "ok"),
    [
        (1.9, 3.9, (), True),
        (2.1, 1.0, (), False),
        (1.0, 4.1, (), False),
        (1.0, 1.0, (3,), False),
        (float("nan"), 1.0, (), False),
        (1.0, float("nan"), (), False),
    ],
)
def test_gate(relative, largest, unexplained, ok):
    accuracy = Accuracy(False, largest * 1e-3, 1e-3, relative * 1e-4, 1e-4)
    found = TokenCheck(False, 8, None, unexplained, 1e-3, accuracy)
    assert end_to_end.gate(found).ok == ok


def test_a_captured_decoder_is_used_again_and_others_are_not(tiny, monkeypatch):
    cache = make_cache(tiny)
    eager = end_to_end.decoder_source("prealloc", tiny, cache)
    assert eager() is not eager()
    monkeypatch.setattr(end_to_end, "make_decoder", lambda *_: SelfFeeding(tiny, cache, 0))
    captured = end_to_end.decoder_source("graph", tiny, cache)
    assert captured() is captured()


def test_a_wrong_step_is_found(tiny, prompt):
    reference, cache = hf_generate(tiny, prompt, 5), make_cache(tiny)
    decoder = make_decoder("prealloc", tiny, cache)
    step = decoder.step
    decoder.step = lambda tokens: step((tokens + 1) % 512)
    assert not end_to_end.check_decoder(tiny, prompt, *reference, cache, decoder=lambda: decoder).ok
