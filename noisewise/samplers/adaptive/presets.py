"""The settings of arXiv 2411.09998, as published: no floor, no importance weights, independent draws, rewards as they come,
the VLB as target.

(Paired noise and bounded Beta parameters are kept; without them the method measures noise, or divides by zero.)
"""

from typing import Any

import torch

from noisewise.processes import DDPM, Process, check_process
from noisewise.samplers.adaptive.sampler import AdaptiveSampler
from noisewise.weighting import VLB


def _paper(process: Process, settings: dict[str, Any], **published: Any) -> AdaptiveSampler:
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
        "target": VLB(),
    }
    return AdaptiveSampler(process, "reinforce", **{**common, **published, **settings})


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
