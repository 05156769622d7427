"""What every script shares: settings as flags, the header, tables, and errors as one line with exit code 2."""

import argparse
import os
import platform
import sys

import torch

import config
from kernels import INTERPRETED


class UsageError(Exception):
    """Bad input or configuration: printed as one line, exit code 2."""


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default that is a list as one would type it, and none where there is none."""

    def _get_help_string(self, action):
        if action.default is None:
            return action.help
        text = super()._get_help_string(action)
        if isinstance(action.default, list):
            separator = " " if action.nargs == "+" else ","
            text = text.replace("%(default)s", separator.join(str(value) for value in action.default))
        return text


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        """Bad flags are bad input like any other: one line, exit code 2."""
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(2)


def parser(doc, *settings, without_gpu=None):
    """An ArgumentParser with the first paragraph of ``doc`` and a flag for each named setting of config.py.

    settings: names in config.py; MAX_SEQ_LEN becomes ``--max-seq-len`` whose default is config's value.
    without_gpu: {name: limit}, smaller defaults where kernels are interpreted; flags and environment variables win.
    ``report_lowered`` says so once the header is printed.
    """
    result = _Parser(description=doc.split("\n\n")[0], formatter_class=_HelpFormatter)
    for name in settings:
        default = value = getattr(config, name)
        if name in (without_gpu or {}) and not torch.cuda.is_available() and f"PHI_TRITON_{name}" not in os.environ:
            default = value if value <= without_gpu[name] else Lowered(without_gpu[name])
        result.add_argument(
            "--" + name.lower().replace("_", "-"),
            type=_setting_type(name),
            default=default,
            metavar=type(value).__name__.upper(),
            help=f"config.{name}",
        )
    return result


class Lowered(int):
    """A default that is smaller than config.py's value because there is no GPU (``parser``); a flag is a plain int."""


def _setting_type(name):
    def convert(text):
        try:
            return config.check(name, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def count(text):
    """argparse type: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def run(main):
    """Run ``main()`` and exit with what it returns (None or True: 0, False: 1); bad input exits 2 with one line."""
    try:
        ok = main()
    except (UsageError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        raise SystemExit(130) from None
    raise SystemExit(0 if ok is None or ok else 1)


def resolve_device(name):
    """torch.device of the setting DEVICE; UsageError where it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"DEVICE {name!r} is not one to run on; use auto, cpu, cuda or cuda:<index>")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"DEVICE {name!r}: this machine has {torch.cuda.device_count()} CUDA devices; use auto or cpu")
    return device


def resolve_dtype(name, device):
    """torch.dtype of the setting DTYPE on ``device``; UsageError where the GPU cannot compute in it."""
    if name == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    if name == "bfloat16" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        raise UsageError("DTYPE bfloat16 needs compute capability 8.0 or newer; use float16 on this GPU")
    return getattr(torch, name)


def dtype_name(dtype):
    """torch.float16 -> "float16"."""
    return str(dtype).removeprefix("torch.")


def machine():
    """One line: the GPU (or CPU) and the versions that decide a result."""
    import transformers
    import triton

    if torch.cuda.is_available():
        place = torch.cuda.get_device_name()
    else:
        place = f"no GPU, {platform.machine()} CPU"
    return (
        f"{place} | Python {platform.python_version()}, torch {torch.__version__}, triton {triton.__version__}, "
        f"transformers {transformers.__version__}"
    )


def header(step, what):
    """Print the step, what it does in one line, the machine, and, without a GPU, what that means."""
    print(f"[{step}] {what}")
    print(machine())
    if INTERPRETED:
        print("No CUDA device: kernels run in Triton's interpreter. It shows that they are right; times mean nothing.")
    print()


def report_lowered(args):
    """Name the values of config.py that ``parser`` lowered and nobody set: one line each, none where there are none."""
    for flag, value in vars(args).items():
        if isinstance(value, Lowered):
            name = flag.upper()
            print(
                f"{name} is {value} here, not config.py's {getattr(config, name)}, because there is no GPU: "
                f"--{flag.replace('_', '-')} or PHI_TRITON_{name} sets it.\n"
            )


def table(columns, rows):
    """Print ``rows`` (sequences of values) under ``columns``: numbers to the right, text to the left."""
    cells = [[str(value) for value in row] for row in rows]
    widths = [max([len(name)] + [len(row[i]) for row in cells]) for i, name in enumerate(columns)]
    numeric = [all(_is_number(row[i]) for row in cells) for i in range(len(columns))]

    def line(values):
        padded = (v.rjust(w) if n else v.ljust(w) for v, w, n in zip(values, widths, numeric, strict=True))
        return "  ".join(padded).rstrip()

    print(line(columns))
    print("  ".join("-" * width for width in widths))
    for row in cells:
        print(line(row))
    print()


def _is_number(text):
    try:
        float(text.rstrip("%x~ ").replace(",", ""))
    except ValueError:
        return text in ("-", "")
    return True


def verdict(ok, text):
    """Print the script's verdict and return ``ok``."""
    print(f"{'PASS' if ok else 'FAIL'}: {text}")
    return ok
