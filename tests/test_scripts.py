"""Every script as a user starts it: from any folder, beside a package named like our kernels/, with bad input."""

import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers

import config
from model import load_model

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for folder in (".", "benchmarks", "kernels", "kv_cache", "model", "profiling")
    for path in (ROOT / folder).glob("*.py")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)
STEPS = ["model/inspect_attention.py", "model/validate_decode_attention_triton.py", "run_baseline.py"]


UNSET = ("PHI_TRITON_", "PYTEST_", "TRITON_INTERPRET")  # the last by kernels/ in this process


def outside():
    """The environment as a user has it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(UNSET)}
    return {**inherited, "OMP_NUM_THREADS": "1"}


def run(script, *arguments, cwd=ROOT, **environment):
    """Run ``script`` (relative to the root) in a process of its own; returns the CompletedProcess with its texts."""
    return subprocess.run(
        [sys.executable, os.path.relpath(ROOT / script, cwd), *arguments],
        cwd=cwd, env={**outside(), **environment}, capture_output=True, text=True, encoding="utf-8", timeout=300,
    )  # fmt: skip


def test_the_steps_are_among_the_scripts():
    assert set(STEPS) <= set(SCRIPTS)


# A process for each script, but only one import of what takes long and is not ours. Triton takes long as well, but a
# script has to import kernels/ before it. Without freeze() and _exit() the memory of each is walked and copied.
HELP_OF_EACH = """
import gc, os, runpy, sys
import sympy, torch, transformers

