"""Resolution shifts, one for all samples or one for each. Card: docs/methods/shift.md."""

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from noisewise.levels import visible
from noisewise.processes import Process
from noisewise.samplers.base import Sampler
from noisewise.samplers.combine import Combined

ShiftOf = Callable[..., float | Tensor]
"""From the shape of a batch to its shift, or to one for each sample."""
Model = Literal["sd3", "flux", "qwen_image", "rae", "wan_480p", "wan_720p"]


def tokens(shape: torch.Size) -> int:
    """How many tokens a transformer with patches of 2 x 2 sees: (B, L, D) are tokens, (B, C, ..., H, W) are latents."""
    if len(shape) < 3:
        raise ValueError(f"a shift by tokens needs latents (B, C, ..., H, W) or tokens (B, L, D), got {tuple(shape)}")
    return shape[1] if len(shape) == 3 else math.prod(shape[2:]) // 4


def by_tokens(low: float, high: float, most: int) -> ShiftOf:
    """exp(mu), mu linear in the number of tokens: `low` at 256 of them, `high` at `most`."""
    return lambda shape: math.exp(low + (high - low) * (tokens(shape) - 256) / (most - 256))


def by_dimension(base: int) -> ShiftOf:
    """sqrt(numbers of a sample / base)."""
    return lambda shape: math.sqrt(math.prod(shape[1:]) / base)


MODELS: dict[str, float | ShiftOf] = {
    "sd3": 3.0,
    "flux": by_tokens(0.5, 1.15, 4096),
    "qwen_image": by_tokens(0.5, 0.9, 8192),
    "rae": by_dimension(4096),
    "wan_480p": 3.0,
    "wan_720p": 5.0,
}
"""The shifts of published models; the card has their sources."""
assert set(MODELS) == set(get_args(Model))


class Shift(Combined):
    """SD3's resolution shift of another sampler: u becomes s u / (1 + (s - 1) u); s > 1 moves towards noise.

    For rectified flow this lowers every log SNR by 2 ln s.

    Args:
        of: the fixed density that is shifted.
        shift: s; or the name of a published model (`MODELS`), some of which take it from the shape of the data; or a function
            of that shape; or a tensor, one s for each sample. `sampler.shift` may be set anew before a draw.
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
        return _check(self._shift(shape)) if callable(self._shift) else self._shift

    def quantile(self, v: Tensor, x0: Tensor | None = None) -> Tensor:
        if x0 is None and callable(self._shift):
            raise ValueError("this shift depends on the shape of the data: call sample(x0) with the batch, not with its size")
        s = _like(self.shift_of(v.shape if x0 is None else x0.shape), v)
        u = self.of.quantile(v, x0)
        return (s * u / (1 + (s - 1) * u)).clamp(2.0**-24, 1 - 2.0**-24)

    def density(self, u: Tensor, x0: Tensor | None = None) -> Tensor:
        """Without data: the mean over the shifts of a tensor, and not shifted where s depends on the shape."""
        if x0 is not None:
            return self._density(u, _like(self.shift_of(x0.shape), u), x0)
        if isinstance(self._shift, Tensor):
            return torch.stack([self._density(u, one) for one in self._shift.to(u)]).mean(0)
        return self.of.density(u) if callable(self._shift) else self._density(u, self._shift)

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


def _check(s: Any) -> Any:
    """s itself, if it is positive and finite; one of a device is not waited for."""
    if isinstance(s, Tensor):
        if visible(s) and not bool(((s > 0) & torch.isfinite(s)).all()):
            raise ValueError(f"shift must be positive and finite, got {float(s.min()):g} to {float(s.max()):g}")
    elif not 0 < s < math.inf:
        raise ValueError(f"shift must be positive and finite, got {s}")
    return s
