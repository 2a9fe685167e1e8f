"""An exponential moving average of a model's weights, kept in float32 whatever precision the model has.

constant  decay^n, as in DDPM; with a ramp min(decay, (1 + n) / (10 + n)), so that short runs forget their start
power     (1 - 1/n)^(gamma + 1): the profile t^gamma over all of training (Karras et al. 2024, EDM2), gamma from its relative
          width `std`
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from noisewise.feedback import put_back
from noisewise.training.config import EMAConfig

MOSTLY = 0.5  # of the average


def initial_share(config: EMAConfig, updates: int) -> float:
    """How much of an average after so many updates is still the weights that it began with."""
    if config.kind == "power":
        return 0.0 if updates else 1.0
    rising = 0
    share = 1.0
    while config.ramp and rising < updates and (rising + 1) / (10 + rising) < config.decay and share > 0:
        rising += 1
        share *= rising / (9 + rising)
    return share * config.decay ** (updates - rising)


def mostly_initial(config: EMAConfig, updates: int) -> str | None:
    """What to say of an average that is mostly initial weights; None of one that is not."""
    share = initial_share(config, updates)
    if not updates or share <= MOSTLY:
        return None
    ramp = "" if config.ramp else ", or --ema.ramp true"
    return (
        f"after {updates} steps the averaged weights are still {share:.0%} the untrained ones (ema.decay {config.decay:g}), so "
        f"what they generate says little: train for longer, use a smaller --ema.decay{ramp}"
    )


def power_exponent(std: float) -> float:
    """gamma of the profile t^gamma whose standard deviation is `std` of its length."""
    if not 0 < std < 12**-0.5:
        raise ValueError(f"ema.std must lie between 0 and {12**-0.5:.3f} (the width of a plain mean), got {std}")
    # std^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)) falls with gamma: bisect
    low, high = 0.0, 1e6
    for _ in range(200):
        gamma = (low + high) / 2
        wide = (gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3)) > std**2
        low, high = (gamma, high) if wide else (low, gamma)
    return (low + high) / 2


class EMA:
    """The average of a model's parameters; buffers are copied as they are.

    Works on sharded parameters too: each rank averages its own part.
    """

    def __init__(self, model: nn.Module, config: EMAConfig) -> None:
        if config.kind == "constant" and not 0 <= config.decay < 1:
            raise ValueError(f"ema.decay must lie in [0, 1), got {config.decay}")
        self.config = config
        self.gamma = power_exponent(config.std) if config.kind == "power" else 0.0
        self.updates = 0
        self._source = dict(model.named_parameters())
        self.average = {name: value.detach().float().clone() for name, value in self._source.items()}

    def decay(self) -> float:
        """What the average so far counts at the next update."""
        n = self.updates + 1
        if self.config.kind == "power":
            return (1 - 1 / n) ** (self.gamma + 1)
        return min(self.config.decay, n / (9 + n)) if self.config.ramp else self.config.decay

    def pairs(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Each parameter and its average."""
        return [(parameter, self.average[name]) for name, parameter in self._source.items()]

    @property
    def changes(self) -> bool:
        """Whether the decay differs from update to update."""
        return self.config.kind == "power" or self.config.ramp

    def update(self) -> None:
        """Take in the model's weights as they are now."""
        self.blend(1 - self.decay())
        self.updates += 1

    @torch.no_grad()
    def blend(self, weight: float | Tensor) -> None:
        """Move the average by this share of the way to the model's weights; a tensor stays on its device, for CUDA graphs."""
        sources = [value.detach() for value in self._source.values()]
        sources = [value if value.dtype == torch.float32 else value.float() for value in sources]
        averages = list(self.average.values())
        if isinstance(weight, Tensor):  # _foreach_lerp_ would wait for it
            differences = torch._foreach_sub(sources, averages)
            torch._foreach_mul_(differences, weight)
            torch._foreach_add_(averages, differences)
        else:
            torch._foreach_lerp_(averages, sources, weight)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averaged weights inside the block, and its own again after it, bit for bit."""
        with put_back(self._source.values()):
            with torch.no_grad():
                for name, parameter in self._source.items():
                    parameter.copy_(self.average[name])
            yield
