"""How well the approximate gain of arXiv 2411.09998 (Alg. 2) predicts the true one, by |S| and by selection.

The run goes on for `--steps` real training steps, which are taken back afterwards. Around each, the change of the loss
delta[k, level, sample] of fixed samples with fixed noise is measured on a grid of noise levels, in units of the target.

true gain         Delta_k: the mean of delta over all levels and samples
approximate gain  the mean of delta over the few levels S. S is selected from the `--queue` steps before k alone, so that step
                  k was never used for it; a row of the queue holds the delta of one sample (`--queue-images`), as published

Two questions are answered apart. *Few levels*: all samples, the levels of S alone; with all levels this is Delta itself. *One
sample*: the levels of S and one sample alone, the published reward, against the gain of all other samples; mean over samples.

*Credit*: the reward of a sample of the batch against the gain that this sample caused, which is what the step without it loses
(leave one out); a policy gradient learns from nothing else.
"""

import argparse
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from matplotlib.figure import Figure
from torch import Tensor

from noisewise.analysis.gradients import chosen_weighting
from noisewise.analysis.moments_of_training import FixedNoise, add_subject, fixed_noise, moments, rewound
from noisewise.analysis.output import Analysis, Watch, new_figure, plain_axis
from noisewise.feedback import evaluate
from noisewise.looking.palette import COLOURS
from noisewise.looking.validation import evaluation_mode
from noisewise.samplers.adaptive.selection import SELECTIONS, Selection, by_f_statistic
from noisewise.samplers.base import Draw, Sampler
from noisewise.training.trainer import Trainer

# How well changes at a few noise levels stand for the change at all of them: selection, approximation, correlation ----


RANDOM_SETS = 20


def largest_variance(changes: Tensor, size: int) -> Tensor:
    """The columns that vary most."""
    return changes.double().var(0).topk(size).indices


CHOICES: dict[str, Selection] = {**SELECTIONS, "largest_variance": largest_variance}


@dataclass(frozen=True)
class Quality:
    """Correlations, over steps, of the approximate gain with the true one."""

    selection: str
    size: int  # |S|
    few_pearson: float  # all samples, the levels of S
    few_spearman: float
    one_pearson: float  # one sample, the levels of S; mean over samples
    one_spearman: float
    low: float  # of few_pearson: the 10th and 90th percentile over random sets, itself for other selections
    high: float
    chance: float  # few_pearson if all levels were independent and varied alike: a part always correlates with its whole
    steps: int


def pearson(a: Tensor, b: Tensor) -> Tensor:
    """Of each column of `a` with that of `b`, 0 where one of them is constant."""
    a, b = a.double() - a.double().mean(0), b.double() - b.double().mean(0)
    norm = a.norm(dim=0) * b.norm(dim=0)
    return torch.where(norm > 0, (a * b).sum(0) / norm.clamp(min=1e-300), 0.0).clamp(-1, 1)


def ranks(values: Tensor) -> Tensor:
    """Within each column; equal values share the mean of their ranks."""
    columns = values.T.contiguous()
    ordered = columns.sort(1).values
    return (torch.searchsorted(ordered, columns) + torch.searchsorted(ordered, columns, right=True)).double().T / 2


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Pearson's correlation of ranks."""
    return pearson(ranks(a), ranks(b))


def rolling_sets(changes: Tensor, size: int, queue: int, queue_images: int, select: Selection) -> Tensor:
    """(steps - queue, size): the levels selected for each step from the `queue` steps before it.

    A row of the queue is the mean change of `queue_images` samples, other ones at every step.
    """
    steps, _, images = changes.shape
    some = (torch.arange(steps)[:, None] * queue_images + torch.arange(queue_images)) % images
    rows = torch.stack([changes[step][:, some[step]].mean(1) for step in range(steps)])
    return torch.stack([select(rows[step - queue : step], size) for step in range(queue, steps)])


def quality(changes: Tensor, sets: Tensor, selection: str) -> Quality:
    """Of one choice of levels, (steps, size), for those steps' changes, (steps, levels, samples)."""
    images = changes.shape[2]
    single = changes.gather(1, sets[:, :, None].expand(-1, -1, images)).mean(1)  # (steps, samples): rewards
    of_sample = changes.mean(1)
    truth = of_sample.mean(1, keepdim=True)
    # a sample is part of the mean over all samples: only the others can be predicted
    others = (truth * images - of_sample) / max(images - 1, 1)
    few = single.mean(1, keepdim=True)
    found = float(pearson(few, truth)[0])
    return Quality(
        selection,
        sets.shape[1],
        found,
        float(spearman(few, truth)[0]),
        float(pearson(single, others).mean()),
        float(spearman(single, others).mean()),
        found,
        found,
        math.sqrt(sets.shape[1] / changes.shape[1]),
        len(changes),
    )


