"""What training some noise levels does to the loss of all others (arXiv 2411.09998, Fig. 4), and the whole matrix of it.

From each moment of training: train for `--steps` steps with draws from one interval of u alone (or a `--share` of them), with
the run's own optimizer, learning rate, clipping, data, and weighting or sampler's target; evaluate the loss of fixed samples
with fixed noise before and after; take everything back bit for bit. Every trial sees the same data and noise. Adam's momentum
starts at zero in each trial: it would carry on what was trained before, and be taken for an effect of the interval.
"""

import argparse
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure
from torch import Tensor

from noisewise.analysis.moments_of_training import (
    FixedNoise,
    RangeSampler,
    add_subject,
    check_range,
    fixed_noise,
    forget_momentum,
    moments,
    rewound,
)
from noisewise.analysis.output import NOISE, Analysis, Watch, new_figure, noise_axis, plain_axis
from noisewise.looking.palette import COLOURS
from noisewise.training.trainer import Trainer

Range = tuple[float, float]
SHOWN: tuple[Range, ...] = ((0.0, 0.1), (0.4, 0.5), (0.9, 1.0))  # unless others are asked for


def add_options(parser: argparse.ArgumentParser) -> None:
    add_subject(parser, budget="400it", points=2)
    parser.add_argument("--strata", type=int, default=10, help="equal intervals of u for the matrix, each trained alone")
    parser.add_argument(
        "--range", action="append", type=parse_range, help="LOW,HIGH: also train this interval of u; repeatable"
    )
    parser.add_argument("--steps", type=int, default=25, help="steps of each trial")
    parser.add_argument("--share", type=float, default=1.0, help="share of the batch in the interval; the rest is uniform")
    parser.add_argument("--levels", type=int, default=50, help="noise levels to evaluate (rounded up to fill the strata)")
    parser.add_argument("--images", type=int, default=48, help="samples to evaluate at each level")


def parse_range(text: str) -> Range:
    """An interval of u, as in 0.0,0.1."""
    try:
        low, high = map(float, text.split(","))
        check_range(low, high)
    except ValueError as error:
        reason = error if "range of noise levels" in str(error) else f"{text!r} is no range: write LOW,HIGH as in 0.0,0.1"
        raise argparse.ArgumentTypeError(str(reason)) from None
    return low, high


@dataclass(frozen=True)
class Trial:
    """Losses (levels, samples) before and after the training of one interval."""

    trained: Range
    before: Tensor
    after: Tensor

    @property
    def change(self) -> Tensor:
        """Of the mean loss at each level; negative where training helped."""
        return (self.after - self.before).mean(1)

    @property
    def error(self) -> Tensor:
        """The standard error of the change, over samples."""
        return (self.after - self.before).std(1) / self.before.shape[1] ** 0.5


def try_ranges(
    trainer: Trainer,
    fixed: FixedNoise,
    ranges: list[Range],
    steps: int,
    share: float = 1.0,
    advance: Callable[[], None] = lambda: None,
) -> list[Trial]:
    """Train each of these intervals from here, and take it back."""
    if steps < 1:
        raise ValueError(f"--steps must be >= 1, got {steps}")
    before, trials = fixed.losses(trainer), []
    for low, high in ranges:
        sampler = RangeSampler(trainer.objective.process, low, high, share, trainer.config.seed, trainer.sampler)
        sampler.to(trainer.device).step = trainer.step
        with rewound(trainer):
            forget_momentum(trainer.optimizer)
            trainer.sampler = sampler
            for _ in range(steps):
                trainer.training_step()
            trials.append(Trial((low, high), before, fixed.losses(trainer)))
        advance()
    return trials


def strata_ranges(strata: int) -> list[Range]:
    """Equal intervals of u."""
    if strata < 1:
        raise ValueError(f"--strata must be >= 1, got {strata}")
    return [(i / strata, (i + 1) / strata) for i in range(strata)]


