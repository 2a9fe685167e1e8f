"""Models whose gradients and losses have closed forms, and blocks of parameters that do not know of one another."""

import torch
from torch import Tensor, nn

from noisewise import DDPM, Objective
from noisewise.analysis.gradients import Samples

DIMENSION = 4
SPREAD = 0.7  # the standard deviation of the data
OBJECTIVE = Objective(DDPM.linear())


class Linear(nn.Module):
    """eps(x, t) = W x, the same W at all times."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(DIMENSION, DIMENSION, generator=generator) * 0.4)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return x @ self.weight.T


class Looks(Linear):
    """The same, with a look at the data that vmap cannot follow."""

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        if float(x.detach().sum()) > 1e9:
            raise ValueError("never")
        return super().forward(x, time)


def losses(model: nn.Module, samples: Samples) -> Tensor:
    return OBJECTIVE.losses(model, samples.x0, samples.u, samples.noise)


def draw(n: int, u: float, seed: int) -> Samples:
    """Gaussian data and noise."""
    generator = torch.Generator().manual_seed(seed)
    x0 = torch.randn(n, DIMENSION, generator=generator) * SPREAD
    return Samples(x0, torch.randn(n, DIMENSION, generator=generator), torch.full((n,), u))


def closed_form(weight: Tensor, u: float) -> tuple[float, float, float]:
    """Var[g], |E g|^2 and the loss of the linear model.

    With r = eps - W x and v = alpha^2 s^2 + sigma^2: Cov(r) = R = I - sigma (W + W') + v W W', Cov(r, x) = C = sigma I - v W,
    g = -(2 / D) r x'. For Gaussians Var(r_i x_j) = R_ii v + C_ij^2.
    """
    alpha, sigma = (float(scale) for scale in OBJECTIVE.process.scales(torch.tensor([u])))
    w, one = weight.detach().double(), torch.eye(DIMENSION, dtype=torch.float64)
    v = alpha**2 * SPREAD**2 + sigma**2
    residual, cross = one - sigma * (w + w.T) + v * w @ w.T, sigma * one - v * w
    squared = float(cross.square().sum())
    variance = 4 / DIMENSION**2 * (v * DIMENSION * float(residual.trace()) + squared)
    return variance, 4 / DIMENSION**2 * squared, float(residual.trace()) / DIMENSION


class Blocks(nn.Module):
    """One scale for each of ten intervals of time: training one cannot touch the others."""

    def __init__(self, blocks: int = 10) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(blocks))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return x * self.scale[time * len(self.scale) // 1000].view(-1, 1, 1, 1)


class Shared(nn.Module):
    """One scale for all times, too small for each of them at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return x * self.scale
