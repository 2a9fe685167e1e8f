"""The optimizer, its learning rate, and the step that is left out when a gradient is not finite."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from noisewise.distributed import whole
from noisewise.training.config import OptimizerConfig


def make_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig, device: torch.device, graphed: bool = False
) -> torch.optim.Optimizer:
    """Adam or AdamW, fused; `graphed` has the learning rate in a tensor, so that a CUDA graph sees it change."""
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.name]
    fused = device.type in ("cuda", "cpu")
    groups = [{"params": group} for group in alike(parameters)]
    return kind(
        groups,
        lr=torch.tensor(config.lr, device=device) if graphed else config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=fused,
        capturable=graphed and device.type == "cuda",
    )


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """At optimizer step `step` (from 0) of `steps`: linear warm-up, constant, linear cool-down."""
    begun = (step + 1) / config.warmup if config.warmup else 1.0
    left = max(0, steps - step) / config.cooldown if config.cooldown else 1.0
    return config.lr * min(1.0, begun, left)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    """The norm of all gradients, as a tensor that was not waited for."""
    groups = [[parameter.grad for parameter in group if parameter.grad is not None] for group in alike(parameters)]
    norms = [whole(torch.nn.utils.get_total_norm(group)) for group in groups]
    return norms[0] if len(norms) == 1 else torch.stack(norms).norm()


def clip_gradients(parameters: list[nn.Parameter], norm: Tensor, limit: float | None) -> None:
    """Scale gradients of this norm to one of at most `limit`."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if limit is not None and gradients:
        local = [getattr(gradient, "_local_tensor", gradient) for gradient in gradients]
        torch._foreach_mul_(local, (limit / (norm + 1e-6)).clamp(max=1.0))


def alike(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The sharded ones (FSDP2) and the others, a learned weighting's: torch's kernels for many tensors take no mixture."""
    parameters = list(parameters)
    sharded = [parameter for parameter in parameters if hasattr(parameter, "device_mesh")]
    others = [parameter for parameter in parameters if not hasattr(parameter, "device_mesh")]
    return [group for group in (sharded, others) if group]


def step_if_finite(optimizer: torch.optim.Optimizer, finite: Tensor) -> None:
    """An optimizer step, or nothing at all if `finite` is false. On CUDA the decision is made there, without waiting for it
    (unless the model is sharded: the fused kernels take no plain tensor beside sharded ones)."""
    sharded = any(hasattr(parameter, "device_mesh") for group in optimizer.param_groups for parameter in group["params"][:1])
    if finite.device.type == "cpu" or sharded:
        if bool(finite):
            optimizer.step()
        return
    # the fused kernels skip the update, and the count of steps, where found_inf is 1: as for GradScaler
    optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]
