"""Every value a user edits, in one place.

Order of precedence: a script's command-line flag, then the environment variable ``PHI_TRITON_<NAME>``, then this file.
A value of the wrong type or range, or a variable ``PHI_TRITON_...`` that is no setting, ends the program with one line
that names it (exit code 2).
"""

import difflib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent

# --- The model -------------------------------------------------------------------------------------------------------

# A checkpoint directory (absolute, or relative to this file), or "random:<preset>" for random weights of a published
# shape: random:phi-3-mini-4k, random:phi-3-mini-128k, random:phi-3-medium-4k, random:phi-4-mini, random:tiny. The
# benchmarks and the profile take random:phi-3-mini-4k (without a GPU random:tiny) unless --model-path names another.
MODEL_PATH = "checkpoints/demo"

# "float16", "bfloat16" or "float32". "auto" takes float16 on a GPU and float32 on the CPU.
DTYPE = "auto"

# "cuda", "cuda:1", "cpu". "auto" takes the GPU when there is one.
DEVICE = "auto"

# --- Generation ------------------------------------------------------------------------------------------------------

# Positions that the KV cache holds: prompt and new tokens together. Memory grows in proportion
# (Phi-3 Mini in float16: 393,216 bytes per position, so 192 MiB for 512).
MAX_SEQ_LEN = 512

PROMPT = "Explain in simple words why the sky is blue."

# Tokens to generate. Without a GPU step 3 makes at most 32, and says so, unless --new-tokens or PHI_TRITON_NEW_TOKENS
# asks for more.
NEW_TOKENS = 256

# Seed of random weights, random inputs and sampling.
SEED = 0

# --- Kernels ---------------------------------------------------------------------------------------------------------

# The most key positions that the decode kernel loads per step of its loop: a power of two from 16 to 256. The kernel
# takes 64 or 32 by the length of the cache, fewer where more would spill registers, and never more than this (so that
# more than 64 changes nothing), but twice as many where the copy engine of compute capability 9.0 loads them:
# kernels/decode_attention_wrapper.py, choose_launch; benchmarks/kernel_resources.py shows what each size would cost.
BLOCK_T = 64

# --- Measuring -------------------------------------------------------------------------------------------------------

# Step 4 (benchmarks/compare_decode_latency.py) and benchmarks/decode_vs_eager.py: calls before the clock starts, and
# timed samples (--samples), of which the median is reported and all are kept in the result file. The other scripts have
# numbers of their own: --samples, --rounds, --runs.
WARMUP = 3
ITERATIONS = 20

# Where scripts write results/<gpu>/<script>.json (absolute, or relative to this file).
RESULTS_DIR = "results"

# --- Overrides (nothing to edit below) -------------------------------------------------------------------------------

CHOICES = {
    "DTYPE": ("auto", "float16", "bfloat16", "float32"),
    "BLOCK_T": (16, 32, 64, 128, 256),
}
MINIMUM = {"MAX_SEQ_LEN": 1, "NEW_TOKENS": 1, "SEED": 0, "WARMUP": 0, "ITERATIONS": 1}
LARGEST = 2**63 - 1  # what a torch seed or size can be
# Read by benchmarks/common.py: the commit to note in result files.
ENVIRONMENT_ONLY = ("COMMIT",)
NO_SETTINGS = ("ROOT", "CHOICES", "MINIMUM", "LARGEST", "ENVIRONMENT_ONLY", "NO_SETTINGS", "NAMES")
NAMES = tuple(name for name in list(globals()) if name.isupper() and name not in NO_SETTINGS)


def check(name, value):
    """Return ``value`` converted to the type of setting ``name``; ValueError names the setting, value and limit."""
    # Not the type of the value in this file, which is as free to be wrong as any: "512", 512.0, a Path.
    whole = name in MINIMUM or name == "BLOCK_T"
    try:
        value = int(str(value)) if whole else str(value)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None
    if name in CHOICES and value not in CHOICES[name]:
        raise ValueError(f"{name} must be one of {', '.join(map(str, CHOICES[name]))}, got {value!r}")
    if name in MINIMUM and value < MINIMUM[name]:
        raise ValueError(f"{name} must be at least {MINIMUM[name]}, got {value}")
    if whole and value > LARGEST:
        raise ValueError(f"{name} must be at most {LARGEST}, got {value}")
    return value


def _apply_environment():
    known = (*NAMES, *ENVIRONMENT_ONLY)
    for variable in os.environ:
        name = variable.removeprefix("PHI_TRITON_")
        if name != variable and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean PHI_TRITON_{near[0]}?" if near else f"settings are {', '.join(known)}"
            print(f"error: environment variable {variable} is no setting; {hint}", file=sys.stderr)
            raise SystemExit(2)
    for name in NAMES:
        text = os.environ.get(f"PHI_TRITON_{name}")
        source = "config.py" if text is None else f"environment variable PHI_TRITON_{name}"
        try:
            globals()[name] = check(name, globals()[name] if text is None else text)
        except ValueError as error:
            print(f"error: {source}: {error}", file=sys.stderr)
            raise SystemExit(2) from None


_apply_environment()
