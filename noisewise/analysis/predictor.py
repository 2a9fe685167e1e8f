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
from collections.abc import Callable
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from noisewise.analysis.gain_quality import Credit, Quality, credit_of, leave_one_out, qualities
from noisewise.analysis.gradients import chosen_weighting
from noisewise.analysis.moments_of_training import FixedNoise, add_subject, fixed_noise, moments, rewound
from noisewise.analysis.output import Analysis, Watch, new_figure, plain_axis
from noisewise.looking.palette import COLOURS
from noisewise.samplers.adaptive.selection import by_f_statistic
from noisewise.training.trainer import Trainer

PUBLISHED = 3  # |S| of the paper
NAMES = {
    "f_statistic": "F-statistic (published)",
    "correlation": "F-statistic less redundancy",
    "largest_variance": "largest variance",
    "grid": "evenly spaced",
    "random": "random",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """How many steps, on what grid, and which sizes of S."""
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
    """Measure at each moment, and draw."""
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
    rows = [{"step": step, **quality.row()} for step, every in found for quality in every]
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
