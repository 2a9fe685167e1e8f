"""See a recipe before training: how often each noise level is drawn (p), how much it counts (w), and their product."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from noisewise.levels import middles
from noisewise.looking.monitor import mean_density
from noisewise.looking.palette import COLOURS
from noisewise.objective import Objective
from noisewise.processes import Process, check_same
from noisewise.samplers import Sampler, Shift
from noisewise.samplers.learning import Learner
from noisewise.weighting import NoWeight, Weighting

Axis = Literal["u", "time", "log_snr"]
WeightOf = Literal["eps", "model"]
AXES: tuple[Axis, ...] = get_args(Axis)
WEIGHT_OF: tuple[WeightOf, ...] = get_args(WeightOf)
CURVES = ("p", "w", "pw")
AT = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class Preview:
    """Curves over equal intervals of u; p and pw have mean 1 over u.

    `pw` is the objective that is really trained: p times w times the sampler's importance weight.
    """

    u: np.ndarray
    time: np.ndarray
    log_snr: np.ndarray
    time_rate: np.ndarray
    """dt / du, where t is the time that the model is fed."""
    log_snr_rate: np.ndarray
    p: np.ndarray
    w: np.ndarray
    pw: np.ndarray
    importance: np.ndarray
    """The sampler's importance weight."""
    process: Process
    title: str = ""

    def quantiles(self, at: Sequence[float] = AT, axis: Axis = "u") -> dict[str, list[float]]:
        """Where those shares of the draws (p) and of the objective (pw) lie, least noise first: as u, time or log SNR."""
        edges = np.linspace(0, 1, len(self.u) + 1)
        result = {}
        for name in ("p", "pw"):
            curve = getattr(self, name)
            cumulative = np.concatenate([[0], np.cumsum(curve)]) / curve.sum()
            u = torch.from_numpy(np.interp(at, cumulative, edges))
            result[name] = (u if axis == "u" else getattr(self.process, _axis(axis))(u.float())).tolist()
        return result

    def shares(self, parts: int = 3) -> dict[str, list[float]]:
        """The share of the draws (p) and of the objective (pw) in equal parts of u, least noise first."""
        if parts < 1:
            raise ValueError(f"parts must be >= 1, got {parts}")
        edges = np.linspace(0, 1, len(self.u) + 1)
        cumulative = {name: np.concatenate([[0], np.cumsum(getattr(self, name))]) for name in ("p", "pw")}
        at = np.linspace(0, 1, parts + 1)
        return {name: (np.diff(np.interp(at, edges, mass)) / mass[-1]).tolist() for name, mass in cumulative.items()}

    @property
    def effective_share(self) -> float:
        """The effective sample size of the importance weights, over the number of samples: 1 without a correction."""
        mean, square = (self.p * self.importance).mean(), (self.p * self.importance**2).mean()
        return float(mean**2 / (square * self.p.mean()))

    def over(self, axis: Axis, curve: str) -> np.ndarray:
        """A curve over another axis: a density is divided by the axis's rate and has integral 1 there, a weight stays."""
        values: np.ndarray = getattr(self, curve)
        if _axis(axis) == "u" or curve == "w":
            return values
        return values / np.abs(getattr(self, f"{axis}_rate"))

    @property
    def bounded_time(self) -> bool:
        """Whether the model's time has two ends, so that densities can be compared with an even spread between them."""
        return self.process.steps is not None or float(np.ptp(self.time_rate)) < 1e-3 * float(np.abs(self.time_rate).max())

    def shown(self, axis: Axis, curve: str) -> np.ndarray:
        """As it is drawn: `over`, but 1 where all times are drawn alike if time is bounded."""
        even = axis == "time" and curve != "w" and self.bounded_time
        return self.over(axis, curve) * (np.abs(self.time_rate).mean() if even else 1.0)

    def plot(self, path: str | Path) -> Path:
        """Draw the curves over the model's time and over log SNR into a picture file (needs matplotlib)."""
        return draw_previews([self], path, self.title)


@torch.no_grad()
def preview(
    sampler: Sampler,
    weighting: Weighting | None,
    process: Process,
    *,
    objective: Objective | None = None,
    bins: int | None = None,
    weight_of: WeightOf = "eps",
    title: str = "",
) -> Preview:
    """The curves p, w and p·w of a sampler and a weighting on a process, before any training.

    Args:
        sampler: draws the noise levels; a learning one shows what it draws before it has learned.
        weighting: weighs their losses; None for none.
        process: the noising process.
        objective: what the model predicts; if absent what a learning sampler takes it to predict, eps for the others.
        bins: equal intervals of u.
        weight_of: whether w multiplies the "eps"-loss, in which all predictions can be compared, or the "model"'s own loss.
        title: of the picture.
    """
    if weight_of not in WEIGHT_OF:
        raise ValueError(f"unknown weight_of {weight_of!r}: choose one of {', '.join(WEIGHT_OF)}")
    check_same(process, sampler.process, "the sampler")
    if any(isinstance(part, Shift) and callable(part.shift) for part in sampler.modules()):
        raise ValueError("this shift depends on the shape of the data, which a preview does not have: give it as a number")
    bins = bins or min(process.steps or 500, 1000)
    u = middles(bins)
    density = mean_density(sampler, bins)
    p, correction = density.cpu(), sampler._weight(u.to(density), density).cpu()
    learned_for = (part.objective for part in sampler.modules() if isinstance(part, Learner))
    objective = objective or next(learned_for, Objective(process, "eps"))
    weighting = weighting or NoWeight()
    w = weighting(objective, u) if weight_of == "eps" else weighting.weights(objective, u)
    if bool((w < 0).any()):
        raise ValueError(f"this weighting is negative at u = {float(u[w.argmin()]):.3f}; a loss weight must not be")
    corrected = p * correction
    w = w / (corrected * w).mean().clamp(min=1e-30)
    curves = {
        "u": u,
        "time": process.time(u),
        "log_snr": process.log_snr(u),
        "time_rate": _time_rate(process, bins),
        "log_snr_rate": process.log_snr_rate(u),
        "p": p,
        "w": w,
        "pw": corrected * w,
        "importance": correction,
    }
    return Preview(**{name: curve.double().numpy() for name, curve in curves.items()}, process=process, title=title)


