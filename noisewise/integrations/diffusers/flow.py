"""Flow matching on the noise levels of a diffusers scheduler: T of them, shifted towards noise.

The i-th, from the least noise up, has s = (i + 1) / T and sigma = shift s / (1 + (shift - 1) s); the model is fed T sigma.
The scheduler lists the same levels from the *most* noise down: its index is T - 1 - i. Both are made by the same operations in
float32, so `time(u)` is found in `scheduler.timesteps` by equality, as training scripts look it up.
"""

import torch
from torch import Tensor

from noisewise.processes import Process, _edges_between, interval


class ShiftedFlow(Process):
    """x = (1 - sigma) x0 + sigma noise on T shifted noise levels; uniform u is diffusers' `weighting_scheme="none"`.

    Args:
        steps: the number T of noise levels (`num_train_timesteps`).
        shift: above 1 more of them are at much noise (3 for SD3); 1 spaces them evenly.
    """

    usual_prediction = "flow"

    def __init__(self, steps: int = 1000, shift: float = 1.0) -> None:
        if steps < 1:
            raise ValueError(f"a schedule needs at least one timestep, got {steps}")
        if not 0 < shift < float("inf"):
            raise ValueError(f"shift must be positive and finite, got {shift}")
        self.steps: int = steps
        self.shift = shift
        even = torch.arange(1, steps + 1, dtype=torch.float32) / steps
        sigma = shift * even / (1 + (shift - 1) * even)
        exact = sigma.double()
        log_snr = 2 * (torch.log1p(-exact) - torch.log(exact))  # -inf at the last level, which is all noise
        edges = _edges_between(log_snr)
        self._tables = {
            "time": sigma * steps,
            "alpha": 1 - exact,
            "sigma": exact,
            "log_snr": log_snr,
            "edges": edges,
            "rate": (edges[1:] - edges[:-1]) * steps,
        }

    def _at(self, table: str, u: Tensor) -> Tensor:
        return self._place(table, u)[interval(u, self.steps)]

    def _place(self, table: str, like: Tensor) -> Tensor:
        return self.cached(table, like, lambda: self._tables[table])

    def time(self, u: Tensor) -> Tensor:
        return self._at("time", u)

    def u_of_time(self, time: Tensor) -> Tensor:
        if time.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"timesteps of a flow are float32, got {time.dtype}, which cannot tell them apart")
        sigma = time / self.steps
        even = sigma / (self.shift - (self.shift - 1) * sigma)
        return ((even * self.steps).round() - 0.5).clamp(0.5, self.steps - 0.5) / self.steps

    def scales(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return self._at("alpha", u), self._at("sigma", u)

    def log_snr(self, u: Tensor) -> Tensor:
        return self._at("log_snr", u)

    def log_snr_rate(self, u: Tensor) -> Tensor:
        return self._at("rate", u)

    def u_of_log_snr(self, log_snr: Tensor) -> Tensor:
        inner = -self._place("edges", log_snr)[1:-1]  # ascending
        return (torch.searchsorted(inner, -log_snr.contiguous()).to(log_snr.dtype) + 0.5) / self.steps

    def log_snr_edges(self, u_edges: Tensor) -> Tensor:
        return self._place("edges", u_edges)[(u_edges * self.steps).round().long()]

    def __repr__(self) -> str:
        return f"ShiftedFlow(T={self.steps}, shift={self.shift:g})"
