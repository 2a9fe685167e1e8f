"""Diffusers' U-Net with fewer, larger kernels; parameters and their names stay as they are, results within rounding.

- channels last in memory, as the tensor cores want convolutions
- normalisation, SiLU, dropout, the time embedding and the first convolution's bias of a residual block together (norm.py);
  the normalisation before attention too
- the time embeddings of all residual blocks by one product, where there are no classes
- attention of one head over few tokens: queries, keys and values by one product, the rest in attention.py
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
            rewire(module, _block)
            fused += 1
        elif isinstance(module, Upsample2D) and _usual_upsampling(module):
            rewire(module, _upsample)
        elif isinstance(module, Attention) and isinstance(module.group_norm, nn.GroupNorm):
            rewire(module.group_norm, _norm)
            if _usual_attention(module):
                rewire(module, _attention)
        elif isinstance(module, UNet2DModel) and isinstance(module.conv_act, nn.SiLU):
            rewire(module.conv_norm_out, _norm_silu)
            rewire(module.conv_act, _nothing)
        if isinstance(module, UNet2DModel) and module.class_embedding is None:
            _feed_together(module.time_embedding, [part for part in module.modules() if isinstance(part, ResnetBlock2D)])
    if fused:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return fused


def unfuse(model: nn.Module) -> None:
    """Take it back, but for the order in memory: where the kernels turn out not to run."""
    for module in model.modules():
        ours = getattr(module.__dict__.get("forward"), "__func__", None)
        if getattr(ours, "__module__", "").startswith(__package__):
            del module.forward
        if "fused" in module.__dict__:
            module.fused = False  # type: ignore[assignment]


def compiler_options() -> dict[str, Any]:
    """Small kernels that do not wait for each other, such as casts of the weights, become one, where this torch can do it."""
    from torch._inductor import list_options

    return {"combo_kernels": True} if "combo_kernels" in list_options() else {}


def rewire(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let a function of this package be the module's forward."""
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


def _usual_attention(module: Any) -> bool:
    layers = [module.to_q, module.to_k, module.to_v, module.to_out[0]]
    return (
        type(module.processor).__name__ == "AttnProcessor2_0"
        and module.heads == 1
        and all(type(layer) is nn.Linear and layer.in_features == layer.out_features for layer in layers)
        and len({layer.bias is None for layer in layers[:3]}) == 1
        and module.to_out[1].p == 0
        and all(getattr(module, name) is None for name in ("spatial_norm", "norm_q", "norm_k"))
        and module.residual_connection
        and module.rescale_output_factor == 1
    )


def _usual_upsampling(module: Any) -> bool:
    return bool(module.use_conv and not module.use_conv_transpose and module.interpolate and module.norm is None)


def _feed_together(embedding: Any, blocks: list[Any]) -> None:
    """Let the embedding of the time be handed on as what each of the blocks adds to its first convolution."""
    if all(map(_usual_block, blocks)):
        embedding.fed = blocks  # in a list: they are no children of it
        for place, block in enumerate(blocks):
            block.place = place
        rewire(embedding, _shifts)


def _shifts(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """One product instead of a small one in each block; their first convolutions' biases with it."""
    embedded = nn.functional.silu(type(self).forward(self, *args, **kwargs))
    shifts = nn.functional.linear(embedded, torch.cat([block.time_emb_proj.weight for block in self.fed]))
    biases = [torch.cat([getattr(block, name).bias for block in self.fed]) for name in ("time_emb_proj", "conv1")]
    return (shifts + (biases[0] + biases[1])).split([len(block.conv1.bias) for block in self.fed], dim=1)


def _nothing(self: nn.Module, x: Tensor) -> Tensor:
    return x


def _norm(self: nn.GroupNorm, x: Tensor) -> Tensor:
    from noisewise.training.fast.norm import group_norm

    return group_norm(x, None, self, silu=False)


def _norm_silu(self: nn.GroupNorm, x: Tensor) -> Tensor:
    from noisewise.training.fast.norm import group_norm

    return group_norm(x, None, self)


def _block(self: Any, x: Tensor, temb: Tensor | tuple[Tensor, ...], *args: Any, **kwargs: Any) -> Tensor:
    from noisewise.training.fast.norm import group_norm

    h = group_norm(x, None, self.norm1)
    h = self.conv1._conv_forward(h, self.conv1.weight, None)
    shift = temb[self.place] if isinstance(temb, tuple) else self.time_emb_proj(nn.functional.silu(temb)) + self.conv1.bias
    h = self.conv2(group_norm(h, shift, self.norm2, dropout=self.dropout.p if self.dropout.training else 0.0))
    if self.conv_shortcut is not None:
        x = self.conv_shortcut(x)
    y = x + h
    return _whole(y) if self.output_scale_factor == 1 else y / self.output_scale_factor


def _attention(
    self: Any, x: Tensor, other: Tensor | None = None, mask: Tensor | None = None, temb: Any = None, **kwargs: Any
) -> Tensor:
    from noisewise.training.fast.attention import FEW, attend

    if other is not None or mask is not None or kwargs or x.ndim != 4 or x.shape[2] * x.shape[3] > FEW:
        out: Tensor = type(self).forward(self, x, other, mask, temb=temb, **kwargs)
        return out
    layers = self.to_q, self.to_k, self.to_v
    bias = None if self.to_q.bias is None else torch.cat([layer.bias for layer in layers])
    tokens = self.group_norm(x.flatten(2)).transpose(1, 2)
    qkv = nn.functional.linear(tokens, torch.cat([layer.weight for layer in layers]), bias)
    return _whole(self.to_out[0](attend(qkv)).transpose(1, 2).unflatten(2, x.shape[2:]) + x)


def _upsample(self: Any, x: Tensor, output_size: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
    if output_size is not None:
        return type(self).forward(self, x, output_size)
    n, c, h, w = x.shape
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    pixels = x.permute(0, 2, 3, 1)[:, :, None, :, None]
    doubled = pixels.expand(n, h, 2, w, 2, c).reshape(n, 2 * h, 2 * w, c)
    return _whole(self.conv(doubled.permute(0, 3, 1, 2)))


def _whole(x: Tensor) -> Tensor:
    """x; compiled, its gradient comes in one piece.

    The gradient of a part of a concatenation is a part of a larger tensor, which convolutions copy, slowly. The division is
    done on the way, by the kernel that adds gradients up.
    """
    return x / 1.0 if torch.compiler.is_compiling() else x
