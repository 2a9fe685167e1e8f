"""diffusers: read a scheduler, and replacements for the functions its training scripts call.

    objective = read_scheduler(noise_scheduler)
    sampler = AdaptiveSampler(objective)
    ...
    draw = sampler.sample(latents)
    timesteps = draw.time

Direction: u = 0 is the least noise here. In diffusers' flow scripts u = 0 is the *most* noise; the replacements keep theirs.
"""

from noisewise.integrations.diffusers.schedulers import ShiftedFlow, read_scheduler
from noisewise.integrations.diffusers.training_utils import (
    DensityWeight,
    compute_density_for_timestep_sampling,
    compute_loss_weighting_for_sd3,
    compute_snr,
    min_snr_weights,
)

__all__ = [
    "DensityWeight",
    "ShiftedFlow",
    "compute_density_for_timestep_sampling",
    "compute_loss_weighting_for_sd3",
    "compute_snr",
    "min_snr_weights",
    "read_scheduler",
]