def _time_rate(process: Process, bins: int) -> Tensor:
    """dt / du in equal intervals of u; timesteps are joined by straight lines, since a staircase has no rate."""
    if process.steps is None:
        return process.time(torch.linspace(0, 1, bins + 1, dtype=torch.float64)).diff() * bins
    if process.steps == 1:
        return torch.ones(bins)
    times = process.time(middles(process.steps)).double().numpy()
    inner = (times[1:] + times[:-1]) / 2
    edges = np.concatenate([[2 * times[0] - inner[0]], inner, [2 * times[-1] - inner[-1]]])
    at = np.interp(np.linspace(0, 1, bins + 1), np.linspace(0, 1, process.steps + 1), edges)
    return torch.from_numpy(np.diff(at) * bins)


def _axis(axis: str) -> str:
    if axis not in AXES:
        raise ValueError(f"unknown axis {axis!r}: choose one of {', '.join(AXES)}")
    return axis


# The picture: p, w and p·w in columns, over the model's time and over log SNR in rows, a line for each recipe ---------

COLUMNS = {"p": "p: how often drawn", "w": "w: how much a loss counts", "pw": "p·w: the objective"}
ROWS: dict[Axis, str] = {"time": "t, as fed to the model", "log_snr": "log SNR"}
TAIL = 0.002  # of the draws and of the objective, left out at each end of an axis that may have no end


def draw_previews(previews: Sequence[Preview], path: str | Path, title: str = "") -> Path:
    """Draw recipes on one process into a picture file, whose ending says which kind (needs matplotlib)."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("drawing needs matplotlib: pip install 'noisewise[train]'") from None
    if not previews:
        raise ValueError("there is nothing to draw: give at least one preview")
    figure = Figure(figsize=(11, 5.8), layout="constrained")
    panels = figure.subplots(2, 3, sharex="row")
    for row, axis in zip(panels, ROWS, strict=True):
        for panel, name in zip(row, COLUMNS, strict=True):
            _draw(panel, previews, axis, name)
    labels = [one.title for one in previews]
    if any(labels) and labels != [title]:
        handles = panels[0][0].get_lines()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(previews), 4), frameon=False)
    if title:
        figure.suptitle(title)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _draw(panel: Any, previews: Sequence[Preview], axis: Axis, name: str) -> None:
    low, high = limits(previews, axis)
    top = 0.0
    for index, one in enumerate(previews):
        along, curve = getattr(one, axis), one.shown(axis, name)
        shown = np.isfinite(along) & (along >= min(low, high)) & (along <= max(low, high))
        top = max(top, float(curve[shown].max(initial=0)))
        kept, colour = np.isfinite(along), COLOURS[index % len(COLOURS)]
        width = 1.6 + 0.6 * min(len(previews) - 1 - index, 4)  # where lines coincide, the lower ones can still be seen
        panel.plot(along[kept], curve[kept], color=colour, linestyle="-" if index < len(COLOURS) else "--", linewidth=width)
        if name != "w":
            panel.fill_between(along[kept], curve[kept], color=colour, alpha=0.08, linewidth=0)
    panel.set_xlim(low, high)
    panel.set_ylim(0, max(top, 1e-9) * (1.3 if name == "w" else 1.08))
    panel.set_xlabel(f"{ROWS[axis]}  (noise →)")
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    if axis == "time":
        panel.set_title(COLUMNS[name], fontsize=11)
    if name == "p":
        even = axis == "time" and previews[0].bounded_time
        panel.set_ylabel("1: all times alike" if even else f"per unit of {'t' if axis == 'time' else 'log SNR'}")


def limits(previews: Sequence[Preview], axis: Axis) -> tuple[float, float]:
    """The axis from the least noise to the most; where it has no end, without the last thousandths of draws and objective."""
    along = np.concatenate([getattr(one, axis) for one in previews])
    along = along[np.isfinite(along)]
    if axis == "log_snr" or not previews[0].bounded_time:
        ends = np.array([one.quantiles((TAIL, 1 - TAIL), axis)[name] for one in previews for name in ("p", "pw")])
        ends = np.clip(ends, along.min(), along.max())
        falling = axis == "log_snr"
        low, high = (ends[:, 0].max(), ends[:, 1].min()) if falling else (ends[:, 0].min(), ends[:, 1].max())
    else:
        low, high = along.min(), along.max()
    return (float(low) - 0.5, float(high) + 0.5) if low == high else (float(low), float(high))
