"""Several processes: Accelerate sets them up and wraps the model for DDP; FSDP2 is torch's own."""

from pathlib import Path

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import ProjectConfiguration
from torch import nn

from noisewise import distributed
from noisewise.training.components import device_of
from noisewise.training.config import Config

KEPT = (
    "this process has used others before (or an environment variable of Accelerate asks for them), and Accelerate keeps device "
    "and precision for the life of a process: give the same, or train in a process of its own"
)


def make_accelerator(config: Config, project: str | None = None) -> Accelerator:
    """The device, processes and precision that a configuration asks for."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch finds no GPU; use --device cpu, or install a CUDA build of torch")
    on_cpu = device_of(config).type == "cpu"
    precision = config.precision
    if precision == "auto":
        precision = "bf16" if not on_cpu and torch.cuda.is_bf16_supported() else "fp32"
    if precision == "fp16" and on_cpu:
        raise ValueError("precision=fp16 needs a GPU; use fp32 or bf16")
    if precision == "fp16" and config.parallel == "fsdp":
        raise ValueError("precision=fp16 is not supported with parallel=fsdp; use bf16")
    trackers = config.log.trackers if project else []
    try:
        accelerator = Accelerator(
            cpu=on_cpu,
            mixed_precision="no" if precision == "fp32" else precision,
            log_with=list(trackers) or None,
            project_config=ProjectConfiguration(project, str(Path(project) / "trackers")) if project else None,
        )
    except ValueError as error:
        if "already been initialized" in str(error):
            raise ValueError(f"device={config.device}, precision={precision}: {KEPT}") from None
        raise
    if config.device not in ("auto", accelerator.device.type):
        raise ValueError(f"device={config.device}, precision={precision}: {KEPT}")
    missing = set(trackers) - {str(getattr(tracker, "value", tracker)) for tracker in accelerator.log_with}
    if missing:
        raise ValueError(
            f"tracker {sorted(missing)[0]!r} is not installed or not known: pip install it, or choose others with "
            "--log.trackers '[]' (metrics.jsonl needs none)"
        )
    return accelerator


def spread(model: nn.Module, accelerator: Accelerator, parallel: str) -> nn.Module:
    """The model on its device, ready for all processes."""
    if parallel == "fsdp" or accelerator.distributed_type == DistributedType.FSDP:
        return distributed.shard(model, accelerator.device)
    return accelerator.prepare_model(model)
