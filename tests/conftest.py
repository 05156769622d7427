"""Shared by all tests: kernels first (they decide about the interpreter), fixed seeds, NaN in fresh memory."""

import functools
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import torch.utils._device

import kernels  # before anything that imports triton
import model  # noqa: F401  before anything that imports transformers (see there)

# `with torch.device("cuda")` looks up the functions it redirects once and remembers them: before any is replaced below.
torch.utils._device._device_constructors()


def patch_once_per_launch():
    """Spare the interpreter a third of its time. When a kernel starts it replaces the functions of triton.language by
    its own; in each call of a device function it searches them all again, and by then there is none left to replace.
    Nothing depends on it: a Triton without that inner function only takes longer.
    """
    from triton import language
    from triton.runtime import interpreter

    patch = getattr(interpreter, "_patch_lang", None)
    if patch is None:
        return

    @functools.cache
    def languages(module):
        return [value for value in vars(sys.modules[module]).values() if value is language or value is language.core]

    def patch_if_needed(fn):
        if any(language.core.is_builtin(one.program_id) for one in languages(fn.__module__)):
            return patch(fn)

    interpreter._patch_lang = patch_if_needed


if kernels.INTERPRETED:
    patch_once_per_launch()


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """torch.empty returns NaN: an output element that a kernel forgets fails the test instead of passing by luck.

    torch's own switch for it (fill_uninitialized_memory) needs deterministic algorithms, and some of those wait for the
    GPU, which no CUDA graph can capture.
    """

    def poisoned(allocate):
        def call(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point():
                with torch.no_grad():
                    tensor.fill_(float("nan"))
            return tensor

        return call

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


@pytest.fixture
def device():
    """The device under test: the GPU where there is one, else the CPU (interpreted kernels)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
