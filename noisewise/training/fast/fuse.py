"""Diffusers' U-Net with fewer, larger kernels; parameters and their names stay as they are, results within rounding.

- channels last in memory, as the tensor cores want convolutions
- normalisation, SiLU, dropout, the time embedding and the first convolution's bias of a residual block together (norm.py);
  the normalisation before attention too
- upsampling as a broadcast, whose backward pass is a sum instead of atomic additions
"""

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def fuse(model: nn.Module) -> int:
    """Rewire every residual block of diffusers' that has the usual form, in place; returns how many there were."""
    try:
        from diffusers.models.attention_processor import Attention
        from diffusers.models.resnet import ResnetBlock2D
        from diffusers.models.unets.unet_2d import UNet2DModel
        from diffusers.models.upsampling import Upsample2D

        from noisewise.training.fast import norm  # noqa: F401  needs triton
    except ImportError:
        return 0
    fused = 0
    for module in model.modules():
        if isinstance(module, ResnetBlock2D) and _usual_block(module):
            _rewire(module, _block)
            fused += 1
        elif isinstance(module, Upsample2D) and _usual_upsampling(module):
            _rewire(module, _upsample)
        elif isinstance(module, Attention) and isinstance(module.group_norm, nn.GroupNorm):
            _rewire(module.group_norm, _norm)
        elif isinstance(module, UNet2DModel) and isinstance(module.conv_act, nn.SiLU):
            _rewire(module.conv_norm_out, _norm_silu)
            _rewire(module.conv_act, _nothing)
    if fused:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return fused


def unfuse(model: nn.Module) -> None:
    """Take it back, but for the order in memory: where the kernels turn out not to run."""
    for module in model.modules():
        if getattr(module.__dict__.get("forward"), "__func__", None) in (_block, _upsample, _norm, _norm_silu, _nothing):
            del module.forward


def _rewire(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    module.forward = types.MethodType(forward, module)


def _usual_block(block: Any) -> bool:
    return (
        isinstance(block.norm1, nn.GroupNorm)
        and isinstance(block.norm2, nn.GroupNorm)
        and isinstance(block.nonlinearity, nn.SiLU)
        and block.time_embedding_norm == "default"
        and block.time_emb_proj is not None
        and block.upsample is None
        and block.downsample is None
        and block.conv1.bias is not None
        and not block.skip_time_act
    )


def _usual_upsampling(module: Any) -> bool:
    return bool(module.use_conv and not module.use_conv_transpose and module.interpolate and module.norm is None)


def _nothing(self: nn.Module, x: Tensor) -> Tensor:
    return x


def _norm(self: nn.GroupNorm, x: Tensor) -> Tensor:
    from noisewise.training.fast.norm import group_norm

    return group_norm(x, None, self, silu=False)


def _norm_silu(self: nn.GroupNorm, x: Tensor) -> Tensor:
    from noisewise.training.fast.norm import group_norm

    return group_norm(x, None, self)


def _block(self: Any, x: Tensor, temb: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    from noisewise.training.fast.norm import group_norm

    h = group_norm(x, None, self.norm1)
    h = self.conv1._conv_forward(h, self.conv1.weight, None)
    shift = self.time_emb_proj(nn.functional.silu(temb)) + self.conv1.bias
    h = self.conv2(group_norm(h, shift, self.norm2, dropout=self.dropout.p if self.dropout.training else 0.0))
    if self.conv_shortcut is not None:
        x = self.conv_shortcut(x)
    y = x + h
    return y if self.output_scale_factor == 1 else y / self.output_scale_factor  # not compiled, it is one more pass


def _upsample(self: Any, x: Tensor, output_size: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
    if output_size is not None:
        return type(self).forward(self, x, output_size)
    n, c, h, w = x.shape
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    pixels = x.permute(0, 2, 3, 1)[:, :, None, :, None]
    doubled = pixels.expand(n, h, 2, w, 2, c).reshape(n, 2 * h, 2 * w, c)
    return self.conv(doubled.permute(0, 3, 1, 2))
