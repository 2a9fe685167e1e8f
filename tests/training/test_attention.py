"""Attention by products. Kernels need Triton, and a GPU or its interpreter (TRITON_INTERPRET=1)."""

import copy
import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from noisewise.models.unet import UNet
from noisewise.training.fast.fuse import _attention, _usual_attention, rewire

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
SHAPES = [(2, 16, 8), (3, 33, 24), (1, 256, 64), (2, 1, 4), (1, 500, 8)]  # samples, tokens, channels


def by_torch(qkv):
    query, key, value = qkv.chunk(3, dim=2)
    return F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0]


def attentions(**settings):
    from diffusers.models.attention_processor import Attention

    torch.manual_seed(0)
    net = UNet((3, 16, 16), channels=16, multipliers=(1, 2), blocks=1, zero_init=False, **settings)
    return [module for module in net.modules() if isinstance(module, Attention)]


@pytest.mark.skipif(not CUDA and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if CUDA else [torch.float32])
@pytest.mark.parametrize(("samples", "tokens", "channels"), SHAPES)
def test_the_kernels_attend_as_in_double_precision(samples, tokens, channels, dtype):
    pytest.importorskip("triton")
    from noisewise.training.fast import attention

    torch.manual_seed(0)
    qkv = (2 * torch.randn(samples, tokens, 3 * channels)).to(DEVICE, dtype).requires_grad_()
    out, weights = attention._attend(qkv)
    assert (out.dtype, weights.dtype) == (dtype, dtype)
    exact = qkv.detach().double().requires_grad_()
    wanted, gradient = by_torch(exact), torch.randn(out.shape).to(DEVICE, dtype)
    (found,) = torch.autograd.grad(out, qkv, gradient)
    (expected,) = torch.autograd.grad(wanted, exact, gradient.double())
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.double(), expected, rtol=2 * tolerance, atol=2 * tolerance * float(expected.abs().max()))


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_the_same_bits_come_every_time():
    from noisewise.training.fast import attention

    torch.manual_seed(0)
    qkv = torch.randn(64, 256, 3 * 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(64, 256, 128, device="cuda", dtype=torch.bfloat16)
    first, *others = [torch.autograd.grad(attention.attend(qkv), qkv, gradient)[0] for _ in range(5)]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("autocast", [False, True] if CUDA else [False])
def test_a_rewired_attention_is_diffusers(autocast):
    tolerance = 2e-2 if autocast else 2e-3 if CUDA else 1e-5
    plain = attentions()[0].to(DEVICE)
    nn.init.normal_(plain.to_q.bias)
    ours = copy.deepcopy(plain)
    assert _usual_attention(ours)
    rewire(ours, _attention)
    x = torch.randn(2, 16, 8, 8, device=DEVICE).contiguous(memory_format=torch.channels_last)
    found = []
    for module in (plain, ours):
        given = x.clone(memory_format=torch.preserve_format).requires_grad_()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
            out = module(given, temb=torch.zeros(2, 64, device=DEVICE))
        out.float().square().sum().backward()
        # not the key's bias: it has no gradient but rounding
        gradients = [parameter.grad for parameter in module.parameters() if parameter is not module.to_k.bias]
        found.append([out, given.grad, *gradients])
    for mine, theirs in zip(*found, strict=True):
        size = float(theirs.detach().abs().max())
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=tolerance, atol=tolerance * size)


def test_what_is_unusual_is_left_alone():
    assert not any(_usual_attention(module) for module in attentions(head_channels=8))  # several heads
    module = attentions()[0]
    module.to_q = nn.Sequential(module.to_q)  # as an adapter does it
    assert not _usual_attention(module)


def test_more_tokens_than_a_few_are_torchs():
    module = attentions()[0]
    x = torch.randn(1, 16, 32, 24)
    wanted = module(x)
    rewire(module, _attention)
    assert torch.equal(module(x), wanted)
