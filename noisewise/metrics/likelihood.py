"""The variational bound on the likelihood of 8-bit images, in bits per dimension, total and per noise level.

For levels from the least noise to the most, 0 < ... < n - 1, and data x0 (Ho et al. 2020, Eq. 5):

    prior    KL(q(x_{n-1} | x0) || N(0, alpha^2 + sigma^2)), which for the VP family is N(0, 1)
    level t  KL(q(x_{t-1} | x_t, x0) || p(x_{t-1} | x_t)), t >= 1, a Gaussian whose mean comes from the model's estimate of x0
    level 0  -ln p(x0 | x_0): the same Gaussian's mass in the bin of each pixel (Ho et al. 2020, Eq. 13)

The variance of p is beta-tilde ("fixed_small", for level 0 see `decoder_variance`) or beta ("fixed_large"), for any levels and
any process that of the solver "ddpm". For a DDPM with all its timesteps as levels this is the VLB of the papers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from noisewise.data import Source
from noisewise.generation.solver_methods import DATA, Denoise, Level, added_variance, model_variance, posterior_variance
from noisewise.generation.spacing import grid
from noisewise.processes import Process
from noisewise.streams import normals

NOISE_SEED = 0x766C62  # "vlb"
VARIANCES = ("fixed_small", "fixed_large")


@dataclass(frozen=True)
class Bound:
    """In bits per dimension: the total is an upper bound on -log2 p(x0) / dimensions."""

    u: Tensor  # the levels, least noise first
    terms: Tensor  # what each level contributes
    prior: float
    images: int
    error: float  # standard error of the total over images

    @property
    def total(self) -> float:
        return float(self.terms.sum()) + self.prior


@torch.no_grad()
def variational_bound(
    denoise: Denoise,
    process: Process,
    source: Source,
    *,
    images: int = 256,
    levels: int | None = None,
    variance: str = "fixed_small",
    clip: float | None = 1.0,
    batch: int = 256,
    device: torch.device | str = "cpu",
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Bound:
    """The bound of a model on images of a source, with fixed noise.

    Args:
        denoise: (x, u) -> the estimate of x0, as for the solvers; of a model in evaluation mode.
        process: the one it was trained with.
        source: 8-bit images.
        images: how many of them, see `Source.some`; the cost is this times `levels` evaluations.
        levels: how many noise levels; all timesteps of a discrete process, 1,000 otherwise. Fewer make another, looser bound.
        variance: of the model's Gaussians, "fixed_small" or "fixed_large".
        clip: bound of the estimates of x0.
        batch: images at a time.
        device: where the model is.
        seed: of the noise.
        progress: told how many images were evaluated at a level.
    """
    if variance not in VARIANCES:
        raise ValueError(f"unknown variance {variance!r}: choose one of {', '.join(VARIANCES)}")
    if not source.image:
        raise ValueError(f"bits per dimension need 8-bit images, and {source.name} holds none")
    levels = levels if levels is not None else process.steps or 1000
    if levels < 2 or images < 1 or batch < 1:
        raise ValueError(f"levels must be >= 2, images and batch >= 1, got levels={levels}, images={images}, batch={batch}")
    chosen = source.some(images)
    count = len(chosen)
    # evenly in u, a continuous process leaps over most of the signal-to-noise ratio in its first few levels
    u = grid(process, levels, "uniform" if process.steps else "karras").flip(0)
    ladder = [DATA, *map(Level, *(s.tolist() for s in process.scales(u)))]
    if ladder[1].sigma == 0:
        raise ValueError("the first level has no noise: use fewer levels")
    nats = torch.zeros(len(u), dtype=torch.float64)
    of_image = torch.zeros(count, dtype=torch.float64)
    prior = 0.0
    for first in range(0, count, batch):
        rows = chosen[first : first + batch]
        x0 = source.decode(source.read(rows)[0].to(device))
        here = prior_kl(x0, ladder[-1])
        prior += float(here.sum())
        for t in range(len(u)):
            now, then = ladder[t + 1], ladder[t]
            noise = normals(seed ^ NOISE_SEED, torch.from_numpy(rows), t, source.shape, device)
            x = now.alpha * x0 + now.sigma * noise
            guess = denoise(x, u[t])
            guess = guess if clip is None else guess.clamp(-clip, clip)
            if t == 0:
                term = decoder_nats(x0, guess, decoder_variance(ladder, variance, process.steps is not None))
            else:
                term = step_kl(x0, guess, now, then, model_variance(now, then, variance))
            nats[t] += float(term.sum())
            here = here + term
            if progress is not None:
                progress(len(rows))
        of_image[first : first + len(rows)] = here.cpu()
    bits = 1 / (math.log(2) * math.prod(source.shape))
    error = float(of_image.std()) / math.sqrt(count) if count > 1 else float("nan")
    return Bound(u, nats / count * bits, prior / count * bits, count, error * bits)


def decoder_variance(ladder: list[Level], variance: str, discrete: bool) -> float:
    """Of p(x0 | x_0), where beta-tilde would be zero: a discrete process takes that of level 1, as the papers do.

    In continuous time that would tend to zero with more levels, and the bound to infinity; there it is beta in any case.
    """
    data, first, second = ladder[:3]
    tilde = discrete and variance == "fixed_small"
    return model_variance(second, first, variance) if tilde else model_variance(first, data, "fixed_large")


def step_kl(x0: Tensor, guess: Tensor, now: Level, then: Level, spread: float) -> Tensor:
    """KL(q(x' | x, x0) || N(mean with the guess, spread)) in nats, one an image."""
    added = added_variance(now, then)[1]
    weight = then.alpha * added / now.sigma**2  # of x0 in the mean of q
    exact = posterior_variance(now, then)
    errors = (x0 - guess).double().flatten(1).square().sum(1)
    constant = math.log(spread / exact) + exact / spread - 1
    return 0.5 * (constant * math.prod(x0.shape[1:]) + weight**2 * errors / spread)


def decoder_nats(x0: Tensor, mean: Tensor, variance: float) -> Tensor:
    """-ln of the Gaussian's mass in each pixel's bin of width 2 / 255, one an image; the outer bins reach to infinity.

    In logarithms, so that it is exact however far off the mean is: with a least mass it would be no bound.
    """
    away, half, scale = (x0 - mean).double(), 1 / 255, math.sqrt(variance)
    near, far = (torch.special.log_ndtr((side - away.abs()) / scale) for side in (half, -half))  # of both tails the same
    inside = near + torch.log(-torch.expm1(far - near))
    outer = torch.special.log_ndtr((half - away * x0.sign()) / scale)
    return -torch.where(x0.abs() > 0.999, outer, inside).flatten(1).sum(1)


def prior_kl(x0: Tensor, last: Level) -> Tensor:
    """KL(N(alpha x0, sigma^2) || N(0, alpha^2 + sigma^2)) in nats, one an image."""
    prior = last.alpha**2 + last.sigma**2
    each = math.log(prior / last.sigma**2) + (last.sigma**2 + last.alpha**2 * x0.double().square()) / prior - 1
    return 0.5 * each.flatten(1).sum(1)
