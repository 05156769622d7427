"""Prefill against SDPA: forward, backward and memory; gradients count as much as the output."""

import time

import pytest

from benchmarks import common, contenders
from benchmarks import prefill_vs_sdpa as script

pytest_plugins = ["tests.fake_gpu"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(script, "SHAPES", script.TINY_SHAPES)
    monkeypatch.setattr(script, "TINY_LENGTHS", [17])


def test_without_a_gpu_no_times_and_no_file(no_gpu, capsys):
    assert no_gpu.run(script)
    output = capsys.readouterr().out
    assert "times mean nothing" in output and " ms" not in output and "TFLOP" not in output
    assert list(no_gpu.folder.iterdir()) == []


def sdpa(q, k, v):
    return contenders.sdpa("math", q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def test_measured_rows(monkeypatch, fake_gpu):
    monkeypatch.setattr(script, "flash_attention", sdpa)
    assert fake_gpu.run(script, "--lengths", 17, "--samples", 3, "--shapes", 0)
    rows = fake_gpu.rows("prefill_vs_sdpa")
    for direction, factor in (("forward", 1), ("backward", 2.5)):
        (ours,) = (row for row in rows if row["case"]["contender"] == script.OURS and row["case"]["pass"] == direction)
        assert ours["status"] == common.PASSED
        flops = 4 * 2 * 4 * 17 * 17 * 16 / 2 * factor
        assert ours["tflop_per_s"] == pytest.approx(flops / ours["median_ms"] / 1e9, rel=1e-4)
        assert len(ours["samples_ms"]) == 3
    assert {row["status"] for row in rows} <= {common.PASSED, common.SKIPPED}


def test_wrong_gradients_alone_are_incorrect(monkeypatch, fake_gpu):
    def wrong_gradient(q, k, v):
        return sdpa(q, k, v) + (k - k.detach()).sum()  # adds zero, and 1 to every gradient of k

    monkeypatch.setattr(script, "flash_attention", wrong_gradient)
    assert not fake_gpu.run(script, "--lengths", 17, "--samples", 2, "--shapes", 1)
    ours = [row for row in fake_gpu.rows("prefill_vs_sdpa") if row["case"]["contender"] == script.OURS]
    assert [row["status"] for row in ours] == [common.INCORRECT, common.INCORRECT]
    assert all("median_ms" not in row and "dk" in row["reason"] and "out" not in row["reason"] for row in ours)


def test_slow_contenders_get_fewer_samples(monkeypatch):
    monkeypatch.setattr(common, "EventClock", lambda: common.WallClock("cpu"))
    monkeypatch.setattr(script, "SLOW_MS", 5)
    timings = script.measure({"fast": lambda: None, "slow": lambda: time.sleep(0.01)}, samples=8)
    assert len(timings["fast"].samples_ms) == 8
    assert len(timings["slow"].samples_ms) == script.SLOW_SAMPLES
