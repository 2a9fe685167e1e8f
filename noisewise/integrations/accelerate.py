"""Accelerate: one object that makes gradient accumulation, skipped steps and checkpoints right. Guide: docs/accelerate.md.

sampler = Accelerated(accelerator, AdaptiveSampler(objective))
for x0 in loader:
    with accelerator.accumulate(model):
        draw = sampler.sample(x0)
        losses = loss_at(slice(None), draw.u)
        accelerator.backward((draw.weight * losses).mean())
        with sampler.observe(draw, losses, loss_at):
            optimizer.step()
        optimizer.zero_grad()
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from noisewise.integrations.pending import Pending, StepSkipped, check_sampler
from noisewise.samplers import Draw, LossAt, Sampler

try:
    from accelerate import Accelerator
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"noisewise.integrations.accelerate needs Accelerate ({error}): pip install accelerate") from None


class Accelerated:
    """A sampler in an Accelerate loop: call `observe` around every `optimizer.step()`, also those that only accumulate.

    The sampler learns once a real optimizer step, from all the micro-batches since the last one. It is part of
    `accelerator.save_state` and `load_state`. A step that fp16 had to skip does not count, and nothing is learned from it.

    Args:
        accelerator: the loop's Accelerator.
        sampler: any sampler; not one that went through `accelerator.prepare`.
    """

    def __init__(self, accelerator: Accelerator, sampler: Sampler) -> None:
        if not isinstance(accelerator, Accelerator):
            raise TypeError(f"the first argument must be an accelerate.Accelerator, got {type(accelerator).__name__}")
        self.accelerator, self.sampler = accelerator, check_sampler(sampler)
        if any(model is sampler for model in accelerator._models):
            raise ValueError(
                "the sampler went through accelerator.prepare(), which would save it twice and wrap it in DDP on several "
                "processes: leave it out, Accelerated registers it for checkpoints itself"
            )
        if not any(registered is sampler for registered in accelerator._custom_objects):
            accelerator.register_for_checkpointing(sampler)
        self._pending = Pending("with sampler.observe(draw, losses, loss_at): optimizer.step()")
        accelerator.register_load_state_pre_hook(lambda *_: self._pending.clear())  # what was drawn belongs to the old state

    def sample(self, x0: Tensor | int, *, generator: torch.Generator | None = None) -> Draw:
        """Draw a noise level for each sample of a training batch; once a micro-batch."""
        self._pending.check_may_draw()
        draw = self.sampler.sample(x0, generator=generator)
        self._pending.drawn(draw)
        return draw

    @contextmanager
    def observe(self, draw: Draw, losses: Tensor, loss_at: LossAt | None = None) -> Iterator[None]:
        """Put this around every `optimizer.step()`.

        Args:
            draw: what `sample` returned for this micro-batch.
            losses: one a sample, without draw.weight and without a loss weighting.
            loss_at: evaluates losses of this micro-batch at other u, for samplers that probe the model.
        """
        self._pending.add(draw, losses, loss_at)
        if not self.accelerator.sync_gradients:  # the optimizer does nothing in this block
            yield
            return
        try:
            with self.sampler.observe(*self._pending.take()):
                yield
                if self.accelerator.optimizer_step_was_skipped:
                    raise StepSkipped
        except StepSkipped:
            pass

    def drop(self) -> None:
        """Forget the last draw, when its batch is not trained on."""
        self._pending.drop()

    def attach(self, model: nn.Module, optimizer: Any | None = None) -> "Accelerated":
        """Show the sampler the prepared model and optimizer, for those that differentiate or look ahead."""
        # look-ahead trials step the optimizer itself: the wrapper would ask the gradient scaler
        self.sampler.attach(model, getattr(optimizer, "optimizer", optimizer))
        return self
