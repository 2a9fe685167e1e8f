"""What the models demand of their settings and inputs. Only shapes and types are looked at: no host synchronisation."""

import math

import torch
from torch import Tensor

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64)


def check_settings(shape: tuple[int, ...], classes: int, dropout: float, time_scale: float, **counts: int | None) -> None:
    """`shape` is (C, H, W), `counts` are whole numbers of at least 1, or None where left to the model."""
    if len(shape) != 3 or not all(_whole(size) and size >= 1 for size in shape):
        raise ValueError(f"shape must be (channels, height, width) of one sample, got {tuple(shape)}")
    if not _whole(classes) or classes < 0:
        raise ValueError(f"classes must be 0 (unconditional) or the number of classes, got {classes!r}")
    if not _number(dropout) or not 0 <= dropout < 1:
        raise ValueError(f"dropout must be a number in [0, 1), got {dropout!r}")
    if not _number(time_scale) or not 0 < time_scale < math.inf:
        raise ValueError(f"time_scale must be a positive number, got {time_scale!r}")
    for name, value in counts.items():
        if value is not None and (not _whole(value) or value < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def check_transformer(shape: tuple[int, ...], patch: int, width: int, heads: int, mlp_ratio: float) -> None:
    """Patches tile the sample, heads divide the width."""
    if shape[1] % patch or shape[2] % patch:
        raise ValueError(f"patches of {patch} do not tile samples of {shape[1]} x {shape[2]}: choose a patch that divides both")
    if width % heads:
        raise ValueError(f"width {width} is not a multiple of heads {heads}")
    if not _number(mlp_ratio) or not 1 <= width * mlp_ratio < math.inf:
        raise ValueError(f"mlp_ratio must be a number with width * mlp_ratio >= 1, got {mlp_ratio!r}")


def check_inputs(x: Tensor, time: Tensor, shape: tuple[int, ...]) -> None:
    """x is (B, C, H, W) of the shape that the model was built for, time (B,) and fine enough to tell timesteps apart."""
    if x.ndim != 4 or tuple(x.shape[1:]) != tuple(shape):
        raise ValueError(f"this model takes samples of shape {tuple(shape)}, got a batch of shape {tuple(x.shape)}")
    if time.ndim != 1 or time.shape[0] != x.shape[0]:
        raise ValueError(f"time must hold one entry a sample, ({x.shape[0]},), got {tuple(time.shape)}: expand a single time")
    if time.dtype not in INTEGERS + FLOATS:
        raise TypeError(f"time must be integer or float32, got {time.dtype}, too coarse for timesteps: keep casts off it")


def fill_labels(labels: Tensor | None, classes: int, x: Tensor) -> Tensor | None:
    """The labels to embed: None for an unconditional model, the null class `classes` where a conditional one gets none."""
    if classes == 0:
        if labels is not None:
            raise ValueError(
                "this model is unconditional (classes=0) but was given labels: build it with classes, or pass None"
            )
        return None
    if labels is None:
        return torch.full((x.shape[0],), classes, dtype=torch.int64, device=x.device)
    if tuple(labels.shape) != (x.shape[0],) or labels.dtype != torch.int64:
        raise ValueError(
            f"labels must be int64 of shape ({x.shape[0]},), from 0 to {classes - 1} or {classes} for no class, "
            f"got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    return labels


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
