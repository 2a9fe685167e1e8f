"""Transformers as the fast path has them, without a GPU: the same numbers, fewer kinds of code, and a way back."""

import copy

import pytest
import torch
from torch import nn

from noisewise.models import DiT, UNet, UViT, with_labels
from noisewise.models.transformer import Attention
from noisewise.training.fast import blocks
from noisewise.training.fast.fuse import unfuse

MADE = {
    "dit": lambda **more: DiT((3, 8, 12), classes=5, width=32, depth=3, heads=2, **more),
    "uvit": lambda **more: UViT((3, 8, 12), classes=5, width=32, depth=5, heads=2, **more),
}


@pytest.fixture(autouse=True)
def with_our_kernels(monkeypatch):
    """Without a GPU they are plain arithmetic, which needs no Triton."""
    monkeypatch.setattr(blocks, "_has_triton", lambda: True)


def made(name, **more):
    torch.manual_seed(0)
    model = MADE[name](**more)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)  # a DiT's own weights begin as the identity
    return model


def inputs():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 3, 8, 12, generator=generator), torch.rand(4, generator=generator), torch.tensor([0, 5, 2, 4])


def gradients(model, call=None):
    out = (call or model)(*inputs())
    return out, torch.autograd.grad(out.square().mean(), list(model.parameters()))


def assert_same(found, wanted):
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(found[1], wanted[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()) + 1e-7)


@pytest.mark.parametrize("name", MADE)
def test_a_fused_transformer_has_the_same_names_outputs_and_gradients(name):
    plain = made(name)
    fused = copy.deepcopy(plain)
    assert blocks.fuse_transformer(fused)
    assert list(fused.state_dict()) == list(plain.state_dict())
    assert_same(gradients(fused), gradients(plain))
    unfuse(fused)
    assert all("forward" not in module.__dict__ for module in fused.modules())
    assert torch.equal(fused(*inputs()), plain(*inputs()))


@pytest.mark.parametrize("name", MADE)
def test_a_wrapped_forward_is_the_plain_one_too_when_all_is_taken_back(name):
    """Accelerate wraps the model's forward, which then cannot be taken away."""
    plain = made(name)
    fused = copy.deepcopy(plain)
    blocks.fuse_transformer(fused)
    forward = fused.forward
    fused.forward = lambda *given: forward(*given)
    unfuse(fused)
    assert torch.equal(fused(*inputs()), plain(*inputs()))


@pytest.mark.parametrize("name", MADE)
def test_dropout_drops_as_before(name):
    plain = made(name, dropout=0.3)
    fused = copy.deepcopy(plain)
    blocks.fuse_transformer(fused)
    found = []
    for model in (plain, fused):
        torch.manual_seed(2)
        found.append(gradients(model))
    assert_same(*found)
    plain.eval()
    fused.eval()
    assert_same(gradients(fused), gradients(plain))


def test_other_models_are_left_alone():
    class Mine(DiT):
        """May have blocks of its own."""

    for model in (UNet((3, 8, 8), channels=8, multipliers=(1,), attention=()), Mine((3, 8, 8), width=16, depth=1, heads=2)):
        assert not blocks.fuse_transformer(model)
        assert blocks.regions(model) == []
        assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.parametrize(("name", "kinds"), [("dit", 3), ("uvit", 3)])
def test_blocks_of_one_kind_share_their_compiled_code(name, kinds, monkeypatch):
    """A DiT has its first block, the others and the last layer; a U-ViT its first block, others, and those with a skip."""
    plain = made(name)
    model, graphs = copy.deepcopy(plain), []
    blocks.fuse_transformer(model)

    def counting(graph, example):
        graphs.append(graph)
        return graph.forward

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **more: compiler(function, backend=counting, **more))
    torch._dynamo.reset()
    before = [module.__dict__.get("forward") for module in model.modules()]
    call = blocks.compiled_by_region(model, with_labels(model))
    assert_same(gradients(model, call), gradients(plain))
    assert len(graphs) == kinds
    assert [module.__dict__.get("forward") for module in model.modules()] == before
    gradients(model, call)
    assert len(graphs) == kinds


@pytest.mark.parametrize("name", MADE)
def test_attention_by_cudnn_is_asked_for_in_every_block_and_only_in_low_precision(name, monkeypatch):
    plain, called = made(name), []

    def other(*qkv):
        called.append(qkv[0].dtype)
        return torch.nn.functional.scaled_dot_product_attention(*qkv)

    monkeypatch.setattr(blocks, "cudnn_attention", other)
    model = copy.deepcopy(plain)
    blocks.fuse_transformer(model)
    blocks.attend_by_cudnn(model)
    assert_same(gradients(model), gradients(plain))
    assert called == []
    with torch.autocast("cpu", torch.bfloat16):
        model(*inputs())
    assert called == [torch.bfloat16] * sum(isinstance(module, Attention) for module in model.modules())
    unfuse(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(*inputs()), plain(*inputs()))


def test_attention_by_cudnn_needs_a_gpu():
    assert not blocks.cudnn_repeats(made("dit"), 4, torch.device("cpu"))
