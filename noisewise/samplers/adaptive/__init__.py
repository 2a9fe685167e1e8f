"""The adaptive sampler and its estimators."""

from noisewise.samplers.adaptive.estimator import Estimator
from noisewise.samplers.adaptive.sampler import ESTIMATORS, AdaptiveSampler

__all__ = ["ESTIMATORS", "AdaptiveSampler", "Estimator"]
