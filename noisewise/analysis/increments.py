"""SpeeD's three areas of a noise schedule (Wang et al. 2024, arXiv 2405.17403): where noising speeds up, slows down, has ended.

Write a = abar, the share of data in x_t (1 - a is the share of noise), x_t = sqrt(a_t) x0 + sqrt(1 - a_t) noise. Processes that
are not variance preserving are looked at after dividing x by sqrt(alpha^2 + sigma^2), which makes them so; continuous ones on
1,000 equal intervals of u.

**The increment** between two neighbours of the forward chain x_{t+1} = r x_t + sqrt(1 - r^2) fresh noise, r^2 = a_{t+1} / a_t:

    x_{t+1} - x_t  given x0  ~  N( (sqrt(a_{t+1}) - sqrt(a_t)) x0,  v_t I )
    v_t = (1 - a_{t+1}) + (1 - a_t) - 2 r (1 - a_t)  =  (1 - r)^2 (1 - a_t) + (1 - r^2)

since Cov(x_t, x_{t+1} | x0) = r (1 - a_t). SpeeD takes the noises of the two as independent and so has no last term: its
variance 2 - a_t - a_{t+1} rises from 0 to 2, as the noise share 1 - a does, while v_t is of the size of one beta. `variance`
and `variance_independent` are the two.

**The areas** are those of the rising curve, SpeeD's variance, whose slope is that of the noise share s = 1 - a:

    acceleration   t < t*           the slope of s grows up to its maximum, at t* (the inflection point of s)
    deceleration   t* <= t < tau    it falls
    convergence    t >= tau         that of sqrt(s) stays below 1e-4 a timestep, for a T of 1,000 (`vanishing_point`)

tau follows SpeeD's paper; its authors' code puts 700 for every schedule. Areas are of the schedule's own clock: another clock
for the same path, such as EDM's quantiles of ln sigma, moves them in u, and may leave out some of them.
"""

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from noisewise.analysis.output import Analysis
from noisewise.looking.palette import COLOURS, GREY, PALE
from noisewise.process_curves import gradient, noise_share, vanishing_point
from noisewise.processes import Process
from noisewise.spec import build_process, split_specs

AREAS = {"acceleration": COLOURS[4], "deceleration": COLOURS[5], "convergence": PALE}
"""Each area with its colour."""


@dataclass(frozen=True)
class Increments:
    """One schedule, at its n timesteps (or at the middles of 1,000 intervals of u)."""

    process: Process
    share: np.ndarray  # of noise, 1 - abar
    mean: np.ndarray  # of the increment to the next timestep, as a multiple of x0: n - 1 of them
    variance: np.ndarray  # of that increment, along the chain
    variance_independent: np.ndarray  # as SpeeD has it
    slope: np.ndarray  # of the noise share, in a thousandth of u
    root_slope: np.ndarray  # of its square root
    peak: int  # t*
    tau: int

    @property
    def u(self) -> np.ndarray:
        """The middle of each timestep's interval."""
        return (np.arange(len(self.share)) + 0.5) / len(self.share)

    @property
    def log_snr(self) -> np.ndarray:
        """At each timestep."""
        return self.process.log_snr(torch.from_numpy(self.u)).numpy()

    def bounds(self) -> dict[str, tuple[int, int]]:
        """The first timestep of each area, and the first after it."""
        return {
            "acceleration": (0, self.peak),
            "deceleration": (self.peak, self.tau),
            "convergence": (self.tau, len(self.share)),
        }

    def shares(self) -> dict[str, float]:
        """How much of uniform sampling falls into each area."""
        return {name: (end - start) / len(self.share) for name, (start, end) in self.bounds().items()}

    def area(self, t: int) -> str:
        """The area that a timestep lies in."""
        return next(name for name, (start, end) in self.bounds().items() if start <= t < end)


def increments(process: Process) -> Increments:
    """The increments and areas of a process."""
    share = noise_share(process)
    n, kept = len(share), 1 - share
    if n < 3:
        raise ValueError(f"a schedule needs at least 3 timesteps to have increments, got {n}")
    before, after = kept[:-1], kept[1:]
    ratio = torch.where(before > 0, after / before.clamp(min=1e-300), 0.0).sqrt()
    slope, tau = gradient(share) * n / 1000, vanishing_point(process)
    peak = int(slope.argmax())
    peak = n if peak == n - 1 else min(peak, tau)  # a slope that is steepest at the very end never fell
    return Increments(
        process,
        share.numpy(),
        (after.sqrt() - before.sqrt()).numpy(),
        ((1 - ratio) ** 2 * (1 - before) + (1 - ratio**2)).numpy(),
        (2 - before - after).numpy(),
        slope.numpy(),
        (gradient(share.sqrt()) * n / 1000).numpy(),
        peak,
        max(peak, tau),
    )


