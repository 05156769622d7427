"""Comparing result files: a slower row and one that no longer passes are regressions."""

import copy

import pytest

import cli
from benchmarks import common, compare_results
from tests.result_files import pretend_gpu, write_ladder


@pytest.fixture(autouse=True)
def passport(monkeypatch):
    pretend_gpu(monkeypatch)


def compare(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["compare_results", *map(str, arguments)])
    return compare_results.main()


def test_compare_passes_within_the_limit_and_fails_past_it(monkeypatch, tmp_path, capsys):
    before = write_ladder(tmp_path / "a", {"0": 30.0, "1": 20.0})
    after = write_ladder(tmp_path / "b", {"0": 30.9, "1": 19.0})
    assert compare(monkeypatch, before, after)
    assert not compare(monkeypatch, before, after, "--limit", 1.02)
    output = capsys.readouterr().out
    assert "1.030" in output and "0.950" in output
    assert compare(monkeypatch, before.parent, after.parent)


def test_a_row_that_no_longer_passes_is_a_regression(monkeypatch, tmp_path, capsys):
    before = write_ladder(tmp_path / "a", {"0": 30.0, "1": 20.0})
    assert not compare(monkeypatch, before, write_ladder(tmp_path / "b", {"0": 30.0, "1": None}))
    assert "SKIPPED (no such GPU | here)" in capsys.readouterr().out
    assert compare(monkeypatch, tmp_path / "b/fake-gpu-9000", before.parent)  # a new row is none


def test_different_scripts_cannot_be_compared(tmp_path):
    one = common.load_results(write_ladder(tmp_path, {"0": 30.0}))
    other = copy.deepcopy(one) | {"script": "other"}
    with pytest.raises(cli.UsageError, match="other"):
        compare_results.compare(one, other, 1.05)


def test_compare_wants_two_files_or_two_folders(monkeypatch, tmp_path):
    path = write_ladder(tmp_path, {"0": 30.0})
    with pytest.raises(cli.UsageError, match="two files or two folders"):
        compare(monkeypatch, path, tmp_path)
