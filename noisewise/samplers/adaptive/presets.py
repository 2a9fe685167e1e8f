"""The settings of arXiv 2411.09998: no floor, no importance weights, independent draws, rewards as they come, no guard.

The reward is measured on c_t w_t, the bound's own weight times the loss weight beside the sampler (section 6.2: a heuristic
weighting is "part of the schedule-dependent constant c_t").
"""

from typing import Any

import torch
from torch import Tensor

from noisewise.processes import DDPM, Process, check_process
from noisewise.samplers.adaptive.paper import ExactBeta, PaperEstimator, ReleasedEstimator
from noisewise.samplers.adaptive.sampler import AdaptiveSampler
from noisewise.samplers.learning import check_weighting
from noisewise.weighting import VLB, vlb_coefficients


class ReleasedBound(VLB):
    """c_t as in the released code, where the variance of t = 0 is the posterior's of t = 1: c_0 is about twice Eq. 7's."""

    def __init__(self) -> None:
        super().__init__(normalise=False)

    def table(self, process: Process) -> Tensor:
        raw = super().table(process)
        return torch.cat([vlb_coefficients(process, "small")[:1], raw[1:]]) if isinstance(process, DDPM) else raw


def _paper(
    process: Process,
    settings: dict[str, Any],
    estimator: type[ExactBeta] = PaperEstimator,
    bound: VLB | None = None,
    **published: Any,
) -> AdaptiveSampler:
    if "estimator" in settings:
        raise ValueError("this preset is an estimator of its own: leave estimator out, or write adaptive:estimator=...")
    bound, weighting = VLB(normalise=False) if bound is None else bound, settings.get("weighting")
    common = {
        "strata": check_process(process).steps or 1000,
        "every": 40,
        "queue": 20,
        "depth": 2,
        "entropy": 1e-2,
        "normalise": False,
        "floor": 0.0,
        "correction": "none",
        "draws": "independent",
        "collapse": 0.0,
        "target": bound if weighting is None else bound * check_weighting(weighting, "weighting"),
    }
    return AdaptiveSampler(process, estimator, **{**common, **published, **settings})


def _is_cosine(process: Process) -> bool:
    """Whether this is the cosine schedule, wherever it was read from."""
    if not isinstance(process, DDPM):
        return False
    return torch.allclose(process.alphas_cumprod, DDPM.cosine(process.steps).alphas_cumprod, rtol=0, atol=1e-3)


def paper_cifar10(process: Process, **settings: Any) -> AdaptiveSampler:
    """CIFAR-10: hidden 128; policy learning rate 1e-2 for the linear and quadratic schedules, 1e-3 for the cosine one."""
    return _paper(process, settings, hidden=128, lr=1e-3 if _is_cosine(process) else 1e-2)


def paper_celebahq(process: Process, **settings: Any) -> AdaptiveSampler:
    """CelebA-HQ 256 (latents): hidden 256, policy learning rate 1e-3."""
    return _paper(process, settings, hidden=256, lr=1e-3)


def paper_imagenet(process: Process, **settings: Any) -> AdaptiveSampler:
    """ImageNet 256 (latents, with Min-SNR): hidden 256, policy learning rate 1e-3."""
    return _paper(process, settings, hidden=256, lr=1e-3)


def released_cifar10(process: Process, **settings: Any) -> AdaptiveSampler:
    """CIFAR-10 as in the authors' released code, where it differs from the paper: `ReleasedEstimator` and hidden 256."""
    return _paper(process, settings, ReleasedEstimator, ReleasedBound(), hidden=256, lr=1e-2)
