"""Flow matching on the noise levels of a diffusers scheduler: T of them, shifted towards noise.

The i-th, from the least noise up, has s = (i + 1) / T and sigma = shift s / (1 + (shift - 1) s); the model is fed T sigma.
The scheduler lists the same levels from the *most* noise down: its index is T - 1 - i. Both are made by the same operations in
float32, so `time(u)` is found in `scheduler.timesteps` by equality, as training scripts look it up.
"""

import torch
from torch import Tensor

from noisewise.processes import Discrete


class ShiftedFlow(Discrete):
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
        self.shift = shift
        even = torch.arange(1, steps + 1, dtype=torch.float32) / steps
        sigma = shift * even / (1 + (shift - 1) * even)
        exact = sigma.double()
        below = exact.clamp(max=1)  # some shifts round the last level to just above
        log_snr = 2 * (torch.log1p(-below) - torch.log(below))  # -inf at the last level, which is all noise
        self._tabulate(1 - exact, exact, log_snr, time=sigma * steps)

    def time(self, u: Tensor) -> Tensor:
        return self._at("time", u)

    def u_of_time(self, time: Tensor) -> Tensor:
        if time.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"timesteps of a flow are float32, got {time.dtype}, which cannot tell them apart")
        sigma = time / self.steps
        even = sigma / (self.shift - (self.shift - 1) * sigma)
        return ((even * self.steps).round() - 0.5).clamp(0.5, self.steps - 0.5) / self.steps

    def __repr__(self) -> str:
        return f"ShiftedFlow(T={self.steps}, shift={self.shift:g})"
