"""Timing, checks, and result files of the measuring scripts."""

import json
import math

import pytest
import torch

import cli
from benchmarks import common


class FakeDevice:
    """A clock that moves only when work is waited for: launching costs nothing, synchronising takes the work's time."""

    def __init__(self, durations_ms):
        self.durations_ms = list(durations_ms)
        self.queued_ms = 0.0
        self.seconds = 100.0
        self.synchronisations = 0

    def launch(self):
        self.queued_ms += self.durations_ms.pop(0)

    def synchronize(self):
        self.synchronisations += 1
        self.seconds += self.queued_ms / 1e3
        self.queued_ms = 0.0

    def now(self):
        return self.seconds


def fake_clock(device):
    return common.WallClock("cpu", synchronize=device.synchronize, now=device.now)


def test_wall_clock_waits_for_earlier_work_before_it_starts_and_for_its_own_before_it_stops():
    device = FakeDevice([7.0, 2.0])
    device.launch()
    assert fake_clock(device).record(device.launch)() == pytest.approx(2.0)
    assert device.synchronisations == 2


@pytest.mark.parametrize("samples", [10, 1000])
def test_median_ignores_compilation_and_a_spike(samples):
    device = FakeDevice([500.0, 1.0, 1.0, 40.0] + [1.0] * (samples - 1))
    timing = common.measure({"x": device.launch}, fake_clock(device), warmup=2, samples=samples, now=device.now)["x"]
    assert timing.first_call_ms == pytest.approx(500.0)
    assert timing.median_ms == pytest.approx(1.0)
    assert len(timing.samples_ms) == samples
    assert max(timing.samples_ms) == pytest.approx(40.0)


def test_contenders_alternate():
    calls = []
    contenders = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    common.measure(contenders, common.WallClock("cpu"), warmup=1, samples=3)
    assert "".join(calls) == "aabb" + "ababab"


def test_timing_numbers_and_parts():
    timing = common.Timing([10.0, 20.0, 30.0, 40.0, 100.0], 500.0).per(10)
    numbers = timing.numbers()
    assert (numbers["median_ms"], numbers["p20_ms"], numbers["p80_ms"]) == (3.0, 1.0, 10.0)
    assert numbers["first_call_ms"] == 500.0
    assert numbers["std_ms"] == pytest.approx(math.sqrt(10.0))


@pytest.mark.parametrize(
    ("per_set", "l2", "expected"), [(1_000_000, 50_000_000, 200), (10**9, 50_000_000, 2), (7, 7, 4)]
)
def test_input_sets_exceed_the_l2(per_set, l2, expected):
    assert common.input_sets(per_set, l2) == expected


def test_share_flags_what_memory_cannot_deliver():
    assert common.share_text(900, 1000) == "90.0"
    assert common.share_text(2000, 1000) == "200 (cache)"


def test_decode_reference_by_heads_equals_the_whole():
    q, k, v = torch.randn(2, 6, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8)
    whole = common.decode_attention_ref(q.double(), k.double(), v.double(), 7)
    torch.testing.assert_close(common.decode_reference64(q, k, v, 7), whole)


def test_read_kernel_reads_every_element(device):
    source = torch.arange(4 * 8192, dtype=torch.int32, device=device)
    out = torch.full((4,), -1, dtype=torch.int32, device=device)
    common.read_sum(source, out)
    assert torch.equal(out.long(), source.view(4, 8192).sum(1).to(torch.int32).long())


def test_a_row_without_a_right_answer_carries_no_time():
    results = common.Results("x", {}, "by hand")
    with pytest.raises(ValueError, match="INCORRECT"):
        results.add({"T": 1}, common.INCORRECT, timing=common.Timing([1.0], 1.0))


def test_errors_become_oom_and_skipped_rows():
    results = common.Results("x", {}, "by hand")
    assert results.add_error({}, torch.OutOfMemoryError("CUDA out of memory"))["status"] == common.OOM
    row = results.add_error({}, ValueError("needs a newer GPU\nmore"))
    assert (row["status"], row["reason"]) == (common.SKIPPED, "needs a newer GPU")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it does write")
