"""What a sampler costs: predicted by the cost model, counted, and measured, as the model, the batch and T grow.

One setting is varied at a time, around the middle one of each list. On each model single steps of uniform and of the sampler
take turns, so that clocks, caches and neighbours are the same for both. Step times have long tails, so all numbers are medians:
of the steps between updates, and of steps with an update, which count for as much as they are frequent; the range holds 90 % of
what resampling the times gives. Samples through the model are counted exactly, by a hook.
"""

import argparse
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from noisewise.analysis.cost_model import PAPER_STEP, by_samples, hold, interval, overhead, published, update
from noisewise.analysis.moments_of_training import opened
from noisewise.analysis.output import Analysis
from noisewise.looking.palette import COLOURS, GREY
from noisewise.recipes import Recipe, recipe
from noisewise.samplers import AdaptiveSampler, Sampler, Uniform
from noisewise.samplers.adaptive.reinforce import ReinforceEstimator
from noisewise.spec import build_process, parse, split_specs
from noisewise.training.config import Config
from noisewise.training.options import config_parser, parse_config, with_files
from noisewise.training.trainer import Trainer

# Single training steps, timed and counted -----------------------------------------------------------------------------


WIDTHS = {"unet": "channels", "dit": "width", "uvit": "width"}
"""The option of each model that makes it larger."""

LEAST = 5  # rounds of a measurement


