"""The training loop.

Everything random in step k is a function of (seed, k, micro-batch, rank): data order, flips, noise, dropout, timesteps. So a
run continues exactly from a checkpoint that holds no random state, and two methods with one seed see the same data and noise.
"""

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from noisewise import distributed
from noisewise.diagnostics import Monitor, mean_density
from noisewise.feedback import preserved_buffers, seed_torch
from noisewise.samplers.base import LossAt
from noisewise.samplers.random import stream_key
from noisewise.spec import build
from noisewise.training import optimizer as optimization
from noisewise.training.checkpoint import Checkpoint, CheckpointError
from noisewise.training.config import Config
from noisewise.training.data import Batches
from noisewise.training.ema import EMA
from noisewise.training.guard import Guard
from noisewise.training.memory import keep_freed_memory
from noisewise.training.models import with_labels
from noisewise.training.parallel import average_gradients, spread
from noisewise.training.parts import STEP, Parts
from noisewise.training.state import (
    load_module,
    load_named,
    load_optimizer,
    module_tensors,
    named_tensors,
    optimizer_tensors,
)

LEVELS = 10  # noise levels in a row of metrics
WHAT_NOW = "The checkpoints are as they were: go on with --resume and a lower --optimizer.lr"


class Trainer:
    """One run: `for row in trainer.run(): ...` trains, and yields a row of metrics at every log point, None in between.

    Args:
        config: all settings.
        parts: what `build_parts` made of them.
        accelerator: the device, the processes and the precision.
    """

    def __init__(self, config: Config, parts: Parts, accelerator: Accelerator) -> None:
        self.config, self.parts, self.accelerator = config, parts, accelerator
        self.device: torch.device = accelerator.device
        if self.device.type == "cpu":
            keep_freed_memory()
        self.objective, self.model = parts.objective, parts.model
        self.micro_batch = config.batch // config.accumulation
        if self.micro_batch % distributed.world_size():
            raise ValueError(
                f"a micro-batch of {self.micro_batch} does not divide among {distributed.world_size()} processes: "
                "choose another batch or accumulation"
            )
        recipe = build(config.sampler, self.objective.process, objective=self.objective, seed=config.seed)
        self.sampler, self.weighting = recipe.sampler.to(self.device), recipe.weighting.to(self.device)
        if config.compile:
            self.model.compile(dynamic=False)
        self.network = spread(self.model, accelerator, config.parallel)
        self.call = with_labels(self.network)
        self.names = {value: name for name, value in self.model.named_parameters()}
        self.names |= {value: f"weighting.{name}" for name, value in self.weighting.named_parameters()}
        self.parameters: list[nn.Parameter] = [value for value in self.names if value.requires_grad]
        self.optimizer = optimization.make_optimizer(self.parameters, config.optimizer, self.device)
        self.scaled_optimizer = accelerator.prepare_optimizer(self.optimizer) if accelerator.scaler is not None else None
        self.ema = EMA(self.model, config.ema)
        self.sampler.attach(self.network, self.optimizer)
        self.monitor, self.guard = Monitor(bins=2 * LEVELS, decay=0.99).to(self.device), Guard().to(self.device)
        # running statistics (BatchNorm's) change in the forward pass: a skipped step puts them back
        kept = self.model.state_dict()
        self._running_buffers = [value for name, value in self.model.named_buffers() if name in kept]
        self.batches = Batches(
            parts.source,
            batch=self.micro_batch,
            seed=config.seed,
            device=self.device,
            rank=distributed.rank(),
            world=distributed.world_size(),
            flip=config.data.flip,
            label_dropout=config.model.label_dropout if parts.classes else 0.0,
            resident=config.data.resident,
            workers=config.data.workers,
        )
        self.step = 0  # optimizer steps made or skipped
        self.samples = 0  # samples seen: the position in the data
        self.seconds = 0.0  # spent in training steps
        self._mark = (0, 0.0)  # step and seconds at the last log point

    # The loop -------------------------------------------------------------------------------------------------------

    def run(self) -> Iterator[dict[str, Any] | None]:
        """Train to the end of the budget; raises `Diverged` if steps keep failing."""
        if not self.finished():
            self.warm_up()
        self._mark = (self.step, self.seconds)
        while not self.finished():
            logging = (self.step + 1) % self.config.log.every == 0 or self.step + 1 == self.config.steps
            others = (self.config.checkpoint.every, self.config.log.samples_every)
            pausing = logging or any(every and (self.step + 1) % every == 0 for every in others)
            self.timed_step(wait=pausing)  # or what the device still has to do would end off the clock
            row = self._metrics() if logging else None
            if pausing or self.device.type == "cpu":
                self.guard.check(self.config.max_bad_steps, WHAT_NOW)
            yield row
        if self.step != self._mark[0]:  # the seconds ran out between two log points
            yield self._metrics()

    def finished(self) -> bool:
        """Whether the budget, in steps or in seconds, is spent; all processes agree."""
        if self.config.seconds is None:
            return self.step >= self.config.steps
        return bool(
            distributed.largest(int(self.step >= self.config.steps or self.seconds >= self.config.seconds), self.device)
        )

    def timed_step(self, wait: bool = True) -> None:
        """One step on the clock; `wait` for the device to finish it."""
        start = time.perf_counter()
        self.training_step()
        if wait:
            self._wait()
        self.seconds += time.perf_counter() - start

    def settle(self) -> None:
        """Wait, on the clock, for what the device still has to do: before another run uses it."""
        start = time.perf_counter()
        self._wait()
        self.seconds += time.perf_counter() - start

    def training_step(self) -> None:
        """One optimizer step."""
        config, accumulation = self.config, self.config.accumulation
        if not self.network.training:
            self.network.train()
        optimization.set_learning_rate(self.optimizer, optimization.learning_rate(config.optimizer, self.step))
        self._drop_gradients()
        buffers = [(buffer, buffer.clone()) for buffer in self._running_buffers]
        draws, losses = [], []
        loss = torch.zeros((), device=self.device)
        for micro in range(accumulation):
            seed_torch(stream_key(config.seed, STEP, self.step, micro, distributed.rank()) >> 1)
            x0, labels = self.batches.get(self.samples + micro * self.micro_batch)
            loss_at = self.loss_at(x0, labels if self.parts.classes else None)
            draw = self.sampler.sample(x0)
            last = micro == accumulation - 1
            with nullcontext() if last else self.accelerator.no_sync(self.network):
                values = loss_at(slice(None), draw.u)
                part = (draw.weight * self.weighting.weighted(values, self.objective, draw.u)).mean() / accumulation
                self.accelerator.backward(part)
            loss += part.detach()
            draws.append(draw)
            losses.append(values.detach())
        average_gradients(self.weighting.parameters())
        finite = self._update(draws, losses, loss, loss_at)
        for buffer, before in buffers:
            buffer.copy_(torch.where(finite, buffer, before))
        self.step += 1
        self.samples += config.batch

    def _update(self, draws: list[Any], losses: list[Tensor], loss: Tensor, loss_at: LossAt) -> Tensor:
        """Clip, step unless something is not finite, let everything that watches take note; whether the step was made."""
        if self.scaled_optimizer is not None:
            self.accelerator.unscale_gradients(self.scaled_optimizer)
        norm = optimization.clip_gradients(self.parameters, self.config.optimizer.clip)
        total = distributed.gather_sum(torch.stack([loss, (~torch.isfinite(loss + norm)).to(loss)]))
        loss, finite = total[0] / distributed.world_size(), total[1] == 0
        with self.sampler.observe(draws, losses, loss_at):
            if self.scaled_optimizer is not None:
                self.scaled_optimizer.step()  # skips by itself, and lowers its scale
            else:
                optimization.step_if_finite(self.optimizer, finite)
        self.ema.update()
        every_loss, every_draw = torch.cat(losses), draws[0] if len(draws) == 1 else type(draws[0]).cat(draws)
        self.monitor.update(every_draw, every_loss)
        self.guard.update(loss, norm, finite, every_draw.time, every_loss)
        return finite

    def loss_at(self, x0: Tensor, labels: Tensor | None) -> LossAt:
        """The function that gives losses of this batch's rows at any noise levels."""

        def losses(rows: Any, u: Tensor) -> Tensor:
            with self.accelerator.autocast():
                chosen = None if labels is None else labels[rows]
                return self.objective.losses(self.call, x0[rows], u, None, chosen)

        return losses

    def warm_up(self) -> None:
        """Compile, choose kernels and allocate, off the clock: a forward and backward pass that leaves no trace."""
        count = self.micro_batch // distributed.world_size()
        x0 = torch.zeros(count, *self.parts.source.shape, device=self.device)
        labels = torch.zeros(count, dtype=torch.int64, device=self.device) if self.parts.classes else None
        self.network.train()
        with preserved_buffers(self.model):
            u = torch.linspace(0.1, 0.9, count, device=self.device)
            self.accelerator.backward(self.loss_at(x0, labels)(slice(None), u).mean())
        self._drop_gradients()
        self._wait()

    def _drop_gradients(self) -> None:
        """optimizer.zero_grad without its bookkeeping."""
        for parameter in self.parameters:
            parameter.grad = None

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # Looking inside -------------------------------------------------------------------------------------------------

    def _metrics(self) -> dict[str, Any]:
        """A row for metrics.jsonl; starts the next interval."""
        self.monitor.snapshot(self.sampler)
        loss, norm = self.guard.means()
        steps, seconds = self.step - self._mark[0], self.seconds - self._mark[1]
        self._mark = (self.step, self.seconds)
        world = distributed.world_size()
        return {
            "step": self.step,
            "samples": self.samples,
            "seconds": round(self.seconds, 3),
            "steps_per_second": round(steps / seconds, 3) if seconds else None,
            "loss": loss if math.isfinite(loss) else None,  # none of the steps was made
            "gradient_norm": norm if math.isfinite(norm) else None,
            "lr": optimization.learning_rate(self.config.optimizer, self.step - 1),
            "skipped": int(self.guard.skipped),
            "loss_by_level": self.loss_by_level(),
            "density_by_level": [round(value, 5) for value in mean_density(self.sampler, LEVELS).tolist()],
            "effective_share": round(float(self.monitor.effective_share), 5),
            **({"processes": world} if world > 1 else {}),
        }

    def loss_by_level(self) -> list[float | None]:
        """The running plain loss in each tenth of u, least noise first; None where there was none yet."""
        count, total, _ = self.monitor.running.sums.view(3, LEVELS, -1).sum(2).tolist()
        return [t / c if c else None for c, t in zip(count, total, strict=True)]

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """All tensors of the run, by part; a collective call when the model is sharded."""
        return {
            "model": module_tensors(self.model),
            "ema": named_tensors(self.ema.average),
            "optimizer": optimizer_tensors(self.optimizer, self.names),
            "sampler": module_tensors(self.sampler),
            "weighting": module_tensors(self.weighting),
            "monitor": module_tensors(self.monitor),
            "guard": module_tensors(self.guard),
        }

    def state(self) -> dict[str, Any]:
        """All other state of the run."""
        scaler = self.accelerator.scaler
        return {
            "step": self.step,
            "samples": self.samples,
            "seconds": self.seconds,
            "ema_updates": self.ema.updates,
            "processes": distributed.world_size(),
            "data": self.parts.description(),
            "scaler": scaler.state_dict() if scaler is not None else None,
        }

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint; raises CheckpointError if it does not fit this run."""
        try:
            self._load(checkpoint.tensors, checkpoint.state)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{checkpoint.path} does not fit this run: {type(error).__name__}: {error}") from error

    def _load(self, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        load_module(self.model, tensors["model"], "model")
        load_named(self.ema.average, tensors["ema"], "ema")
        load_optimizer(self.optimizer, self.names, tensors["optimizer"])
        self.sampler.load_state_dict(tensors["sampler"])  # by itself: it makes parts such as a policy on first use
        load_module(self.weighting, tensors["weighting"], "weighting")
        load_module(self.monitor, tensors["monitor"], "monitor")
        load_module(self.guard, tensors["guard"], "guard")
        self.guard.longest.zero_()  # a run that went on from before its trouble gets another chance
        self.step, self.samples, self.seconds = int(state["step"]), int(state["samples"]), float(state["seconds"])
        self.ema.updates = int(state["ema_updates"])
        if self.accelerator.scaler is not None and state["scaler"]:
            self.accelerator.scaler.load_state_dict(state["scaler"])

    def close(self) -> None:
        """End the reading processes."""
        self.batches.close()
