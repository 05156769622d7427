"""Running benchmark scripts in the suite: as without a GPU, and with a stand-in whose times mean nothing."""

from types import SimpleNamespace

import pytest
import torch

import cli
from benchmarks import common

NAME = "Fake GPU 9000"


class Runner:
    """Runs a script's ``main()`` in this process; its result files go to ``folder``."""

    def __init__(self, monkeypatch, folder):
        self.monkeypatch, self.folder = monkeypatch, folder

    def run(self, module, *arguments):
        """What ``module.main()`` returns with these command-line arguments."""
        self.monkeypatch.setattr("sys.argv", [module.__name__, *map(str, arguments), "--results-dir", str(self.folder)])
        return module.main()

    def how_often(self, module, *arguments):
        """(warmup, samples) of each cold measurement that ``module.main()`` asks for with these arguments."""
        asked, measure = [], common.measure_cold

        def noted(contenders, *, warmup, samples):
            asked.append((warmup, samples))
            return measure(contenders, warmup=warmup, samples=samples)

        with self.monkeypatch.context() as patch:
            patch.setattr(common, "measure_cold", noted)
            self.run(module, *arguments)
        return asked

    def content(self, script):
        """The result file that ``script`` wrote."""
        return common.load_results(self.folder / common.slug(torch.cuda.get_device_name()) / f"{script}.json")

    def rows(self, script):
        return self.content(script)["rows"]


@pytest.fixture
def real_gpu(monkeypatch, tmp_path):
    """Scripts run on the GPU that is there; for tests marked ``gpu``."""
    return Runner(monkeypatch, tmp_path)


@pytest.fixture
def no_gpu(monkeypatch, tmp_path):
    """Scripts run as on a machine without a GPU."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, so the interpreter is off")
    return Runner(monkeypatch, tmp_path)


@pytest.fixture
def fake_gpu(no_gpu, monkeypatch):
    """torch says that there is a GPU; tensors stay on the CPU, clocks are the host's."""
    properties = SimpleNamespace(
        name=NAME, major=9, minor=0, multi_processor_count=4, total_memory=8 * 10**9, L2_cache_size=4096
    )
    for name, value in {
        "is_available": lambda: True,
        "synchronize": lambda *_: None,
        "get_device_name": lambda *_: NAME,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: properties,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cli, "resolve_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(cli, "resolve_dtype", lambda name, device: torch.float32)
    monkeypatch.setattr(common, "_smi", lambda: {"driver_version": "1.0"})
    monkeypatch.setattr(common, "EventClock", lambda: common.WallClock("cpu"))
    measure = common.measure
    quick = lambda functions, clock, *, warmup, samples: measure(functions, clock, warmup=0, samples=min(samples, 3))  # noqa: E731
    monkeypatch.setattr(common, "measure", quick)
    monkeypatch.setattr(common, "measure_cold", measure_cold)
    monkeypatch.setattr(common, "peak_memory_bytes", lambda function: (function(), 1000)[1])
    monkeypatch.setattr(common, "read_bandwidth_gb_per_s", lambda: 100.0)
    monkeypatch.setattr(common, "read_sum", read_sum)
    return no_gpu


def read_sum(source, out, block, num_warps):
    """common.read_sum, whose sums do not wrap around in the interpreter."""
    out.copy_(source.view(-1, block).sum(1, dtype=torch.int32))


def measure_cold(contenders, *, warmup, samples):
    """common.measure_cold without CUDA graphs."""
    outcome = {}
    for name, functions in contenders.items():
        try:
            outcome[name] = common.measure({name: functions[0]}, common.WallClock("cpu"), warmup=0, samples=2)[name]
        except RuntimeError as error:
            outcome[name] = error
    return outcome
