"""The report's round trip: the README can say only what the result files say."""

import itertools

import pytest

import cli
from benchmarks import common, report
from profiling.digest import GROUPS
from tests.result_files import GPU, pretend_gpu, timing, write_ladder

pytest_plugins = ["tests.fake_gpu"]


@pytest.fixture(autouse=True)
def passport(monkeypatch):
    pretend_gpu(monkeypatch)


@pytest.fixture
def readme(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(
        "# Title\n\n<!-- results:headline -->\nstale\n<!-- /results:headline -->\n\nprose stays\n\n"
        "<!-- results:decode_ladder -->\n<!-- /results:decode_ladder -->\n"
    )
    return path


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["report", *map(str, arguments)])
    return report.main()


def test_round_trip(monkeypatch, tmp_path, readme, capsys):
    results = tmp_path / "results"
    write_ladder(results, {"0": 30.0, "0s": None, "1": 20.0, "3": 10.0, "6": 2.0})
    flags = ("--readme", readme, "--results-dir", results)
    assert not run(monkeypatch, *flags, "--check")
    assert "stale" in capsys.readouterr().out
    assert run(monkeypatch, *flags)
    text = readme.read_text()
    assert "stale" not in text and "prose stays" in text
    assert "| 6: programmatic dependent launch | 2.00 | 1.80 to 2.40 | 500 | 15.0x | 75 % |" in text
    assert "| 0s | HF generate, StaticCache + torch.compile | SKIPPED: no such GPU / here | - |" in text
    assert "Fake GPU 9000, driver 1.0" in text
    assert run(monkeypatch, *flags, "--check")
    assert run(monkeypatch, *flags)
    assert readme.read_text() == text  # writing twice changes nothing


def test_check_notices_a_figure_changed_by_hand(monkeypatch, tmp_path, readme, capsys):
    write_ladder(tmp_path, {"0": 30.0, "1": 20.0})
    flags = ("--readme", readme, "--results-dir", tmp_path)
    run(monkeypatch, *flags)
    capsys.readouterr()
    text = readme.read_text()
    changes = (("20.00 |", "headline"), ("20.000 |", "decode_ladder"), ("20.00", "headline, decode_ladder"))
    for changed, names in changes:
        assert changed in text
        readme.write_text(text.replace(changed, changed.replace("20", "12")))
        assert not run(monkeypatch, *flags, "--check")
        assert capsys.readouterr().out.strip().endswith(f"/: {names}")
    readme.write_text(text)
    assert run(monkeypatch, *flags, "--check")


def test_the_headline_holds_against_hugging_faces_fastest_row_too(tmp_path):
    write_ladder(tmp_path, {"0": 30.0, "0s": 6.0, "1": 20.0, "6": 2.0})
    text = report.build("headline", tmp_path, tmp_path)
    assert "| speed-up over rung 0 | speed-up over rung 0s |" in text
    assert "| 1.80 to 2.40 | 500 | 15.0x | 3.0x |" in text
    assert "| 27.00 to 36.00 | 33 | 1.0x | 0.2x |" in text


def test_the_ladders_table_has_the_spread_and_marks_what_is_not_resolved(tmp_path):
    write_ladder(tmp_path, {"0": 30.0, "0s": None, "1": 29.0, "4": 5.0})
    text = report.build("decode_ladder", tmp_path, tmp_path)
    assert "| 30.000 | 27.00 to 36.00 |" in text
    assert "| 1.000 ~ |" in text and "| 24.000 |" in text and "~: not resolved" in text
    assert "| bought |" in text and "---: |\n" in text  # the mark leaves the column to the right
    lessons = report.build("lessons", tmp_path, tmp_path)
    assert lessons.count("not resolved") == 1 and "-1.00 ms (4 % of all that the ladder saves, not resolved" in lessons
    write_ladder(tmp_path, {"0": 30.0, "1": 20.0})
    assert "~" not in report.build("decode_ladder", tmp_path, tmp_path)


def test_the_end_to_end_table_has_the_spread(tmp_path):
    results = common.Results("generate_latency", {}, "by hand")
    case = {"contender": "phi-triton, fused", "prompt": 128, "new_tokens": 8}
    results.add(
        case, timing=timing(2.0), ttft_ms=30.0, tokens_per_s=500.0, share_of_floor=0.75, peak_memory_bytes=10**6
    )
    results.add({**case, "contender": "phi-triton, graph"}, common.SKIPPED, reason="none")
    results.write_as(GPU, tmp_path)
    text = report.build("generate_latency", tmp_path, tmp_path)
    assert "| ms/token | min to max |" in text and "| 2.00 | 1.80 to 2.40 | 500 | 75 % | 1 |" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_kernel_resources_have_no_row_twice_and_say_what_is_forced(tmp_path):
    results = common.Results("kernel_resources", {}, "by hand")
    numbers = {"registers": 100, "spill_bytes": 0, "shared_memory_bytes": 2048, "num_warps": 4, "occupancy": 0.5}
    for cache_len, block_t in ((4096, 32), (65536, 32), (65536, 64), (None, None)):
        case = {"capability": "9.0", "what": "w", "cache_len": cache_len, "block_t": block_t, "kernel": "k"}
        results.add(case | {"forced": block_t == 64}, **numbers, limited_by="registers")
    results.write_as("compiled", tmp_path)
    lines = report.build("kernel_resources", tmp_path, tmp_path).splitlines()
    assert [line.split(" | ")[1] for line in lines if line.startswith("| sm_90")] == [
        "w, BLOCK_T=32, cache 4096, 65536", "w, BLOCK_T=64 forced, cache 65536", "w",
    ]  # fmt: skip


