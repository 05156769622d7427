"""Prefill attention, forward and backward.

One case: pytest tests/test_flash_attention.py -k gqa. Judged against float64: the forward's error is at most 1.5 times
that of scaled_dot_product_attention in the same dtype, each gradient's at most 2 times (tests/oracles.py).
"""

import ast
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F

from kernels import flash_attention_triton, flash_attention_wrapper
from kernels.device import SHARED_MEMORY, DeviceInfo, TensorDescriptor, pretend_device, tma_fits
from kernels.flash_attention_wrapper import choose_tiles, flash_attention, flash_attention_forward
from model.decode_attention_ref import attention_ref
from tests.conftest import ROOT
from tests.oracles import assert_close_to_reference, attention_reference64, sdpa_explicit

HALF = torch.float16
ON_GPU = torch.cuda.is_available()


def make_inputs(device, B, Hq, Hkv, S, T, D, dtype):
    """(q, k, v, dout), the first three as leaves that ask for gradients."""
    q, dout = (torch.randn(B, Hq, S, D, dtype=dtype, device=device) for _ in range(2))
    k, v = (torch.randn(B, Hkv, T, D, dtype=dtype, device=device) for _ in range(2))
    return *(x.requires_grad_() for x in (q, k, v)), dout


def with_gradients(attention, q, k, v, dout, **kwargs):
    """(out, dq, dk, dv) of ``attention`` on detached copies of the inputs."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*inputs, **kwargs)
    return out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))


def reference_with_gradients(q, k, v, dout, **kwargs):
    """float64. The leaves are widened, not what they are multiplied to: a gradient is rounded to its leaf's dtype."""
    return with_gradients(attention_ref, *(x.double() for x in (q, k, v)), dout, **kwargs)


def assert_matches_reference(q, k, v, dout, *, causal=True, **kwargs):
    results = with_gradients(flash_attention, q, k, v, dout, causal=causal, **kwargs)
    reference = reference_with_gradients(q, k, v, dout, causal=causal, **kwargs)
    # SDPA gives NaN for a row without keys; there the naive program in the same dtype takes its place.
    native_program = attention_ref if causal and q.shape[2] > k.shape[2] else sdpa_explicit
    native = with_gradients(native_program, q, k, v, dout, causal=causal, **kwargs)
    ratio = q.shape[1] // k.shape[1]
    case = f"B={q.shape[0]} S={q.shape[2]} T={k.shape[2]} D={q.shape[3]} ratio={ratio} causal={causal} {kwargs}"
    for what, result, expected, ordinary in zip(("out", "dq", "dk", "dv"), results, reference, native, strict=True):
        if (result.double() - expected).abs().max() <= 1e-5:
            continue  # with one visible key dq and dk are 0, and nothing but float32 rounding is left to compare
        factor = 1.5 if what == "out" else 2.0
        assert_close_to_reference(result, expected, ordinary, factor=factor, what=f"{what} of {case}")


# --- Against the reference -------------------------------------------------------------------------------------------

