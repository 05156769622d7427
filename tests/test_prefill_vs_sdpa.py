"""Prefill against SDPA: forward, backward and memory; gradients count as much as the output."""

import pytest
import torch

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


def sdpa(q, k, v, *, causal):
    return contenders.sdpa("math", q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def deaf_to(mask):
    """A kernel that computes the other mask instead of ``mask``."""
    return lambda q, k, v, *, causal: sdpa(q, k, v, causal=mask == "full")


@pytest.mark.parametrize("mask", script.MASKS)
def test_without_a_gpu_both_masks_are_checked(monkeypatch, no_gpu, mask):
    monkeypatch.setattr(script, "flash_attention", deaf_to(mask))
    assert not no_gpu.run(script)


def test_measured_rows(monkeypatch, fake_gpu):
    monkeypatch.setattr(script, "flash_attention", sdpa)
    assert fake_gpu.run(script, "--lengths", 17, "--samples", 3, "--shapes", 0)
    rows = {tuple(row["case"].values()): row for row in fake_gpu.rows("prefill_vs_sdpa")}
    factors = {
        ("causal", "forward"): 0.5, ("causal", "backward"): 1.25, ("full", "forward"): 1, ("full", "backward"): 2.5,
    }  # fmt: skip
    for (mask, direction), factor in factors.items():
        ours = rows[script.TINY_SHAPES[0].name, mask, 17, direction, script.OURS]
        assert ours["status"] == common.PASSED
        flops = 4 * 2 * 4 * 17 * 17 * 16 * factor
        assert ours["tflop_per_s"] == pytest.approx(flops / ours["median_ms"] / 1e9, rel=1e-4)
        assert len(ours["samples_ms"]) == 3
        assert rows[script.TINY_SHAPES[0].name, mask, 17, direction, "sdpa flash"]["status"] == common.PASSED
    assert {row["status"] for row in rows.values()} <= {common.PASSED, common.SKIPPED}


@pytest.mark.parametrize("mask", script.MASKS)
def test_the_wrong_mask_is_incorrect(monkeypatch, fake_gpu, mask):
    monkeypatch.setattr(script, "flash_attention", deaf_to(mask))
    assert not fake_gpu.run(script, "--lengths", 17, "--samples", 2, "--shapes", 1)
    ours = [row for row in fake_gpu.rows("prefill_vs_sdpa") if row["case"]["contender"] == script.OURS]
    assert {row["case"]["mask"] for row in ours if row["status"] == common.INCORRECT} == {mask}
    assert {row["case"]["mask"] for row in ours if row["status"] == common.PASSED} == set(script.MASKS) - {mask}


def test_wrong_gradients_alone_are_incorrect(monkeypatch, fake_gpu):
    def wrong_gradient(q, k, v, *, causal):
        return sdpa(q, k, v, causal=causal) + (k - k.detach()).sum()  # adds zero, and 1 to every gradient of k

    monkeypatch.setattr(script, "flash_attention", wrong_gradient)
    assert not fake_gpu.run(script, "--lengths", 17, "--samples", 2, "--shapes", 1)
    ours = [row for row in fake_gpu.rows("prefill_vs_sdpa") if row["case"]["contender"] == script.OURS]
    assert [row["status"] for row in ours] == [common.INCORRECT] * 4
    assert all("median_ms" not in row and "dk" in row["reason"] and "out" not in row["reason"] for row in ours)


def test_a_length_that_does_not_fit_is_out_of_memory_both_ways(monkeypatch, fake_gpu, capsys):
    def too_long(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(script, "measure_length", too_long)
    assert fake_gpu.run(script, "--lengths", 17, "--shapes", 0)
    rows = fake_gpu.rows("prefill_vs_sdpa")
    assert [(row["status"], row["case"]["mask"], row["case"]["pass"]) for row in rows] == [
        (common.OOM, mask, direction) for mask in script.MASKS for direction in script.PASSES
    ]
    assert "forward unknown, backward unknown; over its FlashAttention" in capsys.readouterr().out


def test_gains_over_the_best_and_over_flash_in_its_better_form():
    def row(contender, ms):
        status = common.SKIPPED if ms is None else common.PASSED
        numbers = {"median_ms": ms, "std_ms": 0.1, "tflop_per_s": 100.0, "peak_memory_bytes": 10**6}
        return {"case": {"contender": contender}, "status": status, **numbers}

    def line(**times):
        rows = {("forward", name.replace("_", " ")): row(name.replace("_", " "), ms) for name, ms in times.items()}
        rows["backward", "sdpa flash"] = row("sdpa flash", 0.1)
        return script.table_line(64, "forward", rows)

    cells, gains = line(triton=2.0, sdpa_cudnn=1.0, sdpa_flash=4.0, sdpa_flash_repeated=3.0, sdpa_efficient=None)
    assert gains == [0.5, 1.5]
    assert cells[6:8] == ("sdpa cudnn", "1.000") and cells[-2:] == ("0.50x", "1.50x")
    cells, gains = line(triton=2.0, sdpa_efficient=3.0, sdpa_flash=None)
    assert gains == [1.5, None] and cells[-2:] == ("1.50x", "-")
    cells, gains = line(triton=None, sdpa_flash=3.0)
    assert gains == [None, None] and cells[2] == common.SKIPPED and cells[6] == "sdpa flash"
    cells, gains = line(triton=2.0)
    assert gains == [None, None] and len(cells) == len(script.COLUMNS)