def test_lessons_are_the_ladders_own_differences(tmp_path):
    write_ladder(tmp_path, {"0": 30.0, "0s": 6.0, "1": 20.0, "2": None, "3": 22.0, "4": 5.0})
    lines = report.build("lessons", tmp_path, tmp_path).splitlines()
    assert "30.00 ms per token, of which the GPU works 1.00 ms and waits 29.00 ms" in lines[0]
    assert "Rung 1, own loop, torch.cat cache: -10.00 ms (40 %" in lines[1]
    assert "Rung 3, Triton decode attention: +2.00 ms (-8 %" in lines[2]
    assert "Rung 4, CUDA graph: -17.00 ms (68 %" in lines[3]
    assert "5.00 ms against a floor of 1.50 ms (30 %)" in lines[4]


def test_a_missing_result_file_says_how_to_get_it(monkeypatch, tmp_path, readme):
    assert run(monkeypatch, "--readme", readme, "--results-dir", tmp_path / "none")
    assert readme.read_text().count("Not measured yet: `python benchmarks/decode_ladder.py`") == 2


@pytest.mark.parametrize(
    "text",
    [
        "<!-- results:decode_ladder -->\n",
        "<!-- results:decode_ladder -->\n<!-- /results:headline -->\n",
        "<!-- results:nonsense -->\n<!-- /results:nonsense -->\n",
    ],
)
def test_bad_markers_are_refused(tmp_path, text):
    with pytest.raises(cli.UsageError):
        report.render(text, tmp_path, tmp_path)


def test_every_table_can_be_built_from_nothing(tmp_path):
    for name in report.NAMES:
        assert report.build(name, tmp_path, tmp_path)


def test_tables_of_a_measured_set(monkeypatch, fake_gpu, tmp_path):
    """Files written by the scripts themselves go through every table and keep their figures."""
    from benchmarks import compare_decode_latency, contenders, decode_vs_eager, prefill_vs_sdpa

    def decode(q, k, v, length):
        return contenders.grouped_matmul_decode(q, k, v)

    def prefill(q, k, v, *, causal):
        return contenders.sdpa("math", q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    monkeypatch.setattr(compare_decode_latency, "decode_attention", decode)
    monkeypatch.setattr(compare_decode_latency, "SHAPES", compare_decode_latency.TINY_SHAPES)
    monkeypatch.setattr(prefill_vs_sdpa, "flash_attention", prefill)
    monkeypatch.setattr(prefill_vs_sdpa, "SHAPES", prefill_vs_sdpa.TINY_SHAPES)
    monkeypatch.setitem(decode_vs_eager.CONTENDERS, "triton", decode_vs_eager.CONTENDERS["grouped matmul"])
    assert fake_gpu.run(compare_decode_latency, "--lengths", "20,33", "--shapes", "0,1")
    assert fake_gpu.run(prefill_vs_sdpa, "--lengths", "17", "--shapes", "0")
    assert fake_gpu.run(decode_vs_eager, "--lengths", "20")
    for name in (
        "compare_decode_latency", "prefill_vs_sdpa", "decode_vs_eager",
    ):  # fmt: skip
        text = report.build(name, fake_gpu.folder, fake_gpu.folder)
        (ours, *_) = (row for row in fake_gpu.rows(name) if row["case"]["contender"] == "triton")
        factor, digits = (1, 3) if name == "prefill_vs_sdpa" else (1e3, 1)
        assert f"{factor * ours['median_ms']:.{digits}f}" in text


def test_prefill_has_a_table_per_shape_and_mask(tmp_path):
    results, ms = common.Results("prefill_vs_sdpa", {}, "by hand"), {"causal": 1.0, "full": 2.0}
    for mask, direction, contender in itertools.product(ms, ("forward", "backward"), ("triton", "sdpa flash")):
        case = {"shape": "a", "mask": mask, "seq_len": 64, "pass": direction, "contender": contender}
        time_ms = ms[mask] * (1 if contender == "triton" else 1.5)
        results.add(case, timing=timing(time_ms), tflop_per_s=100.0, peak_memory_bytes=10**6)
    results.write_as(GPU, tmp_path)
    causal, full = report.build("prefill_vs_sdpa", tmp_path, tmp_path).split("a, full, batch 2:")
    assert "a, causal, batch 2:" in causal
    for table, time in ((causal, "1.000"), (full, "2.000")):
        assert f"| 64 | backward | {time} |" in table and table.count("| 1.50x | 1.50x |") == 2


def test_profile_table_adds_up_and_carries_the_verdict(tmp_path):
    results = common.Results("decode_profile", {}, "by hand")
    groups = dict(zip(GROUPS, range(1, 9), strict=True))
    results.add(
        {"path": "hf", "context": 128}, timing=timing(72.0), gpu_busy_ms=36.0, gpu_idle_ms=36.0,
        kernels_per_token=9.0, launches_per_token=9.0, groups_ms=groups, verdict="launch-bound", verdict_text="waits",
    )  # fmt: skip
    results.write_as(GPU, tmp_path)
    text = report.build("decode_profile", tmp_path, tmp_path)
    assert "| attention | 1.000 (3 %) |" in text and "| **GPU busy** | 36.000 |" in text
    assert "- hf: **launch-bound**. waits." in text
