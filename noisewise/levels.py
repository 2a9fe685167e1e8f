"""A noise level u as a number: type and range, in which of n intervals it lies, how it meets a batch and its losses; edges."""

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode


def over_samples(per_sample: Tensor, like: Tensor) -> Tensor:
    """A (B,) tensor shaped and typed to multiply a batch `like` of shape (B, ...)."""
    return per_sample.to(like.dtype).view(-1, *[1] * (like.ndim - 1))


def check_floating(x0: Tensor) -> None:
    """An error if data have not been scaled yet."""
    if not x0.is_floating_point():
        raise TypeError(f"x0 must be floating-point, got {x0.dtype}: scale images to [-1, 1] first")


def check_tensor(u: Tensor) -> None:
    """An error if u is something else, such as the draw that it belongs to."""
    if not isinstance(u, Tensor):
        raise TypeError(f"u must be a tensor of noise levels, got {type(u).__name__}: hand over draw.u")


def check_per_sample(losses: Any, u: Tensor, whose: str = "losses") -> Tensor:
    """The losses, if there is one for each u; else an error that says how to get there."""
    if not isinstance(losses, Tensor):
        raise TypeError(f"{whose} must be a tensor, one a sample, got {type(losses).__name__}")
    if not losses.is_floating_point():
        raise TypeError(f"{whose} must be floating-point, got {losses.dtype}")
    if losses.shape != u.shape:
        fix = {
            0: "this is the mean over the batch; take the losses before it (reduction='none', or Objective.losses)",
            1: "they belong to another batch or to a part of this one; hand over those of all rows that were drawn for",
        }.get(losses.ndim, "average over a sample's elements but not over the batch: losses.flatten(1).mean(1)")
        raise ValueError(f"{whose} must be one a sample, {tuple(u.shape)}, got {tuple(losses.shape)}: {fix}")
    return losses


def check_u(u: Tensor) -> Tensor:
    """`u` itself, if its type can tell timesteps apart."""
    check_tensor(u)
    if u.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"u must be float32 or float64, got {u.dtype}: with 8 bits of mantissa a bfloat16 u collapses "
            "1,000 timesteps to a few hundred. Keep u as the sampler returned it; only x0 may be of low precision."
        )
    return u


def visible(u: Tensor, wait: bool = False) -> bool:
    """Whether numbers can be looked at: nothing traces or records, and no device is waited for, unless we may `wait`."""
    if torch.compiler.is_compiling() or is_functorch_wrapped_tensor(u) or u.is_meta or _get_current_dispatch_mode() is not None:
        return False
    return u.device.type == "cpu" or (wait and not (u.is_cuda and torch.cuda.is_current_stream_capturing()))


def check_range(u: Tensor, wait: bool = False) -> Tensor:
    """`u` itself, if it lies in [0, 1]; looked at where it is `visible`."""
    if visible(u, wait) and not bool(((u >= 0) & (u <= 1)).all()):
        raise ValueError(
            f"u must lie in [0, 1], got {float(u.min()):g} to {float(u.max()):g}: it is a quantile of the noise levels, not a "
            "time. Pass draw.u; process.u_of_time(time) turns a time into one"
        )
    return u


def check_size(name: str, size: int, most: int = 100_000) -> int:
    """The size itself, if a table of it can be held; else an error before anything is allocated."""
    if size > most:
        raise ValueError(f"{name} must be at most {most:,}, got {size:.6g}")
    return size


def middles(n: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """The middles of n equal intervals of [0, 1]."""
    return (torch.arange(n, device=device, dtype=dtype) + 0.5) / n


def interval(u: Tensor, n: int) -> Tensor:
    """Which of n equal intervals of [0, 1] each u lies in, exactly: float32(i / n) is in interval i, and 1 in the last.

    In whole multiples of 2^-24, the resolution of a float32 below 1; adding one of them makes float32(i / n), which may have
    been rounded down, fall on i.
    """
    ticks = (check_u(u) * 2**24).round().long() + 1
    return ((ticks * n) >> 24).clamp(0, n - 1)


def first_ticks(n: int, device: torch.device | str = "cpu") -> Tensor:
    """(n - 1,): the first multiple of 2^-24 that `interval` puts into the second to the last of n intervals, as float32."""
    return ((torch.arange(1, n, device=device) * 2**24 + n - 1) // n - 1).to(torch.float32)


def edges_between(log_snr: Tensor) -> Tensor:
    """T + 1 finite edges around T values: halfway between neighbours, mirrored at the ends (an infinite last value continues
    the spacing before it)."""
    if len(log_snr) == 1:
        middle = log_snr.clamp(-30.0, 30.0)
        return torch.cat([middle + 0.5, middle - 0.5])
    values = log_snr.clone()
    if torch.isinf(values[-1]):
        values[-1] = 2 * values[-2] - values[-3] if len(values) > 2 else values[-2] - 1.0
    between = (values[1:] + values[:-1]) / 2
    first, last = 2 * values[0] - between[0], 2 * values[-1] - between[-1]
    return torch.cat([first[None], between, last[None]])
