"""Replacements for functions of `diffusers.training_utils`: the same arguments, the same values, finite at the ends.

They also take noisewise's spec strings. Scripts pass one `weighting_scheme` to two functions, which fits: of
"logit_normal:mean=0.5+cosmap_weight" the first draws by the sampler and the second weights by the weighting. A name that
diffusers knows keeps its meaning there ("cosmap" is a weight).
"""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from noisewise import recipes
from noisewise.integrations.diffusers.schedulers import ShiftedFlow, table_prediction
from noisewise.levels import middles, visible
from noisewise.objective import LOG_SNR_LIMIT, Objective, eps_error_per_prediction_error
from noisewise.processes import Flow
from noisewise.samplers import Mode, Sampler
from noisewise.spec import SpecError
from noisewise.weighting import EDMWeight, NoWeight, OfLogSNR, Simple, Weighting, WeightProduct, min_snr

DIFFUSERS_SCHEMES = ("logit_normal", "mode", "sigma_sqrt", "cosmap", "none")
LARGEST = 1 - 2.0**-24
"""The largest float32 below 1: u = 1 would index one past the end of the scheduler's list."""
JUST_ABOVE = 1.0001
"""A sigma of 1 may be rounded, but not so far."""
SMALLEST_SIGMA = 1 / (1 + math.exp(LOG_SNR_LIMIT / 2))
"""Where weights that grow without bound towards sigma = 0 stop growing: the flow's sigma at the largest log SNR."""

LOOP = """
    recipe = noisewise.recipe({spec!r}, read_scheduler(noise_scheduler))
    recipe.attach(optimizer)
    ...
    draw = recipe.sample(model_input)
    timesteps = draw.time        # in place of noise_scheduler.timesteps[indices]
    losses = ((model_pred - target) ** 2).flatten(1).mean(1)
    accelerator.backward(recipe.loss(draw, losses))
    optimizer.step()"""


# Schedulers with alphas_cumprod ---------------------------------------------------------------------------------------


def compute_snr(noise_scheduler: Any, timesteps: Tensor) -> Tensor:
    """The signal-to-noise ratio alpha^2 / sigma^2 of each timestep (0 at the end of a zero-terminal-SNR schedule)."""
    bar = getattr(noise_scheduler, "alphas_cumprod", None)
    if bar is None:
        raise TypeError(
            f"{type(noise_scheduler).__name__} has no alphas_cumprod; for its SNR use objective = "
            "read_scheduler(noise_scheduler) and objective.process.log_snr(draw.u).exp()"
        )
    if not isinstance(timesteps, Tensor) or timesteps.is_floating_point() or timesteps.dtype == torch.bool:
        kind = timesteps.dtype if isinstance(timesteps, Tensor) else type(timesteps).__name__
        raise TypeError(
            f"timesteps must be a tensor of integers, got {kind}: keep them as drawn, without a cast to the model's type"
        )
    if (
        timesteps.device.type == "cpu"
        and timesteps.numel()
        and not 0 <= int(timesteps.min()) <= int(timesteps.max()) < len(bar)
    ):
        raise ValueError(f"timesteps must lie in 0 to {len(bar) - 1}, got {int(timesteps.min())} to {int(timesteps.max())}")
    bar = bar.to(timesteps.device)
    alpha, sigma = bar**0.5, (1.0 - bar) ** 0.5
    return (alpha[timesteps.long()].float() / sigma[timesteps.long()].float()) ** 2


def min_snr_weights(noise_scheduler: Any, timesteps: Tensor, snr_gamma: float = 5.0) -> Tensor:
    """The Min-SNR weight of the model's own loss, for the scheduler's prediction type (Hang et al. 2023).

    min(SNR, gamma) / SNR for epsilon, min(SNR, gamma) / (SNR + 1) for v_prediction, min(SNR, gamma) for sample. Where the SNR
    is zero, epsilon's weight is its limit 1.
    """
    if not snr_gamma > 0:
        raise ValueError(f"snr_gamma must be positive, got {snr_gamma}")
    log_snr = compute_snr(noise_scheduler, timesteps).log()
    return min_snr(log_snr, snr_gamma) * eps_error_per_prediction_error(log_snr, table_prediction(noise_scheduler))


# Flow matching (SD3, Flux) --------------------------------------------------------------------------------------------


