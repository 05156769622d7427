"""Step 4: its rows, its verdict, and that a wrong kernel gets no time."""

import pytest
import torch

import config
from benchmarks import common, contenders
from benchmarks import compare_decode_latency as script

pytest_plugins = ["tests.fake_gpu"]


@pytest.fixture
def small(monkeypatch):
    """Small shapes, and PyTorch in the kernel's place: what is tested here is the script."""
    monkeypatch.setattr(script, "SHAPES", script.TINY_SHAPES)
    monkeypatch.setattr(script, "decode_attention", stand_in)


def stand_in(q, k, v, length):
    return contenders.grouped_matmul_decode(q, k[:, :, : int(length)], v[:, :, : int(length)])


def test_without_a_gpu_no_times_and_no_file(monkeypatch, no_gpu, capsys):
    monkeypatch.setattr(script, "TINY_LENGTHS", [20])
    monkeypatch.setattr(script, "TINY_SHAPES", script.TINY_SHAPES[1:])
    assert no_gpu.run(script)
    output = capsys.readouterr().out
    assert "times mean nothing" in output and " us" not in output and "GB/s" not in output
    assert list(no_gpu.folder.iterdir()) == []


def test_measured_rows(monkeypatch, fake_gpu, small, capsys):
    assert fake_gpu.run(script, "--lengths", "40", "--shapes", "0,1")
    rows = fake_gpu.rows("compare_decode_latency")
    ours = [row for row in rows if row["case"]["contender"] == script.OURS]
    assert [row["case"]["shape"] for row in ours] == [shape.name for shape in script.TINY_SHAPES]
    for row in ours:
        assert row["status"] == common.PASSED
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["median_ms"] / 1e6, rel=1e-4)
        assert row["input_sets"] * row["bytes"] > 4 * 4096
    reads = [row for row in rows if row["case"]["contender"] == script.READ]
    assert [row["status"] for row in reads] == [common.PASSED] * 2 and "max_error" not in reads[0]
    assert {"sdpa math", "grouped matmul", "reference"} <= {
        row["case"]["contender"] for row in rows if row["status"] == common.PASSED
    }
    assert "Ceiling: memory reads at 100 GB/s" in capsys.readouterr().out


def test_a_wrong_kernel_is_incorrect_untimed_and_fails(monkeypatch, fake_gpu, small):
    monkeypatch.setattr(
        script, "decode_attention", lambda q, k, v, n: stand_in(q, k, v, n - 1 if isinstance(n, int) else n)
    )
    assert not fake_gpu.run(script, "--lengths", "40", "--shapes", "1")
    wrong = [row for row in fake_gpu.rows("compare_decode_latency") if row["case"]["contender"] == script.OURS]
    assert [row["status"] for row in wrong] == [common.INCORRECT]
    assert "median_ms" not in wrong[0] and "max error" in wrong[0]["reason"]


def test_out_of_memory_is_a_row(monkeypatch, fake_gpu, small):
    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(script, "make_inputs", no_memory)
    assert fake_gpu.run(script, "--lengths", "40", "--shapes", "0")
    assert [row["status"] for row in fake_gpu.rows("compare_decode_latency")] == [common.OOM]


def test_a_plain_read_that_skips_something_is_refused(monkeypatch, fake_gpu):
    caches = torch.randn(3, 200, dtype=torch.float16)
    assert len(script.plain_reads(caches)) == 3
    whole = common.read_sum
    monkeypatch.setattr(
        common, "read_sum", lambda source, out, *args, **options: whole(source * 0, out, *args, **options)
    )
    with pytest.raises(RuntimeError, match="reads something else"):
        script.plain_reads(caches)


def test_gain_is_against_the_fastest_other_and_an_impossible_rate_gains_nothing():
    def row(name, ms, share=0.5):
        case = {"contender": name}
        return {
            "case": case, "status": common.PASSED, "median_ms": ms, "gb_per_s": 100 * share, "share": share,
            "bytes": 10**6,
        }  # fmt: skip

    rows = {
        row["case"]["contender"]: row
        for row in (row("a", 0.03), row("b", 0.05), row(script.READ, 0.015), row(script.OURS_ON_DEVICE, 0.01))
    }
    rows[script.OURS] = row(script.OURS, 0.02)
    line, gain = script.table_line(128, rows, 100.0)
    assert gain == pytest.approx(1.5)
    assert line[:5] == (128, "10.0", "15.0", "20.0", "10.0") and line[6:9] == ("50.0", "30.0", "a")
    rows[script.OURS] = row(script.OURS, 0.02, share=1.2)
    line, gain = script.table_line(128, rows, 100.0)
    assert gain is None and line[6] == "120 (cache)" and line[-1] == "-"


def test_config_says_how_often(monkeypatch, fake_gpu, small):
    monkeypatch.setattr(config, "WARMUP", 7)
    monkeypatch.setattr(config, "ITERATIONS", 9)
    assert fake_gpu.how_often(script, "--lengths", "20", "--shapes", "1") == [(7, 9)]
    assert fake_gpu.how_often(script, "--lengths", "20", "--shapes", "1", "--warmup", "1", "--samples", "2") == [(1, 2)]


@pytest.mark.gpu
def test_a_short_run_on_the_gpu(real_gpu):
    assert real_gpu.run(script, "--lengths", "512", "--shapes", "1", "--samples", "3")
    content = real_gpu.content("compare_decode_latency")
    ours = [row for row in content["rows"] if script.is_ours(row["case"]["contender"])]
    assert [row["status"] for row in ours] == [common.PASSED] * 2
    assert all(0 < row["share"] <= common.IMPOSSIBLE_SHARE for row in ours)
    assert content["environment"]["driver"] != "unknown"
