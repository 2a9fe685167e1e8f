"""Transformers on the fast path: fewer passes over memory, quicker attention, and each kind of block compiled once.

- Residual, gate, normalisation and modulation are one kernel, and so are bias and GELU (tokens.py). A block hands its last
  branch on to the next one, which joins it to the residual on the way to its own normalisation.
- Patches are cut out and multiplied, which needs no convolution.
- Attention by cuDNN where it repeats itself bit for bit, see `cudnn_repeats`.
- Blocks of one kind share their compiled code, so that set-up does not grow with the depth.

Parameters and their names stay as they are, results within rounding.
"""

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from noisewise.models.dit import DiT, DiTBlock, LastLayer
from noisewise.models.transformer import MLP, Attention, Patches, unpatch
from noisewise.models.uvit import UViT, UViTBlock
from noisewise.training.fast.fuse import rewire
from noisewise.training.fast.tokens import biased_gelu, join

REGIONS = (DiTBlock, LastLayer, UViTBlock)
TWO_TILES = 256  # keys that attention's backward pass takes in two steps at most
TRIALS = 6
BY_CUDNN = "by_cudnn"
HALVES = (torch.bfloat16, torch.float16)


def fuse_transformer(model: nn.Module) -> bool:
    """Rewire a DiT or a U-ViT, in place; returns whether it is one."""
    if type(model) not in (DiT, UViT):
        return False
    for module in model.modules():
        if type(module) is Patches:
            rewire(module, _patches)
    if _has_triton():
        for module in model.modules():
            if type(module) in FORWARDS:
                rewire(module, FORWARDS[type(module)])
        model.fused = True  # type: ignore[assignment]
    return True


def attend_by_cudnn(model: nn.Module, yes: bool = True) -> None:
    """Let all attention of a DiT or a U-ViT call cuDNN, whatever torch would choose; or leave it to torch."""
    for module in model.modules():
        if type(module) is Attention:
            setattr(module, BY_CUDNN, yes)  # for blocks that do not call it but its parts
            rewire(module, _attention)


def attends_by_cudnn(model: nn.Module) -> bool:
    """Whether it does."""
    return any(getattr(module, BY_CUDNN, False) for module in model.modules())


def _has_triton() -> bool:
    return find_spec("triton") is not None


# A DiT, with branches that wait for the next normalisation -----------------------------------------------------------


def _dit(self: Any, x: Tensor, time: Tensor, labels: Tensor | None = None) -> Tensor:
    if not self.fused:  # it was taken back, where others had wrapped this function already
        return DiT.forward(self, x, time, labels)
    (tokens, condition), branch = self.embedded(x, time, labels), None
    for block in self.blocks:
        tokens, *branch = block(tokens, condition, branch)
    return unpatch(self.last(tokens, condition, branch), self.grid, self.patch)


Branch = Sequence[Any] | None
"""What is still to be joined to the residual: a branch, its bias if that was left out, and a DiT's gate."""


def _block(self: Any, x: Tensor, condition: Tensor, branch: Branch = None) -> tuple[Any, ...]:
    shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=1)
    x, y = _joined(x, branch, shift1, scale1, self.norm1)
    x, y = _joined(x, [*_attended(self.attention, y), gate1], shift2, scale2, self.norm2)
    return x, *_mlp(self.mlp, y), gate2


def _last(self: Any, x: Tensor, condition: Tensor, branch: Branch = None) -> Tensor:
    shift, scale = self.modulation(condition).chunk(2, dim=1)
    out: Tensor = self.project(_joined(x, branch, shift, scale, self.norm)[1])
    return out


