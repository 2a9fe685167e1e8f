"""The training loop.

Everything random in step k is a function of (seed, k, micro-batch, rank): data order, flips, noise, dropout, timesteps. So a
run continues exactly from a checkpoint that holds no random state, and two methods with one seed see the same data and noise.
"""

import ctypes
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import Tensor

from noisewise import distributed, recipes
from noisewise.data import Batches
from noisewise.feedback import seed_torch
from noisewise.looking.monitor import mean_density, mean_objective
from noisewise.streams import stream_key
from noisewise.training import optimizer as optimization
from noisewise.training.checkpoint import Checkpoint, CheckpointError
from noisewise.training.components import STEP, Parts
from noisewise.training.config import Config
from noisewise.training.fast import chosen_step
from noisewise.training.state import module_tensors

LEVELS = 10  # noise levels in a row of metrics
FINE = 50  # levels of the curves that cost nothing to know
ROWS = 20  # of metrics, at least, of a run whose budget are seconds
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
        if config.micro_batch % distributed.world_size():
            raise ValueError(
                f"a micro-batch of {config.micro_batch} does not divide among {distributed.world_size()} processes: "
                "choose another batch or accumulation"
            )
        usual = self.objective.process.usual_prediction
        if config.prediction == "eps" != usual:  # the default, which nobody may have chosen
            tell(f"the model predicts eps; usual for the process {config.process} is --prediction {usual}")
        recipe = recipes.recipe(config.sampler, self.objective, seed=config.seed)
        self.sampler = recipe.sampler.to(self.device)
        step = self.arithmetic = chosen_step(config, parts, accelerator, recipe.weighting, tell)
        self.network, self.weighting, self.parameters = step.network, step.weighting, step.parameters
        self.optimizer, self.ema, self.monitor, self.guard = step.optimizer, step.ema, step.monitor, step.guard
        self.call, self.loss_at = step.call, step.loss_at
        self.sampler.attach(self.network, self.optimizer)
        self.batches = Batches(
            parts.source,
            batch=config.micro_batch,
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
        self._warm = False

    # The loop -------------------------------------------------------------------------------------------------------

    def run(self) -> Iterator[dict[str, Any] | None]:
        """Train to the end of the budget; raises `Diverged` if steps keep failing."""
        if not self.finished():
            self.warm_up()
        self._mark = (self.step, self.seconds)
        while not self.finished():
            logging = (self.step + 1) % self.config.log.every == 0 or self.step + 1 == self.config.steps or self._row_is_due()
            others = (self.config.checkpoint.every, self.config.log.samples_every)
            pausing = logging or any(every and (self.step + 1) % every == 0 for every in others)
            self.timed_step(wait=pausing)  # or what the device still has to do would end off the clock
            row = self._metrics() if logging else None
            if pausing or self.device.type == "cpu":
                self.guard.check(self.config.max_bad_steps, WHAT_NOW)
            yield row
        if self.step != self._mark[0]:  # the seconds ran out between two log points
            yield self._metrics()

    def _row_is_due(self) -> bool:
        """A run on the clock may make few steps, and has rows all the same."""
        if self.config.seconds is None:
            return False
        return bool(distributed.largest(int(self.seconds - self._mark[1] > self.config.seconds / ROWS), self.device))

    def finished(self) -> bool:
        """Whether the budget, in steps or in seconds, is spent; all processes agree."""
        if self.config.seconds is None:
            return self.step >= self.config.steps
        return bool(
            distributed.largest(int(self.step >= self.config.steps or self.seconds >= self.config.seconds), self.device)
        )

    def timed_step(self, wait: bool = True) -> None:
        """One step on the clock; `wait` for the device to finish it."""
        start, aside = time.perf_counter(), self.arithmetic.aside
        self.training_step()
        if wait:
            self.arithmetic.wait()
        self.seconds += time.perf_counter() - start - (self.arithmetic.aside - aside)

    def settle(self) -> None:
        """Wait, on the clock, for what the device still has to do: before another run uses it."""
        start = time.perf_counter()
        self.arithmetic.wait()
        self.seconds += time.perf_counter() - start

    def training_step(self) -> None:
        """One optimizer step."""
        config, arithmetic = self.config, self.arithmetic
        arithmetic.begin(self.step)
        draws, losses = [], []
        for micro in range(config.accumulation):
            seed_torch(stream_key(config.seed, STEP, self.step, micro, distributed.rank()) >> 1)
            x0, labels = self.batches.get(self.samples + micro * config.micro_batch)
            labels = labels if self.parts.classes else None
            draws.append(arithmetic.draw(self.sampler, x0))
            losses.append(arithmetic.backward(x0, labels, draws[-1], last=micro == config.accumulation - 1))
        with self.sampler.observe(draws, losses, self.arithmetic.probes(x0, labels)):
            arithmetic.update(draws, losses)
        self.step += 1
        self.samples += config.batch

    def warm_up(self) -> None:
        """Compile, record, choose kernels and allocate, off the clock; leaves no trace. Once is enough."""
        if not self._warm:
            self.arithmetic.warm_up(self.tell)
            self._warm = True

    # Looking inside -------------------------------------------------------------------------------------------------

    def _metrics(self) -> dict[str, Any]:
        """A row for metrics.jsonl; starts the next interval."""
        self.monitor.snapshot(self.sampler)
        loss, norm = self.guard.means()
        steps, seconds = self.step - self._mark[0], self.seconds - self._mark[1]
        self._mark = (self.step, self.seconds)
        world = distributed.world_size()
        outliers = int(self.monitor.running.outliers)
        return {
            "step": self.step,
            "samples": self.samples,
            "seconds": round(self.seconds, 3),
            "steps_per_second": round(steps / seconds, 3) if seconds else None,
            "loss": loss if math.isfinite(loss) else None,  # none of the steps was made
            "gradient_norm": norm if math.isfinite(norm) else None,
            "lr": optimization.learning_rate(self.config.optimizer, self.step - 1, self.config.steps),
            "skipped": int(self.guard.skipped),
            "loss_by_level": self.loss_by_level(),
            "density_by_level": _rounded(mean_density(self.sampler, FINE)),
            "objective_by_level": _rounded(self.objective_by_level()),
            "effective_share": round(float(self.monitor.effective_share), 5),
            **({"outliers": outliers} if outliers else {}),
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

    def tensors(self, gather: bool = True) -> dict[str, dict[str, Tensor]]:
        """All tensors of the run, by part; to `gather` those of a sharded model is a collective call."""
        return {**self.arithmetic.tensors(gather), "sampler": module_tensors(self.sampler, gather)}

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
        except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, SafetensorError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{checkpoint.path} does not fit this run: {type(error).__name__}: {error}") from error

    def _load(self, tensors: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any]) -> None:
        self.parts.check_same_data(state["data"])
        self._warm = False
        self.arithmetic.load(tensors)
        self.sampler.load_state_dict(dict(tensors["sampler"]))  # by itself: it makes parts such as a policy on first use
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

    def close(self) -> None:
        """End the reading processes."""
        self.batches.close()


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # names of mallopt's parameters
KEPT = 1 << 30  # bytes that may lie free before any are given back
LARGEST = 1 << 25  # the largest block that glibc lets the heap hold


def keep_freed_memory() -> bool:
    """Ask glibc to keep freed memory for the next step; whether it was asked.

    It gives freed memory back to the system and asks for it again in the next step, page by page: dropping the gradients of
    the digits preset alone took 1.5 ms of a step of 60. Other allocators must be loaded before Python starts.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(TRIM_THRESHOLD, KEPT)) and bool(mallopt(MMAP_THRESHOLD, LARGEST))
