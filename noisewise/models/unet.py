"""The U-Net of DDPM (Ho et al. 2020) and of latent diffusion, on diffusers' `UNet2DModel`."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from noisewise.models.check import check_inputs, check_settings, fill_labels

USUAL_ATTENTION = 16  # height, as in DDPM


class UNet(nn.Module):
    """A convolutional U-Net with attention at chosen resolutions; the default is DDPM's for CIFAR-10 (35.7 M parameters).

    `net` is the diffusers model; its `save_pretrained` writes a checkpoint that diffusers' pipelines load.

    Args:
        shape: (C, H, W) of one sample.
        classes: the number of classes, 0 for an unconditional model.
        channels: channels at the highest resolution.
        multipliers: channels of each level over `channels`; every level but the last halves the resolution.
        blocks: residual blocks a level (one more on the way up).
        attention: the resolutions with attention, as heights; None for 16 where a level has that height. The middle of the
            network always has it.
        dropout: inside the residual blocks.
        head_channels: channels of an attention head, None for a single head.
        groups: groups of the normalisations, None for the most that divide all levels' channels, 32 at most.
        zero_init: start each residual branch and the output at zero, as DDPM does.
        time_scale: multiplies the time before it is embedded; about 1000 for a process whose time lies in [0, 1].
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int = 0,
        channels: int = 128,
        multipliers: tuple[int, ...] = (1, 2, 2, 2),
        blocks: int = 2,
        attention: tuple[int, ...] | None = None,
        dropout: float = 0.1,
        head_channels: int | None = None,
        groups: int | None = None,
        zero_init: bool = True,
        time_scale: float = 1.0,
    ) -> None:
        super().__init__()
        counts = {"channels": channels, "blocks": blocks, "head_channels": head_channels, "groups": groups}
        check_settings(shape, classes, dropout, time_scale, **counts)
        widths = _widths(channels, multipliers)
        attends = _attends(shape, len(widths), attention)
        groups = _groups(widths) if groups is None else groups
        _check_widths(widths, groups, head_channels)
        self.shape, self.classes, self.time_scale = tuple(shape), classes, time_scale
        self.net: nn.Module = _unet2d()(
            sample_size=shape[1:],
            in_channels=shape[0],
            out_channels=shape[0],
            block_out_channels=widths,
            layers_per_block=blocks,
            down_block_types=tuple("AttnDownBlock2D" if here else "DownBlock2D" for here in attends),
            up_block_types=tuple("AttnUpBlock2D" if here else "UpBlock2D" for here in reversed(attends)),
            dropout=dropout,
            attention_head_dim=head_channels,
            norm_num_groups=groups,
            num_class_embeds=classes + 1 if classes else None,
        )
        if zero_init:
            _zero_branches(self.net)

    def forward(self, x: Tensor, time: Tensor, labels: Tensor | None = None) -> Tensor:
        check_inputs(x, time, self.shape)
        labels = fill_labels(labels, self.classes, x)
        return self.net(x, time.to(torch.float32) * self.time_scale, class_labels=labels, return_dict=False)[0]


def _unet2d() -> Any:
    try:
        from diffusers import UNet2DModel
    except ImportError as error:
        raise ImportError("model 'unet' is built on diffusers: pip install noisewise[train], or use 'dit' or 'uvit'") from error
    return UNet2DModel


def _widths(channels: int, multipliers: tuple[int, ...]) -> tuple[int, ...]:
    multipliers = _numbers("multipliers", multipliers)
    if not multipliers:
        raise ValueError("multipliers must name at least one level, such as (1, 2)")
    return tuple(channels * multiplier for multiplier in multipliers)


def _attends(shape: tuple[int, ...], levels: int, attention: tuple[int, ...] | None) -> list[bool]:
    """Whether each level has attention."""
    halvings = 2 ** (levels - 1)
    if shape[1] % halvings or shape[2] % halvings:
        raise ValueError(
            f"{levels} levels halve the sample {levels - 1} times, but {shape[1]} x {shape[2]} does not divide by {halvings}: "
            "use fewer multipliers, or resize the data"
        )
    heights = [shape[1] // 2**level for level in range(levels)]
    if attention is None:
        return [height == USUAL_ATTENTION for height in heights]
    attention = _numbers("attention", attention)
    for height in attention:
        if height not in heights:
            raise ValueError(
                f"attention at {height}, but the levels have heights {', '.join(map(str, heights))}: choose among them for the "
                "model's option attention, or give none of them, []"
            )
    return [height in attention for height in heights]


def _groups(widths: tuple[int, ...]) -> int:
    common = math.gcd(*widths)
    return max(groups for groups in range(1, 33) if common % groups == 0)


def _check_widths(widths: tuple[int, ...], groups: int, head_channels: int | None) -> None:
    for name, divisor in (("groups", groups), ("head_channels", head_channels)):
        if divisor is not None and any(width % divisor for width in widths):
            raise ValueError(f"{name}={divisor} must divide the channels of every level, {', '.join(map(str, widths))}")


def _numbers(name: str, values: Any) -> tuple[int, ...]:
    if isinstance(values, str) or not hasattr(values, "__iter__") or not all(isinstance(v, int) and v >= 1 for v in values):
        raise ValueError(f"{name} must be a sequence of whole numbers of at least 1, such as (1, 2), got {values!r}")
    return tuple(values)


def _zero_branches(net: nn.Module) -> None:
    """Zero the second convolution of each residual block, the output projection of attention and the last convolution."""
    from diffusers.models.attention_processor import Attention
    from diffusers.models.resnet import ResnetBlock2D

    last: list[Any] = [net.conv_out]
    for module in net.modules():
        if isinstance(module, ResnetBlock2D):
            last.append(module.conv2)
        elif isinstance(module, Attention):
            last.append(module.to_out[0])
    for layer in last:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
