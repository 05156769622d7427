"""The CPU suite under several transformers, each in an environment of its own below .compat/ (`make compat`).

An environment holds transformers and what that version wants otherwise (tokenizers, huggingface-hub); torch, triton and
all else come from the environment this script runs in, through a .pth file. Logs lie beside the environments. Exits 1
when a version fails.

    python tests/compat.py
    python tests/compat.py --versions 4.44.2 5.0.0 -- -k load_model
"""

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".compat"
VERSIONS = ("4.44.2", "4.57.6", "5.0.0", "5.17.0", "newest")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--versions", nargs="+", default=VERSIONS, help="of transformers")
    parser.add_argument("--jobs", type=int, default=2, help="test processes")
    parser.add_argument("pytest_arguments", nargs="*", help="after --")
    arguments = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    failed = []
    for version in arguments.versions:
        start = time.monotonic()
        ok, outcome = check(version, arguments.jobs, arguments.pytest_arguments)
        print(f"{'PASS' if ok else 'FAIL'}: {outcome} ({time.monotonic() - start:.0f} s)", flush=True)
        if not ok:
            failed.append(version)
    print(f"{'FAIL' if failed else 'PASS'}: {len(arguments.versions)} versions of transformers", *failed)
    return not failed


def check(version, jobs, pytest_arguments):
    """(whether the suite passes under ``version``, one line that says so)."""
    python = FOLDER / version / "bin/python"
    if not make_environment(version, python):
        return False, f"transformers {version} could not be installed, see {FOLDER / version}.install.log"
    name = "transformers " + output_of(python, "-c", "import importlib.metadata as m; print(m.version('transformers'))")
    log = FOLDER / f"{version}.test.log"
    command = [python, "-m", "pytest", "-n", str(jobs), "-m", "not gpu", *pytest_arguments]
    with log.open("w") as file:
        code = subprocess.run(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        ).returncode
    text = log.read_text(errors="replace")
    for line in re.findall(r"^(?:FAILED|ERROR) .*", text, flags=re.MULTILINE):
        print("  " + line)
    return code == 0, f"{name}: {text.strip().splitlines()[-1].strip('= ')}, log in {log.relative_to(ROOT)}"


def make_environment(version, python):
    """Install once; False where pip could not. "newest" is looked up again each time."""
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", python.parents[1]], check=True)
        packages = output_of(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        (Path(packages) / "base.pth").write_text(sysconfig.get_path("purelib") + "\n")
    wanted = ["--upgrade", "transformers"] if version == "newest" else [f"transformers=={version}"]
    command = [sys.executable, "-m", "pip", "--python", python, "install", *wanted]
    with (FOLDER / f"{version}.install.log").open("w") as log:
        return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode == 0


def output_of(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
