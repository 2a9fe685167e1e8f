"""One optimizer step: gradients of its micro-batches, then all that follows from them.

The trainer brings data and timesteps, and lets the sampler watch; `fast.GraphedStep` does the same arithmetic in CUDA graphs.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from noisewise import distributed
from noisewise.feedback import preserved_buffers
from noisewise.looking.monitor import Monitor
from noisewise.models import with_labels
from noisewise.samplers import Draw, Sampler
from noisewise.samplers.base import LossAt
from noisewise.training import optimizer as optimization
from noisewise.training.components import Parts
from noisewise.training.config import Config
from noisewise.training.ema import EMA
from noisewise.training.guard import Guard
from noisewise.training.parallel import spread
from noisewise.training.state import (
    load_module,
    load_named,
    load_optimizer,
    module_tensors,
    named_tensors,
    optimizer_tensors,
)
from noisewise.weighting import Weighting

BINS = 20  # of the running losses over u; rows of metrics have tenths


class Step:
    """`begin`, `backward` for each micro-batch, `update`. It makes and holds all that these change.

    Args:
        config: all settings.
        parts: objective, data and model.
        accelerator: the device, the processes and the precision.
        weighting: of the losses; what it learns is trained with the model.
    """

    graphed = False  # whether a subclass records it
    ready = False  # whether it is recorded
    aside = 0.0  # seconds within steps that were spent on getting ready

    def __init__(self, config: Config, parts: Parts, accelerator: Accelerator, weighting: Weighting) -> None:
        self.config, self.parts, self.accelerator = config, parts, accelerator
        self.device: torch.device = accelerator.device
        self.objective, self.model, self.weighting = parts.objective, parts.model, weighting.to(self.device)
        self.network = spread(self.model, accelerator, config.parallel)  # the model, as several processes share it
        self.call = with_labels(self.network)
        self.names = {value: name for name, value in self.model.named_parameters()}
        self.names |= {value: f"weighting.{name}" for name, value in weighting.named_parameters()}
        self.parameters: list[nn.Parameter] = [value for value in self.names if value.requires_grad]
        self.optimizer = optimization.make_optimizer(self.parameters, config.optimizer, self.device, graphed=self.graphed)
        self.scaled_optimizer = accelerator.prepare_optimizer(self.optimizer) if accelerator.scaler is not None else None
        self.ema = EMA(self.model, config.ema)
        self.monitor, self.guard = Monitor(bins=BINS, decay=0.99).to(self.device), Guard().to(self.device)
        self.loss = torch.zeros((), device=self.device)  # of all micro-batches so far
        # running statistics (BatchNorm's) change in the forward pass: a skipped step puts them back
        kept = self.model.state_dict()
        self.running_buffers = [value for name, value in self.model.named_buffers() if name in kept]
        self.buffers_before: list[Tensor] = []

    def begin(self, step: int) -> None:
        """Get ready for optimizer step `step`."""
        if not self.network.training:
            self.network.train()
        rate = optimization.learning_rate(self.config.optimizer, step, self.config.steps)
        optimization.set_learning_rate(self.optimizer, rate)
        self.clear()  # which may record the step anew, and so add to the loss
        self.loss.zero_()

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

    def loss_at(self, x0: Tensor, labels: Tensor | None, call: Any = None) -> LossAt:
        """The function that gives losses of this batch's rows at any noise levels."""

        def losses(rows: Any, u: Tensor) -> Tensor:
            with self.accelerator.autocast():
                chosen = None if labels is None else labels[rows]
                return self.objective.losses(call or self.call, x0[rows], u, None, chosen)

        return losses

    def draw(self, sampler: Sampler, x0: Tensor) -> Draw:
        """Noise levels of a micro-batch."""
        return sampler.sample(x0)

    def probes(self, x0: Tensor, labels: Tensor | None) -> LossAt:
        """As `loss_at`, for samplers, which ask for the same shapes again and again."""
        return self.loss_at(x0, labels)

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

    def drop_gradients(self) -> None:
        """optimizer.zero_grad without its bookkeeping."""
        for parameter in self.parameters:
            parameter.grad = None

    # Getting ready --------------------------------------------------------------------------------------------------

    def warm_up(self, tell: Callable[[str], None]) -> None:
        """Compile, record, choose kernels and allocate; leaves no trace. `tell` is told what the user should know."""
        if self.parts.classes and self.config.model.label_dropout:
            self._try_no_class()
        self.make_ready(tell)
        self.wait()

    def make_ready(self, tell: Callable[[str], None]) -> None:
        """A forward and backward pass."""
        with preserved_buffers(self.model):
            self.accelerator.backward(self._losses_with(0).mean())
        self.drop_gradients()

    def _try_no_class(self) -> None:
        """The label of withheld classes comes up rarely, so it may be long until a model without a place for it fails."""
        classes = self.parts.classes
        trained = self.config.compile and not self.graphed  # then it is compiled with gradients
        with preserved_buffers(self.model), torch.set_grad_enabled(trained):
            self._losses_with(0)  # what fails with any label is said as it is
            try:
                self._losses_with(classes)
            except torch.OutOfMemoryError:
                raise
            except (IndexError, RuntimeError) as error:
                raise ValueError(
                    f"the model fails with the label {classes}, which stands for a withheld class (model.label_dropout "
                    f"{self.config.model.label_dropout}): it must take {classes + 1} labels, or --model.label_dropout 0. "
                    f"It said: {first_line(error)}"
                ) from error

    def _losses_with(self, label: int) -> Tensor:
        """Of a micro-batch of zeros of this process."""
        rows = self.config.micro_batch // distributed.world_size()
        x0 = torch.zeros(rows, *self.parts.source.shape, device=self.device)
        labels = torch.full((rows,), label, device=self.device) if self.parts.classes else None
        self.network.train()
        losses = self.loss_at(x0, labels)(slice(None), torch.linspace(0.1, 0.9, rows, device=self.device))
        self.wait()
        return losses

    def wait(self) -> None:
        """Until the device has done all it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def tensors(self, gather: bool = True) -> dict[str, dict[str, Tensor]]:
        """All tensors that it changes, by part; to `gather` those of a sharded model is a collective call."""
        modules = {name: module_tensors(module, gather) for name, module in self.modules().items()}
        optimizer = optimizer_tensors(self.optimizer, self.names, gather)
        return {**modules, "ema": named_tensors(self.ema.average, gather), "optimizer": optimizer}

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Put saved tensors in place; they must fit."""
        self.ready = False  # the optimizer's state will lie elsewhere
        for name, module in self.modules().items():
            if module is self.monitor:
                module.load_state_dict(dict(tensors[name]))  # by itself: it knows what it looked like earlier
            else:
                load_module(module, tensors[name], name)
        load_named(self.ema.average, tensors["ema"], "ema")
        load_optimizer(self.optimizer, self.names, tensors["optimizer"])

    def modules(self) -> dict[str, nn.Module]:
        """The modules whose tensors a step changes."""
        return {"model": self.model, "weighting": self.weighting, "monitor": self.monitor, "guard": self.guard}


def first_line(error: Exception) -> str:
    """What an error says, shortly."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
