"""GroupNorm, SiLU and dropout of channels-last images, fused.

    y = dropout(silu(group_norm(x + shift)))

`shift` (N, C) is a time embedding and a convolution's bias, neither of which then needs a pass of its own. A program has some
channels of an image, reads x once (large images: twice) and writes y; backwards, x and dy are read and dx is written. Dropout's
decisions are computed anew backwards instead of kept. What this gains: docs/speed.md.
"""

from typing import Any

import torch
import triton
from torch import Tensor, nn
from torch.nn import functional as F

from noisewise.training.fast import kernels

MOST = 16384  # values of an image that a program can keep: with more of them registers run out
EACH = {"forward": 64, "backward": 32}  # values a thread then has
VALUES, FEW, AHEAD = 2048, 16, 3  # otherwise: values at a time, values a thread, and parts on their way
IMAGES = 65535  # the second dimension of a grid has no more
QUICK = True  # off where there is no GPU: Triton's interpreter knows no instructions of one


def _share(x: Tensor, groups: int, which: str) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid, and what a program takes on: groups that fill about so many columns.

    It keeps the pixels of small images, and fetches those of larger ones part by part, some ahead. Sizes are those that
    measured best (benchmarks/kernel_sizes.py).
    """
    n, channels, pixels = x.shape
    per_group, block = channels // groups, triton.next_power_of_2(pixels)
    narrow, backward = per_group < 4, which == "backward"
    held = pixels <= (256 if narrow or backward else 1024) and per_group & (per_group - 1) == 0 and block * per_group <= MOST
    filled = min(1 << (9 - backward - (block.bit_length() - 1) // 2), 128)
    count, columns = _columns(groups, per_group, filled if held else 32 if narrow else 64)
    rows = block if held else min(max(VALUES // columns, 1), block)
    warps = min(max(rows * columns // (32 * (EACH[which] if held else FEW)), 1), 16)
    sizes = {"HW": pixels, "C": channels, "CPG": per_group, "GROUPS": count, "K": columns, "ROWS": rows}
    return (groups // count, n), {**sizes, "num_warps": warps, "QUICK": QUICK, "STAGES": 1 if held else AHEAD}


def _columns(groups: int, per_group: int, wanted: int) -> tuple[int, int]:
    """How many groups, and a power of two of columns for them: about `wanted`, few of them empty."""
    best = (1, triton.next_power_of_2(per_group))
    for count in range(2, groups + 1):
        columns = triton.next_power_of_2(count * per_group)
        if groups % count == 0 and columns <= wanted and columns / count <= 1.15 * best[1] / best[0]:
            best = (count, columns)
    return best


def _pixel_rows(x: Tensor) -> Tensor:
    """x (N, C, pixels) if the channels of a pixel are neighbours, also as a part of more; else a copy where they are."""
    return x if x.stride(1) == 1 else x.transpose(1, 2).contiguous().transpose(1, 2)


def _like(x: Tensor) -> Tensor:
    n, channels, pixels = x.shape
    return torch.empty(n, pixels, channels, dtype=x.dtype, device=x.device).transpose(1, 2)


@torch.library.custom_op("noisewise::norm", mutates_args=())
def _norm(
    x: Tensor, shift: Tensor | None, gamma: Tensor, beta: Tensor, seed: Tensor, groups: int, eps: float, silu: bool, p: float
) -> tuple[Tensor, Tensor, Tensor]:
    x = _pixel_rows(x)
    y = _like(x)
    centre, rstd = (torch.empty(x.shape[:2], dtype=torch.float32, device=x.device) for _ in range(2))
    given = x if shift is None else shift if shift.stride(1) == 1 else shift.contiguous()
    grid, sizes = _share(x, groups, "forward")
    kernels.forward[grid](
        x,
        given,
        gamma,
        beta,
        seed,
        y,
        centre,
        rstd,
        x.stride(0),
        x.stride(2),
        given.stride(0),
        eps,
        SHIFT=shift is not None,
        SILU=silu,
        P=p,
        **sizes,
    )
    return y, centre, rstd


@_norm.register_fake
def _(
    x: Tensor, shift: Tensor | None, gamma: Tensor, beta: Tensor, seed: Tensor, groups: int, eps: float, silu: bool, p: float
) -> tuple[Tensor, Tensor, Tensor]:
    statistics = gamma.new_empty(x.shape[:2], dtype=torch.float32)
    return _like(x), statistics, torch.empty_like(statistics)


@torch.library.custom_op("noisewise::norm_backward", mutates_args=())
def _norm_backward(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    seed: Tensor,
    centre: Tensor,
    rstd: Tensor,
    groups: int,
    silu: bool,
    p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    x, dy = _pixel_rows(x), _pixel_rows(dy)
    dx = _like(x)
    sums, dshift = centre.new_empty(2, *centre.shape), torch.empty_like(centre)
    grid, sizes = _share(x, groups, "backward")
    strides = (x.stride(0), x.stride(2), dy.stride(0), dy.stride(2))
    kernels.backward[grid](dy, x, gamma, beta, seed, centre, rstd, dx, sums, dshift, *strides, len(x), SILU=silu, P=p, **sizes)
    return dx, sums, dshift


@_norm_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    seed: Tensor,
    centre: Tensor,
    rstd: Tensor,
    groups: int,
    silu: bool,
    p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(x), centre.new_empty(2, *centre.shape), torch.empty_like(centre)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, shift, gamma, beta, seed, groups, _, silu, p = inputs
    ctx.save_for_backward(x, gamma, beta, seed, *output[1:])
    ctx.shift = None if shift is None else shift.dtype
    ctx.settings = (groups, silu, p)


def _gradients(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    x, gamma, beta, seed, centre, rstd = ctx.saved_tensors
    dx, sums, dshift = _norm_backward(dy, x, gamma, beta, seed, centre, rstd, *ctx.settings)
    dgamma, dbeta = sums.sum(1).unbind(0)
    moved = None if ctx.shift is None else dshift.to(ctx.shift)
    return dx, moved, dgamma.to(gamma.dtype), dbeta.to(beta.dtype), None, None, None, None, None


_norm.register_autograd(_gradients, setup_context=_keep_for_backward)


def group_norm(x: Tensor, shift: Tensor | None, norm: nn.GroupNorm, silu: bool = True, dropout: float = 0.0) -> Tensor:
    """dropout(silu(norm(x + shift))), with `shift` (N, C) or None; under autocast x is first cast as a convolution would."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if x.device.type != "cuda" or x.dtype == torch.float64 or len(x) > IMAGES:  # the kernels compute in float32
        moved = x if shift is None else x + shift[:, :, None, None].to(x.dtype)
        # not norm(x): the forward of the module itself may be this function
        y = F.group_norm(moved, norm.num_groups, norm.weight, norm.bias, norm.eps)
        return F.dropout(F.silu(y) if silu else y, dropout)
    if dropout:
        seed = torch.randint(0, 2**31 - 1, (), device=x.device)
    else:
        seed = torch.zeros((), dtype=torch.int64, device=x.device)
    pixels = x.flatten(2)
    y = _norm(pixels, shift, norm.weight, norm.bias, seed, norm.num_groups, norm.eps, silu, dropout)[0]
    return y.unflatten(2, x.shape[2:])
