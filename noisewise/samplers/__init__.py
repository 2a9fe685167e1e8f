"""Timestep samplers. CONTRIBUTING.md says how to add one."""

from collections.abc import Callable
from functools import partial

from noisewise.samplers.adaptive import AdaptiveSampler, paper_celebahq, paper_cifar10, paper_imagenet, released_cifar10
from noisewise.samplers.base import Draw, LossAt, Sampler
from noisewise.samplers.combine import Mix, Product
from noisewise.samplers.correction import Correction, effective_sample_size
from noisewise.samplers.gradient_variance import GradientVariance
from noisewise.samplers.infonoise import InfoNoise
from noisewise.samplers.loss_moment import LossMoment
from noisewise.samplers.pairs import Pairs
from noisewise.samplers.shift import Shift
from noisewise.samplers.speed import PublishedSpeeD, SpeeD
from noisewise.samplers.stages import Curriculum, CurriculumSampling, Piecewise, Switch
from noisewise.samplers.static import Beta, CosMap, EDMLogNormal, Laplace, LogitNormal, Mode, Table, Uniform
from noisewise.samplers.window import Window

SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "uniform": Uniform,
    "logit_normal": LogitNormal,
    "mode": Mode,
    "cosmap": CosMap,
    "beta": Beta,
    "edm": EDMLogNormal,
    "laplace": Laplace,
    "speed": SpeeD,
    "speed_published": PublishedSpeeD,
    "table": Table,
    "mix": Mix,
    "shift": Shift,
    "product": Product,
    "curriculum": Curriculum,
    "switch": Switch,
    "piecewise": Piecewise,
    "pairs": Pairs,
    "window": Window,
    "curriculum_sampling": CurriculumSampling,
    "loss_moment": LossMoment,
    "loss_adaptive": partial(
        AdaptiveSampler, estimator="loss", floor=0.2, strata=100, over="log_snr", correction="unbiased", draws="independent"
    ),
    "gradient_variance": GradientVariance,
    "infonoise": InfoNoise,
    "adaptive": AdaptiveSampler,
    "paper_cifar10": paper_cifar10,
    "paper_celebahq": paper_celebahq,
    "paper_imagenet": paper_imagenet,
    "released_cifar10": released_cifar10,
}
"""The names of spec strings."""
ALIASES = {"lognormal": "logit_normal"}
"""Older names, which still mean the same."""

__all__ = [
    "ALIASES",
    "SAMPLERS",
    "AdaptiveSampler",
    "Beta",
    "Correction",
    "CosMap",
    "Curriculum",
    "CurriculumSampling",
    "Draw",
    "EDMLogNormal",
    "GradientVariance",
    "InfoNoise",
    "Laplace",
    "LogitNormal",
    "LossAt",
    "LossMoment",
    "Mix",
    "Mode",
    "Pairs",
    "Piecewise",
    "Product",
    "PublishedSpeeD",
    "Sampler",
    "Shift",
    "SpeeD",
    "Switch",
    "Table",
    "Uniform",
    "Window",
    "effective_sample_size",
    "paper_celebahq",
    "paper_cifar10",
    "paper_imagenet",
    "released_cifar10",
]
