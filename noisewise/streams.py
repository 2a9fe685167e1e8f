"""Uniform numbers as a pure function of (seed, step, micro-batch, rank, index): nothing to advance, save or disturb.

The generator is SplitMix64 (Steele, Lea & Flood 2014) in 64-bit integer tensor operations: the same numbers on every device,
no host synchronisation, the caller's random state untouched. Results lie strictly inside (0, 1), on odd multiples of 2^-24,
so that v and 1 - v are both exact.
"""

import operator
from typing import SupportsIndex

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIX1 = 0xBF58476D1CE4E5B9
MIX2 = 0x94D049BB133111EB
MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _mix_int(z: int) -> int:
    z = ((z ^ (z >> 30)) * MIX1) & MASK
    z = ((z ^ (z >> 27)) * MIX2) & MASK
    return z ^ (z >> 31)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _signed(MIX1)
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _signed(MIX2)
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def checked_seed(seed: SupportsIndex) -> int:
    """A seed as a signed 64-bit number, which a checkpoint can hold; larger ones are cut to it, as the draws do anyway."""
    try:
        return _signed(operator.index(seed) & MASK)
    except TypeError:
        raise TypeError(f"a seed must be a whole number, got {seed!r}") from None


def stream_key(*parts: int) -> int:
    """One 64-bit key for a tuple of integers, each of which changes it."""
    key = 0
    for part in parts:
        key = _mix_int((key + GOLDEN + (part & MASK)) & MASK)
    return key


def bits(key: int, n: int, device: torch.device | str = "cpu") -> Tensor:
    """n random 64-bit integers (as int64)."""
    counter = torch.arange(1, n + 1, dtype=torch.int64, device=device)
    return _mix(counter * _signed(GOLDEN) + _signed(key))


def uniforms(key: int, n: int, device: torch.device | str = "cpu") -> Tensor:
    """n float32 numbers, uniform on the odd multiples of 2^-24 in (0, 1)."""
    return uniform_of(bits(key, n, device))


def uniform_of(random: Tensor) -> Tensor:
    """The float32 numbers that the upper bits of random integers stand for."""
    top = (random >> 41) & ((1 << 23) - 1)
    return (top.to(torch.float32) + 0.5) * 2.0**-23
