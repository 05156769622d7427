"""Decode against eager PyTorch: the same work for all, cache update included."""

import pytest
import torch

import config
from benchmarks import common
from benchmarks import decode_vs_eager as script

pytest_plugins = ["tests.fake_gpu"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in {"NUM_HEADS": 4, "NUM_KV_HEADS": 2, "HEAD_DIM": 16, "TINY_LENGTHS": [20], "SPARE": 8}.items():
        monkeypatch.setattr(script, name, value)


def test_contenders_append_and_leave_the_rest_alone(device):
    dtype = torch.float32
    for name in ("triton", "eager slice", "grouped matmul", "sdpa"):
        step = script.make_step(20, dtype, device)
        before = step.k_cache.clone()
        script.CONTENDERS[name](step)
        assert torch.equal(step.k_cache[:, :, 19:20], step.k_new)
        before[:, :, 19] = step.k_cache[:, :, 19]
        assert torch.equal(step.k_cache, before)
    assert all(found.ok for found in script.check_all(script.make_step(20, dtype, device)).values())


def test_without_a_gpu_no_times_and_no_file(no_gpu, capsys):
    assert no_gpu.run(script)
    output = capsys.readouterr().out
    assert "times mean nothing" in output and " us" not in output
    assert list(no_gpu.folder.iterdir()) == []


def test_measured_rows(monkeypatch, fake_gpu):
    monkeypatch.setitem(script.CONTENDERS, script.OURS, script.CONTENDERS["grouped matmul"])
    assert fake_gpu.run(script, "--lengths", "20,33", "--samples", "2")
    rows = fake_gpu.rows("decode_vs_eager")
    assert [row["status"] for row in rows] == [common.PASSED] * 10
    assert all(row["peak_memory_bytes"] == 1000 and row["call_median_ms"] > 0 for row in rows)


def test_config_says_how_often(monkeypatch, fake_gpu):
    monkeypatch.setattr(config, "WARMUP", 7)
    monkeypatch.setattr(config, "ITERATIONS", 9)
    assert fake_gpu.how_often(script, "--lengths", "20") == [(7, 9)]
    assert fake_gpu.how_often(script, "--lengths", "20", "--warmup", "1", "--samples", "2") == [(1, 2)]


def test_a_wrong_kernel_fails(monkeypatch, fake_gpu):
    monkeypatch.setitem(script.CONTENDERS, script.OURS, lambda step: step.q)
    assert not fake_gpu.run(script, "--lengths", "20")
