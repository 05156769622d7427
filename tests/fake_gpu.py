"""A stand-in for the GPU, so that the measuring code of the benchmarks runs in the suite: its times mean nothing."""

from types import SimpleNamespace

import pytest
import torch

import cli
from benchmarks import common

NAME = "Fake GPU 9000"


@pytest.fixture
def fake_gpu(monkeypatch, tmp_path):
    """torch says that there is a GPU, tensors stay on the CPU, clocks are the host's; -> the results folder."""
    if torch.cuda.is_available():
        pytest.skip("there is a real GPU: the interpreter is off, and the scripts run as they are")
    properties = SimpleNamespace(
        name=NAME, major=9, minor=0, multi_processor_count=4, total_memory=8 * 10**9, L2_cache_size=4096
    )
    for name, value in {
        "is_available": lambda: True,
        "synchronize": lambda *_: None,
        "get_device_name": lambda *_: NAME,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (9, 0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cli, "resolve_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(cli, "resolve_dtype", lambda name, device: torch.float32)
    monkeypatch.setattr(common, "_smi", lambda: {"driver_version": "1.0"})
    monkeypatch.setattr(common, "EventClock", lambda: common.WallClock("cpu"))
    monkeypatch.setattr(common, "measure_cold", measure_cold)
    monkeypatch.setattr(common, "peak_memory_bytes", lambda function: (function(), 1000)[1])
    monkeypatch.setattr(common, "read_bandwidth_gb_per_s", lambda: 100.0)
    return tmp_path


def measure_cold(contenders, *, warmup=1, samples=2):
    """common.measure_cold without CUDA graphs."""
    outcome = {}
    for name, functions in contenders.items():
        try:
            timing = common.measure({name: functions[0]}, common.WallClock("cpu"), warmup=0, samples=2)[name]
            outcome[name] = timing
        except RuntimeError as error:
            outcome[name] = error
    return outcome


def run_script(monkeypatch, module, *arguments):
    """Run ``module.main()`` with command-line arguments -> what it returns."""
    monkeypatch.setattr("sys.argv", [module.__name__, *map(str, arguments)])
    return module.main()
