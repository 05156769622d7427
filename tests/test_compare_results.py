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


def test_a_missing_row_is_a_regression_if_it_passed(monkeypatch, tmp_path, capsys):
    before = write_ladder(tmp_path / "a", {"0": 30.0, "1": 20.0, "2": None})
    assert not compare(monkeypatch, before, write_ladder(tmp_path / "b", {"0": 30.0}))
    output = capsys.readouterr().out
    assert "rung 1, name own loop, torch.cat cache: missing" in output and "FAIL: 1 regression," in output
    assert compare(monkeypatch, before, write_ladder(tmp_path / "c", {"0": 30.0, "1": 20.0}))
    assert "PASS: 0 regressions," in capsys.readouterr().out


def test_a_missing_file_is_a_regression_and_a_new_one_is_not(monkeypatch, tmp_path, capsys):
    before = write_ladder(tmp_path / "a", {"0": 30.0}).parent
    after = write_ladder(tmp_path / "b", {"0": 60.0}).parent
    (before / "other.json").write_text((before / "decode_ladder.json").read_text())
    assert not compare(monkeypatch, before, after)
    output = capsys.readouterr().out
    assert f"other.json: missing in {after}" in output and "FAIL: 2 regressions," in output
    (after / "decode_ladder.json").write_text((before / "decode_ladder.json").read_text())
    assert compare(monkeypatch, after, before)


def test_different_scripts_cannot_be_compared(tmp_path):
    one = common.load_results(write_ladder(tmp_path, {"0": 30.0}))
    other = copy.deepcopy(one) | {"script": "other"}
    with pytest.raises(cli.UsageError, match="other"):
        compare_results.compare(one, other, 1.05)


@pytest.mark.parametrize("setting", [{"model_path": "random:phi-4-mini"}, {"dtype": "float32"}], ids=str)
def test_different_models_and_dtypes_cannot_be_compared(tmp_path, setting):
    one = common.load_results(write_ladder(tmp_path, {"0": 30.0}))
    other = copy.deepcopy(one)
    other["configuration"] |= setting
    with pytest.raises(cli.UsageError, match="cannot be compared"):
        compare_results.compare(one, other, 1.05)


def test_compare_wants_two_files_or_two_folders(monkeypatch, tmp_path):
    path = write_ladder(tmp_path, {"0": 30.0})
    with pytest.raises(cli.UsageError, match="two files or two folders"):
        compare(monkeypatch, path, tmp_path)


@pytest.mark.parametrize("there_first", [True, False])
def test_a_path_that_is_not_there(monkeypatch, tmp_path, there_first):
    paths = [tmp_path, tmp_path / "nowhere"]
    with pytest.raises(cli.UsageError, match="nowhere does not exist"):
        compare(monkeypatch, *(paths if there_first else reversed(paths)))