def rows_of(schedule: str, found: Increments) -> list[dict[str, Any]]:
    """A row for each timestep; the increment is that to the next one, so the last has none."""
    log_snr, last = found.log_snr, len(found.share) - 1
    return [
        {
            "schedule": schedule,
            "t": t,
            "u": found.u[t],
            "log_snr": log_snr[t],
            "noise_share": found.share[t],
            "slope": found.slope[t],
            "root_slope": found.root_slope[t],
            "mean_increment": found.mean[t] if t < last else None,
            "variance": found.variance[t] if t < last else None,
            "variance_independent": found.variance_independent[t] if t < last else None,
            "area": found.area(t),
        }
        for t in range(len(found.share))
    ]


def sentence(schedule: str, found: Increments) -> str:
    """Where the areas are, in words."""
    n, log_snr = len(found.share), found.log_snr
    unit = "t" if found.process.steps else "t (thousandths of u)"
    parts = []
    for name, (start, end) in found.bounds().items():
        if start == end:
            parts.append(f"no {name}")
            continue
        span = (
            f"{start} to {end - 1}, u {start / n:.3f} to {end / n:.3f}, log SNR {log_snr[start]:.2f} to {log_snr[end - 1]:.2f}"
        )
        parts.append(f"{name} at {unit} {span}: {(end - start) / n:.1%} of uniform draws")
    return f"{schedule}: " + "; ".join(parts)


def draw(found: dict[str, Increments]) -> Figure:
    """A panel for each schedule with its areas, and all areas over log SNR below."""
    columns = min(len(found), 3)
    upper = -(-len(found) // columns)
    lower = 0.5 + 0.3 * len(found)
    figure = Figure(figsize=(3.6 * max(columns, 2), 2.9 * upper + lower + 0.9), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(2.9 * upper, lower + 0.9))
    top, bottom = parts
    for place, (schedule, one) in enumerate(found.items(), 1):
        _panel(top.add_subplot(upper, columns, place), schedule, one)
    top.legend(*top.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    _over_log_snr(bottom.subplots(), found)
    return figure


def _panel(axis: Any, schedule: str, one: Increments) -> None:
    n, shown = len(one.share), 1000 * one.slope
    axis.plot(one.u, shown, color=COLOURS[0], label="slope of the noise share 1 − ᾱ")
    axis.plot(one.u, 1000 * one.root_slope, color=COLOURS[1], linestyle="--", label="slope of √(1 − ᾱ)")
    axis.plot(one.u, one.share, color=GREY, linestyle=":", label="1 − ᾱ itself")
    top = 1.45 * max(float(shown.max()), 1.0)
    for name, (start, end) in one.bounds().items():
        axis.axvspan(start / n, end / n, color=AREAS[name], alpha=0.3, linewidth=0)
        if end - start > 0.1 * n:
            words = f"{name}\n{(end - start) / n:.0%}" if end - start > 0.28 * n else f"{name[:6]}.\n{(end - start) / n:.0%}"
            axis.text((start + end) / 2 / n, 0.97 * top, words, ha="center", va="top", fontsize=8)
    axis.set(xlim=(0, 1), ylim=(0, top), xlabel="u (0: least noise, 1: most)", ylabel="per unit of u")
    marks = ", ".join(f"{name} {t}" for name, t in (("t* =", one.peak), ("τ =", one.tau)) if t < n)
    axis.set_title(f"{schedule}" + (f"   {marks}" if marks else ""), fontsize=9, fontweight="bold")


def _over_log_snr(axis: Any, found: dict[str, Increments]) -> None:
    """The areas as bars, cut where there is hardly data or noise left."""
    for place, one in enumerate(found.values()):
        log_snr = np.clip(one.log_snr, -15, 15)
        for name, (start, end) in one.bounds().items():
            if end > start:
                left, right = log_snr[min(end, len(log_snr) - 1)], log_snr[start]
                axis.barh(place, right - left, left=left, color=AREAS[name], height=0.7)
                label = f"{one.shares()[name]:.0%}" if right - left > 1.5 else ""
                axis.text((left + right) / 2, place, label, ha="center", va="center", fontsize=8)
    axis.set_yticks(range(len(found)), list(found), fontsize=8)
    axis.invert_yaxis()
    axis.invert_xaxis()
    axis.set(xlabel="log SNR (noise to the right; % are shares of uniform draws)")
    handles = [axis.barh([0], [0], color=colour, label=name) for name, colour in AREAS.items()]
    axis.legend(handles=handles, frameon=False, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--schedules",
        default="linear,cosine,quadratic,edm,flow",
        help="processes, separated by commas, as in linear:steps=4000",
    )


def analyse(options: argparse.Namespace, rest: list[str]) -> Analysis:
    if rest:
        raise ValueError(f"unknown option {rest[0]!r}: increments takes --schedules, --out and --formats")
    if not options.schedules.strip():
        raise ValueError("--schedules is empty: name processes, as in --schedules linear,cosine")
    found = {schedule: increments(build_process(schedule)) for schedule in split_specs(options.schedules)}
    rows = [row for schedule, one in found.items() for row in rows_of(schedule, one)]
    return Analysis("increments", draw(found), rows, [sentence(schedule, one) for schedule, one in found.items()])
