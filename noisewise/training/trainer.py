"""The training loop.

Everything random in step k is a function of (seed, k, micro-batch, rank): data order, flips, noise, dropout, timesteps. So a
run continues exactly from a checkpoint that holds no random state, and two methods with one seed see the same data and noise.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from noisewise import distributed
from noisewise.data import Batches
from noisewise.feedback import preserved_buffers, seed_torch
from noisewise.looking.monitor import Monitor, mean_density, mean_objective
from noisewise.samplers.learning import Learner
from noisewise.spec import build
from noisewise.streams import stream_key
from noisewise.training import optimizer as optimization
from noisewise.training.checkpoint import Checkpoint, CheckpointError
from noisewise.training.components import STEP, Parts
from noisewise.training.config import Config
from noisewise.training.ema import EMA
from noisewise.training.fast import GraphedStep, why_not
from noisewise.training.fast.fuse import fuse, unfuse
from noisewise.training.guard import Guard
from noisewise.training.memory import keep_freed_memory
from noisewise.training.parallel import spread
from noisewise.training.state import (
    load_module,
    load_named,
    load_optimizer,
    module_tensors,
    named_tensors,
    optimizer_tensors,
)
from noisewise.training.step import Step

LEVELS = 10  # noise levels in a row of metrics
FINE = 50  # levels of the curves that cost nothing to know
WHAT_NOW = "Lower --optimizer.lr"


class Trainer:
    """One run: `for row in trainer.run(): ...` trains, and yields a row of metrics at every log point, None in between.

    Args:
        config: all settings.
        parts: what `build_parts` made of them.
        accelerator: the device, the processes and the precision.
        tell: told which path is taken, and why.
    """

    def __init__(
        self, config: Config, parts: Parts, accelerator: Accelerator, tell: Callable[[str], None] = lambda message: None
    ) -> None:
        self.config, self.parts, self.accelerator, self.tell = config, parts, accelerator, tell
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
        usual = self.objective.process.usual_prediction
        if config.prediction == "eps" != usual:  # the default, which nobody may have chosen
            tell(f"the model predicts eps; usual for the process {config.process} is --prediction {usual}")
        recipe = build(config.sampler, self.objective.process, objective=self.objective, seed=config.seed)
        self.sampler, self.weighting = recipe.sampler.to(self.device), recipe.weighting.to(self.device)
        for part in self.sampler.modules():
            if isinstance(part, Learner):
                part.give_way(config.max_bad_steps + config.log.every)  # we know more, and look when we log
        against = why_not(config, accelerator, self.model)
        if config.fast == "always" and against is not None:
            raise ValueError(f"fast=always, but the fast path cannot be taken: {against}")
        if against is None:
            fuse(self.model)
        elif config.compile:
            self.model.compile(dynamic=False)
        self.network = spread(self.model, accelerator, config.parallel)
        self.names = {value: name for name, value in self.model.named_parameters()}
        self.names |= {value: f"weighting.{name}" for name, value in self.weighting.named_parameters()}
        self.parameters: list[nn.Parameter] = [value for value in self.names if value.requires_grad]
        self.optimizer = optimization.make_optimizer(self.parameters, config.optimizer, self.device, graphed=against is None)
        self.ema = EMA(self.model, config.ema)
        self.sampler.attach(self.network, self.optimizer)
        self.monitor, self.guard = Monitor(bins=2 * LEVELS, decay=0.99).to(self.device), Guard().to(self.device)
        self.arithmetic = (GraphedStep if against is None else Step)(
            config,
            accelerator,
            self.objective,
            self.model,
            self.network,
            self.weighting,
            self.parameters,
            self.optimizer,
            self.ema,
            self.monitor,
            self.guard,
        )
        self.call, self.loss_at = self.arithmetic.call, self.arithmetic.loss_at
        if against is not None and self.device.type == "cuda" and config.fast != "never":
            tell(f"the plain path, not the fast one: {against}")
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
        config, arithmetic = self.config, self.arithmetic
        arithmetic.begin(self.step)
        draws, losses = [], []
        for micro in range(config.accumulation):
            seed_torch(stream_key(config.seed, STEP, self.step, micro, distributed.rank()) >> 1)
            x0, labels = self.batches.get(self.samples + micro * self.micro_batch)
            labels = labels if self.parts.classes else None
            draws.append(self.sampler.sample(x0))
            losses.append(arithmetic.backward(x0, labels, draws[-1], last=micro == config.accumulation - 1))
        with self.sampler.observe(draws, losses, self.loss_at(x0, labels)):
            arithmetic.update(draws, losses)
        self.step += 1
        self.samples += config.batch

    def warm_up(self) -> None:
        """Compile, record, choose kernels and allocate, off the clock; leaves no trace."""
        if self.parts.classes and self.config.model.label_dropout:
            self._try_no_class()
        if isinstance(self.arithmetic, GraphedStep) and not self.arithmetic.ready:
            self._record(self.arithmetic)
        if not self.arithmetic.ready:
            self._try_out()
        self._wait()

    def _record(self, arithmetic: GraphedStep) -> None:
        self.tell("compiling and recording the training step: up to two minutes, less the next time")
        try:
            arithmetic.capture(self.parts.source.shape, self.parts.classes)
        except Exception as error:
            if self.config.fast == "always":
                raise
            unfuse(self.model)  # our kernels may be what does not run
            if self.config.compile:
                self.model.compile(dynamic=False)
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.tell(f"the plain path, not the fast one: the step cannot be recorded ({first})")
        if arithmetic.ready and arithmetic.unrepeatable is not None:
            self.tell(f"a resumed run will be the same up to rounding, not bit for bit: {arithmetic.unrepeatable}")

    def _try_no_class(self) -> None:
        """The label of withheld classes comes up rarely, so it may be long until a model without a place for it fails."""
        classes = self.parts.classes
        trained = self.config.compile and not isinstance(self.arithmetic, GraphedStep)  # then it is compiled with gradients
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
                    f"It said: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
                ) from error

    def _try_out(self) -> None:
        """A forward and backward pass."""
        with preserved_buffers(self.model):
            self.accelerator.backward(self._losses_with(0).mean())
        self.arithmetic.drop_gradients()

    def _losses_with(self, label: int) -> Tensor:
        """Of a micro-batch of zeros of this process."""
        x0 = torch.zeros(self.micro_batch // distributed.world_size(), *self.parts.source.shape, device=self.device)
        labels = torch.full((len(x0),), label, device=self.device) if self.parts.classes else None
        self.network.train()
        losses = self.loss_at(x0, labels)(slice(None), torch.linspace(0.1, 0.9, len(x0), device=self.device))
        self._wait()
        return losses

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
            "density_by_level": _rounded(mean_density(self.sampler, FINE)),
            "objective_by_level": _rounded(self.objective_by_level()),
            "effective_share": round(float(self.monitor.effective_share), 5),
            **({"processes": world} if world > 1 else {}),
        }

    def loss_by_level(self) -> list[float | None]:
        """The running plain loss in each tenth of u, least noise first; None where there was none yet."""
        count, total, _ = self.monitor.running.sums.view(3, LEVELS, -1).sum(2).tolist()
        return [t / c if c else None for c, t in zip(count, total, strict=True)]

    @torch.no_grad()
    def objective_by_level(self) -> Tensor:
        """How much each of FINE intervals of u counts in the objective: draws times weights, 1 on average."""
        return mean_objective(self.sampler, self.weighting, self.objective, FINE)

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
            if checkpoint.step != self.step:
                raise ValueError(f"its state is that of step {self.step}")
        except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{checkpoint.path} does not fit this run: {type(error).__name__}: {error}") from error

    def _load(self, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        self._check_data(state["data"])
        self.arithmetic.ready = False  # the optimizer's state will lie elsewhere
        load_module(self.model, tensors["model"], "model")
        load_named(self.ema.average, tensors["ema"], "ema")
        load_optimizer(self.optimizer, self.names, tensors["optimizer"])
        self.sampler.load_state_dict(tensors["sampler"])  # by itself: it makes parts such as a policy on first use
        load_module(self.weighting, tensors["weighting"], "weighting")
        load_module(self.monitor, tensors["monitor"], "monitor")
        load_module(self.guard, tensors["guard"], "guard")
        self.guard.longest.zero_()  # a run that went on from before its trouble gets another chance
        counts = {name: state[name] for name in ("step", "samples", "ema_updates", "processes")}
        if strange := [name for name, value in counts.items() if type(value) is not int or not 0 <= value < 2**63]:
            raise ValueError(f"its {strange[0]} is {counts[strange[0]]!r}")
        self.step, self.samples, self.seconds = counts["step"], counts["samples"], float(state["seconds"])
        if not 0 <= self.seconds < math.inf:
            raise ValueError(f"its seconds are {self.seconds}")
        self.ema.updates = counts["ema_updates"]
        if self.accelerator.scaler is not None and state["scaler"]:
            self.accelerator.scaler.load_state_dict(state["scaler"])

    def _check_data(self, description: dict[str, Any]) -> None:
        """An error if there are more or fewer samples than the run was trained on, a warning if they do not look the same."""
        found = self.parts.other_data(description)
        difference = ", ".join(found.values())
        if "samples" in found:
            raise ValueError(f"the data are not those that it was trained on ({difference}): begin a new run with --out")
        if found:
            warnings.warn(
                f"the data are not those that the run was trained on, or are stored in another way ({difference}): if they are "
                "others, it is no longer one run, and should be begun anew with --out",
                stacklevel=2,
            )

    def close(self) -> None:
        """End the reading processes."""
        self.batches.close()


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