@contextmanager
def counting(model: nn.Module) -> Iterator[Counter[str]]:
    """Counts samples that go through a model within the block: "forward" alone, and "trained", for gradients."""
    counter: Counter[str] = Counter()

    def count(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        counter["trained" if torch.is_grad_enabled() else "forward"] += len(arguments[0])

    handle = model.register_forward_pre_hook(count)
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
    return counter["forward"], counter["trained"] - trainer.config.batch


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
def step_in_forwards(trainer: Trainer, plain: float) -> float:
    """A plain training step in units of a forward pass of its batch: the cost model takes it as 3."""
    x0, labels = trainer.batches.get(0)
    losses = trainer.loss_at(x0, labels if trainer.parts.classes else None)
    u = torch.linspace(0.1, 0.9, len(x0), device=trainer.device)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        float(losses(slice(None), u).sum())  # waits for the device
        times.append(time.perf_counter() - start)
    return plain / statistics.median(times)


def as_published(sampler: Sampler, batch: int) -> float | None:
    """The overhead by the paper's own account, of a sampler that is a policy gradient."""
    estimator = sampler.estimator if isinstance(sampler, AdaptiveSampler) else None
    if not isinstance(estimator, ReinforceEstimator):
        return None
    return published(len(estimator.edges) - 1, batch, estimator.chosen, estimator.every) / PAPER_STEP


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
        "published": as_published(other.sampler, batch),
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


# Pictures and words ---------------------------------------------------------------------------------------------------


WIDE = 0.25  # a range of the ratio that says little
AXES = {"parameters": "parameters of the model", "batch": "samples in a batch", "T": "timesteps T of the process"}


def draw(rows: list[dict[str, Any]]) -> Figure:
    """The overhead along each axis, and predicted against measured."""
    figure = Figure(figsize=(9.6, 7.2), layout="constrained")
    axes = figure.subplots(2, 2, sharey=True)
    samplers = list(dict.fromkeys(row["sampler"] for row in rows))
    for place, sampler in enumerate(samplers):
        look = {"color": COLOURS[place % len(COLOURS)], "marker": "o", "markersize": 5, "linestyle": "", "capsize": 3}
        aside = 1.04 ** (place - (len(samplers) - 1) / 2)  # so that ranges do not cover each other
        own = [row for row in rows if row["sampler"] == sampler]
        for axis, name in zip(axes.flat, AXES, strict=False):
            along = sorted((row for row in own if row["varied"] in (name, "none")), key=lambda row: row[name])
            places = [row[name] * aside for row in along]
            axis.plot(places, [row["predicted"] for row in along], color=look["color"], linestyle="--", linewidth=1)
            axis.errorbar(places, *_measured(along), **look, label=sampler)
        axes[1, 1].errorbar([row["predicted"] for row in own], *_measured(own), **look, alpha=0.8)
    for axis, (name, words) in zip(axes.flat, AXES.items(), strict=False):
        axis.axhline(1, color=GREY, linewidth=0.8)
        ticks = sorted({row[name] for row in rows})
        axis.set(xscale="log", xlabel=words, ylabel="time of a step over uniform's")
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axis.minorticks_off()
    ends = (0.97, 1.03 * max(row["predicted"] for row in rows))
    axes[1, 1].plot(ends, ends, color=GREY, linewidth=1, label="identity")
    axes[1, 1].legend(frameon=False)
    axes[1, 1].set(xlabel="predicted by the cost model", ylabel="measured", xlim=ends)
    axes[0, 0].plot([], [], color="black", linestyle="--", linewidth=1, label="predicted")
    axes[0, 0].plot([], [], color="black", linestyle="", marker="o", markersize=5, label="measured, with a 90 % range")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    return figure


def _measured(rows: list[dict[str, Any]]) -> tuple[list[float], list[list[float]]]:
    values = [row["measured"] for row in rows]
    below = [max(row["measured"] - row["low"], 0.0) for row in rows]
    return values, [below, [max(row["high"] - row["measured"], 0.0) for row in rows]]


def sentence(row: dict[str, Any]) -> str:
    account = "" if row["published"] is None else f", by the paper's own account {row['published']:.3f}"
    same = "as predicted" if abs(row["counted"] - row["predicted"]) < 1e-9 else f"predicted were {row['predicted']:.3f}"
    return (
        f"{row['sampler']}: predicted {row['predicted']:.3f}{account}, "
        f"measured {row['measured']:.3f} ({row['low']:.3f} to {row['high']:.3f}) "
        f"times uniform's step at {row['parameters']:,} parameters, batch {row['batch']}, T = {row['T']}; "
        f"an update, every {row['every']} steps, sent {row['forward']} samples forward "
        f"and {row['trained']} forward and back, {same}; "
        f"a plain step took {row['step_in_forwards']:.1f} forward passes (the model takes 3)"
    )


def section_9() -> str:
    """The paper's figure from its own assumptions, and ours for the same settings."""
    steps, batch = 1000, 128
    passes, exact = published(steps, batch, rounded=True), published(steps, batch)
    return (
        f"arXiv 2411.09998, section 9, at T = {steps}, batch {batch}, |S| = 3, f_S = 40: {passes:.3f} forward passes a step "
        f"over its {PAPER_STEP:.0f} are {passes / PAPER_STEP:.2f} ({exact:.3f}, {exact / PAPER_STEP:.2f}, without rounding an "
        f"update of {update(steps, batch):.1f} to {math.floor(update(steps, batch))}); it takes a backward pass for three "
        "forward ones and the policy for as dear as the model. "
        f"By samples through the model, a step taken as 3 forward passes, it is {by_samples(steps, batch):.2f}"
    )


# The command ----------------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    samplers = "adaptive,adaptive:estimator=lookahead,strata=4,horizon=2,gradient_variance,paper_cifar10"
    parser.add_argument("--preset", action="append", default=[], help="settings of the model and the data; default: digits")
    parser.add_argument("--samplers", default=samplers, help="specs, separated by commas")
    parser.add_argument("--widths", default="8,16,32", help="widths of the model; only one of these lists varies at a time")
    parser.add_argument("--batches", default="16,32,64", help="samples in a batch")
    parser.add_argument("--steps-of-process", default="100,300,1000", help="T of a discrete process")
    parser.add_argument("--seconds", type=float, default=1.0, help="about how long each measurement takes")


def whole_numbers(option: str, text: str) -> list[int]:
    """ "16,32" as numbers, in order."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise ValueError(f"{option} {text!r}: give whole numbers of at least 1, separated by commas, as in 16,32")
    return found


def settings(lists: dict[str, list[int]]) -> Iterator[tuple[str, dict[str, int]]]:
    """Every setting once, one list varied at a time around its middle; with the name of what was varied ("none": nothing)."""
    base = {name: values[len(values) // 2] for name, values in lists.items()}
    yield "none", base
    for name, values in lists.items():
        yield from ((name, {**base, name: value}) for value in values if value != base[name])


def analyse(options: argparse.Namespace, rest: list[str]) -> Analysis:
    if not options.seconds > 0:
        raise ValueError(f"--seconds must be positive, got {options.seconds}")
    texts = {"parameters": options.widths, "batch": options.batches, "T": options.steps_of_process}
    names = {"parameters": "--widths", "batch": "--batches", "T": "--steps-of-process"}
    lists = {name: whole_numbers(names[name], text) for name, text in texts.items()}
    for word, instead in (("--batch", "--batches"), ("--sampler", "--samplers")):
        if word in (given.partition("=")[0] for given in rest):
            raise ValueError(f"analyze overhead takes {instead}, which may be a single one, not {word}")
    samplers = split_specs(options.samplers)
    config = parse_config(
        config_parser(prog="noisewise analyze"), with_files(rest, options.preset or ["digits"]), [*names.values()]
    )
    plan = [(varied, configured(config, *sizes.values())) for varied, sizes in settings(lists)]
    for _, one in plan:
        for spec in samplers:
            replace(one, sampler=spec).check()
    rows = []
    for place, (varied, one) in enumerate(plan, 1):
        print(
            f"{place} of {len(plan)}: width {one.model.options[WIDTHS[one.model.name]]}, batch {one.batch}, {one.process}",
            flush=True,
        )
        with opened(replace(one, sampler="uniform", log=replace(one.log, trackers=[], samples_every=0))) as trainer:
            trainer.warm_up()
            rows += [{"varied": varied, **measure(trainer, spec, options.seconds)} for spec in samplers]
    says = [*(sentence(row) for row in rows if row["varied"] == "none"), section_9()]
    if any(row["high"] - row["low"] > WIDE for row in rows):
        says.append("some of the ranges are wide: is the machine busy? More --seconds, or OMP_NUM_THREADS=1, may help")
    return Analysis("overhead", draw(rows), rows, says)