gc.freeze()
for number, script in enumerate(sys.argv[1:]):
    child = os.fork()
    if child == 0:
        for stream, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{number}.{name}", os.O_WRONLY | os.O_CREAT), stream)
        sys.argv, sys.path[0] = [script, "--help"], os.path.dirname(os.path.abspath(script))
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code)
        raise RuntimeError("the script went on after its help")
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)  # or the next child inherits and writes it
"""


def test_help_from_another_folder(tmp_path):
    """`python model/x.py` puts model/ on the path and not the root: each script has to find the packages itself."""
    paths = [os.path.relpath(ROOT / script, tmp_path) for script in SCRIPTS]
    result = subprocess.run(
        [sys.executable, "-c", HELP_OF_EACH, *paths],
        cwd=tmp_path, env=outside(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    failed = {}
    for number, (script, code) in enumerate(zip(SCRIPTS, result.stdout.split(), strict=True)):
        stdout, stderr = ((tmp_path / f"{number}.{name}").read_text(encoding="utf-8") for name in ("stdout", "stderr"))
        if code != "0" or not stdout.startswith("usage:"):
            failed[script] = stderr or stdout
    assert not failed, "\n".join(f"{script}: {text}" for script, text in failed.items())


# --- A package named kernels -----------------------------------------------------------------------------------------


@pytest.fixture
def other_kernels(tmp_path):
    """A folder for PYTHONPATH with a stand-in of the PyPI package ``kernels``, of a version transformers accepts."""
    version = getattr(transformers.utils.import_utils, "KERNELS_MIN_VERSION", "0.10.0")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text("def __getattr__(name):\n    return lambda *args, **kwargs: None\n")
    metadata = tmp_path / f"kernels-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    (metadata / "RECORD").write_text("kernels/__init__.py,,\n")
    return tmp_path


IMPORT_PHI3 = "from transformers import Phi3ForCausalLM, GenerationConfig"


def test_another_package_named_kernels(other_kernels):
    environment = {**os.environ, "PYTHONPATH": str(other_kernels)}

    def python(code):
        return subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
        )

    if hasattr(transformers.utils.import_utils, "KERNELS_MIN_VERSION"):
        unprotected = python(IMPORT_PHI3)
        assert "cannot import name" in unprotected.stderr, "the trap has to be there for the test to mean anything"
    result = python(f"import model; {IMPORT_PHI3}; import kernels; print(kernels.__file__)")
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()) == ROOT / "kernels/__init__.py"


def test_a_script_beside_another_package_named_kernels(other_kernels):
    result = run(
        "model/inspect_attention.py", "--model-path", "random:tiny", "--device", "cpu", PYTHONPATH=str(other_kernels)
    )
    assert result.returncode == 0, result.stderr


# --- Bad input -------------------------------------------------------------------------------------------------------


@pytest.fixture
def start(monkeypatch, capsys):
    """start(script, *arguments, **settings) -> (exit code, stdout, stderr), in this process: without the seconds that
    importing torch takes. The settings are PHI_TRITON_ variables, read again as a new process would."""

    def start(script, *arguments, **settings):
        for name, value in settings.items():
            monkeypatch.setenv(f"PHI_TRITON_{name}", value)
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        monkeypatch.chdir(ROOT)
        with pytest.raises(SystemExit) as end:
            importlib.reload(config)
            runpy.run_path(script, run_name="__main__")
        return end.value.code, *capsys.readouterr()

    with mock.patch.dict(os.environ):  # a script may set variables, as kernel_resources.py does
        yield start
        monkeypatch.undo()
    importlib.reload(config)


def assert_one_line_error(result, message):
    code, _, stderr = result
    assert code == 2, stderr
    assert re.search(message, stderr), stderr
    assert stderr.startswith("error: ") and len(stderr.strip().splitlines()) == 1, stderr


def test_a_process_ends_with_the_line_and_code_2(tmp_path):
    """What the other cases check in this process, once from outside: no traceback behind the line. In another folder,
    as the help above, but started by Python itself.
    """
    result = run("model/inspect_attention.py", cwd=tmp_path, PHI_TRITON_MODEL_PATH="nowhere")
    assert_one_line_error((result.returncode, result.stdout, result.stderr), "MODEL_PATH 'nowhere' does not exist")


BAD_INPUT = [
    ("run_baseline.py", {"MODEL_PATH": "nowhere"}, "MODEL_PATH 'nowhere' does not exist"),
    (
        "model/inspect_attention.py",
        {"NEW_TOKEN": "3"},
        "PHI_TRITON_NEW_TOKEN is no setting; did you mean PHI_TRITON_NEW_TOKENS?",
    ),
    ("run_baseline.py", {"MODEL_PATH": "tests"}, "not a checkpoint: it has no config.json"),
    ("run_baseline.py", {"MODEL_PATH": "random:phi-5"}, "no preset; choose from random:phi-3-mini-4k"),
    ("run_baseline.py", {"MODEL_PATH": "random:tiny", "PROMPT": " "}, "(?i)prompt is empty"),
    ("run_baseline.py", {"MODEL_PATH": "random:tiny", "MAX_SEQ_LEN": "8"}, r"KV cache of 8; raise MAX_SEQ_LEN to \d+ "),
    ("run_baseline.py", {"DTYPE": "float64"}, "DTYPE must be one of .*, got 'float64'"),
    ("run_baseline.py", {"BLOCK_T": "48"}, "BLOCK_T must be one of .*, got 48"),
    ("run_baseline.py", {"NEW_TOKENS": "many"}, "NEW_TOKENS must be a whole number, got 'many'"),
    ("run_baseline.py", {"DEVICE": "tpu9"}, "DEVICE 'tpu9'"),
    ("run_baseline.py", {"DEVICE": "meta"}, "DEVICE 'meta' is not one to run on; use auto, cpu, cuda"),
    ("run_baseline.py", {"SEED": str(2**70)}, "SEED must be at most 9223372036854775807"),
    ("run_baseline.py", {"MODEL_PATH": "random:tiny", "PROMPT": "\udcff\udcfe"}, "PROMPT is not text"),
    ("model/inspect_attention.py", {"MODEL_PATH": "random:tiny", "MAX_SEQ_LEN": str(10**14)}, "lower MAX_SEQ_LEN"),
    ("model/inspect_attention.py", {"MODEL_PATH": "tests"}, "not a checkpoint: it has no config.json"),
    ("model/validate_decode_attention_triton.py", {"DEVICE": "tpu9"}, "DEVICE 'tpu9'"),
]


@pytest.mark.parametrize(
    ("script", "settings", "message"),
    BAD_INPUT,
    ids=[
        f"{Path(script).stem}-{list(settings.items())[-1]}".encode("ascii", "replace").decode()
        for script, settings, _ in BAD_INPUT
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(start, script, settings, message):
    assert_one_line_error(start(script, **settings), message)


@pytest.mark.parametrize("script", ["model/inspect_attention.py", "run_baseline.py"])
def test_another_architecture(start, script, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "tokenizer.json").write_text("{}")
    message = r"is a 'llama' model \(LlamaForCausalLM\); only 'phi3' is supported"
    assert_one_line_error(start(script, MODEL_PATH=str(tmp_path)), message)


@pytest.mark.parametrize("flag", [("--dtype", "int8"), ("--max-seq-len", "0"), ("--no-such-flag",)], ids="".join)
def test_bad_flags(start, flag):
    result = start("run_baseline.py", *flag)
    assert_one_line_error(result, re.escape(flag[0]))
    assert result[1] == ""


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        ("compare_decode_latency", ("--lengths", "abc"), "--lengths: expected comma-separated numbers of at least 1, "),
        ("decode_ladder", ("--contexts", "0,128"), "--contexts: expected comma-separated numbers of at least 1, "),
        ("decode_ladder", ("--new-tokens", "1"), "--new-tokens must be at least 2: the first token is the prefill's"),
        ("kernel_resources", ("--block-t", "48"), "BLOCK_T must be one of 16, 32, 64, 128, 256, got 48"),
        ("compare_results", ("results", "results", "--limit", "nan"), "--limit must be above 0 and finite, got nan"),
        ("decode_ladder", ("--rounds", "0"), "--rounds: expected a whole number of at least 1, got '0'"),
        ("generate_latency", ("--runs", "-1"), "--runs: expected a whole number of at least 1, got '-1'"),
        ("compare_decode_latency", ("--shapes", "0,3"), "--shapes: '3' is none of 0, 1, 2 "),
        ("prefill_vs_sdpa", ("--shapes", "2"), "--shapes: '2' is none of 0, 1 "),
        ("decode_vs_eager", ("--lengths", "1,,2"), "--lengths: expected comma-separated numbers of at least 1"),
        ("decode_attention_choices", ("stages=3",), "'stages=3' sets none of rows, block_t, num_warps, "),
        ("decode_ladder", ("--rungs", "0,7"), "--rungs: '7' is none of 0, 0s, 1, 2, 3, 4, 5, 6 "),
        ("decode_ladder", ("--contexts", "128 512"), "--contexts: expected comma-separated numbers .* got '128 512'"),
        ("compare_results", ("nowhere", "results"), "error: nowhere does not exist"),
    ],
)
def test_bad_flags_of_benchmarks(start, script, flags, message):
    result = start(f"benchmarks/{script}.py", *flags)
    assert_one_line_error(result, message)
    assert result[1] == ""


@pytest.mark.parametrize(
    ("script", "texts"),
    [
        (
            "benchmarks/compare_decode_latency.py",
            ("cache lengths, comma-separated (default: 128,256,", "1: 32/8 D=128; 2: Phi-3 Medium", "(default: 0,1,2)"),
        ),
        ("benchmarks/prefill_vs_sdpa.py", ("which shapes, comma-separated, of 0: 32/8 D=128; 1:", "(default: 0,1)")),
        (
            "benchmarks/decode_ladder.py",
            ("prompt lengths, comma-separated (default: 128,512,2048)", "4: CUDA graph", "(default: 0,0s,1,2,3,4,5,6)"),
        ),
        ("benchmarks/generate_latency.py", ("which rungs (default: triton graph fused)",)),
    ],
)
def test_help_shows_lists_as_one_would_type_them(start, script, texts):
    code, stdout, _ = start(script, "--help")
    help_text = " ".join(stdout.split())
    assert code == 0 and "None)" not in help_text and "default: [" not in help_text
    for text in texts:
        assert text in help_text


@pytest.mark.parametrize("bandwidth", ["0", "-5", "nan"])
def test_a_bandwidth_that_is_none(start, bandwidth):
    assert_one_line_error(start("model/inspect_attention.py", "--bandwidth", bandwidth), "--bandwidth must be above 0")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("NEW_TOKENS", "many", "NEW_TOKENS must be a whole number, got 'many'"),
        ("MAX_SEQ_LEN", 512.0, r"MAX_SEQ_LEN must be a whole number, got 512\.0"),
        ("SEED", None, "SEED must be a whole number, got None"),
        ("DTYPE", None, "DTYPE must be one of auto, .*, got 'None'"),
    ],
)
def test_a_wrong_value_in_the_file_itself(name, value, message, monkeypatch):
    """Its type says nothing about what the setting should be."""
    monkeypatch.setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        config.check(name, value)


def test_right_values_in_the_file_of_another_type(monkeypatch):
    assert config.check("NEW_TOKENS", "64") == 64
    monkeypatch.setattr(config, "MODEL_PATH", Path("checkpoints/mine"))
    assert config.check("MODEL_PATH", config.MODEL_PATH) == "checkpoints/mine"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU decodes through Triton's interpreter alone")
@pytest.mark.parametrize("tokens", [0, 2])
def test_ctrl_c_while_streaming(tokens, start, monkeypatch):
    """Nothing generated: the usual exit code 130. Something: it is kept and compared, although the logits of one more
    token had been there."""
    from model.generate import _Loop

    accept = _Loop.accept

    def interrupted(self, ids):
        if len(self.columns) == tokens and self.on_token is not None:
            raise KeyboardInterrupt
        return accept(self, ids)

    monkeypatch.setattr(_Loop, "accept", interrupted)
    code, stdout, stderr = start("run_baseline.py", "--model-path", "random:tiny", "--device", "cpu", PROMPT="ab")
    if tokens:
        assert code == 0 and "all 2 tokens equal" in stdout, stderr
    else:
        assert code == 130 and stderr.strip().endswith("interrupted")


def test_the_flag_beats_the_environment(start):
    result = start("run_baseline.py", "--model-path", "random:phi-5", MODEL_PATH="nowhere")
    assert_one_line_error(result, "random:phi-5")


def test_weights_that_do_not_fit(start, monkeypatch):
    """Phi-3 Medium in float32 takes 55.8 GB: more than this process is told it has."""
    monkeypatch.setattr(load_model, "free_memory", lambda device: 8 * 10**9)
    result = start("run_baseline.py", MODEL_PATH="random:phi-3-medium-4k", DEVICE="cpu", DTYPE="float32")
    assert_one_line_error(result, r"55\.84 GB in float32, but cpu has 8\.00 GB free")


@pytest.mark.parametrize(
    ("preset", "line"),
    [("tiny", r"head_dim +16$"), ("phi-3-mini-4k", r"head_dim +96 \(64 \+ 32 in decode, padded to 128 in prefill\)$")],
)
def test_step_1_makes_no_random_weights(start, monkeypatch, preset, line):
    monkeypatch.setattr(load_model, "free_memory", lambda device: 0)
    code, stdout, stderr = start("model/inspect_attention.py", "--max-seq-len", "9", MODEL_PATH=f"random:{preset}")
    assert code == 0, stderr
    assert re.search(line, stdout, re.MULTILINE), stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is lowered where there is a GPU")
@pytest.mark.parametrize(("flags", "said"), [((), True), (("--new-tokens", "32"), False)], ids=["file", "flag"])
def test_a_lowered_number_of_tokens_is_said(start, monkeypatch, flags, said):
    from model.generate import _Loop

    lengths = []
    monkeypatch.setattr(_Loop, "accept", lambda self, ids: lengths.append(self.remaining))  # the loop ends at once
    _, stdout, _ = start("run_baseline.py", "--model-path", "random:tiny", "--device", "cpu", *flags, PROMPT="ab")
    assert lengths == [32]
    text = "NEW_TOKENS is 32 here, not config.py's 256, because there is no GPU: --new-tokens or PHI_TRITON_NEW_TOKENS"
    assert (text in stdout) == said


def test_make_names_the_python_it_needs(tmp_path):
    result = subprocess.run(
        ["make", "setup", "PYTHON=false", f"VENV={tmp_path}/venv"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert "Python 3.10 to 3.13" in result.stderr and not (tmp_path / "venv").exists()


def test_the_readme_lists_every_module():
    """The README's tree names each Python file once, and no other."""
    tree = (ROOT / "README.md").read_text(encoding="utf-8").split("## Structure")[1].split("```")[1]
    listed = [line.split()[0] for line in tree.splitlines() if line.split()[:1] and line.split()[0].endswith(".py")]
    folders = (".", "benchmarks", "kernels", "kv_cache", "model", "profiling")
    modules = [path for folder in folders for path in (ROOT / folder).glob("*.py") if path.name != "__init__.py"]
    assert sorted(listed) == sorted(str(path.relative_to(ROOT)) for path in modules)