def qualities(changes: Tensor, sizes: list[int], queue: int, queue_images: int = 1) -> list[Quality]:
    """Of every selection and size, and of all levels; `changes` is (steps, levels, samples), weighted by the target."""
    steps, levels, _ = changes.shape
    if steps <= queue:
        raise ValueError(f"{steps} steps leave none to predict after a queue of {queue}")
    later, found = changes[queue:], []
    for size in sizes:
        for name, select in CHOICES.items():
            found.append(quality(later, rolling_sets(changes, size, queue, queue_images, select), name))
        found.append(of_random_sets(later, size))
    every = torch.arange(levels).expand(len(later), levels)
    return [*found, quality(later, every, "all")]


def of_random_sets(changes: Tensor, size: int) -> Quality:
    """The mean over some sets of levels, each the same for all steps."""
    steps, levels, _ = changes.shape
    orders = [torch.randperm(levels, generator=torch.Generator().manual_seed(seed)) for seed in range(RANDOM_SETS)]
    each = [quality(changes, order[:size].expand(steps, size), "random") for order in orders]
    names = ("few_pearson", "few_spearman", "one_pearson", "one_spearman")
    means = {name: sum(getattr(one, name) for one in each) / len(each) for name in names}
    few = torch.tensor([one.few_pearson for one in each])
    return replace(each[0], **means, low=float(few.quantile(0.1)), high=float(few.quantile(0.9)))


# Credit: a reward against the gain that its sample caused, found by leaving it out ------------------------------------


# One training step is made with the whole batch, and once more without each of some samples (weight 0 in the loss). What the
# objective loses without a sample is the gain that this sample caused; its reward is the change of its own loss over the step
# with all of them, as in Algorithm 2 of arXiv 2411.09998.
STREAM = 0x637265646974  # "credit": the noise of the rewards


@dataclass(frozen=True)
class Credit:
    """Correlations over samples of the reward, on the levels of S and on all, with the gain caused."""

    size: int  # |S|
    few: tuple[float, float]  # Pearson, Spearman
    every: tuple[float, float]
    levels: int
    samples: int

    def rows(self) -> list[dict[str, Any]]:
        both = ((self.size, self.few), (self.levels, self.every))
        return [
            {"selection": "credit", "size": size, "one_pearson": found[0], "one_spearman": found[1], "steps": self.samples}
            for size, found in both
        ]

    def finding(self) -> str:
        return (
            f"over {self.samples} samples of one batch, the reward correlates {self.few[0]:+.2f} with the gain that the sample "
            f"itself caused ({self.every[0]:+.2f} with all levels; chance alone gives up to ±{2 / self.samples**0.5:.2f})."
        )


class Without:
    """A sampler that gives one row of its first batch no weight."""

    def __init__(self, sampler: Sampler, row: int) -> None:
        self.sampler, self.row, self.drawn = sampler, row, False

    def sample(self, x0: Tensor) -> Draw:
        draw = self.sampler.sample(x0)
        if self.drawn:
            return draw
        self.drawn = True
        return replace(draw, weight=draw.weight.index_fill(0, torch.tensor([self.row], device=draw.weight.device), 0.0))

    def observe(self, *args: Any) -> AbstractContextManager[None]:
        return self.sampler.observe(*args)


def leave_one_out(
    trainer: Trainer, fixed: FixedNoise, weight: Tensor, count: int, advance: Callable[[], None] = lambda: None
) -> tuple[Tensor, Tensor]:
    """For the first `count` samples of the next batch: (count, levels) rewards, and the (count,) gains that each caused."""
    device, levels = trainer.device, len(fixed.u)
    x0, labels = trainer.batches.get(trainer.samples)
    loss_at = trainer.loss_at(x0, labels if trainer.parts.classes else None)
    rows = torch.arange(count, device=device).repeat_interleave(levels)
    u = fixed.u.to(device).repeat(count)
    probe = partial(evaluate, loss_at, rows, u, most=512, seed=STREAM % 2**31, model=trainer.model)
    with evaluation_mode(trainer.network):
        before = probe()
    with rewound(trainer):
        trainer.training_step()
        with evaluation_mode(trainer.network):
            after = probe()
        reached = _objective(trainer, fixed, weight)
    caused = []
    for row in range(count):
        with rewound(trainer):
            trainer.sampler = cast(Sampler, Without(trainer.sampler, row))
            trainer.training_step()
            caused.append(_objective(trainer, fixed, weight) - reached)
        advance()
    return (before - after).double().cpu().view(count, levels) * weight, torch.tensor(caused, dtype=torch.float64)


