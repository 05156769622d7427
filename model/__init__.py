"""The Phi-3 model: loading, prefill, and one module per rung of the decode ladder.

transformers imports the PyPI package ``kernels`` where a version it accepts is installed, and from this repository's
root it would find ours instead and fail. It asks once and remembers, so it is asked while ours is out of sight.
"""

import importlib
import sys

import kernels

sys.modules["kernels"] = None  # for importlib: "there is no such module"
try:
    import transformers  # noqa: F401

    for _name in ("transformers.utils.import_utils", "transformers.integrations.hub_kernels"):
        try:
            _module = importlib.import_module(_name)
        except ModuleNotFoundError:
            continue  # a transformers from before it knew that package
        if hasattr(_module, "is_kernels_available"):
            _module.is_kernels_available()
finally:
    sys.modules["kernels"] = kernels
