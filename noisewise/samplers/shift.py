"""Resolution shifts, one for all samples or one for each. Card: docs/methods/shift.md."""

import math
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from noisewise.levels import visible
from noisewise.processes import Process
from noisewise.samplers.base import Sampler
from noisewise.samplers.combine import Combined

ShiftOf = Callable[..., float | Tensor]
"""From the shape of a batch to its shift, or to one for each sample."""
LEAST, MOST = 1e-4, 1e4
Model = Literal["sd3", "flux", "qwen_image", "rae", "wan_480p", "wan_720p"]


def tokens(shape: torch.Size) -> int:
    """How many tokens a transformer with patches of 2 x 2 sees: (B, L, D) are tokens, (B, C, ..., H, W) are latents."""
    if len(shape) < 3:
        raise ValueError(f"a shift by tokens needs latents (B, C, ..., H, W) or tokens (B, L, D), got {tuple(shape)}")
    return shape[1] if len(shape) == 3 else math.prod(shape[2:]) // 4


def by_tokens(shape: torch.Size, low: float, high: float, most: int) -> float:
    """exp(mu), mu linear in the number of tokens: `low` at 256 of them, `high` at `most`."""
    return math.exp(min(low + (high - low) * (tokens(shape) - 256) / (most - 256), 99.0))  # refused if so large


def by_dimension(shape: torch.Size, base: int) -> float:
    """sqrt(numbers of a sample / base)."""
    return math.sqrt(math.prod(shape[1:]) / base)


MODELS: dict[str, float | ShiftOf] = {
    "sd3": 3.0,
    "flux": partial(by_tokens, low=0.5, high=1.15, most=4096),
    "qwen_image": partial(by_tokens, low=0.5, high=0.9, most=8192),
    "rae": partial(by_dimension, base=4096),
    "wan_480p": 3.0,
    "wan_720p": 5.0,
}
"""The shifts of published models; the card has their sources."""
assert set(MODELS) == set(get_args(Model))


class Shift(Combined):
    """SD3's resolution shift of another sampler: u becomes s u / (1 + (s - 1) u); s > 1 moves towards noise.

    For rectified flow this lowers every log SNR by 2 ln s.

    Args:
        of: the fixed density to shift.
        shift: s; or the name of a published model (`MODELS`), where s may depend on the shape of the data; or a function of
            that shape; or a tensor, one s per sample. You may set `sampler.shift` before each draw.
    """

    def __init__(self, process: Process, of: Sampler, shift: float | Model | ShiftOf | Tensor = 3.0, **common: Any) -> None:
        if not of.constant:
            raise ValueError(f"shift takes a fixed density, but {type(of).__name__} changes during training")
        super().__init__(process, [of], **common)
        self.of = of
        self.shift = shift

    @property
    def shift(self) -> float | ShiftOf | Tensor:
        """s, one for each sample, or the function of the shape that gives it."""
        return self._shift

    @shift.setter
    def shift(self, given: float | str | ShiftOf | Tensor) -> None:
        if isinstance(given, str) and given not in MODELS:
            raise ValueError(f"unknown shift {given!r}: give a number, or one of {', '.join(MODELS)}")
        found = MODELS[given] if isinstance(given, str) else given
        if isinstance(found, Tensor) and (found.ndim != 1 or not found.is_floating_point()):
            raise ValueError(f"shift must be one number a sample, a vector, got shape {tuple(found.shape)} of {found.dtype}")
        if not callable(found):
            _check(found)
        self._shift = found
        self._seen: float | Tensor | None = None if callable(found) else found  # of the last batch, for plots
        self.conditional = callable(found) or isinstance(found, Tensor) or self.of.conditional
        self._mean_weight = None
        self._check_mean_is_known()

    def shift_of(self, shape: torch.Size) -> float | Tensor:
        """s for a batch of this shape."""
        if isinstance(self._shift, Tensor):
            if len(self._shift) != shape[0]:
                raise ValueError(
                    f"shift has {len(self._shift)} entries for a batch of {shape[0]}: set sampler.shift to one each"
                )
            return self._shift
        return _found(self._shift(shape), shape) if callable(self._shift) else self._shift

    def quantile(self, v: Tensor, x0: Tensor | None = None) -> Tensor:
        if x0 is None and callable(self._shift):
            raise ValueError("this shift depends on the shape of the data: call sample(x0) with the batch, not with its size")
        self._seen = s = _like(self.shift_of(v.shape if x0 is None else x0.shape), v)
        u = self.of.quantile(v, x0)
        return (s * u / (1 + (s - 1) * u)).clamp(2.0**-24, 1 - 2.0**-24)

    def density(self, u: Tensor, x0: Tensor | None = None) -> Tensor:
        """Without data: the mean over the shifts of a tensor; where s depends on the shape that of the last batch, if any."""
        if x0 is not None:
            return self._density(u, _like(self.shift_of(x0.shape), u), x0)
        if isinstance(self._seen, Tensor):
            return torch.stack([self._density(u, one) for one in self._seen.to(u).flatten()]).mean(0)
        return self.of.density(u) if self._seen is None else self._density(u, self._seen)

    def _draw(self, v: Tensor, x0: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        known = x0 is not None or not isinstance(self._shift, Tensor)
        return super()._draw(v, x0 if known else v)  # a tensor needs to know how many samples there are, no more

    def marginal(self, u: Tensor, x0: Tensor | None = None) -> Tensor:
        return self.density(u) if isinstance(self._shift, Tensor) else super().marginal(u, x0)

    def _density(self, u: Tensor, s: float | Tensor, x0: Tensor | None = None) -> Tensor:
        before = u / (s + (1 - s) * u)
        return self.of.density(before, x0) * s / (s + (1 - s) * u) ** 2


def _like(s: float | Tensor, u: Tensor) -> float | Tensor:
    return s.to(u) if isinstance(s, Tensor) else s


def _found(s: Any, shape: torch.Size) -> Any:
    """What a function of the shape returned, if it is a shift for this batch."""
    if isinstance(s, Tensor) and s.shape not in (torch.Size(), shape[:1]):
        raise ValueError(f"the function of shift must return a number, or ({shape[0]},) numbers, got shape {tuple(s.shape)}")
    try:
        return _check(s)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error}, for data of shape {tuple(shape)}") from None


def _check(s: Any) -> Any:
    """s itself, if levels can be drawn with it; one of a device is not waited for."""
    if isinstance(s, Tensor):
        if not visible(s) or not s.numel():
            return s
        least, most = (float(end) for end in s.detach().aminmax())
        got = f"{least:g} to {most:g}"
    elif isinstance(s, Real):
        least = most = float(s)
        got = f"{most:g}"
    else:
        raise TypeError(
            f"shift must be a number, a tensor with one a sample, or a function of the shape, got {type(s).__name__}"
        )
    if not (least > 0 and most < math.inf):  # also of what is not a number
        raise ValueError(f"shift must be positive and finite, got {got}")
    if least < LEAST or most > MOST:
        raise ValueError(f"shift must lie between {LEAST:g} and {MOST:g}, where float32 tells noise levels apart, got {got}")
    return s
