"""Importance weights: what to multiply a loss by when its u was drawn from q instead of uniformly.

`draw.weight` is computed here alone, in `Correction.weight`. Samplers supply q, t and the masses.

    weight(u) = r(q(u)) t(u) / m

1. Training takes the mean over the draws, so it minimises E_q[weight l] = int q weight l du.
2. With r = 1, q acts as the weighting. r = 1 / q cancels it: int q (1 / q) l du = E_u[l], whatever q is.
3. r = min(1 / q, c) and r = q^-p lie between the two. They are divided by their mean m = E_q[r] = sum_k mass_k r(q_k).
4. `target` wants the objective w, but the loop multiplies its losses by v. t = (w / v) E[v] / E[w], with r = 1 / q, gives
   E_q[(t / q) v l] = E_u[w l] E[v] / E[w]. Elsewhere t = 1.
5. So E_q[weight] = 1 (E_q[weight v] = E[v] for `target`): no correction changes the learning rate.

============  ===========================  ==========================================================
correction    weight                       the objective then is
============  ===========================  ==========================================================
none          1                            the sampler *is* the weighting: E_q[l]
unbiased      1 / q                        exactly uniform's, E_u[l], with more variance
target        t / q                        the sampler's own target, whatever weighting the loop has
clipped(c)    min(1 / q, c) over its mean  between: rare draws count at most c, before the division
tempered(p)   q^-p over its mean           none at p = 0, unbiased at p = 1
============  ===========================  ==========================================================

Where q is zero nothing is ever drawn, and no weight can correct that: mix in a floor.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Correction:
    """Importance weights of one kind: none, unbiased, target, clipped(c) or tempered(p); `Correction.parse("clipped(5)")`."""

    kind: str = "none"
    value: float = 1.0

    @classmethod
    def parse(cls, text: "str | Correction") -> "Correction":
        """From text, such as "unbiased" or "clipped(5)"."""
        if isinstance(text, Correction):
            return text
        match = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*([^)]+?)\s*\))?\s*", text)
        kind, value = (match.group(1), match.group(2)) if match else (text, None)
        takes_value = {"none": False, "unbiased": False, "target": False, "clipped": True, "tempered": True}
        if kind not in takes_value or takes_value[kind] != (value is not None):
            raise ValueError(
                f"unknown correction {text!r}: use none, unbiased, target, clipped(c) or tempered(p), as in clipped(5)"
            )
        try:
            number = float(value) if value is not None else 1.0
        except ValueError:
            raise ValueError(f"the value in correction {text!r} must be a number") from None
        if kind == "clipped" and not 1 <= number <= 1e30:
            raise ValueError(f"clipped(c) needs 1 <= c <= 1e30, got {number}: below 1 every weight would be clipped")
        if kind == "tempered" and not 0 <= number <= 1:
            raise ValueError(f"tempered(p) needs 0 <= p <= 1, got {number}")
        return cls(kind, number)

    @property
    def needs_mean(self) -> bool:
        """Whether m is other than 1."""
        return self.kind in ("clipped", "tempered")

    def weight(self, density: Tensor, target: Callable[[], Tensor], mean: Callable[[], Tensor]) -> Tensor:
        """`draw.weight` for draws of these densities; t(u) and m are asked for only where they are not 1."""
        raw = self.raw(density)
        if self.kind == "target":
            raw = raw * target()
        return raw / mean() if self.needs_mean else raw

    def raw(self, density: Tensor) -> Tensor:
        """r(q)."""
        if self.kind == "none":
            return torch.ones_like(density)
        density = density.clamp(min=1e-12)
        if self.kind in ("unbiased", "target"):
            return 1 / density
        if self.kind == "clipped":
            return (1 / density).clamp(max=self.value)
        return density**-self.value

    def mean(self, mass: Tensor, density: Tensor, total: Tensor | float = 1.0) -> Tensor:
        """m, over intervals in the last dimension; `total` is what the masses sum to."""
        return (mass * self.raw(density)).sum(-1) / total

    def __str__(self) -> str:
        return f"{self.kind}({self.value:g})" if self.needs_mean else self.kind


def target_ratio(target: Tensor, loop: Tensor, mean_target: Tensor, mean_loop: Tensor) -> Tensor:
    """t: the target's weights over the loop's, scaled so that t times the loop's weight has the loop's mean."""
    return target / loop.clamp(min=1e-30) / (mean_target / mean_loop)


def effective_sample_size(weight: Tensor) -> Tensor:
    """(sum w)^2 / sum w^2: how many equally weighted samples these are worth."""
    return weight.sum() ** 2 / (weight**2).sum().clamp(min=1e-30)
