"""Densities of noise levels, of specs and of runs; over u and over log SNR.

A density is a list of means over equal intervals of u, whose own mean is 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from noisewise import recipes
from noisewise.looking.recipe_curves import preview
from noisewise.processes import Process
from noisewise.spec import build_process
from noisewise.study.outcome import Outcome

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
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    log_snr, rate = process.log_snr(u).numpy(), process.log_snr_rate(u).numpy()
    finite = np.isfinite(log_snr)
    return log_snr[finite], (refined(density, n) / np.abs(rate))[finite]


def no_signal(process: Process, density: np.ndarray) -> float:
    """The share of a density that lies where log SNR is minus infinity."""
    n = process.steps or CONTINUOUS
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
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
