"""Occupancy by hand, and one real compilation for an RTX 4060 in a process of its own."""

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
    assert "sm_89" in run.stdout and "largest BLOCK_T" in run.stdout