@dataclass(frozen=True)
class Matrix:
    """[j, i]: what training stratum j did to the mean loss of stratum i."""

    change: Tensor
    before: Tensor  # the loss of each stratum i

    @property
    def relative(self) -> Tensor:
        """The change over the loss before."""
        return self.change / self.before.clamp(min=1e-30)

    def off_diagonal(self) -> float:
        """How much of all relative change falls on strata that were not trained."""
        size = self.relative.abs()
        return float(1 - size.diagonal().sum() / size.sum().clamp(min=1e-30))

    def harmed(self) -> float:
        """The share of pairs of different strata where training one raised the loss of the other."""
        others = ~torch.eye(len(self.change), dtype=torch.bool)
        return float((self.change[others] > 0).double().mean()) if others.any() else 0.0


def matrix_of(trials: list[Trial]) -> Matrix:
    """The trials of all strata, as a matrix over strata."""
    strata = len(trials)
    change = torch.stack([trial.change.view(strata, -1).mean(1) for trial in trials])
    return Matrix(change, trials[0].before.mean(1).view(strata, -1).mean(1))


def analyse(options: argparse.Namespace, rest: list[str]) -> Analysis:
    strata = strata_ranges(options.strata)
    shown: list[Range] = options.range or list(SHOWN)
    extra = [asked for asked in shown if asked not in strata]
    levels = -(-options.levels // options.strata) * options.strata
    found: list[tuple[int, list[Trial], list[Trial]]] = []
    with Watch().shown() as watch:
        fixed: FixedNoise | None = None
        for trainer in moments(options, rest, watch.tell):
            fixed = fixed or fixed_noise(trainer, levels, options.images, watch.tell)
            with watch.moment(trainer, len(strata) + len(extra)):
                trials = try_ranges(trainer, fixed, [*strata, *extra], options.steps, options.share, watch.advance)
            by_range = {trial.trained: trial for trial in trials}
            found.append((trainer.step, trials[: len(strata)], [by_range[asked] for asked in shown]))
    assert fixed is not None
    figure = draw(found, fixed, f"{trainer.config.name}: what {options.steps} steps on one interval of noise levels do")
    kind = "held-out" if fixed.held_out else "training"
    samples = len(found) * len(by_range) * options.steps * trainer.config.batch
    evaluated = len(found) * (1 + len(by_range)) * fixed.size
    says = [
        *(_finding(step, matrix_of(trials)) for step, trials, _ in found),
        f"Cost: {len(found) * len(by_range)} trials of {options.steps} steps = {samples:,} samples forward and backward, and "
        f"{evaluated:,} forward to evaluate ({kind} samples, the same noise throughout).",
    ]
    return Analysis("interdependence", figure, table(found, fixed), says)


def _finding(step: int, matrix: Matrix) -> str:
    return (
        f"Step {step}: {matrix.off_diagonal():.0%} of the relative change of the loss falls on noise levels that were not "
        f"trained; {matrix.harmed():.0%} of the pairs of strata harm one another."
    )


def table(found: list[tuple[int, list[Trial], list[Trial]]], fixed: FixedNoise) -> list[dict[str, Any]]:
    """A line for each moment, trained interval and noise level; those of the matrix are means over a stratum."""
    rows = []
    for step, strata, _ in found:
        matrix = matrix_of(strata)
        for j, trial in enumerate(strata):
            for i, other in enumerate(strata):
                rows.append(_row(step, "stratum", trial.trained, other.trained, matrix.before[i], matrix.change[j, i], None))
    width = 1 / len(fixed.u)
    for step, _, ranges in found:
        for trial in ranges:
            for i in range(len(fixed.u)):
                affected = (i * width, (i + 1) * width)
                before = trial.before.mean(1)[i]
                rows.append(_row(step, "range", trial.trained, affected, before, trial.change[i], float(trial.error[i])))
    return rows


def _row(
    step: int, kind: str, trained: Range, affected: Range, before: Tensor, change: Tensor, error: float | None
) -> dict[str, Any]:
    return {
        "step": step,
        "kind": kind,
        "trained_low": round(trained[0], 6),
        "trained_high": round(trained[1], 6),
        "affected_low": round(affected[0], 6),
        "affected_high": round(affected[1], 6),
        "loss_before": float(before),
        "change": float(change),
        "change_error": error,
        "relative_change": float(change / before.clamp(min=1e-30)),
    }


# The picture --------------------------------------------------------------------------------------------------------


def draw(found: list[tuple[int, list[Trial], list[Trial]]], fixed: FixedNoise, title: str) -> Figure:
    """A column for each moment: the matrix relative to the loss, the matrix itself, and the chosen intervals as lines."""
    figure = new_figure(1.6 + 3.1 * len(found), 9.6)
    axes = figure.subplots(3, len(found), squeeze=False, sharey="row")
    matrices = [matrix_of(strata) for _, strata, _ in found]
    _heat_maps(axes[0], [matrix.relative * 100 for matrix in matrices], "relative change of the loss, %", near=10.0)
    _heat_maps(axes[1], [matrix.change for matrix in matrices], "change of the loss", near=None)
    for axis, (step, _, ranges) in zip(axes[2], found, strict=True):
        _lines(axis, ranges, fixed.u)
        axis.set_title(f"step {step:,}", fontsize=10)
    for row in axes[:2]:
        for axis, (step, _, _) in zip(row, found, strict=True):
            axis.set_title(f"step {step:,}", fontsize=10)
    axes[2, 0].set_ylabel("relative change of the loss, %", fontsize=9)
    axes[2, 0].legend(frameon=False, fontsize=8)
    if max(abs(edge) for edge in axes[2, 0].get_ylim()) > 150:  # harm has no bound, help has
        axes[2, 0].set_yscale("symlog", linthresh=10, linscale=0.7)
        axes[2, 0].yaxis.set_major_formatter(lambda value, _: f"{value:+,.0f}" if value else "0")
    figure.suptitle(f"{title}\nblue: the loss fell; red: it rose; dotted: where a level was trained itself", fontsize=11)
    return figure


def _heat_maps(axes: Any, matrices: list[Tensor], label: str, near: float | None) -> None:
    """One scale of colours for all moments, centred at 0: linear up to `near`, logarithmic beyond."""
    limit = max(max(float(matrix.abs().max()) for matrix in matrices), 1e-12)
    near = 10.0 ** (math.floor(math.log10(limit)) - 2) if near is None or limit <= near else near
    norm = SymLogNorm(linthresh=near, vmin=-limit, vmax=limit, base=10)
    for axis, matrix in zip(axes, matrices, strict=True):
        image = axis.imshow(matrix.numpy(), origin="lower", extent=(0, 1, 0, 1), cmap="RdBu_r", norm=norm, aspect="equal")
        axis.plot([0, 1], [0, 1], color="black", linewidth=0.8, alpha=0.6, linestyle=":")
        axis.set_xlabel("affected noise level u", fontsize=9)
    axes[0].set_ylabel("trained noise level u", fontsize=9)
    bar = axes[0].figure.colorbar(image, ax=list(axes), fraction=0.03, pad=0.02)
    sizes = [near * 10.0**k for k in range(math.floor(math.log10(limit / near) + 1e-9) + 1)]
    ticks = [*(-size for size in reversed(sizes)), 0.0, *sizes]
    bar.set_ticks(ticks, labels=[f"{tick:+,g}" if tick else "0" for tick in ticks])
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=8)
    bar.set_label(label, fontsize=9)


def _lines(axis: Any, ranges: list[Trial], u: Tensor) -> None:
    for colour, trial in zip(itertools.cycle(COLOURS), ranges):
        before = trial.before.mean(1).clamp(min=1e-30)
        change, error = (trial.change / before * 100).numpy(), (trial.error / before * 100).numpy()
        low, high = trial.trained
        axis.axvspan(low, high, color=colour, alpha=0.12, linewidth=0)
        axis.plot(u, change, color=colour, linewidth=1.5, label=f"trained {low:g} to {high:g}")
        axis.fill_between(u, change - error, change + error, color=colour, alpha=0.25, linewidth=0)
    axis.axhline(0, color="black", linewidth=0.8)
    noise_axis(axis)
    axis.set_xlabel(NOISE, fontsize=9)
    plain_axis(axis)
