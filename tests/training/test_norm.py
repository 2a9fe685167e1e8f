"""The kernels of normalisation at shapes that few networks have; those of the presets are tested in test_fast_cuda.py.

Needs Triton, and for what runs a kernel a GPU or Triton's interpreter (TRITON_INTERPRET=1).
"""

import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("triton")
from noisewise.training.fast import norm

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
kernel = pytest.mark.skipif(not CUDA and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or TRITON_INTERPRET=1")
SHAPES = [
    # images, channels, groups, pixels
    (2, 12, 1, 9),  # one group, which fills no power of two
    (2, 16, 1, 9),
    (2, 6, 6, 10),  # groups of one channel
    (1, 1, 1, 5),
    (2, 20, 4, 7),  # groups of five, several in a program
    (2, 48, 2, 5),  # groups of 24, one in a program
    (3, 6, 2, 1),  # one pixel
    (2, 6, 2, 1100),  # more than a program keeps
    (0, 8, 2, 4),  # no image
]


@pytest.fixture
def runs_here(monkeypatch):
    monkeypatch.setattr(norm, "QUICK", CUDA)


def layouts(n, channels, pixels):
    last = torch.randn(n, pixels, channels + 3).to(DEVICE).transpose(1, 2)
    return {"channels last": last[:, 3:].clone(), "part of more": last[:, 3:], "channels first": last[:, 3:].contiguous()}


@kernel
@pytest.mark.parametrize("layout", ["channels last", "part of more", "channels first"])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(("n", "channels", "groups", "pixels"), SHAPES)
def test_odd_shapes_are_normalised_as_in_double_precision(n, channels, groups, pixels, shifted, layout, runs_here):
    torch.manual_seed(0)
    x = (layouts(n, channels, pixels)[layout] + 3).requires_grad_()
    gamma, beta = (torch.randn(channels).to(DEVICE).requires_grad_() for _ in range(2))
    shift = torch.randn(n, channels).to(DEVICE).requires_grad_() if shifted else None
    seed = torch.zeros((), dtype=torch.int64, device=DEVICE)
    inputs = [value for value in (x, shift, gamma, beta) if value is not None]
    y = norm._norm(x, shift, gamma, beta, seed, groups, 1e-5, True, 0.0)[0]
    exact = [value.detach().double().requires_grad_() for value in inputs]
    moved = exact[0] + exact[1][:, :, None] if shifted else exact[0]
    wanted = F.silu(F.group_norm(moved, groups, *exact[-2:], 1e-5))
    gradient = torch.randn(y.shape).to(DEVICE)
    found = torch.autograd.grad(y, inputs, gradient)
    expected = torch.autograd.grad(wanted, exact, gradient.double())
    torch.testing.assert_close(y.double(), wanted, rtol=1e-4, atol=2e-5)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-3, atol=2e-4)


@kernel
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("rows", [16, 64])
def test_an_image_that_is_streamed_comes_out_as_one_that_is_held(rows, stages, runs_here, monkeypatch):
    torch.manual_seed(0)
    x = (torch.randn(2, 64, 16) + 3).to(DEVICE).transpose(1, 2).requires_grad_()
    gamma, beta = (torch.randn(16).to(DEVICE).requires_grad_() for _ in range(2))
    seed, gradient = torch.ones((), dtype=torch.int64, device=DEVICE), torch.randn(2, 16, 64).to(DEVICE)
    found, usual = [], norm._share
    for change in ({}, {"ROWS": rows, "STAGES": stages, "num_warps": 1}):

        def chosen(*about, change=change):
            grid, sizes = usual(*about)
            return grid, {**sizes, **change}

        monkeypatch.setattr(norm, "_share", chosen)
        y = norm._norm(x, None, gamma, beta, seed, 4, 1e-5, True, 0.25)[0]
        found.append([y, *torch.autograd.grad(y, [x, gamma, beta], gradient)])
    for held, streamed in zip(*found, strict=True):
        torch.testing.assert_close(streamed, held, rtol=1e-4, atol=1e-4)


@kernel
def test_statistics_are_float32_whatever_the_default_is(runs_here):
    x, ones = torch.randn(2, 8, 4).to(DEVICE), torch.ones(8, device=DEVICE)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = norm._norm(x, None, ones, ones, torch.zeros((), dtype=torch.int64, device=DEVICE), 2, 1e-5, False, 0.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [value.dtype for value in found] == [torch.float32] * 3


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("channels", [1, 6, 64, 96, 384, 512, 1536, 4096])
@pytest.mark.parametrize("pixels", [1, 16, 100, 1024, 1025, 4096])
def test_programs_have_all_channels_between_them_and_no_more_values_than_registers(which, channels, pixels):
    for groups in (groups for groups in range(1, channels + 1) if channels % groups == 0):
        grid, sizes = norm._share(torch.empty(3, channels, pixels, device="meta"), groups, which)
        assert grid == (groups // sizes["GROUPS"], 3)
        assert grid[0] * sizes["GROUPS"] * sizes["CPG"] == channels
        assert sizes["GROUPS"] * sizes["CPG"] <= sizes["K"]
        assert sizes["K"] * sizes["ROWS"] <= norm.MOST
        assert sizes["GROUPS"] == 1 or sizes["K"] <= 128  # within_groups compares them in pairs
        assert 1 <= sizes["num_warps"] <= 16


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_what_the_kernels_are_not_for_is_torchs():
    x, module = torch.randn(2, 8, 4, 4, device="cuda", dtype=torch.float64), nn.GroupNorm(2, 8).cuda().double()
    assert torch.equal(norm.group_norm(x, None, module), F.silu(module(x)))
    many, module = torch.randn(norm.IMAGES + 1, 2, 1, 2, device="cuda"), nn.GroupNorm(1, 2).cuda()
    torch.testing.assert_close(norm.group_norm(many, None, module), F.silu(module(many)))
