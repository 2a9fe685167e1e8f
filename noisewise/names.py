"""The public names: what `noisewise.NAME` is."""

from noisewise.batches import take
from noisewise.looking.monitor import Monitor
from noisewise.looking.recipe_curves import preview
from noisewise.looking.validation import Validation, validate
from noisewise.objective import Objective
from noisewise.processes import DDPM, EDM, PROCESSES, VE, VP, Flow, Process
from noisewise.recipes import Recipe, recipe
from noisewise.samplers import SAMPLERS, AdaptiveSampler, Draw, Sampler, Uniform
from noisewise.spec import SpecError
from noisewise.weighting import WEIGHTINGS, Weighting

__all__ = [
    "DDPM",
    "EDM",
    "PROCESSES",
    "SAMPLERS",
    "VE",
    "VP",
    "WEIGHTINGS",
    "AdaptiveSampler",
    "Draw",
    "Flow",
    "Monitor",
    "Objective",
    "Process",
    "Recipe",
    "Sampler",
    "SpecError",
    "Uniform",
    "Validation",
    "Weighting",
    "preview",
    "recipe",
    "take",
    "validate",
]