def _objective(trainer: Trainer, fixed: FixedNoise, weight: Tensor) -> float:
    return float((weight[:, None] * fixed.losses(trainer)).mean())


def credit_of(rewards: Tensor, caused: Tensor, selected: Tensor) -> Credit:
    """The correlations, for the levels `selected` and for all."""
    few, every = (
        (float(pearson(values[:, None], caused[:, None])[0]), float(spearman(values[:, None], caused[:, None])[0]))
        for values in (rewards[:, selected].mean(1), rewards.mean(1))
    )
    return Credit(len(selected), few, every, rewards.shape[1], len(caused))


# The analysis ---------------------------------------------------------------------------------------------------------


PUBLISHED = 3  # |S| of the paper
NAMES = {
    "f_statistic": "F-statistic (published)",
    "correlation": "F-statistic less redundancy",
    "largest_variance": "largest variance",
    "grid": "evenly spaced",
    "random": "random",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    add_subject(parser, budget="400it", points=2)
    parser.add_argument("--steps", type=int, default=80, help="training steps at each moment; the first --queue are for S only")
    parser.add_argument("--levels", type=int, default=40, help="noise levels of the grid")
    parser.add_argument("--images", type=int, default=24, help="samples to evaluate at each level")
    parser.add_argument("--sizes", default="1,2,3,5,10,20", help="|S|, separated by commas")
    parser.add_argument("--queue", type=int, default=20, help="steps that S is selected from (|Q|)")
    parser.add_argument("--queue-images", type=int, default=1, help="samples in a row of the queue; 1 is the paper's")
    parser.add_argument("--target", default="plain", help="weight of the levels in the gain: plain, vlb, or a weighting's spec")
    parser.add_argument("--credit", type=int, default=24, help="samples of the batch to leave out one by one; 0 for none")


def analyse(options: argparse.Namespace, rest: list[str]) -> Analysis:
    weighting, sizes = chosen_weighting(options.target), parse_sizes(options.sizes, options.levels)
    if options.queue < 3:
        raise ValueError(f"--queue must be >= 3, for a correlation to select by, got {options.queue}")
    if options.steps < options.queue + 5:
        raise ValueError(f"--steps must be at least --queue + 5 = {options.queue + 5}, to predict some, got {options.steps}")
    if not 1 <= options.queue_images <= options.images:
        raise ValueError(f"--queue-images must lie in 1 ... {options.images} (--images), got {options.queue_images}")
    if options.credit and options.credit < 5:
        raise ValueError(f"--credit must be 0 or at least 5, for a correlation, got {options.credit}")
    found: list[tuple[int, list[Quality]]] = []
    credits: list[tuple[int, Credit]] = []
    with Watch().shown() as watch:
        fixed: FixedNoise | None = None
        for trainer in moments(options, rest, watch.tell):
            fixed = fixed or fixed_noise(trainer, options.levels, options.images, watch.tell)
            count = min(options.credit, trainer.config.micro_batch)
            with watch.moment(trainer, options.steps + count):
                weight = weighting.to(trainer.device).weights(trainer.objective, fixed.u.to(trainer.device)).double().cpu()
                changes = step_changes(trainer, fixed, options.steps, watch.advance) * weight[:, None]
                found.append((trainer.step, qualities(changes, sizes, options.queue, options.queue_images)))
                if count:
                    selected = by_f_statistic(changes[-options.queue :, :, 0], min(PUBLISHED, options.levels))
                    rewards, caused = leave_one_out(trainer, fixed, weight, count, watch.advance)
                    credits.append((trainer.step, credit_of(rewards, caused, selected)))
    assert fixed is not None
    title = f"{trainer.config.name}: how well the change at a few noise levels predicts the gain of a step"
    says = [finding for step, quality in found for finding in findings(step, quality)]
    says += [f"Step {step}: {credit.finding()}" for step, credit in credits]
    says.append(cost(options, trainer.config.batch, count, fixed.size, len(found)))
    return Analysis("predictor", draw(found, options.levels, title), table(found, credits), says)


def parse_sizes(text: str, levels: int) -> list[int]:
    """The sizes of S, in order."""
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"--sizes {text!r}: give whole numbers separated by commas, as in 1,3,10") from None
    if sizes[0] < 1 or sizes[-1] > levels:
        raise ValueError(f"--sizes must lie in 1 ... {levels}, the number of levels, got {text}")
    return sizes


