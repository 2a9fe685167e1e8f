"""Importance weights: what to multiply a loss by when its u was drawn from q instead of uniformly.

============  ==========================  ===================================================================
correction    weight                      the objective then is
============  ==========================  ===================================================================
none          1                           the sampler *is* the weighting: E_q[loss]
unbiased      1 / q                       exactly uniform's, E_u[loss], at the price of variance
target        (w / v) / q, scaled         the sampler's own target w, whatever weighting v the loop has on its losses;
                                          for samplers that learn. The same as unbiased where the target is v
clipped(c)    min(1 / q, c), over its     between the two: rare draws count at most c, before the division
              mean
tempered(p)   q^-p, over its mean         none at p = 0, unbiased at p = 1
============  ==========================  ===================================================================

Every weight has mean 1 over the draws, that of `target` where the loop has no weighting; with one, the two together have the
mean of the loop's. So a correction does not change the learning rate. (Where q is zero nothing is ever
drawn, and no weight can make up for that: mix in a floor.)
"""

import re
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
        """From what is written in specs, such as "unbiased" or "clipped(5)"."""
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
        if kind == "clipped" and not number >= 1:
            raise ValueError(f"clipped(c) needs c >= 1, got {number}: below 1 every weight would be clipped")
        if kind == "tempered" and not 0 <= number <= 1:
            raise ValueError(f"tempered(p) needs 0 <= p <= 1, got {number}")
        return cls(kind, number)

    @property
    def needs_mean(self) -> bool:
        """Whether `raw` has a mean other than 1."""
        return self.kind in ("clipped", "tempered")

    def raw(self, density: Tensor) -> Tensor:
        """The part of the weight that depends on the density alone, before it is divided by its mean."""
        if self.kind == "none":
            return torch.ones_like(density)
        density = density.clamp(min=1e-12)
        if self.kind in ("unbiased", "target"):
            return 1 / density
        if self.kind == "clipped":
            return (1 / density).clamp(max=self.value)
        return density**-self.value

    def __str__(self) -> str:
        return f"{self.kind}({self.value:g})" if self.needs_mean else self.kind


def effective_sample_size(weight: Tensor) -> Tensor:
    """(sum w)^2 / sum w^2: how many equally weighted samples these are worth."""
    return weight.sum() ** 2 / (weight**2).sum().clamp(min=1e-30)
