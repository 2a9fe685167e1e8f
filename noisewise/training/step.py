"""The arithmetic of one optimizer step: gradients of its micro-batches, then all that follows from them.

The trainer brings data and timesteps, and lets the sampler watch; `fast.GraphedStep` does the same arithmetic in CUDA graphs.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from noisewise import distributed
from noisewise.looking.monitor import Monitor
from noisewise.models import with_labels
from noisewise.objective import Objective
from noisewise.samplers import Draw
from noisewise.samplers.base import LossAt
from noisewise.training import optimizer as optimization
from noisewise.training.config import Config
from noisewise.training.ema import EMA
from noisewise.training.guard import Guard
from noisewise.weighting import Weighting


@dataclass
class Step:
    """`begin`, `backward` for each micro-batch, `update`."""

    ready = False  # not a field: whether it is recorded in graphs
    config: Config
    accelerator: Accelerator
    objective: Objective
    model: nn.Module
    network: nn.Module  # the model, as several processes share it
    weighting: Weighting
    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    ema: EMA
    monitor: Monitor
    guard: Guard
    loss: Tensor = field(init=False)  # of all micro-batches so far

    def __post_init__(self) -> None:
        self.device: torch.device = self.accelerator.device
        self.call = with_labels(self.network)
        self.scaled_optimizer = (
            self.accelerator.prepare_optimizer(self.optimizer) if self.accelerator.scaler is not None else None
        )
        self.loss = torch.zeros((), device=self.device)
        # running statistics (BatchNorm's) change in the forward pass: a skipped step puts them back
        kept = self.model.state_dict()
        self.running_buffers = [value for name, value in self.model.named_buffers() if name in kept]
        self.buffers_before: list[Tensor] = []

    def begin(self, step: int) -> None:
        """Get ready for optimizer step `step`."""
        if not self.network.training:
            self.network.train()
        optimization.set_learning_rate(self.optimizer, optimization.learning_rate(self.config.optimizer, step))
        self.loss.zero_()
        self.clear()

    def clear(self) -> None:
        """Forget the gradients of the step before, and remember what a skipped step puts back."""
        self.drop_gradients()
        self.buffers_before = [buffer.clone() for buffer in self.running_buffers]

    def backward(self, x0: Tensor, labels: Tensor | None, draw: Draw, last: bool = True) -> Tensor:
        """Add a micro-batch's gradients; returns its losses, one a sample, without weights."""
        with nullcontext() if last else self.accelerator.no_sync(self.network):
            return self.differentiate(self.loss_at(x0, labels), draw.u, draw.weight)

    def update(self, draws: Sequence[Draw], losses: Sequence[Tensor]) -> None:
        """Clip, step unless something is not finite, and let everything that watches take note."""
        draw = draws[0] if len(draws) == 1 else Draw.cat(draws)
        self.apply(draw, losses[0] if len(losses) == 1 else torch.cat(list(losses)), 1 - self.ema.decay())
        self.ema.updates += 1

    # What is captured in graphs -------------------------------------------------------------------------------------

    def differentiate(self, loss_at: LossAt, u: Tensor, weight: Tensor) -> Tensor:
        """Losses at u, and the gradients of their weighted mean."""
        losses = loss_at(slice(None), u)
        part = (weight * self.weighting.weighted(losses, self.objective, u)).mean() / self.config.accumulation
        self.accelerator.backward(part)
        self.loss += part.detach()
        return losses.detach()

    def apply(self, draw: Draw, losses: Tensor, blend: float | Tensor) -> None:
        """From gradients to new weights, averages (moved by the share `blend`) and statistics."""
        distributed.average_gradients(self.weighting.parameters())
        if self.scaled_optimizer is not None:
            self.accelerator.unscale_gradients(self.scaled_optimizer)
        norm = optimization.gradient_norm(self.parameters)
        total = distributed.gather_sum(torch.stack([self.loss, (~torch.isfinite(self.loss + norm)).to(self.loss)]))
        loss, finite = total[0] / distributed.world_size(), total[1] == 0
        self.move(norm, finite, blend)
        self.monitor.update(draw, losses)
        self.guard.update(loss, norm, finite, draw.time, losses)
        for buffer, before in zip(self.running_buffers, self.buffers_before, strict=True):
            buffer.copy_(torch.where(finite, buffer, before))

    def move(self, norm: Tensor, finite: Tensor, blend: float | Tensor) -> None:
        """Clip gradients of this norm, step if all is finite, and move the average."""
        optimization.clip_gradients(self.parameters, norm, self.config.optimizer.clip)
        if self.scaled_optimizer is not None:
            self.scaled_optimizer.step()  # skips by itself, and lowers its scale
        else:
            optimization.step_if_finite(self.optimizer, finite)
        self.ema.blend(blend)

    # Evaluation and tidying -----------------------------------------------------------------------------------------

    def loss_at(self, x0: Tensor, labels: Tensor | None, call: Any = None) -> LossAt:
        """The function that gives losses of this batch's rows at any noise levels."""

        def losses(rows: Any, u: Tensor) -> Tensor:
            with self.accelerator.autocast():
                chosen = None if labels is None else labels[rows]
                return self.objective.losses(call or self.call, x0[rows], u, None, chosen)

        return losses

    def drop_gradients(self) -> None:
        """optimizer.zero_grad without its bookkeeping."""
        for parameter in self.parameters:
            parameter.grad = None