def compute_density_for_timestep_sampling(
    weighting_scheme: str,
    batch_size: int,
    logit_mean: float | None = None,
    logit_std: float | None = None,
    mode_scale: float | None = None,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw u in [0, 1) for `noise_scheduler.timesteps[(u * num_train_timesteps).long()]`: here **u = 0 is the most noise**.

    Args:
        weighting_scheme: a name of diffusers, which draws the same numbers as there; or a spec such as "logit_normal:mean=0.5"
            or "beta:a=2,b=1", whose u is turned round for this list. A sampler that learns needs the loop and is an error.
        batch_size: how many.
        logit_mean: of "logit_normal"; 0 if absent, as in the scripts.
        logit_std: of "logit_normal"; 1 if absent.
        mode_scale: of "mode"; 1.29 if absent.
        device: where to draw.
        generator: what to draw from.
    """
    if weighting_scheme == "logit_normal":
        mean, std = 0.0 if logit_mean is None else logit_mean, 1.0 if logit_std is None else logit_std
        u = torch.normal(mean, std, (batch_size,), device=device, generator=generator).sigmoid()
        return u.clamp(0, LARGEST)
    u = torch.rand((batch_size,), device=device, generator=generator)
    if weighting_scheme == "mode":
        scale = 1.29 if mode_scale is None else mode_scale
        if not -1 <= scale < Mode.largest:
            raise ValueError(f"mode_scale must lie in [-1, {Mode.largest:.3f}), got {scale}: outside, u leaves [0, 1]")
        u = 1 - u - scale * (torch.cos(math.pi * u / 2) ** 2 - 1 + u)
    elif weighting_scheme not in DIFFUSERS_SCHEMES:
        sampler = _fixed_sampler(weighting_scheme).to(u.device)
        u = 1 - sampler.quantile(u.clamp(min=2.0**-24))
    return u.clamp(0, LARGEST)


def compute_loss_weighting_for_sd3(weighting_scheme: str, sigmas: Tensor | None = None) -> Tensor:
    """The weight of the flow loss (noise - x0) at each sigma, float32, in the shape of `sigmas`.

    Args:
        weighting_scheme: a name of diffusers, or a spec such as "minsnr:gamma=5" or "logit_normal+debiased". A spec's weight
            is of the flow loss; scripts with `precondition_outputs` compute the x0-loss, which is sigma^2 times that. A
            sampler that `compute_density_for_timestep_sampling` cannot draw, such as one that learns, is an error here too.
        sigmas: noise levels in [0, 1] of any shape and floating type.
    """
    if not isinstance(sigmas, Tensor) or not sigmas.is_floating_point():
        raise TypeError(f"sigmas must be a floating-point tensor, got {getattr(sigmas, 'dtype', type(sigmas).__name__)}")
    sigma = _in_range(sigmas.float())
    if weighting_scheme == "sigma_sqrt":
        return sigma.clamp(min=SMALLEST_SIGMA) ** -2.0
    if weighting_scheme == "cosmap":
        return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))
    if weighting_scheme in DIFFUSERS_SCHEMES:
        return torch.ones_like(sigma)
    _fixed_sampler(weighting_scheme)  # for its error: weights beside other draws would train another objective
    weighting = recipes.recipe(weighting_scheme, Flow()).weighting
    if isinstance(weighting, NoWeight):
        return torch.ones_like(sigma)
    for factor in weighting.factors if isinstance(weighting, WeightProduct) else [weighting]:
        if not isinstance(factor, OfLogSNR | EDMWeight | NoWeight | Simple):
            raise SpecError(
                f"{weighting_scheme!r}: {type(factor).__name__} is no function of sigma alone (it is trained, or needs the "
                f"schedule), so this function cannot compute it. Use it in the loop:{LOOP.format(spec=weighting_scheme)}"
            )
    return weighting.weights(Objective(Flow(), "flow"), sigma.flatten()).view(sigma.shape)


def _in_range(sigma: Tensor) -> Tensor:
    """sigma, with 1 for what a scheduler's shift has rounded to just above; times are an error where they can be looked at."""
    if visible(sigma) and sigma.numel() and not bool(((sigma >= 0) & (sigma < JUST_ABOVE)).all()):
        raise ValueError(
            f"sigmas must lie in [0, 1], got {float(sigma.min()):g} to {float(sigma.max()):g}: hand over the noise levels, as "
            "get_sigmas(timesteps) returns them, not the timesteps"
        )
    return torch.where((sigma > 1) & (sigma < JUST_ABOVE), 1.0, sigma)


class DensityWeight(Weighting):
    """Weights the model's own loss by the density of a fixed sampler: the objective that drawing from it would train.

    A learning sampler with importance weights trains its target as if all levels were drawn alike. With this weighting that is,
    say, the objective of SD3's logit-normal draws:
    `AdaptiveSampler(objective, weighting=DensityWeight(LogitNormal(objective.process)))`.
    """

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        if not sampler.constant or str(sampler.correction) != "none":
            raise ValueError(f"{type(sampler).__name__} must be a sampler with a fixed density and correction='none'")
        self.sampler = sampler

    def forward(self, objective: Objective, u: Tensor) -> Tensor:
        if self.sampler.device != u.device:
            self.sampler.to(u.device)
        return self.sampler.density(u) / objective.per_prediction(torch.ones_like(u), u)


@lru_cache(maxsize=16)
def _fixed_sampler(spec: str) -> Sampler:
    """The sampler of a spec, if drawing from it takes nothing but u."""
    process = ShiftedFlow()
    sampler = recipes.recipe(spec, process).sampler
    why = None
    if not sampler.constant:
        why = "changes during training and needs to see the losses"
    elif str(sampler.correction) != "none":
        why = "has importance weights, which would be lost"
    elif sampler.draws != "independent":
        why = f"has {sampler.draws} draws, which depend on the step and the rank"
    else:
        u = middles(1000)
        if not torch.allclose(sampler.density(u), recipes.recipe(spec, ShiftedFlow(shift=4.0)).sampler.density(u)):
            why = "depends on the scheduler's shift, which is not known here"
    if why is not None:
        raise SpecError(f"{spec!r} {why}, so a function without state cannot draw it. Use the loop:", LOOP.format(spec=spec))
    return sampler
