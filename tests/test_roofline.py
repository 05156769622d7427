"""The floor by hand for two cards, and which models they hold."""

import argparse

import pytest

from benchmarks import roofline
from benchmarks.roofline import GPUS, floors, table_lines

pytest_plugins = ["tests.fake_gpu"]


def one(gpu_name, model, contexts=(128,)):
    (gpu,) = (gpu for gpu in GPUS if gpu_name in gpu.name)
    return floors([gpu], [f"random:{model}"], list(contexts))[0]


def test_phi3_mini_on_an_rtx_4060_does_not_fit():
    found = one("4060", "phi-3-mini-4k")
    assert found.weight_bytes == pytest.approx(7.642e9, rel=1e-3)
    assert found.fits == [False]
    assert found.needed_bytes[0] > 8 * 2**30 > found.weight_bytes  # it is the reserve that is missing
    assert found.floors_ms[0] == pytest.approx((7.445e9 + 128 * 393216) / 272e9 * 1e3, rel=1e-3)


def test_phi3_mini_on_an_h200():
    found = one("H200", "phi-3-mini-128k", (128, 2048))
    assert found.fits == [True, True]
    assert found.floors_ms == pytest.approx([7.495e9 / 4.8e9, 8.250e9 / 4.8e9], rel=2e-3)


def test_long_contexts_can_outgrow_a_card():
    assert one("L4", "phi-3-mini-128k", (128, 65536)).fits == [True, False]


def test_lines_mark_what_does_not_fit():
    (line,) = table_lines([one("L4", "phi-3-mini-128k", (128, 65536))])
    assert not line[5].startswith("(") and line[6].startswith("(") and line[7] == "40"
    (line,) = table_lines([one("4060", "phi-3-medium-4k")])
    assert line[5].startswith("(") and line[-1] == "does not fit"


def test_a_checkpoints_own_config_is_read():
    assert roofline.shape_of("random:phi-3-mini-4k").hidden_size == 3072
    assert roofline.shape_of("phi-3-mini-4k") == roofline.shape_of("random:phi-3-mini-4k")
    with pytest.raises(ValueError, match="nowhere"):
        roofline.shape_of("checkpoints/nowhere")
    with pytest.raises(ValueError, match="no preset"):
        roofline.shape_of("random:nonsense")


def test_ones_own_gpu(monkeypatch, no_gpu, capsys):
    flags = ["--models", "phi-3-mini-4k", "--contexts", "128", "--gpu", "Mine=272", "--gpu", "Mine too=544,8"]
    monkeypatch.setattr("sys.argv", ["roofline", *flags])
    assert roofline.main()
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[1:] == ["Mine", "272", "7.64", "8.1", "27.56", "36"] for line in lines)
    assert "Mine: 272 GB/s, memory not given. Source: --gpu" in lines
    assert any("Mine too" in line and "(13.78)" in line and "does not fit" in line for line in lines)


@pytest.mark.parametrize("text", ["Mine", "=272", "Mine=fast", "Mine=0", "Mine=-1", "Mine=272,8,1", "Mine=nan"])
def test_a_gpu_that_is_none(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected NAME=GB/s"):
        roofline.own_gpu(text)


def test_every_gpu_names_its_source_and_bandwidths_ascend():
    assert all(gpu.source for gpu in GPUS)
    bandwidths = [gpu.bandwidth_gb_per_s for gpu in GPUS]
    assert bandwidths == sorted(bandwidths)


def test_script_runs_without_a_gpu(monkeypatch, no_gpu, capsys):
    monkeypatch.setattr("sys.argv", ["roofline"])
    assert roofline.main()
    output = capsys.readouterr().out
    assert "H200" in output and "Source: NVIDIA L4" in output
