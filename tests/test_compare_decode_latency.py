"""Step 4: its rows, its verdict, and that a wrong kernel gets no time."""

import pytest
import torch
from fake_gpu import NAME, run_script

from benchmarks import common
from benchmarks import compare_decode_latency as script

pytest_plugins = ["fake_gpu"]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(script, "SHAPES", script.TINY_SHAPES)


def rows_of(folder):
    return common.load_results(folder / common.slug(NAME) / "compare_decode_latency.json")["rows"]


def test_without_a_gpu_no_times_and_no_file(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(script, "TINY_LENGTHS", [20])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(script.cli, "resolve_device", lambda name: torch.device("cpu"))
    assert run_script(monkeypatch, script, "--results-dir", tmp_path)
    output = capsys.readouterr().out
    assert "times mean nothing" in output and " us" not in output and "GB/s" not in output
    assert list(tmp_path.iterdir()) == []


def test_measured_rows(monkeypatch, fake_gpu, small, capsys):
    assert run_script(monkeypatch, script, "--lengths", "40", "--shapes", "0,1", "--results-dir", fake_gpu)
    rows = rows_of(fake_gpu)
    ours = [row for row in rows if row["case"]["contender"] == script.OURS]
    assert [row["case"]["shape"] for row in ours] == [shape.name for shape in script.TINY_SHAPES]
    for row in ours:
        assert row["status"] == common.PASSED
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["median_ms"] / 1e6, rel=1e-4)
        assert row["input_sets"] * row["bytes"] > 4 * 4096
    assert {"sdpa math", "grouped matmul"} <= {
        row["case"]["contender"] for row in rows if row["status"] == common.PASSED
    }
    assert "Ceiling: memory reads at 100 GB/s" in capsys.readouterr().out


def test_a_wrong_kernel_is_incorrect_untimed_and_fails(monkeypatch, fake_gpu, small):
    right = script.decode_attention
    monkeypatch.setattr(
        script, "decode_attention", lambda q, k, v, n: right(q, k, v, n - 1 if isinstance(n, int) else n)
    )
    assert not run_script(monkeypatch, script, "--lengths", "40", "--shapes", "1", "--results-dir", fake_gpu)
    wrong = [row for row in rows_of(fake_gpu) if row["case"]["contender"] == script.OURS]
    assert [row["status"] for row in wrong] == [common.INCORRECT]
    assert "median_ms" not in wrong[0] and "max error" in wrong[0]["reason"]


def test_out_of_memory_is_a_row(monkeypatch, fake_gpu, small):
    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(script, "make_inputs", no_memory)
    assert run_script(monkeypatch, script, "--lengths", "40", "--shapes", "0", "--results-dir", fake_gpu)
    assert [row["status"] for row in rows_of(fake_gpu)] == [common.OOM]


def test_gain_is_against_the_fastest_other():
    def row(name, ms):
        return {"case": {"contender": name}, "status": common.PASSED, "median_ms": ms, "gb_per_s": 50.0, "bytes": 10**6}

    rows = {
        name: row(name, ms)
        for name, ms in ((script.OURS, 0.02), (script.OURS_ON_DEVICE, 0.01), ("a", 0.03), ("b", 0.05))
    }
    line, gain = script.table_line(128, rows, 100.0)
    assert gain == pytest.approx(1.5)
    assert line[:4] == (128, "10.0", "20.0", "10.0") and line[5:8] == ("50.0", "30.0", "a")
