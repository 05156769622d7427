"""The digest counts GPU time once, whatever else in the trace carries it; shown on traces written by hand."""

import gzip
import json

import pytest

from profiling import digest as module
from profiling.digest import ATTENTION, CACHE, COPIES, ELEMENTWISE, LM_HEAD, MLP, OTHER, PROJECTIONS, digest


def event(category, name, start, duration, **args):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "tid": 7, "args": args}


def kernel(name, start, duration, **args):
    return event("kernel", name, start, duration, **args)


def test_operators_annotations_and_copies_are_not_kernel_time():
    trace = [
        kernel("_decode_attention_kernel", 0, 100),
        kernel("vectorized_elementwise_kernel", 100, 200),
        event("cpu_op", "aten::mm", 0, 400, device_time=100),
        event("gpu_user_annotation", "layer 0", 0, 350),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 300, 20),
        {"ph": "M", "name": "process_name"},
    ]
    found = digest(trace, steps=1, num_layers=1)
    assert sum(found.names.values()) == pytest.approx(0.3)
    assert found.groups[COPIES] == pytest.approx(0.02)
    assert found.busy_ms == pytest.approx(0.32) == sum(found.groups.values())
    assert found.kernels == 2


def test_overlapping_streams_sum_200_busy_150():
    found = digest([kernel("a", 0, 100), kernel("b", 50, 100)], steps=1, num_layers=1)
    assert found.sum_ms == pytest.approx(0.2)
    assert found.busy_ms == pytest.approx(0.15)
    assert found.names == pytest.approx({"a": 0.1, "b": 0.05})


def test_a_kernel_inside_another_adds_nothing():
    found = digest([kernel("long", 0, 100), kernel("inner", 10, 20), kernel("next", 100, 5)], steps=1, num_layers=1)
    assert found.names == pytest.approx({"long": 0.1, "inner": 0.0, "next": 0.005})


def test_everything_is_per_step():
    trace = [kernel("a", start, 10) for start in range(0, 400, 100)]
    trace += [event("cuda_runtime", "cudaLaunchKernel", start, 1) for start in range(0, 400, 100)]
    trace += [event("cuda_runtime", "cudaStreamSynchronize", 0, 1), event("cuda_runtime", "cudaGraphLaunch", 0, 1)]
    trace += [event("cuda_driver", "cuLaunchKernelEx", 0, 1)]
    found = digest(trace, steps=2, num_layers=1)
    assert (found.kernels, found.launches, found.busy_ms) == (2, 3, pytest.approx(0.02))


def test_a_range_names_the_work_launched_inside_it_and_the_innermost_wins():
    trace = [
        event("user_annotation", "step", 0, 100),
        event("user_annotation", "layer 0", 0, 90),
        event("user_annotation", "layer 0: gate_up_proj", 10, 10),
        event("user_annotation", "layer 0: cache", 30, 30),
        event("user_annotation", "layer 0: rope", 40, 10),
        *(
            event("cuda_runtime", "cudaLaunchKernel", launched, 1, correlation=number)
            for number, launched in enumerate((12, 32, 42, 55, 80))
        ),
        kernel("sm90_gemm", 200, 10, correlation=0),
        kernel("CatArrayBatchedCopy", 210, 20, correlation=1),
        kernel("CatArrayBatchedCopy", 230, 40, correlation=2),
        kernel("CatArrayBatchedCopy", 270, 80, correlation=3),
        kernel("CatArrayBatchedCopy", 350, 160, correlation=4),
    ]
    groups = digest(trace, steps=1, num_layers=1).groups
    assert groups[MLP] == pytest.approx(0.010)
    assert groups[ELEMENTWISE] == pytest.approx(0.040)
    assert groups[CACHE] == pytest.approx(0.020 + 0.080 + 0.160)  # the last one by its name


def test_matrix_products_of_a_captured_graph_are_told_apart_by_their_order():
    names = ["nvjet_qkv", "_rope_attention_kernel", "gemvx_o", "splitKreduce_kernel", "gemm_gate_up", "gemm_down"] * 2
    names += ["_matvec_kernel", "_embed_kernel"]
    trace = [kernel(name, 10 * i, 1 + i, correlation=1) for i, name in enumerate(names * 2)]
    trace = [{**e, "dur": 1.0} for e in trace]
    groups = digest(trace, steps=2, num_layers=2).groups
    expected = {PROJECTIONS: 6, ATTENTION: 2, MLP: 4, LM_HEAD: 1, ELEMENTWISE: 1}
    assert {name: round(1e3 * ms) for name, ms in groups.items() if ms} == expected


def test_products_of_an_unknown_program_are_not_guessed():
    groups = digest([kernel("gemm", 10 * i, 1) for i in range(7)], steps=1, num_layers=1).groups
    assert groups[OTHER] == pytest.approx(0.007)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("void pytorch_flash::flash_fwd_splitkv_kernel<...>", ATTENTION),
        ("fmha_cutlassF_f16_aligned_64x64", ATTENTION),
        ("cudnn_generated_fort_native_sdpa_sm90", ATTENTION),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<...>", CACHE),
        ("void at::native::index_put_kernel", CACHE),
        ("void at::native::vectorized_elementwise_kernel<4, silu>", ELEMENTWISE),
        ("void at::native::reduce_kernel<512, MeanOps>", ELEMENTWISE),
        ("something_else", OTHER),
    ],
)
def test_kernels_without_ranges_are_known_by_name(name, group):
    assert digest([kernel(name, 0, 1000)], steps=1, num_layers=1).groups[group] == pytest.approx(1.0)


def make_digest(**changes):
    base = module.Digest(1, 2.0, 2.0, {}, 300, 300, {}, 0.0)
    return base._replace(**changes)


@pytest.mark.parametrize(
    ("changes", "wall_ms", "limits", "kind"),
    [
        ({"busy_ms": 8.7}, 30.9, {}, "launch-bound"),
        ({"busy_ms": 1.8}, 1.9, {}, "bandwidth-bound"),
        ({"busy_ms": 20.0}, 21.0, {}, "kernel-bound"),
        ({"busy_ms": 60.0}, 61.0, {"weight_bytes": 7.64e9, "memory_bytes": 7.5e9}, "spilling to host"),
        ({"busy_ms": 60.0, "host_copy_ms": 40.0}, 61.0, {}, "spilling to host"),
    ],
)
def test_verdict(changes, wall_ms, limits, kind):
    found = module.judge(make_digest(**changes), wall_ms, 7.5e9, 4660, **limits)
    assert found.kind == kind
    assert f"wall {wall_ms:.2f} ms" in found.text


def test_trace_files_plain_and_gzipped(tmp_path):
    content = json.dumps({"traceEvents": [kernel("a", 0, 1)]})
    (tmp_path / "a.json").write_text(content)
    with gzip.open(tmp_path / "a.json.gz", "wt") as file:
        file.write(content)
    assert module.read_trace(tmp_path / "a.json") == module.read_trace(tmp_path / "a.json.gz")
