"""Which noise levels are trained, over u and over log SNR (arXiv 2411.09998, Figs. 5 and 6).

Two densities, both with mean 1 over u, so that 1 is what uniform sampling without weights does:

    draws       p(u), how often a noise level is drawn
    objective   p(u) w(u), normalised: how much it counts, importance and loss weights included. This is a weight turned into a
                probability, so that weightings and samplers can be compared

A density over u becomes one over log SNR by |du / d log SNR|: p(u) / |d log SNR / du|. Its integral stays 1, but for what a
process draws where nothing is left of the data (log SNR of minus infinity), which has no place on that axis.
"""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from noisewise import recipes
from noisewise.analysis.output import Analysis
from noisewise.levels import middles
from noisewise.looking.palette import COLOURS, GREY
from noisewise.looking.recipe_curves import preview
from noisewise.processes import Process
from noisewise.report.charts import doublings
from noisewise.report.figures import DENSITY, add_scale, folded
from noisewise.spec import build_process, split_specs
from noisewise.study.outcome import Outcome, read_comparison, read_outcome

# A density is a list of means over equal intervals of u, whose own mean is 1 ------------------------------------------


MOMENTS = 200  # of a run's training, at most, in pictures and data
CONTINUOUS = 2000  # intervals of u that stand for continuous time


@dataclass(frozen=True)
class History:
    """The densities of one sampler, in equal intervals of u, at some steps of training (or at step 0, for a preview)."""

    label: str
    process: Process
    steps: list[int]
    draws: np.ndarray  # (moments, intervals)
    objective: np.ndarray

    @property
    def u(self) -> np.ndarray:
        """The middle of each interval."""
        return (np.arange(self.draws.shape[1]) + 0.5) / self.draws.shape[1]

    @property
    def weighted(self) -> bool:
        """Whether the objective differs from the draws at any moment."""
        return not np.allclose(self.draws, self.objective, rtol=0.02, atol=0.01)


def normalised(values: np.ndarray) -> np.ndarray:
    """Each row with mean 1."""
    return values / values.mean(-1, keepdims=True)


def refined(density: np.ndarray, intervals: int) -> np.ndarray:
    """A density that is constant in equal intervals of u, as its means over another number of them."""
    mass = np.concatenate([[0], np.cumsum(density)]) / len(density)
    edges = np.arange(intervals + 1) / intervals
    return np.diff(np.interp(edges, np.arange(len(density) + 1) / len(density), mass)) * intervals


def smooth(density: np.ndarray) -> np.ndarray:
    """Straight lines between the middles of its intervals instead of steps, which over log SNR would be teeth."""
    n = len(density)
    fine = (np.arange(CONTINUOUS) + 0.5) / CONTINUOUS
    return normalised(np.interp(fine, (np.arange(n) + 0.5) / n, density))


