"""Which noise levels a solver visits: `steps` values of u, the most noise first.

The jump from the last of them to zero noise is the solver's, so n values make n steps. With T timesteps, or in continuous time:

=========  ==================================================  =====================================================
spacing    discrete, timesteps t                               continuous, u
=========  ==================================================  =====================================================
uniform    n numbers evenly from T - 1 to 0, both included     evenly from 1 to 0, both included; flow: 1 - i / n
leading    (T // n) i, as the DDIM paper and diffusers do      (refused: it would not start from pure noise)
trailing   T - 1, T - 1 - T / n, ... (Lin et al. 2023)         1 - i / n
quadratic  (T - 1) (j / (n - 1))^2, dense at little noise      the square of uniform
karras     (sigma / alpha)^(1/rho) evenly spaced (Karras et al. 2022, Eq. 5)
=========  ==================================================  =====================================================

Flow differs because at u = 0 it has no noise left to remove. Timesteps are rounded to integers, and where two fall together
they are moved apart to the next free ones, so that n steps remain n steps. "quadratic" follows the DDIM paper's text and
starts at T - 1; its reference code stops at 0.8 T. "leading" starts at (T // n) (n - 1), far below T if T / n is small and not
whole. "karras" goes from sigma_max to sigma_min in units of sigma / alpha, by default EDM's 80 and 0.002, kept within what the
process has.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from noisewise.processes import EDM, VE, Process
from noisewise.words import unknown

RHO, SIGMA_MIN, SIGMA_MAX = 7.0, 0.002, 80.0


def _uniform(n: int, total: int) -> Tensor:
    return torch.linspace(0, total - 1, n, dtype=torch.float64) if n > 1 else torch.tensor([total - 1.0], dtype=torch.float64)


TIMESTEPS: dict[str, Callable[[int, int], Tensor]] = {
    "uniform": _uniform,
    "leading": lambda n, total: torch.arange(n, dtype=torch.float64) * (total // n),
    "trailing": lambda n, total: (total - torch.arange(n - 1, -1, -1, dtype=torch.float64) * (total / n)).round() - 1,
    "quadratic": lambda n, total: _uniform(n, total) ** 2 / max(total - 1, 1),
}
SPACINGS = (*TIMESTEPS, "karras")


def default_spacing(process: Process) -> str:
    """What the process's own paper uses: "karras" where u is no time (EDM, VE), else "uniform"."""
    return "karras" if isinstance(process, EDM | VE) else "uniform"


def grid(
    process: Process,
    steps: int,
    spacing: str,
    *,
    rho: float = RHO,
    sigma_min: float | None = None,
    sigma_max: float | None = None,
) -> Tensor:
    """`steps` values of u in float64 (float32 cannot tell EDM's largest sigmas apart), the most noise first."""
    check_spacing(steps, spacing, rho=rho, sigma_min=sigma_min, sigma_max=sigma_max)
    if process.steps is None:
        return (
            _karras(process, steps, rho, sigma_min, sigma_max) if spacing == "karras" else _continuous(process, steps, spacing)
        )
    if steps > process.steps:
        raise ValueError(f"{steps} steps were asked for, but the process has only {process.steps} timesteps: ask for fewer")
    if spacing == "karras":
        timesteps = process.time(_karras(process, steps, rho, sigma_min, sigma_max)).flip(0)
    else:
        timesteps = TIMESTEPS[spacing](steps, process.steps).round().long()
    return (_apart(timesteps, process.steps).flip(0).double() + 0.5) / process.steps


def check_spacing(
    steps: int, spacing: str, *, rho: float = RHO, sigma_min: float | None = None, sigma_max: float | None = None
) -> None:
    """Raise a ValueError for settings that no process could use."""
    if spacing not in SPACINGS:
        raise ValueError(unknown("spacing", spacing, SPACINGS))
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be an integer of at least 1, got {steps!r}")
    if spacing != "karras" and (rho, sigma_min, sigma_max) != (RHO, None, None):
        raise ValueError(f"rho, sigma_min and sigma_max belong to the spacing karras; {spacing} would ignore them")
    least, most = SIGMA_MIN if sigma_min is None else sigma_min, SIGMA_MAX if sigma_max is None else sigma_max
    if not (0 < least < most < math.inf and 0 < rho < math.inf):
        raise ValueError(f"karras needs 0 < sigma_min < sigma_max and rho > 0, got {least}, {most} and {rho}")


def _continuous(process: Process, n: int, spacing: str) -> Tensor:
    if spacing == "leading":
        raise ValueError("leading counts timesteps, and this process has none: use uniform or trailing")
    down = 1 - torch.arange(n, dtype=torch.float64) / n
    if spacing == "trailing":
        return down
    noise_left = float(process.scales(torch.zeros((), dtype=torch.float64))[1]) > 0
    even = torch.linspace(1, 0, n, dtype=torch.float64) if noise_left else down
    return even**2 if spacing == "quadratic" else even


def _karras(process: Process, n: int, rho: float, sigma_min: float | None, sigma_max: float | None) -> Tensor:
    alpha, sigma = process.scales(torch.tensor([0.0, 1.0], dtype=torch.float64))
    own_min, own_max = (sigma / alpha).tolist()
    least = max(SIGMA_MIN if sigma_min is None else sigma_min, own_min)
    most = min(SIGMA_MAX if sigma_max is None else sigma_max, own_max)
    if least > most:
        raise ValueError(f"sigma_min and sigma_max leave nothing of the process's own range, {own_min:.4g} to {own_max:.4g}")
    ends = least ** (1 / rho), most ** (1 / rho)
    ratio = torch.linspace(ends[1], ends[0], n, dtype=torch.float64) ** rho
    return process.u_of_log_snr(-2 * torch.log(ratio))


def _apart(ascending: Tensor, total: int) -> Tensor:
    """The same timesteps, those that coincide moved to the next free ones (first up, then down from the end)."""
    timesteps: list[int] = ascending.tolist()
    for i in range(1, len(timesteps)):
        timesteps[i] = max(timesteps[i], timesteps[i - 1] + 1)
    limit = total - 1
    for i in reversed(range(len(timesteps))):
        timesteps[i] = limit = min(timesteps[i], limit)
        limit -= 1
    return torch.tensor(timesteps)
