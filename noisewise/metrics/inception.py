"""The Inception network of 5 December 2015 that FID is defined by, up to its third pooling layer: 2,048 features an image.

It is not torchvision's Inception v3: average pools leave the padding out of their mean, and the last block pools by the
maximum. Modules carry the names of the original graph (``mixed_9.tower.mixed.conv``); the weights come from `weights`.
"""

import copy
from collections import OrderedDict
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE = 299
DIM = 2048


class Conv(nn.Conv2d):
    """Convolution, batch normalisation by fixed statistics, ReLU."""

    gamma: Tensor
    beta: Tensor
    mean: Tensor
    var: Tensor

    def __init__(self, inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1, padded: bool = True) -> None:
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (height // 2, width // 2) if padded else (0, 0)
        super().__init__(inputs, outputs, (height, width), stride, padding, bias=False)
        for name, value in {"gamma": 1.0, "beta": 0.0, "mean": 0.0, "var": 1.0}.items():
            self.register_buffer(name, torch.full((outputs,), value))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.batch_norm(super().forward(x), self.mean, self.var, self.gamma, self.beta, eps=0.001))


class Folded(nn.Module):
    """The same with the normalisation in its weights: one kernel of cuDNN's instead of three."""

    weight: Tensor
    bias: Tensor

    def __init__(self, conv: Conv) -> None:
        super().__init__()
        scale = conv.gamma / torch.sqrt(conv.var + 0.001)
        weight = (conv.weight * scale[:, None, None, None]).contiguous(memory_format=torch.channels_last)
        self.register_buffer("weight", weight)
        self.register_buffer("bias", conv.beta - conv.mean * scale)
        self.stride, self.padding = conv.stride, cast(tuple[int, ...], conv.padding)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cuda" and torch.version.cuda is not None:
            return torch.cudnn_convolution_relu(x, self.weight, self.bias, self.stride, self.padding, (1, 1), 1)
        return F.relu(F.conv2d(x, self.weight, self.bias, self.stride, self.padding))


class Fork(nn.Sequential):
    """Branches over the same input, their channels joined."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], 1)


def _numbered(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name


def _tower(*layers: nn.Module) -> nn.Sequential:
    """Layers one after another; convolutions are named conv, conv_1, ..., a fork "mixed" and a pool "pool"."""
    named: OrderedDict[str, nn.Module] = OrderedDict()
    for layer in layers:
        convs = sum(isinstance(other, Conv) for other in named.values())
        name = _numbered("conv", convs) if isinstance(layer, Conv) else "mixed" if isinstance(layer, Fork) else "pool"
        named[name] = layer
    return nn.Sequential(named)


def _fork(*branches: nn.Module) -> Fork:
    """Branches side by side; single convolutions are named conv, conv_1, ..., towers tower, tower_1, ..., a pool "pool"."""
    named: OrderedDict[str, nn.Module] = OrderedDict()
    for branch in branches:
        if isinstance(branch, Conv | nn.Sequential):
            kind = "conv" if isinstance(branch, Conv) else "tower"
            named[_numbered(kind, sum(name.startswith(kind) for name in named))] = branch
        else:
            named["pool"] = branch
    return Fork(named)


def _average() -> nn.Module:
    return nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)


def _halve() -> nn.Module:
    return nn.MaxPool2d(3, stride=2)


def _block_a(inputs: int, pooled: int) -> Fork:
    return _fork(
        Conv(inputs, 64, 1),
        _tower(Conv(inputs, 48, 1), Conv(48, 64, 5)),
        _tower(Conv(inputs, 64, 1), Conv(64, 96, 3), Conv(96, 96, 3)),
        _tower(_average(), Conv(inputs, pooled, 1)),
    )


def _block_b(inputs: int) -> Fork:
    return _fork(
        Conv(inputs, 384, 3, stride=2, padded=False),
        _tower(Conv(inputs, 64, 1), Conv(64, 96, 3), Conv(96, 96, 3, stride=2, padded=False)),
        _halve(),
    )


def _block_c(inputs: int, w: int) -> Fork:
    row, column = (1, 7), (7, 1)
    return _fork(
        Conv(inputs, 192, 1),
        _tower(Conv(inputs, w, 1), Conv(w, w, row), Conv(w, 192, column)),
        _tower(Conv(inputs, w, 1), Conv(w, w, column), Conv(w, w, row), Conv(w, w, column), Conv(w, 192, row)),
        _tower(_average(), Conv(inputs, 192, 1)),
    )


def _block_d(inputs: int) -> Fork:
    return _fork(
        _tower(Conv(inputs, 192, 1), Conv(192, 320, 3, stride=2, padded=False)),
        _tower(
            Conv(inputs, 192, 1),
            Conv(192, 192, (1, 7)),
            Conv(192, 192, (7, 1)),
            Conv(192, 192, 3, stride=2, padded=False),
        ),
        _halve(),
    )


def _block_e(inputs: int, pool: nn.Module) -> Fork:
    def cross() -> Fork:
        return _fork(Conv(384, 384, (1, 3)), Conv(384, 384, (3, 1)))

    return _fork(
        Conv(inputs, 320, 1),
        _tower(Conv(inputs, 384, 1), cross()),
        _tower(Conv(inputs, 448, 1), Conv(448, 384, 3), cross()),
        _tower(pool, Conv(inputs, 192, 1)),
    )


class Inception(nn.Sequential):
    """Images (n, 3, 299, 299), float32 in [-1, 1], to features (n, 2048)."""

    def __init__(self) -> None:
        blocks = [
            *(_block_a(192, 32), _block_a(256, 64), _block_a(288, 64), _block_b(288)),
            *(_block_c(768, 128), _block_c(768, 160), _block_c(768, 160), _block_c(768, 192), _block_d(768)),
            *(_block_e(1280, _average()), _block_e(2048, nn.MaxPool2d(3, stride=1, padding=1))),
        ]
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv=Conv(3, 32, 3, stride=2, padded=False),
            conv_1=Conv(32, 32, 3, padded=False),
            conv_2=Conv(32, 64, 3),
            pool=_halve(),
            conv_3=Conv(64, 80, 1),
            conv_4=Conv(80, 192, 3, padded=False),
            pool_1=_halve(),
        )
        layers.update((_numbered("mixed", number), block) for number, block in enumerate(blocks))
        super().__init__(layers)
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        if images.ndim != 4 or images.shape[1:] != (3, SIZE, SIZE):
            raise ValueError(f"images must be (n, 3, {SIZE}, {SIZE}), got {tuple(images.shape)}: resize with preprocess first")
        if images.dtype != torch.float32:
            raise TypeError(f"images must be float32 in [-1, 1], got {images.dtype}: FID is not defined in lower precision")
        return super().forward(images).mean((2, 3))


def folded(network: Inception) -> Inception:
    """A copy with fewer, larger kernels, the same within rounding: for features in TF32, which are rounded anyway."""
    quick = copy.deepcopy(network)
    for part in list(quick.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, Conv):
                setattr(part, name, Folded(child))
    return quick
