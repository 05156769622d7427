"""Plots are drawn from what passed, at the size that a README shows; legibility was judged by eye."""

import struct

import pytest

from benchmarks import common, plots
from profiling.digest import GROUPS
from tests.result_files import GPU, pretend_gpu, timing, write_ladder

pytest.importorskip("matplotlib")


@pytest.fixture(autouse=True)
def passport(monkeypatch):
    pretend_gpu(monkeypatch)


def size_of(picture):
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


PREFILL_RATES = {
    ("forward", "causal"): 400.0,
    ("forward", "full"): 450.0,
    ("backward", "causal"): 300.0,
    ("backward", "full"): 350.0,
}


def write_all(folder):
    write_ladder(folder, {"0": 30.0, "0s": 6.0, "1": 20.0, "2": None, "3": 21.0})
    decode = common.Results("compare_decode_latency", {}, "by hand")
    decode.numbers["bandwidth_gb_per_s"] = 1000.0
    prefill = common.Results("prefill_vs_sdpa", {}, "by hand")
    for contender in ("triton", "sdpa cudnn", "sdpa cudnn gqa"):
        for length in (128, 1024):
            decode.add(
                {"shape": "a", "cache_len": length, "contender": contender}, timing=timing(length / 1e5), bytes=10**6
            )
            for direction, mask in PREFILL_RATES:
                case = {"shape": "a", "mask": mask, "seq_len": length, "pass": direction, "contender": contender}
                prefill.add(case, timing=timing(1.0), tflop_per_s=PREFILL_RATES[direction, mask])
    decode.write_as(GPU, folder)
    prefill.write_as(GPU, folder)
    profile = common.Results("decode_profile", {"model_path": "random:tiny"}, "by hand")
    groups = dict.fromkeys(GROUPS, 1.0)
    profile.add({"path": "hf", "context": 128}, timing=timing(30.0), gpu_busy_ms=8.0, groups_ms=groups)
    profile.write_as(GPU, folder)


def test_every_plot_is_drawn_at_twice_a_readmes_width(tmp_path):
    write_all(tmp_path)
    pictures = plots.draw_all(tmp_path)
    assert [picture.stem for picture in pictures] == list(plots.PLOTS)
    for picture in pictures:
        assert picture.parent == tmp_path / "fake-gpu-9000"
        width, height = size_of(picture)
        assert width == 1660 and 400 < height < 2500


def test_prefill_has_a_panel_per_pass_and_mask(monkeypatch, tmp_path):
    write_all(tmp_path)
    monkeypatch.setattr(plots, "finish", lambda figure, *_: figure)
    content = common.load_results(tmp_path / "fake-gpu-9000" / "prefill_vs_sdpa.json")
    figure = plots.draw_prefill(content, tmp_path / "unused.png")
    drawn = {
        axes.get_title(): {line.get_label(): list(line.get_ydata()) for line in axes.lines} for axes in figure.axes
    }
    plots.pyplot().close(figure)
    assert drawn == {
        f"{direction}, {mask}": {"triton": [rate] * 2, "SDPA cudnn": [rate] * 2}
        for (direction, mask), rate in PREFILL_RATES.items()
    }


def test_nothing_to_draw_draws_nothing(tmp_path):
    write_ladder(tmp_path, {"0": None, "1": None})
    assert plots.draw_all(tmp_path) == []


def test_each_backend_counts_in_its_best_form():
    def row(name, length, ms):
        return {"case": {"contender": name, "cache_len": length}, "median_ms": ms}

    rows = [row("sdpa cudnn", 1, 3.0), row("sdpa cudnn gqa", 1, 2.0), row("sdpa cudnn", 2, 4.0), row("triton", 1, 1.0)]
    assert plots.best_by(rows, "cache_len", "median_ms", min) == {"cudnn": {1: 2.0, 2: 4.0}, "triton": {1: 1.0}}
