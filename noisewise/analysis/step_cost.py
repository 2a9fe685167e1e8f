"""The cost of a sampler on one model: single training steps, timed and counted.

Steps of uniform and of the sampler take turns on the same model, so that clocks, caches and neighbours are the same for both.
"""

import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from noisewise.analysis.cost_model import hold, interval, overhead
from noisewise.recipes import Recipe, recipe
from noisewise.samplers import Uniform
from noisewise.samplers.adaptive.reinforce import ReinforceEstimator
from noisewise.spec import build_process, parse
from noisewise.training.config import Config
from noisewise.training.trainer import Trainer

WIDTHS = {"unet": "channels", "dit": "width", "uvit": "width"}
"""The option of each model that makes it larger."""

LEAST = 5  # rounds of a measurement


class Counter:
    """Samples that go through a model, forward alone and for gradients."""

    def __init__(self) -> None:
        self.calls = self.forward = self.trained = 0

    def count(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Take note of a call of the model."""
        self.calls += 1
        if torch.is_grad_enabled():
            self.trained += len(arguments[0])
        else:
            self.forward += len(arguments[0])


@contextmanager
def counting(model: nn.Module) -> Iterator[Counter]:
    """Counts within the block."""
    counter = Counter()
    handle = model.register_forward_pre_hook(counter.count)
    try:
        yield counter
    finally:
        handle.remove()


@dataclass(frozen=True)
class Times:
    """Seconds of single steps."""

    plain: list[float]
    between: list[float]
    update: list[float]
    every: int

    def ratio(self) -> float:
        """A step with the sampler over one without, updates spread over their interval."""
        typical = statistics.median(self.between)
        return (typical + (statistics.median(self.update) - typical) / self.every) / statistics.median(self.plain)

    def spread(self, samples: int = 500) -> tuple[float, float]:
        """What holds 90 % of the ratios that resampling gives."""
        chance = random.Random(0)

        def resampled(times: list[float]) -> list[float]:
            return chance.choices(times, k=len(times))

        parts = (self.plain, self.between, self.update)
        drawn = (map(resampled, parts) for _ in range(samples))
        again = sorted(Times(plain, between, update, self.every).ratio() for plain, between, update in drawn)
        return again[samples // 20], again[-1 - samples // 20]


def configured(config: Config, width: int, batch: int, steps: int) -> Config:
    """The configuration with a model, a batch and a T of those sizes."""
    if config.model.name not in WIDTHS:
        raise ValueError(f"--widths needs a model of {', '.join(WIDTHS)}, not {config.model.name}")
    process = parse(config.process)[0]
    if build_process(config.process).steps is None:
        raise ValueError(f"--steps-of-process needs a process with timesteps, such as linear, not {config.process}")
    settings = ",".join(f"{key}={value}" for key, value in {**process.options, "steps": steps}.items())
    model = replace(config.model, options={**config.model.options, WIDTHS[config.model.name]: width})
    return replace(config, batch=batch, model=model, process=f"{process.name}:{settings}")


def recipes(trainer: Trainer, spec: str) -> tuple[Recipe, Recipe]:
    """The sampler, and uniform with the same weighting, both for this trainer."""
    other = recipe(spec, trainer.objective, seed=trainer.config.seed)
    other.sampler.to(trainer.device).attach(trainer.network, trainer.optimizer)
    other.weighting.to(trainer.device)
    for part in other.sampler.modules():
        if isinstance(part, ReinforceEstimator):
            part.pairing_checked = True  # a look that is taken once in a run, and no part of its cost
            part.filled.fill_(2)  # from two rows on an update has its whole cost
    uniform = Uniform(trainer.objective.process, seed=trainer.config.seed).to(trainer.device)
    return Recipe(uniform, other.weighting, trainer.objective, "uniform"), other


def step(trainer: Trainer, recipe: Recipe, update: bool = False) -> float:
    """One training step with this recipe, with or without an update of its sampler; returns the seconds it took."""
    trainer.sampler, trainer.weighting = recipe.sampler, recipe.weighting
    hold(recipe.sampler, update)
    before = trainer.seconds
    trainer.timed_step()
    return trainer.seconds - before


def counted(trainer: Trainer, recipe: Recipe) -> tuple[int, int]:
    """Samples that the sampler sends through the model in a step with an update: forward alone, and for gradients."""
    with counting(trainer.model) as counter:
        step(trainer, recipe, update=True)
    return counter.forward, counter.trained - trainer.config.batch


def timed(trainer: Trainer, uniform: Recipe, other: Recipe, seconds: float) -> Times:
    """Steps of uniform and of the sampler in turns, for about so many seconds."""
    times = Times([], [], [], interval(other.sampler, trainer.config.batch))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times.update) < LEAST:
        times.plain.append(step(trainer, uniform))
        times.between.append(step(trainer, other))
        times.plain.append(step(trainer, uniform))
        times.update.append(step(trainer, other, update=True))
    return times


@torch.no_grad()
def step_in_forwards(trainer: Trainer, plain: float, repeats: int = 9) -> float:
    """A plain training step in units of a forward pass of its batch: the cost model takes it as 3."""
    x0, labels = trainer.batches.get(0)
    losses = trainer.loss_at(x0, labels if trainer.parts.classes else None)
    u = torch.linspace(0.1, 0.9, len(x0), device=trainer.device)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        float(losses(slice(None), u).sum())  # waits for the device
        times.append(time.perf_counter() - start)
    return plain / statistics.median(times)


def measure(trainer: Trainer, spec: str, seconds: float) -> dict[str, Any]:
    """One sampler on one model, as a row."""
    batch = trainer.config.batch
    uniform, other = recipes(trainer, spec)
    step(trainer, uniform)
    step(trainer, other)
    forward, trained = counted(trainer, other)
    times = timed(trainer, uniform, other, seconds)
    forwards, (low, high) = step_in_forwards(trainer, statistics.median(times.plain)), times.spread()
    return {
        "sampler": spec,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "batch": batch,
        "T": trainer.objective.process.steps,
        "every": times.every,
        "forward": forward,
        "trained": trained,
        "predicted": overhead(other.sampler, batch),
        "counted": 1 + (forward + 3 * trained) / (3 * batch * times.every),
        "measured": times.ratio(),
        "low": low,
        "high": high,
        "uniform_ms": 1e3 * statistics.median(times.plain),
        "between_ms": 1e3 * statistics.median(times.between),
        "update_ms": 1e3 * statistics.median(times.update),
        "step_in_forwards": forwards,
        "rounds": len(times.update),
    }
