"""The fast step where it can be taken; where not, the plain one, and why."""

from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch import nn

from noisewise import distributed
from noisewise.training.components import Parts
from noisewise.training.config import Config
from noisewise.training.fast.blocks import fuse_transformer
from noisewise.training.fast.fuse import fuse
from noisewise.training.fast.graphs import GraphedStep
from noisewise.training.step import Step
from noisewise.weighting import Weighting

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def chosen_step(
    config: Config, parts: Parts, accelerator: Accelerator, weighting: Weighting, tell: Callable[[str], None]
) -> Step:
    """The step that suits device and settings; `tell` is told if a GPU has to do with the plain one."""
    against = why_not(config, accelerator, parts.model)
    if against is None:
        if not fuse_transformer(parts.model):
            fuse(parts.model)
        return GraphedStep(config, parts, accelerator, weighting)
    if config.fast == "always":
        raise ValueError(f"fast=always, but the fast path cannot be taken: {against}")
    if config.fast == "auto" and accelerator.device.type == "cuda":
        tell(f"the plain path, not the fast one: {against}")
    if config.compile:
        parts.model.compile(dynamic=False)
    return Step(config, parts, accelerator, weighting)


def why_not(config: Config, accelerator: Accelerator, model: nn.Module) -> str | None:
    """The reason against the fast path, as the end of a sentence; None if there is none known beforehand."""
    if config.fast == "never":
        return "fast=never asks for the plain one"
    if accelerator.device.type != "cuda":
        return f"it needs a CUDA device, and this is {accelerator.device.type}"
    if distributed.world_size() > 1 or config.parallel == "fsdp":
        return "several processes exchange gradients within the step"
    if accelerator.scaler is not None:
        return "fp16 chooses the scale of the loss on the host"
    hooked = [name or type(module).__name__ for name, module in model.named_modules() if _has_hooks(module)]
    if hooked:
        return f"the model has hooks (on {hooked[0]}), which a graph would not call"
    if torch.version.cuda is None:
        return "CUDA graphs were not tried on this kind of device"
    return None


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, kind) for kind in HOOKS)
