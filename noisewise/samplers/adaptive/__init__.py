"""The adaptive sampler, its estimators and the paper's settings."""

from noisewise.samplers.adaptive.estimator import Estimator
from noisewise.samplers.adaptive.presets import paper_celebahq, paper_cifar10, paper_imagenet, released_cifar10
from noisewise.samplers.adaptive.sampler import ESTIMATORS, AdaptiveSampler

__all__ = [
    "ESTIMATORS",
    "AdaptiveSampler",
    "Estimator",
    "paper_celebahq",
    "paper_cifar10",
    "paper_imagenet",
    "released_cifar10",
]