def over_log_snr(process: Process, density: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """log SNR, falling, and the density over it, for a density in equal intervals of u.

    A discrete process has one point for each timestep, continuous time 2,000; points without a finite log SNR are left out.
    """
    n = process.steps or CONTINUOUS
    u = middles(n, dtype=torch.float64)
    log_snr, rate = process.log_snr(u).numpy(), process.log_snr_rate(u).numpy()
    finite = np.isfinite(log_snr)
    return log_snr[finite], (refined(density, n) / np.abs(rate))[finite]


def no_signal(process: Process, density: np.ndarray) -> float:
    """The share of a density that lies where log SNR is minus infinity."""
    n = process.steps or CONTINUOUS
    u = middles(n, dtype=torch.float64)
    return float(refined(density, n)[np.isinf(process.log_snr(u).numpy())].sum() / n)


def median(density: np.ndarray) -> float:
    """Where half of a density lies, as u."""
    mass = np.concatenate([[0], np.cumsum(density)])
    return float(np.interp(mass[-1] / 2, mass, np.linspace(0, 1, len(mass))))


# Where densities come from --------------------------------------------------------------------------------------------


def of_spec(spec: str, process: Process) -> History:
    """A sampler and its weighting before training."""
    recipe = recipes.recipe(spec, process)
    curves = preview(recipe.sampler, recipe.weighting, process)
    return History(spec, process, [0], normalised(curves.p[None]), normalised(curves.pw[None]))


def of_run(outcome: Outcome, label: str) -> History:
    """A run, from its rows of metrics."""
    rows = [row for row in outcome.metrics() if "density_by_level" in row]
    if not rows:
        raise ValueError(
            f"{outcome.folder} has no density in its metrics.jsonl yet: let it train up to its first row (log.every)"
        )
    rows = [rows[i] for i in np.unique(np.linspace(0, len(rows) - 1, min(len(rows), MOMENTS)).round().astype(int))]
    draws, objective = (np.array([row[key] for row in rows]) for key in ("density_by_level", "objective_by_level"))
    process = build_process(outcome.process)
    return History(label, process, [row["step"] for row in rows], normalised(draws), normalised(objective))


def of_runs(outcomes: Sequence[Outcome]) -> list[History]:
    """Runs, each named by what tells it apart from the others."""
    parts = {"sampler": [o.sampler for o in outcomes], "process": [o.process for o in outcomes]}
    parts["seed"] = [f"seed {o.seed}" for o in outcomes]
    kept = ["sampler", *(name for name in ("process", "seed") if len(set(parts[name])) > 1)]
    labels = [", ".join(parts[name][i] for name in kept) for i in range(len(outcomes))]
    return [of_run(outcome, label) for outcome, label in zip(outcomes, labels, strict=True)]


def one_seed_each(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The first run of each sampler and process that has trained for long enough to have a density."""
    begun = [outcome for outcome in outcomes if any("density_by_level" in row for row in outcome.metrics())]
    found: dict[tuple[str, str], Outcome] = {}
    for outcome in begun:
        found.setdefault((outcome.process, outcome.sampler), outcome)
    return list(found.values())


REACH = 3  # doublings and halvings of uniform that the colours tell apart


def rows_of(history: History) -> list[dict[str, Any]]:
    """A row for each moment and interval of u."""
    u = torch.from_numpy(history.u)
    log_snr, rate = history.process.log_snr(u).tolist(), history.process.log_snr_rate(u).abs().tolist()
    return [
        {
            "sampler": history.label,
            "step": step,
            "u": at,
            "log_snr": log_snr[k],
            "density": history.draws[i, k],
            "objective": history.objective[i, k],
            "density_over_log_snr": history.draws[i, k] / rate[k],
        }
        for i, step in enumerate(history.steps)
        for k, at in enumerate(history.u.tolist())
    ]


def sentence(history: History) -> str:
    """Where draws and objective lie in the end."""
    end = f"at step {history.steps[-1]} " if history.steps[-1] else ""
    said = f"{history.label}: {end}half of the draws are below u = {median(history.draws[-1]):.3f}"
    if history.weighted:
        said += f", half of the objective below {median(history.objective[-1]):.3f}"
    lost = no_signal(history.process, history.draws[-1])
    return said + (f"; {lost:.1%} of the draws have no signal at all and no place over log SNR" if lost else "")


# Pictures -------------------------------------------------------------------------------------------------------------


def draw_static(histories: Sequence[History]) -> Figure:
    """Draws above, objective below; over u and over log SNR."""
    figure = Figure(figsize=(9.6, 6.2), layout="constrained")
    axes = figure.subplots(2, 2, sharex="col")
    shown: list[list[np.ndarray]] = [[], []]
    for history, colour in zip(histories, _colours(histories), strict=True):
        for row, values, before in zip(axes, (history.draws[0], history.objective[0]), shown, strict=True):
            style = _style(values, before)
            row[0].plot(history.u, values, color=colour, linestyle=style)
            row[1].plot(*over_log_snr(history.process, values), color=colour, linestyle=style)
            before.append(values)
        axes[0, 0].plot([], [], color=colour, label=history.label)
    for row, words in zip(axes, ("how often drawn: p", "how much it counts: p·w"), strict=True):
        row[0].set(ylabel=f"{words}\n(1: as uniform)", ylim=(0, None), xlim=(0, 1))
        row[1].set(ylabel="per unit of log SNR", ylim=(0, None))
    axes[1, 0].set(xlabel="u (0: least noise, 1: most)")
    _log_snr_axis(axes[1, 1])
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    return figure


def draw_runs(histories: Sequence[History]) -> Figure:
    """A column for each run: through training above, at its start, middle and end below."""
    maps = [("draws", "how often drawn: p")]
    if any(history.weighted for history in histories):
        maps.append(("objective", "how much it counts: p·w"))
    figure = Figure(figsize=(3.4 * len(histories) + 0.8, 2.3 * (len(maps) + 2)), layout="constrained")
    axes = figure.subplots(len(maps) + 2, len(histories), squeeze=False, sharey="row")
    for column, (history, colour) in enumerate(zip(histories, _colours(histories), strict=True)):
        axes[0, column].set_title(folded(history.label, 30), color=colour, fontsize=10, fontweight="bold")
        for axis, (name, words) in zip(axes[:, column], maps, strict=False):
            edges = np.linspace(0, 1, history.draws.shape[1] + 1)
            values = doublings(getattr(history, name).T, REACH)
            image = axis.pcolormesh([0, *history.steps], edges, values, cmap=DENSITY, vmin=-REACH, vmax=REACH)
            axis.set(xlabel="training step")
            if column == 0:
                axis.set(ylabel=f"{words}\nu (0: least noise)")
        _curves(axes[-2, column], axes[-1, column], history, colour)
    axes[-2, 0].set(ylabel="relative to uniform", ylim=(0, None))
    axes[-1, 0].set(ylabel="per unit of log SNR", ylim=(0, None))
    add_scale(figure, image, REACH, ax=axes[: len(maps), -1], label="relative to uniform")
    return figure


def _curves(over_u: Any, over_snr: Any, history: History, colour: str) -> None:
    """The draws at the start, the middle and the end, darker with time; the last objective dashed."""
    last = len(history.steps) - 1
    moments = sorted({0, last // 2, last})
    for strength, i in zip(np.linspace(0.3, 1, len(moments)) if last else [1.0], moments, strict=True):
        edges = np.linspace(0, 1, history.draws.shape[1] + 1)
        over_u.stairs(history.draws[i], edges, baseline=None, color=colour, alpha=strength, linewidth=1.5)
        over_snr.plot(*over_log_snr(history.process, smooth(history.draws[i])), color=colour, alpha=strength)
        over_u.plot([], [], color=colour, alpha=strength, label=f"p, step {history.steps[i]:,}")
    if history.weighted:
        words = f"p·w, step {history.steps[last]:,}"
        over_u.plot(history.u, history.objective[last], color="black", linestyle=":", label=words)
        over_snr.plot(*over_log_snr(history.process, smooth(history.objective[last])), color="black", linestyle=":")
    over_u.set(xlabel="u (0: least noise, 1: most)", xlim=(0, 1))
    over_u.legend(frameon=False, fontsize=7)
    _log_snr_axis(over_snr)


def _style(values: np.ndarray, before: Sequence[np.ndarray]) -> Any:
    """Solid; dashed, with gaps for the others, where a curve covers earlier ones."""
    covered = sum(np.allclose(values, other, atol=0.01) for other in before)
    return (5 * covered, (5, 15)) if covered else "-"


def _log_snr_axis(axis: Any) -> None:
    low, high = axis.dataLim.x0, axis.dataLim.x1
    axis.set(xlim=(min(high, 15), max(low, -15)), xlabel="log SNR (noise to the right)")


def _colours(histories: Sequence[History]) -> list[str]:
    """Grey for plain uniform, and a colour for each of the others."""
    others = itertools.cycle(COLOURS)
    return [GREY if history.label.partition(",")[0] == "uniform" else next(others) for history in histories]


# The command ----------------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, nargs="+", default=[], help="runs, to show their densities through training")
    parser.add_argument("--comparison", type=Path, help="or the folder of a comparison: one run of each sampler")
    parser.add_argument("--samplers", help="or specs, separated by commas, to show them before training (default: a few)")
    parser.add_argument("--process", default="linear", help="the process for --samplers")


def analyse(options: argparse.Namespace, rest: list[str]) -> Analysis:
    if rest:
        raise ValueError(f"unknown option {rest[0]!r}: density takes --run, --comparison, --samplers and --process")
    given = [bool(options.run), options.comparison is not None, options.samplers is not None]
    if sum(given) > 1:
        raise ValueError("give one of --run, --comparison and --samplers, not several")
    says: list[str] = []
    if given[0]:
        histories = of_runs([read_outcome(folder) for folder in options.run])
    elif given[1]:
        comparison = read_comparison(options.comparison)
        chosen = one_seed_each(comparison.outcomes)
        if not chosen:
            raise ValueError(
                f"no run of {options.comparison} has a density in its metrics.jsonl yet: let them train for longer"
            )
        histories = of_runs(chosen)
        if len(chosen) < len(comparison.outcomes):
            says.append(f"shown: the first run of each sampler and process, {len(chosen)} of {len(comparison.outcomes)}")
    else:
        process = build_process(options.process)
        specs = split_specs("uniform,minsnr,speed,logit_normal" if options.samplers is None else options.samplers)
        histories = [of_spec(spec, process) for spec in specs]
        learning = [spec for spec in specs if not recipes.recipe(spec, process).sampler.constant]
        if learning:
            says.append(f"{', '.join(learning)}: shown before training, which changes it; --run shows what became of it")
    figure = draw_runs(histories) if any(given[:2]) else draw_static(histories)
    rows = [row for history in histories for row in rows_of(history)]
    return Analysis("density", figure, rows, [*says, *map(sentence, histories)])