def test_nothing_is_written_without_cuda(tmp_path, capsys):
    results = common.Results("x", {}, "by hand")
    with pytest.raises(RuntimeError, match="CUDA"):
        results.write(tmp_path)
    assert common.finish(results, True, "all right", tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert "No result file" in capsys.readouterr().out


def test_result_file_round_trip(tmp_path):
    results = common.Results("some_script", {"samples": 3}, "by hand")
    results.numbers["bandwidth_gb_per_s"] = 1234.56789
    results.add({"T": 128}, timing=common.Timing([0.1234567891, 0.2, 0.3], 9.0), gb_per_s=1.0)
    results.add({"T": 256}, common.SKIPPED, reason="too long")
    path = results.write_as("NVIDIA GeForce RTX 4060", tmp_path)
    assert path == tmp_path / "nvidia-geforce-rtx-4060" / "some_script.json"
    content = common.load_results(path)
    assert content["schema"] == common.SCHEMA
    assert content["bandwidth_gb_per_s"] == 1234.57
    assert content["rows"][0]["samples_ms"] == [0.123457, 0.2, 0.3]
    assert content["rows"][1] == {"case": {"T": 256}, "status": "SKIPPED", "reason": "too long"}
    assert {"torch", "triton", "transformers", "python", "commit", "cpu"} <= set(content["environment"])


@pytest.mark.parametrize("text", ["not json", "[]", *(json.dumps({"schema": common.SCHEMA + n}) for n in (0, 1))])
def test_a_foreign_file_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(cli.UsageError, match=r"result file|JSON"):
        common.load_results(path)


@pytest.mark.gpu
def test_event_and_wall_clocks_wait_for_a_sleeping_gpu():
    sleep = {"sleep": lambda: torch.cuda._sleep(10**8)}  # cycles: 20 ms even at 5 GHz
    clocks = (common.EventClock(), common.WallClock("cuda"))
    event_ms, wall_ms = (common.measure(sleep, clock, warmup=2, samples=5)["sleep"].median_ms for clock in clocks)
    assert event_ms > 20
    assert event_ms <= wall_ms < 1.2 * event_ms


@pytest.mark.gpu
def test_cold_graph_timing_counts_launches():
    x = [torch.ones(2**22, device="cuda") for _ in range(4)]
    contenders = {"add": [lambda t=t: t.add_(1) for t in x], "broken": [lambda: torch.ones(2, 3) @ torch.ones(2, 3)]}
    outcome = common.measure_cold(contenders, warmup=1, samples=5)
    assert 0 < outcome["add"].median_ms < 1
    assert int(x[1][0]) == 1 + 7 * 4, "7 replays (the first, a warm-up, 5 samples) of 16 launches over 4 sets"
    assert isinstance(outcome["broken"], RuntimeError)


@pytest.mark.gpu
def test_bandwidth_is_plausible():
    assert 50 < common.read_bandwidth_gb_per_s() < 10_000


def test_a_named_commit_comes_before_git(monkeypatch):
    monkeypatch.setenv("PHI_TRITON_COMMIT", "abc123")
    assert common.environment()["commit"] == "abc123"


def test_a_result_does_not_say_where_it_was_written(tmp_path):
    results = common.Results("script", {"samples": 3, "results_dir": str(tmp_path / "new")}, "method")
    assert results.configuration == {"samples": 3} and not list(tmp_path.iterdir())


def test_a_result_file_keeps_its_command_but_not_where_it_lay(monkeypatch, tmp_path):
    for arguments in (["--results-dir", str(tmp_path)], [f"--results-dir={tmp_path}"]):
        monkeypatch.setattr("sys.argv", ["elsewhere/script.py", "--rounds", "3", *arguments, "--last"])
        path = common.Results("script", {"results_dir": str(tmp_path)}, "a clock").write_as("place", tmp_path)
        assert common.load_results(path)["command"] == ["script.py", "--rounds", "3", "--last"]
        assert str(tmp_path) not in path.read_text()


def test_a_results_folder_that_cannot_be_is_noticed_before_measuring(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(cli.UsageError, match="file is no folder that can be written to"):
        common.Results("script", {"results_dir": str(tmp_path / "file" / "new")}, "method")


def test_only_a_kernel_of_this_project_fails_by_not_running(capsys):
    results = common.Results("script", {}, "method")
    for name, status in (
        ("ours", common.SKIPPED),
        ("ours", common.OOM),
        ("theirs", common.SKIPPED),
        ("ours", "PASSED"),
    ):
        results.add({"contender": name}, status, reason="raised")
    assert common.print_failures(results.rows, lambda name: name == "ours") == results.rows[:1]
    assert capsys.readouterr().out.count("raised") == 2
