"""What lies between a DiT's matrix products. Kernels need Triton, and a GPU or its interpreter (TRITON_INTERPRET=1)."""

import os
from importlib.util import find_spec

import pytest
import torch
from torch.nn import functional as F

from noisewise.training.fast import tokens

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
RUNS = find_spec("triton") is not None and (CUDA or os.environ.get("TRITON_INTERPRET") == "1")
kernel = pytest.mark.skipif(not RUNS, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")
SHAPES = [(2, 3, 8), (3, 65, 24), (1, 70, 96), (2, 1, 5)]  # samples, tokens, features: a program has 64 tokens


@pytest.fixture(autouse=True)
def runs_here(monkeypatch):
    monkeypatch.setattr(tokens, "QUICK", CUDA)


def made(*shape, dtype=torch.float32):
    return torch.randn(shape).to(DEVICE, dtype).requires_grad_()


def gradients(outputs, inputs, of):
    given = [value.to(output.dtype) for value, output in zip(of, outputs, strict=True)]
    return torch.autograd.grad(outputs, inputs, given)


def close(found, wanted, tolerance):
    for mine, theirs in zip(found, wanted, strict=True):
        assert float((mine.double() - theirs).detach().abs().max()) <= tolerance * float(
            theirs.detach().abs().max().clamp(min=1.0)
        )


@kernel
@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("biased", "gated"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize(("samples", "count", "width"), SHAPES)
def test_joining_and_normalising_is_as_in_double_precision(samples, count, width, biased, gated, low):
    torch.manual_seed(0)
    x, h = made(samples, count, width), made(samples, count, width, dtype=low)
    parts = made(samples, 6 * width)  # as a modulation makes them: the rows of a part are apart
    bias = made(width) if biased else None
    gate, shift, scale = parts.chunk(6, 1)[2:5]
    joined, y, _, _ = tokens._join(x, h, bias, gate if gated else None, shift, scale, 1e-6, low)
    assert (joined.dtype, y.dtype) == (torch.float32, low)
    inputs = [value for value in (x, h, parts, bias) if value is not None]
    exact = [value.detach().double().requires_grad_() for value in inputs]
    gate, shift, scale = (part[:, None] for part in exact[2].chunk(6, 1)[2:5])
    wanted = exact[0] + (gate if gated else 1) * (exact[1] + exact[3] if biased else exact[1])
    normal = F.layer_norm(wanted, (width,), eps=1e-6) * (1 + scale) + shift
    of = [torch.randn(joined.shape).to(DEVICE), torch.randn(y.shape).to(DEVICE).to(low)]
    tolerance = 1e-5 if low == torch.float32 else 1e-2
    close([joined, y], [wanted, normal], tolerance)
    close(gradients([joined, y], inputs, of), gradients([wanted, normal], exact, of), 3 * tolerance)


@kernel
@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize(("samples", "count", "width"), [(2, 3, 8), (3, 100, 300), (1, 1, 5)])
def test_gelu_of_a_biased_product_is_as_in_double_precision(samples, count, width, approximate, low):
    torch.manual_seed(0)
    x, bias = made(samples, count, width, dtype=low), made(width)
    y = tokens._gelu(x, bias, approximate == "none")
    assert y.dtype == low
    exact = [value.detach().double().requires_grad_() for value in (x, bias)]
    wanted = F.gelu(exact[0] + exact[1], approximate=approximate)
    of = [torch.randn(y.shape).to(DEVICE).to(low)]
    tolerance = 1e-5 if low == torch.float32 else 1e-2
    close([y], [wanted], tolerance)
    close(gradients([y], [x, bias], of), gradients([wanted], exact, of), 3 * tolerance)


def test_without_a_gpu_it_is_the_plain_arithmetic():
    torch.manual_seed(0)
    x, h, bias = torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.randn(8)
    gate, shift, scale = torch.randn(3, 2, 8)
    joined, y = tokens.join(x, h, bias, gate, shift, scale, 1e-6)
    torch.testing.assert_close(joined, x + gate[:, None] * (h + bias))
    torch.testing.assert_close(y, F.layer_norm(joined, (8,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None])
    for approximate in ("none", "tanh"):
        torch.testing.assert_close(tokens.biased_gelu(x, bias, approximate), F.gelu(x + bias, approximate=approximate))
    with torch.autocast("cpu", torch.bfloat16):
        assert tokens.join(x, h, bias, gate, shift, scale, 1e-6)[1].dtype == torch.bfloat16
