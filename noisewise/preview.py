"""See a recipe before training: how often each noise level is drawn (p), how much it counts (w), and their product."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from noisewise.diagnostics import mean_density
from noisewise.objective import Objective
from noisewise.processes import Process
from noisewise.samplers import Sampler
from noisewise.weighting import NoWeight, Weighting


@dataclass(frozen=True)
class Preview:
    """Curves over equal intervals of u; p and pw have mean 1 over u.

    `pw` is the objective that is really trained: p times w times the sampler's importance weight.
    """

    u: np.ndarray
    time: np.ndarray
    log_snr: np.ndarray
    log_snr_rate: np.ndarray
    p: np.ndarray
    w: np.ndarray
    pw: np.ndarray
    title: str = ""

    def quantiles(self, at: tuple[float, ...] = (0.05, 0.25, 0.5, 0.75, 0.95)) -> dict[str, list[float]]:
        """Where those shares of the draws (p) and of the objective (p w) lie, as u."""
        edges = np.linspace(0, 1, len(self.u) + 1)
        result = {}
        for name, curve in (("p", self.p), ("pw", self.pw)):
            cumulative = np.concatenate([[0], np.cumsum(curve)]) / curve.sum()
            result[name] = np.interp(at, cumulative, edges).tolist()
        return result

    def plot(self, path: str | Path) -> Path:
        """Draw the curves over u and over log SNR into a picture file (needs matplotlib)."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ImportError("drawing needs matplotlib: pip install 'noisewise[train]'") from None
        figure = Figure(figsize=(10, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for name, colour, style in (("p", "#0072B2", "-"), ("w", "#E69F00", "--"), ("pw", "#009E73", "-")):
            label = {"p": "p: how often drawn", "w": "w: how much it counts", "pw": "p·w: the objective"}[name]
            curve = getattr(self, name)
            left.plot(self.u, curve, color=colour, linestyle=style, label=label)
            finite = np.isfinite(self.log_snr)
            # densities change with the axis, weights do not
            scale = 1 if name == "w" else 1 / np.abs(self.log_snr_rate[finite])
            right.plot(self.log_snr[finite], curve[finite] * scale, color=colour, linestyle=style, label=label)
        left.set(xlabel="u (0: least noise, 1: most)", ylabel="relative to uniform", ylim=(0, None))
        right.set(xlabel="log SNR (noise to the left)", ylabel="per unit of log SNR (w: relative)", ylim=(0, None))
        left.legend(frameon=False)
        figure.suptitle(self.title)
        figure.savefig(path, dpi=150)
        return Path(path)


@torch.no_grad()
def preview(
    sampler: Sampler,
    weighting: Weighting | None,
    process: Process,
    *,
    objective: Objective | None = None,
    bins: int | None = None,
    title: str = "",
) -> Preview:
    """The curves p, w and p·w of a sampler and a weighting (of the eps-loss) on a process, before any training."""
    bins = bins or min(process.steps or 500, 1000)
    u = (torch.arange(bins) + 0.5) / bins
    density = mean_density(sampler, bins)
    p, correction = density.cpu(), sampler._weight(density, None).cpu()
    w = (weighting or NoWeight())(objective or Objective(process), u)
    if bool((w < 0).any()):
        raise ValueError(f"this weighting is negative at u = {float(u[w.argmin()]):.3f}; a loss weight must not be")
    corrected = p * correction
    w = w / (corrected * w).mean().clamp(min=1e-30)
    log_snr, rate = process.log_snr(u), process.log_snr_rate(u)
    curves = {"u": u, "time": process.time(u), "log_snr": log_snr, "log_snr_rate": rate, "p": p, "w": w, "pw": corrected * w}
    return Preview(**{name: curve.double().numpy() for name, curve in curves.items()}, title=title)
