"""Occupancy by hand, and one real compilation for an RTX 4060 in a process of its own."""

import argparse
import os
import subprocess
import sys

import pytest

from benchmarks import common
from benchmarks import kernel_resources as script
from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("capability", "registers", "shared", "warps", "expected"),
    [
        ((9, 0), 32, 0, 4, (1.0, "warps")),
        ((9, 0), 128, 0, 4, (0.25, "registers")),  # 65536 / (128 * 32 * 4) = 4 blocks of 4 warps, 16 of 64 warps
        ((9, 0), 96, 0, 4, (0.3125, "registers")),  # 5 blocks
        ((8, 9), 32, 48 * 1024, 4, (2 * 4 / 48, "shared memory")),  # 2 * (48 + 1) KB of 100 KB
        ((8, 9), 32, 0, 1, (0.5, "blocks")),  # 24 blocks of one warp
        ((7, 5), 32, 65537, 4, (0.0, "shared memory")),
        ((9, 0), 97, 0, 4, (4 * 4 / 64, "registers")),  # rounded up to 104 per thread
    ],
)
def test_occupancy(capability, registers, shared, warps, expected):
    assert script.occupancy(capability, registers, shared, warps) == pytest.approx(expected)


def test_largest_tile_counts_spills_and_fit_over_all_kernels():
    def row(block_t, spill_bytes, occupancy, capability="8.9"):
        case = {"capability": capability, "block_t": block_t}
        return {"case": case, "status": common.PASSED, "spill_bytes": spill_bytes, "occupancy": occupancy}

    rows = [row(32, 0, 0.5), row(64, 0, 0.3), row(64, 0, 0.3), row(128, 0, 0.2), row(128, 8, 0.2), row(256, 0, 0.0)]
    rows += [row(None, 64, 0.1), row(16, 4, 0.5, "7.5")]
    assert script.largest_without_spills(rows) == {"8.9": 64, "7.5": None}


def row(cache_len, block_t, *, spill_bytes=0, capability="9.0", registers=100):
    case = {"capability": capability, "what": "w", "cache_len": cache_len, "block_t": block_t, "kernel": "k"}
    numbers = {"registers": registers, "spill_bytes": spill_bytes, "occupancy": 0.5, "limited_by": "warps"}
    numbers |= {"shared_memory_bytes": 0, "num_warps": 4}
    return {"case": case, "status": common.PASSED, **numbers}


def test_rows_that_differ_in_the_cache_alone_are_one_in_the_table():
    rows = [row(4096, 16), row(4096, 32), row(65536, 16), row(65536, 32, registers=99), row(None, None)]
    found = [(one["case"]["cache_len"], one["case"]["block_t"], one["registers"]) for one in script.merged(rows)]
    assert found == [("4096, 65536", 16, 100), ("4096", 32, 100), ("65536", 32, 99), ("", None, 100)]
    assert rows[0]["case"]["cache_len"] == 4096  # the file's rows are left as they are


def test_the_verdict_counts_kernels_and_names_tiles():
    rows = [row(4096, 32), row(65536, 64), row(65536, 64, spill_bytes=8, capability="8.0"), row(None, None)]
    assert script.verdict(rows) == (
        "3 of 4 kernels, as they are launched, fit without spills; "
        "the largest tile that all decode kernels take so, forced or not, in keys: sm_90: 64, sm_80: none"
    )
    assert script.verdict(rows[3:]) == "1 of 1 kernels, as they are launched, fit without spills"
    forced = row(4096, 64, spill_bytes=8)
    forced["case"]["forced"] = True
    assert script.verdict([*rows[:1], forced]).startswith("1 of 1 kernels")
    assert script.verdict([*rows[:1], forced]).endswith("sm_90: 32")
    assert [script.table_line(one)[4] for one in (*rows[:1], forced, rows[3])] == ["32", "64 forced", ""]


def test_long_caches_are_compiled_with_their_own_tiles(tmp_path):
    """On sm_90 long caches have twice the keys by the copy engine; what no choice gives is forced, and says so."""
    arguments = ["--capabilities", "9.0", "--block-t", "32,64,128", "--kernels", "decode"]
    run = subprocess.run(
        [sys.executable, "benchmarks/kernel_resources.py", *arguments, "--results-dir", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    rows = common.load_results(tmp_path / "compiled" / "kernel_resources.json")["rows"]
    tiles = {tuple(one["case"][name] for name in ("what", "cache_len", "block_t", "forced")) for one in rows}
    mini, grouped = "decode attention 32/32 D=96", "decode attention 32/8 D=128"
    single = "decode attention, single pass, 32/32 D=96"
    assert tiles == {
        (mini, 65536, 64, False), (mini, 65536, 128, False),
        *((what, 4096, size, size > 32) for what in (mini, single, grouped) for size in (32, 64, 128)),
    }  # fmt: skip


def test_capabilities_are_known_ones():
    assert [script.capability(text) for text in ("8.9", "12.0")] == [(8, 9), (12, 0)]
    with pytest.raises(argparse.ArgumentTypeError, match=r"'9' is none of 7\.5, 8\.0, 8\.9, 9\.0, 12\.0"):
        script.capability("9")


def test_compiles_for_a_gpu_that_is_not_here(tmp_path):
    arguments = ["--capabilities", "8.9", "--block-t", "32", "--kernels", "decode", "--results-dir", str(tmp_path)]
    run = subprocess.run(
        [sys.executable, "benchmarks/kernel_resources.py", *arguments],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    rows = common.load_results(tmp_path / "compiled" / "kernel_resources.json")["rows"]
    assert rows and all(row["status"] == common.PASSED for row in rows)
    assert all(0 < row["registers"] <= 255 and row["num_warps"] >= 1 for row in rows)
    assert "sm_89" in run.stdout and "launched, fit without spills" in run.stdout
