"""The ladder: what a rung bought adds up, wrong and absent rungs get no time."""

import pytest

from benchmarks import common, end_to_end
from benchmarks import decode_ladder as script
from model import generate as generate_module

pytest_plugins = ["tests.fake_gpu"]

SMALL = (
    "--contexts",
    "9",
    "--new-tokens",
    "3",
    "--rounds",
    "2",
    "--profile-steps",
    "1",
    "--static-contexts",
    "1",
    "--model-path",
    "random:tiny",
)


@pytest.fixture
def host_rungs(monkeypatch):
    """A tiny model, few tokens, and a trace of one kernel of 2 us per run."""

    def trace_events(function):
        function()
        return [{"cat": "kernel", "name": "k", "ts": 0, "dur": 2}]

    monkeypatch.setattr(script, "trace_events", trace_events)
    monkeypatch.setattr(script, "CHECKED_TOKENS", 3)


def test_without_a_gpu_no_times_and_no_file(no_gpu, capsys):
    assert no_gpu.run(script, "--rungs", "0,1,3,4")
    output = capsys.readouterr().out
    assert "times mean nothing" in output and "ms" not in output.replace("programs", "")
    assert list(no_gpu.folder.iterdir()) == []


def test_measured_rows(fake_gpu, host_rungs):
    assert fake_gpu.run(script, *SMALL, "--rungs", "0,0s,1,2")
    rows = {row["case"]["rung"]: row for row in fake_gpu.rows("decode_ladder")}
    assert {number: row["status"] for number, row in rows.items()} == {
        "0": "PASSED", "0s": "SKIPPED", "1": "PASSED", "2": "PASSED",
    }  # fmt: skip
    assert "--static-contexts 9" in rows["0s"]["reason"]
    for number in ("0", "1", "2"):
        row = rows[number]
        assert len(row["samples_ms"]) == 2  # two rounds; the one before them stands apart
        assert row["first_run_ms"] > 0 and row["first_run_ms"] not in row["samples_ms"]
        assert row["tokens_per_s"] == pytest.approx(1e3 / row["median_ms"], rel=1e-4)
        assert row["gpu_idle_ms"] == pytest.approx(row["median_ms"] - row["gpu_busy_ms"], rel=1e-4)
        assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["median_ms"], rel=1e-4)
    assert (rows["2"]["kernels_per_token"], rows["2"]["gpu_busy_ms"]) == (1, 0.002)
    bought = sum(rows[number]["bought_ms"] for number in ("0", "1", "2"))
    assert bought == pytest.approx(rows["0"]["median_ms"] - rows["2"]["median_ms"], rel=1e-3)


def test_a_rung_with_wrong_logits_is_incorrect_and_fails(monkeypatch, fake_gpu, host_rungs):
    class Wrong(generate_module.PreallocDecoder):
        def step(self, token_ids):
            return super().step(token_ids).roll(1, dims=-1)

    monkeypatch.setattr(generate_module, "PreallocDecoder", Wrong)
    assert not fake_gpu.run(script, *SMALL, "--rungs", "0,1,2")
    rows = fake_gpu.rows("decode_ladder")
    assert [row["status"] for row in rows] == ["PASSED", "PASSED", "INCORRECT"]
    assert "median_ms" not in rows[2]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ImportError("no such rung"), "SKIPPED"),
        (ValueError("needs CUDA"), "SKIPPED"),
        (RuntimeError("bug"), "INCORRECT"),
    ],
)
def test_a_rung_that_raises_is_a_row_with_its_reason(monkeypatch, fake_gpu, host_rungs, error, status):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(end_to_end, "make_decoder", fail)
    assert fake_gpu.run(script, *SMALL, "--rungs", "0,6") == (status == "SKIPPED")
    row = fake_gpu.rows("decode_ladder")[1]
    assert row["status"] == status and str(error) in row["reason"]


def test_a_rung_that_cannot_be_traced_is_a_row_with_its_reason(monkeypatch, fake_gpu, host_rungs):
    """As where longrope's border lies among the steps of the trace: what else was measured stays."""

    def raises(self, steps):
        raise ValueError("position 16 crosses longrope's border")

    monkeypatch.setattr(script.Ours, "gpu_work", raises)
    fake_gpu.run(script, *SMALL, "--rungs", "0,2")
    rows = {row["case"]["rung"]: row for row in fake_gpu.rows("decode_ladder")}
    assert (rows["0"]["status"], rows["2"]["status"]) == ("PASSED", "SKIPPED") and "border" in rows["2"]["reason"]


def test_five_rounds_by_default(fake_gpu, host_rungs):
    flags = [*SMALL[:4], *SMALL[6:]]  # without --rounds
    assert fake_gpu.run(script, *flags, "--rungs", "2")
    assert [len(row["samples_ms"]) for row in fake_gpu.rows("decode_ladder")] == [5]


def test_the_table_shows_the_spread_and_marks_what_noise_may_explain(capsys):
    def row(number, *samples):
        row = {"case": {"rung": number, "name": "n"}, "status": common.PASSED if samples else common.SKIPPED}
        names = ("tokens_per_s", "share_of_floor", "gpu_busy_ms", "gpu_idle_ms", "kernels_per_token")
        row |= dict.fromkeys((*names, "launches_per_token"), 1.0) | {"reason": "absent"}
        return row | ({"median_ms": sorted(samples)[1], "samples_ms": list(samples)} if samples else {})

    rows = [row("0", 80.7, 27.8, 31.8), row("0s", 4.5, 6.4, 4.6), row("1", 25, 24, 29), row("2"), row("4", 5.3, 5, 6)]
    script.add_bought(rows)
    assert script.unresolved(rows) == {"1"}  # "0s" and "4" are faster in each run than what they are held against
    script.show(128, rows)
    lines = capsys.readouterr().out.splitlines()
    assert "27.80 to 80.70" in lines[3] and "24.00 to 29.00" in lines[5]
    assert [line.endswith("~") for line in lines[3:8]] == [False, False, True, False, False]
    assert script.UNRESOLVED in lines


def test_what_the_rungs_bought_adds_up_over_gaps():
    def row(number, wall):
        status = common.PASSED if wall else common.SKIPPED
        return {"case": {"rung": number}, "status": status, "median_ms": wall}

    rows = [row("0", 30.0), row("0s", 5.0), row("1", 25.0), row("2", None), row("3", 26.0), row("4", 2.0)]
    script.add_bought(rows)
    assert [r.get("bought_ms") for r in rows] == [0.0, 25.0, 5.0, None, -1.0, 24.0]


@pytest.mark.gpu
def test_a_tiny_ladder_on_the_gpu(real_gpu):
    assert real_gpu.run(script, *SMALL, "--rungs", "0,2,3,4")
    rows = real_gpu.rows("decode_ladder")
    assert [row["status"] for row in rows] == [common.PASSED] * 4
    assert all(row["gpu_busy_ms"] > 0 for row in rows)
    # Launched from Python; so small a graph is busy without a pause, and the more so while it is traced.
    assert all(row["gpu_busy_ms"] < row["median_ms"] for row in rows[:3])
    assert rows[3]["gpu_busy_ms"] < 2 * rows[3]["median_ms"]
    assert rows[-1]["launches_per_token"] < rows[0]["launches_per_token"]