def _joined(x: Tensor, branch: Branch, shift: Tensor, scale: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    if branch is None:
        return x, norm(x) * (1 + scale[:, None]) + shift[:, None]
    h, bias, gate = branch
    return join(x, h, bias, gate, shift, scale, norm.eps)


# A U-ViT, in the same way --------------------------------------------------------------------------------------------


def _uvit(self: Any, x: Tensor, time: Tensor, labels: Tensor | None = None) -> Tensor:
    if not self.fused:
        return UViT.forward(self, x, time, labels)
    tokens, skips, branch = self.embedded(x, time, labels), [], None
    for block in (*self.first_half, self.middle):
        begun, tokens, *branch = block(tokens, branch)
        skips.append(begun)  # what the block before has made, once its last branch is joined
    for block in self.second_half:
        _, tokens, *branch = block(tokens, branch, skips.pop())
    pixels = self.project(self.norm(_plainly_joined(tokens, branch)))[:, self.extras :]
    return self.final(unpatch(pixels, self.grid, self.patch))


def _uvit_block(self: Any, x: Tensor, branch: Branch = None, skip: Tensor | None = None) -> tuple[Any, ...]:
    if skip is not None:
        x, branch = self.join(torch.cat([_plainly_joined(x, branch), skip], dim=2)), None
    begun, y = _normalised(x, branch, self.norm1)
    x, y = _normalised(begun, _attended(self.attention, y), self.norm2)
    return begun, x, *_mlp(self.mlp, y)


def _plainly_joined(x: Tensor, branch: Branch) -> Tensor:
    if branch is None:
        return x
    h, bias = branch
    return (x + (h if bias is None else h + bias)).to(x.dtype)


def _normalised(x: Tensor, branch: Branch, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    if branch is None:
        return x, norm(x)
    weight, shift = (value.expand(len(x), -1) for value in (norm.weight - 1, norm.bias))
    h, bias = branch
    return join(x, h, bias, None, shift, weight, norm.eps)


# What both have ------------------------------------------------------------------------------------------------------


def _attended(self: Attention, x: Tensor) -> tuple[Tensor, Tensor | None]:
    return _projected(self.project, _mixed(self, x), self.dropout)


def _mlp(self: MLP, x: Tensor) -> tuple[Tensor, Tensor | None]:
    hidden = biased_gelu(F.linear(x, self.expand.weight), self.expand.bias, self.act.approximate)
    return _projected(self.project, self.dropout(hidden), self.dropout)


def _projected(layer: nn.Linear, x: Tensor, dropout: nn.Dropout) -> tuple[Tensor, Tensor | None]:
    """The product, and the bias, which can wait unless dropout comes first."""
    if dropout.p and dropout.training:
        return dropout(layer(x)), None
    return F.linear(x, layer.weight), layer.bias


FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    DiT: _dit,
    DiTBlock: _block,
    LastLayer: _last,
    UViT: _uvit,
    UViTBlock: _uvit_block,
}


# Patches and attention -----------------------------------------------------------------------------------------------


def _patches(self: Any, x: Tensor) -> Tensor:
    layer = self.project
    side, (n, c, h, w) = layer.kernel_size[0], x.shape
    pixels = x.reshape(n, c, h // side, side, w // side, side).permute(0, 2, 4, 1, 3, 5)
    return F.linear(pixels.reshape(n, -1, c * side * side), layer.weight.flatten(1), layer.bias)


def _attention(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.dropout(self.project(_mixed(self, x)))
    return out


def _mixed(self: Attention, x: Tensor) -> Tensor:
    batch, tokens, width = x.shape
    qkv = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
    by_cudnn = getattr(self, BY_CUDNN, False) and qkv[0].dtype in HALVES
    mixed = cudnn_attention(*qkv) if by_cudnn else F.scaled_dot_product_attention(*qkv)
    return mixed.transpose(1, 2).reshape(batch, tokens, width)


def cudnn_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention by cuDNN, also where torch has been told to keep to a fixed order of adding."""
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, False, False)[0]
    return out


def cudnn_repeats(model: nn.Module, batch: int, device: torch.device) -> bool:
    """Whether cuDNN's attention of this size gives, in bf16, the same bits every time, forwards and backwards.

    Its backward pass adds to the gradient of the queries from each tile of keys, whichever comes first. Of two tiles, sums do
    not depend on the order: a + b = b + a. With more of them they do, so sizes beyond are not even tried.
    """
    from noisewise.training.fast.graphs import waiting_is_an_error  # which imports this file

    found = next((module for module in model.modules() if type(module) is Attention), None)
    if found is None or device.type != "cuda":
        return False
    grid: tuple[int, int] = model.grid  # type: ignore[assignment]
    tokens, width = grid[0] * grid[1] + int(getattr(model, "extras", 0)), found.project.in_features
    if tokens > TWO_TILES:
        return False
    generator = torch.Generator(device).manual_seed(0)
    shape = (batch, tokens, 3, found.heads, width // found.heads)
    qkv = torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator).requires_grad_()
    weight = torch.randn(batch, found.heads, tokens, shape[-1], device=device, dtype=torch.bfloat16, generator=generator)
    try:
        first = _trial(qkv, weight)
        with waiting_is_an_error():
            _trial(qkv, weight)
        return all(all(map(torch.equal, first, _trial(qkv, weight))) for _ in range(TRIALS))
    except Exception:  # no cuDNN, or one that does not do this: there is other attention
        return False


def _trial(qkv: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        out = cudnn_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0))
        return out.detach(), torch.autograd.grad(out, qkv, weight)[0]


# Compilation ---------------------------------------------------------------------------------------------------------


def regions(model: nn.Module) -> list[nn.Module]:
    """The parts to compile one by one; none if the model is better compiled as a whole."""
    return [module for module in model.modules() if type(module) in REGIONS] if type(model) in (DiT, UViT) else []


def compiled_by_region(model: nn.Module, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`call`, during which the regions of the model are compiled; at other times they are as they were."""
    parts: list[tuple[nn.Module, Any]] = []
    made: dict[Any, Any] = {}
    for part in regions(model):
        plain = cast(types.MethodType, part.forward).__func__  # not the method: all regions of one kind share its code
        made.setdefault(plain, torch.compile(plain, dynamic=False))
        parts.append((part, types.MethodType(made[plain], part)))

    def compiled(*inputs: Any) -> Tensor:
        with _forwards(parts):
            return call(*inputs)

    return compiled


@contextmanager
def _forwards(parts: list[tuple[nn.Module, Any]]) -> Iterator[None]:
    before = [part.__dict__.get("forward") for part, _ in parts]
    try:
        for part, forward in parts:
            part.forward = forward
        yield
    finally:
        for (part, _), forward in zip(parts, before, strict=True):
            if forward is None:
                del part.forward
            else:
                part.forward = forward
