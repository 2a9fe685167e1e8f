"""GroupNorm, SiLU and dropout of channels-last images in one Triton kernel each way.

    y = dropout(silu(group_norm(x + shift)))

`shift` (N, C) is a time embedding and a convolution's bias, neither of which then needs a pass of its own. A program holds all
pixels of a few groups of one image, so x is read once and y written once; backwards, x and dy are read and dx is written, and
dropout's decisions are computed anew instead of kept. On one H200 the step of DDPM's U-Net spends less than half of the time
on normalisation that torch.compile's kernels do (docs/speed.md).
"""

from typing import Any

import torch
import triton
from torch import Tensor, nn
from torch.nn import functional as F

from noisewise.training.fast import kernels

LARGEST = 65536  # values that a program may hold; larger images take torch's own kernels
TILE = 8192  # values that it should hold
EACH = {"forward": 64, "backward": 32}  # values a thread


def _layout(x: Tensor, groups: int, which: str) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid, and what a program holds: as many groups as fit TILE without many empty columns."""
    n, channels, height, width = x.shape
    each, block = channels // groups, triton.next_power_of_2(height * width)
    best: tuple[float, int, int] | None = None
    for count in (count for count in range(1, groups + 1) if groups % count == 0):
        columns = triton.next_power_of_2(count * each)
        if best is not None and block * columns > TILE:
            break
        waste = columns / (count * each)
        if best is None or waste <= 1.15 * best[0]:
            best = (waste, count, columns)
    assert best is not None
    _, count, columns = best
    warps = min(max(block * columns // (32 * EACH[which]), 1), 16)
    sizes = {"HW": height * width, "C": channels, "CPG": each, "GROUPS": count, "K": columns, "BLOCK": block}
    return (groups // count, n), {**sizes, "num_warps": warps}


def _pixel_rows(x: Tensor) -> Tensor:
    """x if the channels of a pixel are neighbours and pixels evenly spaced (also as a part of more channels), else a copy."""
    even = x.stride(1) == 1 and x.stride(2) == x.shape[3] * x.stride(3)
    return x if even else x.contiguous(memory_format=torch.channels_last)


@torch.library.custom_op("noisewise::norm_silu", mutates_args=())
def _norm_silu(
    x: Tensor, shift: Tensor | None, gamma: Tensor, beta: Tensor, seed: Tensor, groups: int, eps: float, p: float
) -> tuple[Tensor, Tensor, Tensor]:
    x = _pixel_rows(x)
    y = torch.empty(x.shape, device=x.device, dtype=x.dtype, memory_format=torch.channels_last)
    mean, rstd = (torch.empty(x.shape[:2], device=x.device) for _ in range(2))
    grid, sizes = _layout(x, groups, "forward")
    given = x if shift is None else shift.contiguous()
    kernels.forward[grid](
        x, given, gamma, beta, seed, y, mean, rstd, x.stride(0), x.stride(3), eps, SHIFT=shift is not None, P=p, **sizes
    )
    return y, mean, rstd


@_norm_silu.register_fake
def _(
    x: Tensor, shift: Tensor | None, gamma: Tensor, beta: Tensor, seed: Tensor, groups: int, eps: float, p: float
) -> tuple[Tensor, Tensor, Tensor]:
    statistics = gamma.new_empty(x.shape[:2], dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.channels_last), statistics, torch.empty_like(statistics)


@torch.library.custom_op("noisewise::norm_silu_backward", mutates_args=())
def _norm_silu_backward(
    dy: Tensor,
    x: Tensor,
    shift: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    seed: Tensor,
    mean: Tensor,
    rstd: Tensor,
    groups: int,
    p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    x, dy = _pixel_rows(x), _pixel_rows(dy)
    dx = torch.empty(x.shape, device=x.device, dtype=x.dtype, memory_format=torch.channels_last)
    sums, dshift = mean.new_empty(2, *mean.shape), torch.empty_like(mean)
    grid, sizes = _layout(x, groups, "backward")
    given = x if shift is None else shift.contiguous()
    strides = (x.stride(0), x.stride(3), dy.stride(0), dy.stride(3))
    kernels.backward[grid](
        dy, x, given, gamma, beta, seed, mean, rstd, dx, sums, dshift, *strides, len(x), SHIFT=shift is not None, P=p, **sizes
    )
    return dx, sums, dshift


@_norm_silu_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    shift: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    seed: Tensor,
    mean: Tensor,
    rstd: Tensor,
    groups: int,
    p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.channels_last)
    return dx, mean.new_empty(2, *mean.shape), torch.empty_like(mean)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, shift, gamma, beta, seed, groups, _, p = inputs
    ctx.save_for_backward(x, shift, gamma, beta, seed, *output[1:])
    ctx.groups, ctx.p = groups, p


def _gradients(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    x, shift, gamma, beta, seed, mean, rstd = ctx.saved_tensors
    dx, sums, dshift = _norm_silu_backward(dy, x, shift, gamma, beta, seed, mean, rstd, ctx.groups, ctx.p)
    dgamma, dbeta = sums.sum(1).unbind(0)
    return (
        dx,
        None if shift is None else dshift.to(shift.dtype),
        dgamma.to(gamma.dtype),
        dbeta.to(beta.dtype),
        None,
        None,
        None,
        None,
    )


_norm_silu.register_autograd(_gradients, setup_context=_keep_for_backward)


def group_norm_silu(x: Tensor, shift: Tensor | None, norm: nn.GroupNorm, dropout: float = 0.0) -> Tensor:
    """dropout(silu(norm(x + shift))), with `shift` (N, C) or None; under autocast x is first cast as a convolution would."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    pixels = triton.next_power_of_2(x.shape[2] * x.shape[3])
    if x.device.type != "cuda" or pixels * triton.next_power_of_2(x.shape[1] // norm.num_groups) > LARGEST:
        moved = x if shift is None else x + shift[:, :, None, None].to(x.dtype)
        # not norm(x): the forward of the module itself may be this function
        return F.dropout(F.silu(F.group_norm(moved, norm.num_groups, norm.weight, norm.bias, norm.eps)), dropout)
    if dropout:
        seed = torch.randint(0, 2**31 - 1, (), device=x.device)
    else:
        seed = torch.zeros((), dtype=torch.int64, device=x.device)
    return _norm_silu(x, shift, norm.weight, norm.bias, seed, norm.num_groups, norm.eps, dropout)[0]
