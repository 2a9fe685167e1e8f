"""Clipping, Adam or AdamW, and the average of the weights: all parameters in one kernel.

The plain way goes over all parameters five times: to scale the gradients, to step, and three times for the average, whose share
lies in a tensor. Here each number is read once and written once, in the optimizer's own tensors, so that checkpoints are the
same. A step that is left out changes neither weights nor moments nor counts, while averages move on towards the weights as they
are; so do the averages of weights that are not trained. Both are as on the plain path, and results equal up to rounding.
"""

import math
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK = 2048  # numbers of one tensor that a program moves
LANES = 128  # tensors that a program prepares


class Row(NamedTuple):
    """The tensors of one parameter: it may lack an average, or all that is there for training."""

    parameter: Tensor
    gradient: Tensor | None
    first: Tensor | None
    second: Tensor | None
    average: Tensor | None
    step: Tensor | None


class FusedMove:
    """Does what clipping, `step_if_finite` and `EMA.blend` do; `fused_move` makes it where it fits.

    A graph in which it was recorded knows the addresses of its tensors alone: keep it as long as the graph.
    """

    def __init__(self, rows: Sequence[Row], settings: dict[str, Any], decoupled: bool, limit: float | None) -> None:
        self.rows = rows
        sizes = [row.parameter.numel() for row in rows]
        table = [[*map(_address, row[:5]), size] for row, size in zip(rows, sizes, strict=True)]
        self.lr: Tensor = settings["lr"]
        self.table, self.steps, self.parts = (
            torch.tensor(values, dtype=kind, device=self.lr.device)
            for values, kind in (
                (table, torch.int64),
                ([_address(row.step) for row in rows], torch.int64),
                (parts(sizes, BLOCK), torch.int32),
            )
        )
        self.numbers = torch.zeros(len(rows), 3, device=self.lr.device)
        betas = [float(beta) for beta in settings["betas"]]
        self.logs = [math.log(beta) if beta else -math.inf for beta in betas]
        self.numerics = (*(1 - beta for beta in betas), float(settings["eps"]), float(settings["weight_decay"]))
        self.decoupled, self.limit = decoupled, math.inf if limit is None else float(limit)

    def __call__(self, norm: Tensor, finite: Tensor, blend: float | Tensor) -> None:
        """Move all, given the gradients' norm, whether the step is made, and the share by which averages move."""
        from noisewise.training.fast import kernels

        blend = blend if isinstance(blend, Tensor) else self.lr.new_full((), blend)
        count = len(self.rows)
        kernels.prepare[(math.ceil(count / LANES),)](
            self.steps, self.numbers, norm, finite, self.lr, self.limit, *self.logs, count, LANES=LANES
        )
        kernels.move[(len(self.parts),)](
            self.table, self.numbers, self.parts, finite, blend, self.lr, *self.numerics,
            DECOUPLED=self.decoupled, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip


def fused_move(
    optimizer: torch.optim.Optimizer, averages: Iterable[tuple[Tensor, Tensor]], limit: float | None
) -> FusedMove | None:
    """For an optimizer that has made a step, and for gradients where they lie now; None if the kernel does not fit.

    It fits Adam and AdamW as made for graphs, if all tensors of a parameter are float32 and have its elements in one order.

    Args:
        optimizer: with its learning rate in a tensor.
        averages: parameters, trained or not, and their averages.
        limit: largest norm of the gradient; None for none.
    """
    if find_spec("triton") is None or not _usual(optimizer):
        return None
    settings, average_of, rows = optimizer.param_groups[0], dict(averages), []
    for parameter in settings["params"]:
        if parameter.grad is not None:
            state = optimizer.state[parameter]
            average = average_of.pop(parameter, None)
            rows.append(Row(parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"], average, state["step"]))
    rows += [Row(parameter, None, None, None, average, None) for parameter, average in average_of.items()]
    if not any(row.parameter.numel() for row in rows) or not all(_fits(row, settings["lr"].device) for row in rows):
        return None
    decoupled = settings.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
    return FusedMove(rows, settings, decoupled, limit)


def parts(sizes: Sequence[int], block: int) -> list[tuple[int, int]]:
    """(tensor, part of it) for tensors of these sizes, in parts of `block` elements, of which the last may have fewer."""
    return [(index, part) for index, size in enumerate(sizes) for part in range(math.ceil(size / block))]


def in_one_order(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors of one shape have their elements in the same order in memory, without gaps or overlaps."""
    shape = tensors[0].shape
    strides = [tuple(step for step, size in zip(x.stride(), shape, strict=True) if size != 1) for x in tensors]
    expected = 1
    for stride, size in sorted(zip(strides[0], (size for size in shape if size != 1), strict=True)):
        if stride != expected:
            return False
        expected *= size
    return all(x.shape == shape for x in tensors) and len(set(strides)) == 1


def _usual(optimizer: torch.optim.Optimizer) -> bool:
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or len(optimizer.param_groups) != 1:
        return False
    settings = optimizer.param_groups[0]
    rate_in_tensor = isinstance(settings["lr"], Tensor) and settings["lr"].dtype == torch.float32
    return rate_in_tensor and not settings["amsgrad"] and not settings["maximize"]


def _fits(row: Row, device: torch.device) -> bool:
    tensors = [tensor for tensor in row if tensor is not None]
    if any(x.layout != torch.strided or x.dtype != torch.float32 or x.device != device for x in tensors):
        return False
    elements = [tensor for tensor in row[:5] if tensor is not None]
    return in_one_order(elements) and all(x.data_ptr() % 16 == 0 for x in elements)  # the kernel loads 16 bytes at once


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
