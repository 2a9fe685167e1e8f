"""The optimizer, its learning rate, and the step that is left out when a gradient is not finite."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from noisewise.distributed import whole
from noisewise.training.config import OptimizerConfig


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig, device: torch.device) -> torch.optim.Optimizer:
    """Adam or AdamW, fused."""
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.name]
    fused = device.type in ("cuda", "cpu")
    return kind(parameters, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=fused)


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """At optimizer step `step` (from 0): linear warm-up, then constant."""
    return config.lr * min(1.0, (step + 1) / config.warmup) if config.warmup else config.lr


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradients(parameters: list[nn.Parameter], limit: float | None) -> Tensor:
    """Scale gradients to a norm of at most `limit` and return the norm they had, as a tensor that was not waited for."""
    return whole(torch.nn.utils.clip_grad_norm_(parameters, float("inf") if limit is None else limit))


def step_if_finite(optimizer: torch.optim.Optimizer, finite: Tensor) -> None:
    """An optimizer step, or nothing at all if `finite` is false. On CUDA the decision is made there, without waiting for it."""
    if finite.device.type == "cpu":
        if bool(finite):
            optimizer.step()
        return
    # the fused kernels skip the update, and the count of steps, where found_inf is 1: as for GradScaler
    optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]