def step_changes(trainer: Trainer, fixed: FixedNoise, steps: int, advance: Callable[[], None] = lambda: None) -> Tensor:
    """(steps, levels, samples): how much each of the next training steps lowers the loss; the steps are taken back."""
    with rewound(trainer):
        losses = [fixed.losses(trainer)]
        for _ in range(steps):
            trainer.training_step()
            losses.append(fixed.losses(trainer))
            advance()
    every = torch.stack(losses)
    return every[:-1] - every[1:]


def findings(step: int, found: list[Quality]) -> list[str]:
    """What the numbers say of the published choice."""
    by_name = {(one.selection, one.size): one for one in found}
    size = PUBLISHED if ("f_statistic", PUBLISHED) in by_name else found[0].size
    published, spaced, every = (
        by_name["f_statistic", size],
        by_name["grid", size],
        next(q for q in found if q.selection == "all"),
    )
    return [
        f"Step {step}: with |S| = {size} the F-statistic's levels give a correlation of {published.few_pearson:.2f} with the "
        f"true gain over {published.steps} steps (evenly spaced {spaced.few_pearson:.2f}; {published.chance:.2f} if levels "
        f"were independent); on one sample {published.one_pearson:.2f}, and {every.one_pearson:.2f} with all levels."
    ]


def cost(options: argparse.Namespace, batch: int, credited: int, size: int, count: int) -> str:
    """What it took, with so many samples of a batch credited."""
    trained = count * (options.steps + (1 + credited if credited else 0)) * batch
    evaluated = count * (options.steps + 1 + (1 + credited if credited else 0)) * size
    evaluated += count * 2 * credited * options.levels
    return f"Cost: {trained:,} samples forward and backward, and {evaluated:,} forward to evaluate, over {count} moments."


def table(found: list[tuple[int, list[Quality]]], credits: list[tuple[int, Credit]]) -> list[dict[str, Any]]:
    """A line for each moment, selection and size of S; credit stands in lines of its own."""
    rows = [{"step": step, **asdict(quality)} for step, every in found for quality in every]
    blank = dict.fromkeys(rows[0])
    return rows + [{**blank, "step": step, **row} for step, credit in credits for row in credit.rows()]


def draw(found: list[tuple[int, list[Quality]]], levels: int, title: str) -> Figure:
    """A column for each moment; above all samples at few levels, below one sample."""
    figure = new_figure(0.8 + 3.4 * len(found), 7.4)
    axes = figure.subplots(2, len(found), squeeze=False, sharex=True, sharey=True)
    for column, (step, every) in enumerate(found):
        for axis, field in ((axes[0, column], "few_pearson"), (axes[1, column], "one_pearson")):
            for colour, (selection, name) in zip(COLOURS, NAMES.items(), strict=False):
                chosen = [one for one in every if one.selection == selection]
                sizes, values = [one.size for one in chosen], [getattr(one, field) for one in chosen]
                wide = 2.2 if selection == "f_statistic" else 1.3
                axis.plot(sizes, values, color=colour, linewidth=wide, marker="o", markersize=4, label=name)
                if selection == "random" and field == "few_pearson":
                    low, high = [one.low for one in chosen], [one.high for one in chosen]
                    axis.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
            ceiling = next(getattr(one, field) for one in every if one.selection == "all")
            axis.axhline(ceiling, color="black", linewidth=1, linestyle="--", label=f"all {levels} levels")
            axis.set_xscale("log")
            axis.set_xticks(sizes, labels=[str(size) for size in sizes])
            axis.minorticks_off()
            axis.axhline(0, color="black", linewidth=0.6)
            plain_axis(axis)
        chance = [one.chance for one in chosen]
        axes[0, column].plot(sizes, chance, color="black", linewidth=1, linestyle=":", label="if levels were independent")
        axes[0, column].set_title(f"step {step:,}: few levels, all samples", fontsize=10)
        axes[1, column].set_title(f"step {step:,}: few levels, one sample (the reward)", fontsize=10)
        axes[1, column].set_xlabel("noise levels selected, |S|")
    for axis in axes[:, 0]:
        axis.set_ylabel("correlation with the true gain (Pearson)")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    return figure
