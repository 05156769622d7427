"""Step 7: named ranges for every stage on every path, rows that add up, and no profile of a wrong path."""

import functools

import pytest
import torch
import torch.nn.functional as F

from benchmarks import common, end_to_end
from kv_cache.kv_layout import KVCache
from model.load_model import load_model
from profiling import decode_profile as script
from profiling.digest import GROUPS, STAGES, read_trace
from profiling.tracing import trace_events

pytest_plugins = ["tests.fake_gpu"]

SMALL = ("--steps", "2", "--runs", "2", "--prompt-tokens", "9", "--model-path", "random:tiny")


@pytest.fixture(scope="module")
def tiny():
    return load_model("random:tiny", dtype=torch.float32)


def start(path, model, steps):
    return script.prepare(path, model, torch.arange(3, 12, device=model.device)[None], steps)()


@pytest.mark.parametrize("path", ["hf", "cat", "prealloc", "triton"])
def test_every_stage_of_every_layer_has_a_range(tiny, path, tmp_path):
    decoder, token = start(path, tiny, 2)
    with script.named_ranges(tiny):
        kept = tmp_path / "x.pt.trace.json.gz"
        events = trace_events(functools.partial(end_to_end.decode_steps, decoder, token, 2), ranges=True, path=kept)
    names = [e["name"] for e in events if e.get("cat") == "user_annotation"]
    for layer in range(tiny.config.num_hidden_layers):
        for stage in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
            assert names.count(f"layer {layer}: {stage}") == 2  # one per step
        assert names.count(f"layer {layer}: norm") == 4
    assert names.count("lm_head") == 2
    assert names.count("decode step 0") == names.count("decode step 1") == 1
    expected = {"rope", "cache"}
    if path != "hf" or tiny.config._attn_implementation == "sdpa":  # old transformers have only eager for Phi-3
        expected.add("attention")
    assert expected <= set(names)
    assert len(read_trace(kept)) == len(events)


def test_ranges_are_gone_afterwards(tiny):
    with script.named_ranges(tiny):
        pass
    decoder, token = start("prealloc", tiny, 1)
    events = trace_events(functools.partial(end_to_end.decode_steps, decoder, token, 1), ranges=True)
    names = {e["name"].rsplit(": ", 1)[-1] for e in events if e.get("cat") == "user_annotation"}
    assert not names & STAGES.keys()


def test_without_a_gpu_no_times_and_no_file(no_gpu, capsys):
    assert no_gpu.run(script, "--path", "hf", "prealloc", "graph")
    output = capsys.readouterr().out
    assert "times mean nothing" in output and " ms" not in output
    assert list(no_gpu.folder.iterdir()) == []


def test_rows(monkeypatch, fake_gpu, capsys):
    def recorded(function, **_):
        function()
        names = ["gemm_a", "_decode_attention_kernel", "gemm_b", "gemm_c", "gemm_d"] * 3 + ["gemm_head"]
        return [
            {"cat": "kernel", "name": name, "ts": 10.0 * i, "dur": 1.0, "args": {}} for i, name in enumerate(names * 2)
        ] + [{"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 1, "tid": 1, "args": {}}] * 32

    monkeypatch.setattr(script, "trace_events", recorded)
    assert fake_gpu.run(script, *SMALL, "--path", "hf", "prealloc", "graph")
    hf, ours, graph = fake_gpu.rows("decode_profile")
    assert graph["status"] == common.SKIPPED
    for row in (hf, ours):
        assert sum(row["groups_ms"].values()) == pytest.approx(row["gpu_busy_ms"], rel=1e-4)
        assert set(row["groups_ms"]) == set(GROUPS)
        assert row["groups_ms"] == pytest.approx(
            dict.fromkeys(GROUPS, 0.0)
            | {"attention": 0.003, "QKV and O projections": 0.006, "MLP": 0.006, "LM head": 0.001}
        )
        assert (row["kernels_per_token"], row["launches_per_token"]) == (16, 16)
        assert row["verdict"] == "launch-bound"
    assert "launch-bound: the GPU waits for the host" in capsys.readouterr().out


def test_all_times_come_first_without_ranges_and_over_the_same_lengths(monkeypatch, fake_gpu):
    """A profiler or a range would slow the host, and SDPA may plan anew for each length that it has not seen."""
    events, lengths = [], []
    plain, record, sdpa = KVCache.append, common.WallClock.record, F.scaled_dot_product_attention

    def timed(self, function):
        assert KVCache.append is plain
        lengths.clear()
        read = record(self, function)
        events.append(("time", *lengths))
        return read

    def noted(q, k, *args, **kwargs):
        lengths.append(k.shape[2])
        return sdpa(q, k, *args, **kwargs)

    def traced(function, **_):
        assert KVCache.append is not plain
        lengths.clear()
        function()
        events.append(("trace", *lengths))
        return [{"cat": "kernel", "name": "gemm", "ts": 0.0, "dur": 1.0, "args": {}}]

    monkeypatch.setattr(common.WallClock, "record", timed)
    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(script, "trace_events", traced)
    assert fake_gpu.run(script, *SMALL, "--path", "cat", "prealloc")
    # Two paths, a first pass and two runs each; nine tokens of prompt, one step, then two steps in each of the layers.
    assert events == [("time", *[11] * 3, *[12] * 3)] * 6 + [("trace", *[11] * 3, *[12] * 3)] * 2
    for row in fake_gpu.rows("decode_profile"):
        assert len(row["samples_ms"]) == 2 and row["first_call_ms"] not in row["samples_ms"]


def test_a_wrong_path_gets_no_profile(monkeypatch, fake_gpu):
    check = end_to_end.check_decoder
    monkeypatch.setattr(end_to_end, "check_decoder", lambda *a, **k: check(*a, **k)._replace(ok=False))
    assert not fake_gpu.run(script, *SMALL, "--path", "prealloc")
    (row,) = fake_gpu.rows("decode_profile")
    assert row["status"] == common.INCORRECT and "groups_ms" not in row


@pytest.mark.gpu
def test_a_captured_graph_is_few_launches_and_many_kernels(real_gpu):
    assert real_gpu.run(script, *SMALL, "--path", "hf", "graph")
    hf, graph = real_gpu.rows("decode_profile")
    for row in (hf, graph):
        assert row["status"] == common.PASSED
        assert 0 < row["gpu_busy_ms"] == pytest.approx(sum(row["groups_ms"].values()), rel=1e-4)
        for group in ("attention", "QKV and O projections", "MLP", "LM head"):
            assert row["groups_ms"][group] > 0
    assert hf["launches_per_token"] >= hf["kernels_per_token"] * 0.9
    assert graph["launches_per_token"] < 0.3 * graph["kernels_per_token"]
