"""Running something under torch.profiler and getting the trace's events."""

import gzip
import shutil
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from profiling.digest import read_trace


def trace_events(function, *, ranges=False, path=None):
    """Run ``function()`` under torch.profiler -> the trace's events.

    ranges: record operators and named ranges of the host too (slower); GPU work and launches are always recorded.
    path: where to keep the trace, a file name ending in ``.pt.trace.json.gz``.
    """
    activities = [ProfilerActivity.CPU] if ranges or not torch.cuda.is_available() else []
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with profile(activities=activities) as profiler:
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(plain))
        if path is not None:
            with open(plain, "rb") as source, gzip.open(path, "wb") as target:
                shutil.copyfileobj(source, target)
        return read_trace(plain)
