"""Random numbers as pure functions of a seed and a place: nothing to advance, save or disturb.

The generator is SplitMix64 (Steele, Lea & Flood 2014) in 64-bit integer tensor operations: the same numbers on every device,
no host synchronisation, the caller's random state untouched. Uniform numbers, of (seed, step, micro-batch, rank, index), lie
strictly inside (0, 1), on odd multiples of 2^-24, so that v and 1 - v are both exact.
"""

import math
import operator
from collections.abc import Sequence
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


def bits(key: int | Sequence[int], n: int, device: torch.device | str = "cpu") -> Tensor:
    """n random 64-bit integers (as int64); of several keys a row for each."""
    counter = torch.arange(1, n + 1, dtype=torch.int64, device=device) * _signed(GOLDEN)
    if isinstance(key, int):
        return _mix(counter + _signed(key))
    keys = torch.tensor([_signed(one) for one in key], dtype=torch.int64, device="cpu").to(device, non_blocking=True)
    return _mix(counter + keys[:, None])


def uniforms(key: int | Sequence[int], n: int, device: torch.device | str = "cpu") -> Tensor:
    """n float32 numbers, uniform on the odd multiples of 2^-24 in (0, 1); of several keys a row for each."""
    return uniform_of(bits(key, n, device))


def uniform_of(random: Tensor) -> Tensor:
    """The float32 numbers that the upper bits of random integers stand for."""
    top = (random >> 41) & ((1 << 23) - 1)
    return (top.to(torch.float32) + 0.5) * 2.0**-23


# Normals of (seed, image, draw, element) --------------------------------------------------------------------------------

# Image 1,234 starts from the same noise whatever the batch it is generated in, whatever came before it and however many
# processes share the work. Draw 0 is the noise an image starts from, draw k the noise of step k of a stochastic solver; in
# validation the draw is the noise level.
#
# They are Box and Muller's: r = sqrt(-2 ln a), (r cos b, r sin b). A library's log, cos and sin may differ in the last bit
# between devices, and even between the middle and the tail of one vector; so they are computed here with +, *, / and sqrt
# alone, which IEEE 754 defines to the last bit: the same numbers come out of every device and every batch.

STREAM = 0x6E6F697365  # "noise": keeps these bits apart from those that choose timesteps under the same seed
LOW = (1 << 32) - 1

_SINE = [(-1) ** k / math.factorial(2 * k + 1) for k in range(8)]
_COSINE = [(-1) ** k / math.factorial(2 * k) for k in range(9)]
_ATANH = [1 / (2 * k + 1) for k in range(11)]


def normals(
    seed: int, images: Tensor, draw: int | Sequence[int], shape: tuple[int, ...], device: torch.device | str | None = None
) -> Tensor:
    """Standard normals for a batch of images, float32 of shape (len(images), *shape).

    Args:
        seed: any integer; another seed is another set of images.
        images: int64 indices, one an image; equal indices get equal noise.
        draw: 0 for the start, k for step k; or one number an image.
        shape: of one image.
        device: where to make them; that of `images` if absent.
    """
    if images.ndim != 1 or images.dtype != torch.int64:
        raise ValueError(f"images must be a vector of int64 indices, got {images.dtype} of shape {tuple(images.shape)}")
    if not isinstance(draw, int) and len(draw) != len(images):
        raise ValueError(f"draw must be one number, or one an image, so {len(images)} of them, got {len(draw)}")
    lowest = draw if isinstance(draw, int) else min(draw, default=0)
    if lowest < 0:
        raise ValueError(f"draw must be 0 (the start) or the number of a step, got {lowest}")
    if any(size < 1 for size in shape):
        raise ValueError(f"shape must be that of one image, every size at least 1, got {tuple(shape)}")
    images = images.to(device if device is not None else images.device)
    count = math.prod(shape)
    key = _mix(images * _signed(GOLDEN) + _streams(seed, draw, images.device))
    # Mixed before the key is added, so that no two images can read the same run of one sequence, a few places apart.
    element = _mix(torch.arange(1, (count + 1) // 2 + 1, dtype=torch.int64, device=images.device) * _signed(GOLDEN))
    word = _mix(element + key[:, None])
    return torch.stack(_box_muller((word >> 32) & LOW, word & LOW), -1).flatten(1)[:, :count].reshape(len(images), *shape)


def _streams(seed: int, draw: int | Sequence[int], device: torch.device) -> int | Tensor:
    """What sets one draw's bits apart from another's."""
    if isinstance(draw, int):
        return _signed(stream_key(STREAM, seed, draw))
    return torch.tensor([_signed(stream_key(STREAM, seed, one)) for one in draw], dtype=torch.int64, device=device)


def _box_muller(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Two float32 normals from two 32-bit integers (|normal| is at most 6.8)."""
    radius = torch.sqrt(-2 * _log((first.double() + 0.5) * 2.0**-32))
    cosine, sine = _unit_vector(second)
    return (radius * cosine).float(), (radius * sine).float()


def _log(x: Tensor) -> Tensor:
    """ln x = e ln 2 + 2 atanh((m - 1) / (m + 1)) for x = m 2^e, with m in [sqrt(1/2), sqrt(2))."""
    mantissa, exponent = torch.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa, exponent = torch.where(small, 2 * mantissa, mantissa), exponent.double() - small.double()
    s = (mantissa - 1) / (mantissa + 1)
    return exponent * math.log(2) + 2 * s * _polynomial(_ATANH, s * s)


def _unit_vector(turn: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) of 2 pi (turn + 1/2) / 2^32: series within an eighth of a turn of the nearest quarter, then a rotation."""
    quarter = (turn + (1 << 29)) >> 30
    angle = ((turn - (quarter << 30)).double() + 0.5) * (2 * math.pi * 2.0**-32)
    square = angle * angle
    sine, cosine = angle * _polynomial(_SINE, square), _polynomial(_COSINE, square)
    odd, half = (quarter & 1) == 1, (quarter & 2) == 2
    sign = torch.where(half, -1.0, 1.0).double()
    return sign * torch.where(odd, -sine, cosine), sign * torch.where(odd, cosine, sine)


def _polynomial(coefficients: list[float], x: Tensor) -> Tensor:
    """c0 + c1 x + c2 x^2 + ... by Horner's rule, each operation on its own so that none is fused."""
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x
        value = value + coefficient
    return value