CASES = {  # B, Hq, Hkv, S, T, D, dtype, keywords
    "mha": (2, 2, 2, 65, 65, 32, HALF, {}),
    "gqa": (1, 4, 2, 127, 127, 64, HALF, {}),
    "mqa-full": (1, 4, 1, 63, 63, 96, torch.bfloat16, {"causal": False}),
    "one-token": (1, 2, 1, 1, 1, 16, HALF, {}),
    "more-keys": (1, 2, 1, 33, 150, 40, HALF, {}),
    "more-queries": (1, 2, 1, 150, 31, 80, HALF, {}),
    "more-keys-full": (1, 2, 2, 17, 200, 16, HALF, {"causal": False}),
    "window": (1, 2, 1, 200, 200, 32, HALF, {"window": 70}),
    "window-1": (1, 2, 1, 40, 60, 16, HALF, {"window": 1}),
    "window-full": (1, 2, 1, 100, 140, 16, HALF, {"causal": False, "window": 30}),
    "scale": (1, 2, 1, 65, 65, 16, HALF, {"scale": 0.7}),
    "float32": (1, 2, 1, 65, 65, 32, torch.float32, {}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_matches_reference(case, device):
    *shape, kwargs = case
    assert_matches_reference(*make_inputs(device, *shape), **kwargs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("D", [16, 40, 64, 80, 96, 128, 256])
def test_whole_matrix(D, dtype, device):
    """Lengths at one middle ratio, and every ratio at one length; causal and full share one compilation."""
    lengths = [(n, n) for n in (1, 31, 33, 63, 65, 127, 257, 1000)] + [(33, 257), (257, 65), (1, 1000), (1000, 129)]
    shapes = [(4, S, T) for S, T in lengths] + [(ratio, 257, 257) for ratio in (1, 2, 8, 16)]
    for ratio, S, T in shapes:
        for causal in (True, False):
            assert_matches_reference(*make_inputs(device, 4, 16, 16 // ratio, S, T, D, dtype), causal=causal)


@pytest.mark.parametrize("D", [16, 64, 72, 80, 96, 112, 128, 160, 256])
def test_head_dims(D, device):
    for length in (17, 130) if ON_GPU or D == 96 else (17,):
        assert_matches_reference(*make_inputs(device, 1, 2, 1, length, length, D, HALF))


@pytest.mark.skipif(TensorDescriptor is None, reason="this Triton has no tensor descriptors")
@pytest.mark.skipif(ON_GPU, reason="the GPU's own path is the one under test there")
@pytest.mark.parametrize("D", [40, 96])
def test_tensor_descriptors_in_the_interpreter(D, device):
    """The path of sm_90, with its tiles, where no such GPU is."""
    with pretend_device(DeviceInfo((9, 0), 132, SHARED_MEMORY[9, 0])):
        assert_matches_reference(*make_inputs(device, 2, 2, 1, 130, 150, D, HALF), window=100)


def test_finite_differences(device):
    """A directional derivative of sum(out * dout) along random directions, for q, k and v."""
    inputs = make_inputs(device, 1, 4, 2, 6, 9, 16, torch.float32)
    *tensors, dout = [x.detach() for x in inputs]

    def loss(*args):
        return (flash_attention(*args).double() * dout).sum()

    _, *gradients = with_gradients(flash_attention, *inputs)
    step = 1e-2
    for i, gradient in enumerate(gradients):
        for _ in range(3):
            direction = torch.randn_like(tensors[i])
            ahead, behind = ([*tensors[:i], tensors[i] + s * direction, *tensors[i + 1 :]] for s in (step, -step))
            slope = (loss(*ahead) - loss(*behind)) / (2 * step)
            torch.testing.assert_close((gradient * direction).sum().double(), slope, rtol=1e-3, atol=2e-3)


def test_training_follows_sdpa(device):
    """The loss curve of a small attention layer under SGD is that of the same layer on SDPA."""
    x, target = torch.randn(2, 2, 20, 32, device=device).unbind()
    curves = []
    for attention in (flash_attention, sdpa_explicit):
        torch.manual_seed(1)
        qkv, project = torch.nn.Linear(32, 64, bias=False).to(device), torch.nn.Linear(32, 32).to(device)
        optimizer = torch.optim.SGD([*qkv.parameters(), *project.parameters()], lr=8.0)
        losses = []
        for _ in range(6):
            heads = qkv(x).unflatten(-1, (4, 16)).transpose(1, 2)  # 2 query heads, 1 key head, 1 value head
            q, k, v = heads.split((2, 1, 1), dim=1)
            loss = F.mse_loss(project(attention(q, k, v).transpose(1, 2).flatten(2)), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[0][-1] < 0.8 * curves[0][0], "the layer does not learn: the comparison would show nothing"
    torch.testing.assert_close(*(torch.tensor(c) for c in curves), rtol=1e-4, atol=0)


# --- What must not be read or written --------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 65, 127, 129, 200, 1000] if ON_GPU else [1, 17, 65, 129])
def test_guard_rows(length, device, monkeypatch):
    """64 rows of NaN behind each head of the inputs are not read; 64 behind each head of the results not written."""
    D, guard, sentinel = 32, 64, 7.0
    results = []

    def guarded_empty(like):
        B, H, rows, width = like.shape
        results.append(like.new_full((B, H, rows + guard, width), sentinel))
        return results[-1][:, :, :rows]

    monkeypatch.setattr(flash_attention_wrapper, "_empty", guarded_empty)
    for causal in (True, False):
        tensors = make_inputs(device, 1, 4, 2, length, length, D, HALF)
        views = []
        for x in tensors:
            buffer = torch.full((1, x.shape[1], length + guard, D), float("nan"), dtype=HALF, device=device)
            views.append(buffer[:, :, :length].copy_(x.detach()))
        results.clear()
        assert_matches_reference(*views, causal=causal)
        for result in results:
            assert result[:, :, :length].isfinite().all()
            assert (result[:, :, length:] == sentinel).all()


def test_views_need_no_copy(device):
    """Slices of a fused projection, [B, S, H, D] memory, a slice of a longer buffer: bitwise the contiguous result."""
    B, Hq, Hkv, S, D = 2, 4, 2, 70, 32
    tensors = make_inputs(device, B, Hq, Hkv, S, S, D, HALF)
    expected = with_gradients(flash_attention, *tensors)
    plain = [x.detach() for x in tensors]

    fused = torch.cat([x.transpose(1, 2).flatten(2) for x in plain[:3]], dim=-1)
    parts = fused.split((Hq * D, Hkv * D, Hkv * D), dim=-1)
    from_fused = [x.unflatten(-1, (-1, D)).transpose(1, 2) for x in parts]
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain]
    longer = [F.pad(x, (0, 0, 0, 50), value=float("nan"))[:, :, :S] for x in plain]
    last_dim_swapped = plain[3].transpose(2, 3).contiguous().transpose(2, 3)
    for inputs in ([*from_fused, plain[3]], swapped, longer, [*plain[:3], last_dim_swapped]):
        assert not all(x.is_contiguous() for x in inputs)
        for result, wanted in zip(with_gradients(flash_attention, *inputs), expected, strict=True):
            assert torch.equal(result, wanted)


def test_expanded_tensors(device):
    """K and V shared by the batch (stride 0), and the gradient of sum(), which is one expanded number."""
    q, k, v, _ = make_inputs(device, 2, 2, 1, 40, 40, 16, HALF)
    k, v = (x.detach()[:1].expand(2, -1, -1, -1) for x in (k, v))
    ones = torch.ones((), dtype=HALF, device=device).expand(q.shape)
    assert_matches_reference(q, k, v, ones)


@pytest.mark.skipif(ON_GPU and torch.cuda.mem_get_info()[0] < 24e9, reason="needs 24 GB of free GPU memory")
def test_offsets_beyond_int32():
    """Batch 2 of tensors whose batch stride is 2^30 elements begins at element 2^31. Untouched memory costs nothing."""
    script = """
        import kernels, torch
        from kernels import flash_attention_wrapper as wrapper
        B, Hq, Hkv, S, D = 3, 2, 1, 20, 16
        device = "cuda" if torch.cuda.is_available() else "cpu"

        def far(H, storage, start):
            return storage.as_strided((B, H, S, D), (2**30, S * D, D, 1), start)

        read, *written = (torch.empty(2**31 + 4096, dtype=torch.float16, device=device) for _ in range(5))
        q, dout, k, v = far(Hq, read, 0), far(Hq, read, 640), far(Hkv, read, 1280), far(Hkv, read, 1600)
        near = [torch.randn(1, x.shape[1], S, D, dtype=x.dtype, device=device) for x in (q, k, v, dout)]

        def gradients(q, k, v, dout):
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            out = wrapper.flash_attention(q, k, v)
            return out, *torch.autograd.grad(out, (q, k, v), dout)

        expected = gradients(*near)
        for x, values in zip((q, k, v, dout), near):
            x[:2] = 0
            x[2] = values[0]
        wrapper._empty = lambda like: far(like.shape[1], written.pop(), 0)
        for result, wanted in zip(gradients(q, k, v, dout), expected):
            assert result.stride(0) == 2**30
            assert torch.equal(result[2:], wanted)
        print("equal")
    """
    assert "equal" in run_script(script, OMP_NUM_THREADS="1")


def run_script(script, **environment):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


# --- Masks, rows without keys, logsumexp -----------------------------------------------------------------------------


def positions(device, T, S, D=16):
    """q, k, v such that the output is the mean position of the visible keys."""
    q, k = torch.randn(1, 1, S, D, device=device), torch.zeros(1, 1, T, D, device=device)
    v = torch.arange(T, dtype=torch.float32, device=device)[:, None].expand(T, D).contiguous()[None, None]
    return q, k, v


@pytest.mark.parametrize(
    ("S", "T", "expected"),
    [(1, 5, [2.0]), (2, 5, [1.5, 2.0]), (5, 2, [0.0, 0.0, 0.0, 0.0, 0.5])],
    ids=["decode", "chunk", "more-queries"],
)
def test_causal_corner_is_bottom_right(S, T, expected, device):
    out, lse = flash_attention_forward(*positions(device, T, S))
    assert out[0, 0, :, 0].tolist() == pytest.approx(expected, abs=1e-6)
    assert lse[0, 0].isneginf().tolist() == [m + T - S < 0 for m in range(S)]


def test_window_counts_the_own_position(device):
    """With a window of 2047 the query at position 2047 sees keys 1 to 2047; one position earlier nothing is dropped."""
    q, k, v = positions(device, 2048, 3)
    out = flash_attention(q, k, v, window=2047)
    assert out[0, 0, :, 0].tolist() == pytest.approx([1022.5, 1023.0, 1024.0], abs=0.01)


def test_rows_without_keys(device):
    """They give 0, lse -inf and gradient 0, and put nothing into the keys' gradients."""
    q, k, v, dout = make_inputs(device, 1, 2, 1, 100, 40, 16, HALF)
    out, lse = flash_attention_forward(q, k, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    assert (out[:, :, :60] == 0).all() and lse[:, :, :60].isneginf().all() and (dq[:, :, :60] == 0).all()
    assert lse[:, :, 60:].isfinite().all()
    _, _, dk_rest, dv_rest = with_gradients(flash_attention, q[:, :, 60:], k, v, dout[:, :, 60:])
    torch.testing.assert_close((dk, dv), (dk_rest, dv_rest), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("B", "S", "T"), [(1, 3, 0), (1, 0, 3), (0, 3, 3)], ids=["no-keys", "no-queries", "no-batch"])
def test_empty_inputs(B, S, T, device):
    q, k, v, dout = make_inputs(device, B, 2, 1, S, T, 16, HALF)
    out, lse = flash_attention_forward(q, k, v, causal=False)
    assert out.shape == q.shape and (out == 0).all() and lse.isneginf().all()
    for x, gradient in zip((q, k, v), torch.autograd.grad(out, (q, k, v), dout), strict=True):
        assert gradient.shape == x.shape and (gradient == 0).all()


def test_logsumexp_is_natural_and_merges(device):
    q, k, v, _ = make_inputs(device, 1, 2, 2, 5, 256, 16, torch.float32)
    out, lse = flash_attention_forward(q, k, v, causal=False)
    _, reference = attention_reference64(q, k, v, causal=False, return_lse=True)
    torch.testing.assert_close(lse.double(), reference, rtol=0, atol=1e-4)
    halves = [
        flash_attention_forward(q, k[:, :, part], v[:, :, part], causal=False) for part in (slice(200), slice(200, 256))
    ]
    total = torch.logaddexp(halves[0][1], halves[1][1])
    merged = sum(part * (part_lse - total).exp()[..., None] for part, part_lse in halves)
    torch.testing.assert_close(merged, out, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("Hq", "Hkv"), [(32, 32), (24, 8), (40, 10), (48, 2), (24, 1), (32, 1), (71, 1), (128, 1)], ids=str
)
def test_group_sizes(Hq, Hkv, device):
    """V of head h is h everywhere: query head i must give exactly i // group_size."""
    q, k = torch.randn(1, Hq, 3, 16, device=device, dtype=HALF), torch.randn(1, Hkv, 3, 16, device=device, dtype=HALF)
    v = torch.arange(Hkv, device=device, dtype=HALF)[None, :, None, None].expand(1, Hkv, 3, 16).contiguous()
    out = flash_attention(q, k, v)
    assert torch.equal(out[0, :, 2, 5], torch.arange(Hq, device=device) // (Hq // Hkv))


@pytest.mark.gpu
@pytest.mark.parametrize("allow_tf32", [True, False])
def test_float32_is_full_precision(allow_tf32, device, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", allow_tf32)
    tensors = make_inputs(device, 1, 2, 1, 257, 257, 32, torch.float32)
    reference = reference_with_gradients(*tensors)
    for result, expected in zip(with_gradients(flash_attention, *tensors), reference, strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=2e-5, atol=2e-5)


def test_backward_is_deterministic(device):
    tensors = make_inputs(device, 1, 4, 2, 200, 200, 16, HALF)
    runs = [with_gradients(flash_attention, *tensors) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


# --- Errors ----------------------------------------------------------------------------------------------------------


def tensor(*shape, dtype=HALF):
    return torch.zeros(shape, dtype=dtype)


ERRORS = {
    "dimensions": ({"q": tensor(2, 8, 16)}, r"^q must have 4 dimensions .* got shape \(2, 8, 16\)$"),
    "batch": ({"k": tensor(2, 2, 8, 16)}, r"^k must have q's batch size 1 .* got shape \(2, 2, 8, 16\)$"),
    "head-dim": ({"k": tensor(1, 2, 8, 32)}, r"^k must have .* head_dim 16, got shape \(1, 2, 8, 32\)$"),
    "k-v": ({"v": tensor(1, 2, 9, 16)}, r"^v must have k's shape \(1, 2, 8, 16\), got \(1, 2, 9, 16\)$"),
    "heads": ({"q": tensor(1, 3, 8, 16)}, r"^q must have a multiple of k's 2 heads, got 3$"),
    "dtype": ({"q": tensor(1, 4, 8, 16, dtype=torch.float64)}, r"^q must be float16, .* got torch.float64$"),
    "mixed-dtype": ({"v": tensor(1, 2, 8, 16, dtype=torch.bfloat16)}, r"^v must have q's dtype torch.float16, got"),
    "device": ({"k": torch.zeros(1, 2, 8, 16, dtype=HALF, device="meta")}, r"^k must be on q's device cpu, got meta$"),
    "stride": ({"k": tensor(1, 2, 8, 32)[..., ::2]}, r"^k must be contiguous in its last dimension, got strides"),
    "too-wide": ({n: tensor(1, 2, 8, 257) for n in "qkv"}, r"^q must have a head_dim from 16 to 256, got 257$"),
    "too-narrow": ({n: tensor(1, 2, 8, 8) for n in "qkv"}, r"^q must have a head_dim from 16 to 256, got 8$"),
    "scale": ({"scale": 0.0}, r"^scale must be positive and finite, got 0.0$"),
    "window": ({"window": 0}, r"^window must be None or an int of at least 1, got 0$"),
    "window-type": ({"window": 2.5}, r"^window must be None or an int of at least 1, got 2.5$"),
}


@pytest.mark.parametrize(("changes", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_argument(changes, message):
    arguments = {"q": tensor(1, 4, 8, 16), "k": tensor(1, 2, 8, 16), "v": tensor(1, 2, 8, 16), **changes}
    with pytest.raises(ValueError, match=message):
        flash_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def test_bfloat16_on_turing_is_refused():
    q = tensor(1, 2, 8, 16, dtype=torch.bfloat16)
    with (
        pretend_device(DeviceInfo((7, 5), 40, SHARED_MEMORY[7, 5])),
        pytest.raises(
            ValueError, match=r"^bfloat16 needs compute capability 8.0 or newer, this GPU has 7.5: use float16$"
        ),
    ):
        flash_attention(q, q, q)


# --- torch.compile and torch.library ---------------------------------------------------------------------------------


def test_operators_pass_opcheck(device):
    q, k, v, dout = make_inputs(device, 1, 2, 1, 10, 12, 16, HALF)
    ops = torch.ops.phi_triton
    band = (0.25, -(2**30), 2)
    torch.library.opcheck(ops.flash_attention_forward.default, (q, k, v, *band), rtol=1e-3, atol=1e-3)
    inputs = [x.detach() for x in (q, k, v)]
    out, lse = ops.flash_attention_forward(*inputs, *band)
    # The backward has no derivative of its own, and says so by registering none.
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        ops.flash_attention_backward.default, (dout, *inputs, out, lse, *band), test_utils=tests, rtol=1e-3, atol=1e-3
    )


def test_compiles_as_one_graph(device):
    def layer(q, k, v):
        return flash_attention(q * 2, k, v, window=5).transpose(1, 2).flatten(2).float().square()

    compiled = torch.compile(layer, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")
    for S in (12, 20, 21):  # the second length makes it dynamic
        q, k, v, _ = make_inputs(device, 1, 2, 1, S, S, 16, HALF)
        expected, result = (torch.autograd.grad(function(q, k, v).sum(), (q, k, v)) for function in (layer, compiled))
        torch.testing.assert_close(result, expected)


# --- Launch choices and code generation ------------------------------------------------------------------------------

CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)]


def test_tiles_are_a_pure_function():
    for capability in CAPABILITIES:
        for kernel in ("forward", "dq", "dk_dv"):
            for D in (16, 40, 64, 65, 96, 128, 129, 256):
                tiles = choose_tiles(kernel, D, HALF, capability)
                assert tiles == choose_tiles(kernel, D, torch.bfloat16, max(capability, (8, 0))) or capability < (8, 0)
                precise = choose_tiles(kernel, D, torch.float32, capability)
                assert precise.block_m * precise.block_n <= tiles.block_m * tiles.block_n
                assert all(size & (size - 1) == 0 for size in (*tiles[:3], *precise[:3]))
    assert choose_tiles("forward", 128, HALF, (9, 0), use_tma=True) == (64, 64, 4, 3)


def test_tensor_descriptors_where_the_copy_engine_can():
    hopper, ada = DeviceInfo((9, 0), 132, 232448), DeviceInfo((8, 9), 24, 101376)
    x = tensor(1, 2, 8, 40)
    assert tma_fits(hopper, x) == (TensorDescriptor is not None)
    assert not tma_fits(ada, x)
    for unfit in (x.float(), tensor(1, 2, 8, 33), tensor(1, 2, 8, 41)[..., 1:], x[:, :1].expand(1, 2, 8, 40), x[:0]):
        assert not tma_fits(hopper, x, unfit)


AOT_SCRIPT = """
    import torch
    from kernels.aot import compile_only
    from kernels.device import SHARED_MEMORY, TRITON_VERSION
    from kernels.flash_attention_wrapper import flash_attention

    capability, head_dims, dtypes = {arguments}
    for D in head_dims:
        for dtype in dtypes:
            q, k, v = (torch.empty(1, H, 256, D, dtype=getattr(torch, dtype), requires_grad=True) for H in (4, 2, 2))
            with compile_only(capability) as compiled:
                flash_attention(q, k, v).sum().backward()
            assert len(compiled) == 4, compiled
            for kernel in compiled:
                case = (capability, D, dtype, *kernel[:5])
                assert kernel.shared_memory <= SHARED_MEMORY[capability], case
                # Local memory is allowed without tensor cores (float32, and all Triton code for sm_75, where no tile
                # at all fits the registers at head_dim above 128), and where rows that are no multiple of 16 elements
                # make every element a load of its own. Triton 3.6 runs out of registers by two in one case.
                plain = dtype == "float32" or capability == (7, 5)
                short = TRITON_VERSION < (3, 7) and (capability, D) == ((9, 0), 96) and "dk_dv" in kernel.name
                allowed = 32 if plain else 192 if D % 16 else 8 if short else 0
                assert kernel.spill_bytes <= allowed or (capability == (7, 5) and D > 128), case
                if capability == (9, 0) and dtype != "float32" and "rows" not in kernel.name:
                    assert "wgmma.mma_async" in kernel.ptx and "cp.async.bulk.tensor" in kernel.ptx, case
                    assert "mma.sync" not in kernel.ptx, case
    print("compiled")
"""


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (12, 0)], ids=str)
def test_compiles_within_resources(capability):
    """Without a GPU: registers, spills and shared memory of exactly what a launch at Phi-3's head_dim would run."""
    script = AOT_SCRIPT.format(arguments=(capability, (96,), ("float16",)))
    assert "compiled" in run_script(script, TRITON_INTERPRET="0", OMP_NUM_THREADS="1")


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_compiles_within_resources_everywhere(capability):
    dtypes = ("float16", "float32") if capability < (8, 0) else ("float16", "bfloat16", "float32")
    script = AOT_SCRIPT.format(arguments=(capability, (16, 40, 64, 96, 128, 256), dtypes))
    assert "compiled" in run_script(script, TRITON_INTERPRET="0", OMP_NUM_THREADS="1")


def test_one_compilation_serves_all_lengths_and_masks(tmp_path):
    script = """
        import torch
        from kernels.aot import compile_only
        from kernels.flash_attention_wrapper import flash_attention

        with compile_only((9, 0)) as compiled:
            for S, T, causal, window, heads in (
                (1, 1, True, None, 1), (2, 2, False, None, 2), (16, 16, True, 1, 1), (17, 33, False, 16, 2),
                (128, 128, True, None, 1), (1000, 1000, True, 100, 2),
            ):
                q = torch.empty(1, 2, S, 16, dtype=torch.float16, requires_grad=True)
                k = torch.empty(1, heads, T, 16, dtype=torch.float16)
                flash_attention(q, k, k, causal=causal, window=window).sum().backward()
        print(len(compiled))
    """
    launches = run_script(script, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path), OMP_NUM_THREADS="1")
    assert int(launches) == 24
    assert len(list(tmp_path.rglob("*.cubin"))) == 4


def test_kernel_source_keeps_the_rules():
    """Every product goes through _dot, every masked load says what it puts elsewhere, nothing that Triton renamed."""
    with open(flash_attention_triton.__file__) as file:
        source = file.read()
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [(ast.unparse(call.func), {keyword.arg for keyword in call.keywords}, call) for call in calls]
    dots = [call for name, _, call in named if name == "tl.dot"]
    assert len(dots) == 1 and "input_precision='ieee'" in ast.unparse(dots[0])
    assert all("other" in keywords for name, keywords, _ in named if name == "tl.load" and "mask" in keywords)
    assert "libdevice" not in source and "tanh" not in source
