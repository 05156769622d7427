"""Steps 5 and 6: the same prompt, count and clock; a wrong contender gets no time."""

import pytest
import torch

from benchmarks import baseline_latency, common, end_to_end, generate_latency

pytest_plugins = ["tests.fake_gpu"]

SMALL = ("--new-tokens", "4", "--prompt-tokens", "9", "--runs", "2", "--model-path", "random:tiny")


@pytest.mark.parametrize(
    ("script", "flags"), [(baseline_latency, ()), (generate_latency, ("--paths", "triton", "graph"))], ids=["5", "6"]
)
def test_without_a_gpu_no_times_and_no_file(no_gpu, capsys, script, flags):
    assert no_gpu.run(script, *flags)
    output = capsys.readouterr().out
    assert "times mean nothing" in output and "ms/token" not in output and "tokens/s" not in output
    assert list(no_gpu.folder.iterdir()) == []


def test_steps_5_and_6_measure_the_same_work(fake_gpu, capsys):
    assert fake_gpu.run(baseline_latency, *SMALL)
    assert fake_gpu.run(generate_latency, *SMALL, "--paths", "prealloc", "graph")
    assert capsys.readouterr().out.count("min to max") == 2
    rows = fake_gpu.rows("baseline_latency") + fake_gpu.rows("generate_latency")
    dynamic, static, prealloc, graph = rows
    measured = [dynamic, prealloc]
    if not (static["status"] == common.SKIPPED and "static" in static["reason"].lower()):  # transformers 4.44 has none
        measured.append(static)
    for row in measured:
        assert row["status"] == common.PASSED
        assert (row["case"]["prompt"], row["case"]["new_tokens"]) == (9, 4)
        assert len(row["samples_ms"]) == len(row["ttft_samples_ms"]) == 2
        assert row["tokens_per_s"] == pytest.approx(1e3 / row["median_ms"], rel=1e-4)
        assert row["total_ms"] > row["ttft_ms"]
    assert graph["status"] == common.SKIPPED and graph["reason"]  # needs a real GPU


def test_a_baseline_that_cannot_run_is_a_row(monkeypatch, fake_gpu):
    def fail(*_, **__):
        raise RuntimeError("no compiler found\nlong story")

    monkeypatch.setattr(baseline_latency, "check_static", fail)
    assert fake_gpu.run(baseline_latency, *SMALL)
    dynamic, static = fake_gpu.rows("baseline_latency")
    assert dynamic["status"] == common.PASSED
    assert (static["status"], static["reason"]) == (common.SKIPPED, "no compiler found")


def test_a_wrong_rung_is_incorrect_and_fails(monkeypatch, fake_gpu):
    real = end_to_end.generate

    def off_by_one(*args, sampler=None, **options):
        shifted = sampler and (lambda ids, logits: sampler(ids, torch.roll(logits, 1, dims=-1)))
        return real(*args, sampler=shifted, **options)

    monkeypatch.setattr(end_to_end, "generate", off_by_one)
    assert not fake_gpu.run(generate_latency, *SMALL, "--paths", "prealloc")
    (row,) = fake_gpu.rows("generate_latency")
    assert row["status"] == common.INCORRECT and "median_ms" not in row
