"""Numerical solvers that turn noise into samples, for every process, prediction and spacing.

Ours, because diffusers' schedulers know DDPM's timesteps and their own flow only, hold state between steps, and draw their own
noise: here one path serves all processes, and image i depends on the seed and on i alone. Tests compare the two.

======  ============================================================  ===========================================
name    method                                                        options
======  ============================================================  ===========================================
ddpm    ancestral sampling                                            variance = fixed_small, fixed_large
ddim    deterministic to ancestral                                    eta = 0 to 1
euler   first order, deterministic; the same numbers as ddim          none
dpmpp   DPM-Solver++ 2M, second order, one evaluation a step          order = 1, 2
heun    second order, two evaluations a step, noise put back if told  S_churn, S_min, S_max, S_noise
======  ============================================================  ===========================================

A `Solver` has all its settings, and one line of text names it: "ddim:steps=50,eta=0.5,spacing=quadratic".
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from noisewise.generation.solver_methods import (
    DDIM,
    Ancestral,
    Denoise,
    DPMSolverPP,
    Euler,
    Heun,
    Level,
    Path,
    check_levels,
    start,
)
from noisewise.generation.spacing import RHO, check_spacing, default_spacing, grid
from noisewise.processes import EDM, VE, Flow, Process
from noisewise.spec import SpecError, parse
from noisewise.words import unknown

Method = Callable[[Path, Tensor], Iterator[Tensor]]

__all__ = ["SOLVERS", "Denoise", "Level", "Solver", "default_solver", "solve", "start"]

SOLVERS: dict[str, type[Ancestral | DDIM | Euler | DPMSolverPP | Heun]] = {
    "ddpm": Ancestral,
    "ddim": DDIM,
    "euler": Euler,
    "dpmpp": DPMSolverPP,
    "heun": Heun,
}


@torch.no_grad()
def solve(
    name: str,
    denoise: Denoise,
    process: Process,
    x: Tensor,
    u_grid: Tensor,
    *,
    noise: Callable[[int], Tensor],
    clip: float | None = None,
    callback: Callable[[int, Tensor], None] | None = None,
    **options: Any,
) -> Tensor:
    """Carry x from the noise of u_grid[0] to the data.

    Args:
        name: one of `SOLVERS`.
        denoise: (x, u) -> the estimate of x0, see `noisewise.generation.guidance.denoiser`; u is float64 without dimensions.
        process: the one the model was trained with.
        x: a batch at the level of u_grid[0], see `start`; its type is kept.
        u_grid: the levels to visit, the most noise first, see `noisewise.generation.spacing.grid`.
        noise: step number (from 1) -> normals of the shape of x; called by stochastic methods only.
        clip: bound of the estimate of x0 (1 for images in [-1, 1]); None for latents.
        callback: told the number of steps done and x after each of them.
        options: the solver's own.
    """
    method = make_method(name, options)
    if u_grid.ndim != 1 or len(u_grid) == 0 or not u_grid.is_floating_point():
        raise ValueError(f"u_grid must be a vector of floats, got {u_grid.dtype} of shape {tuple(u_grid.shape)}")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be positive, or None to leave the estimates alone, got {clip}")
    path = Path(process, u_grid.detach().double().cpu(), denoise, noise, clip)
    if not bool(((path.u >= 0) & (path.u <= 1)).all()):
        raise ValueError("u_grid must lie in [0, 1]")
    check_levels(path.levels[:-1])
    for done, state in enumerate(method(path, x), 1):
        x = state
        if callback is not None:
            callback(done, x)
    return x


def make_method(name: str, options: Mapping[str, Any]) -> Method:
    """The method of that name, its options checked."""
    if name not in SOLVERS:
        raise SpecError(unknown("solver", name, SOLVERS))
    known = [option.name for option in fields(SOLVERS[name])]
    for key in options:
        if key not in known:
            raise SpecError(unknown(f"option of {name}", key, known))
    return SOLVERS[name](**options)


@dataclass(frozen=True)
class Solver:
    """How images are generated.

    Args:
        name: one of `SOLVERS`.
        steps: how many.
        spacing: of the levels, see `noisewise.generation.spacing`.
        rho: exponent of the spacing "karras".
        sigma_min: its least noise; by default 0.002, and never less than the process has.
        sigma_max: its most noise; by default 80, and never more than the process has.
        options: the solver's own, such as {"eta": 0.5}.
    """

    name: str
    steps: int
    spacing: str = "uniform"
    rho: float = RHO
    sigma_min: float | None = None
    sigma_max: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        make_method(self.name, self.options)
        check_spacing(self.steps, self.spacing, rho=self.rho, sigma_min=self.sigma_min, sigma_max=self.sigma_max)

    @classmethod
    def parse(cls, spec: str, process: Process) -> "Solver":
        """From text; steps and spacing that it does not give are the process's usual ones."""
        terms = parse(spec)
        if len(terms) != 1:
            raise SpecError(f"{spec!r} should name one solver, as in ddim:steps=50")
        name, texts = terms[0].name, dict(terms[0].options)
        if name not in SOLVERS:
            raise SpecError(unknown("solver", name, SOLVERS))
        own = {option.name: option.type for option in fields(SOLVERS[name])}
        general = {"steps": int, "spacing": str, "rho": float, "sigma_min": float, "sigma_max": float}
        for key in texts:
            if key not in own and key not in general:
                raise SpecError(unknown(f"setting of {name}", key, [*general, *own]))
        settings: dict[str, Any] = {"steps": default_steps(name, process), "spacing": usual_spacing(name, process)}
        settings.update({key: _value(key, texts[key], kind) for key, kind in general.items() if key in texts})
        options = {key: _value(key, texts[key], kind) for key, kind in own.items() if key in texts}
        return cls(name, options=options, **settings)

    @property
    def spec(self) -> str:
        """The text that `parse` turns back into this solver, whatever the process."""
        settings = {key: value for key, value in asdict(self).items() if key not in ("name", "options")}
        usual = {"rho": RHO, "sigma_min": None, "sigma_max": None}
        given = {key: value for key, value in settings.items() if key not in usual or value != usual[key]}
        return f"{self.name}:" + ",".join(f"{key}={value}" for key, value in {**given, **self.options}.items())

    @property
    def evaluations(self) -> int:
        """How often the denoiser is called for one image (flow with a grid that ends at u = 0 needs fewer)."""
        return 2 * self.steps - 1 if self.name == "heun" else self.steps

    def grid(self, process: Process) -> Tensor:
        """The levels it visits."""
        return grid(process, self.steps, self.spacing, rho=self.rho, sigma_min=self.sigma_min, sigma_max=self.sigma_max)

    def generate(
        self,
        denoise: Denoise,
        process: Process,
        noise: Callable[[int], Tensor],
        *,
        clip: float | None = None,
        callback: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Samples from noise: `noise(0)` is where they start, `noise(k)` belongs to step k."""
        u = self.grid(process)
        x = start(process, u[0], noise(0))
        return solve(self.name, denoise, process, x, u, noise=noise, clip=clip, callback=callback, **self.options)


def default_steps(name: str, process: Process) -> int:
    """All timesteps (or 1,000) for "ddpm", 18 for "heun" on EDM and VE, else 50; never more than there are timesteps."""
    if name == "ddpm":
        return process.steps or 1000
    usual = 18 if name == "heun" and isinstance(process, EDM | VE) else 50
    return usual if process.steps is None else min(usual, process.steps)


def usual_spacing(name: str, process: Process) -> str:
    """The process's own; but "trailing" for "dpmpp", which extrapolates badly over uniform's last timesteps."""
    spacing = default_spacing(process)
    return "trailing" if name == "dpmpp" and spacing == "uniform" else spacing


def default_solver(process: Process) -> Solver:
    """DDIM with 50 steps for DDPM and VP, Heun with 18 in Karras' spacing for EDM and VE, Euler with 50 for flow."""
    name = "heun" if isinstance(process, EDM | VE) else "euler" if isinstance(process, Flow) else "ddim"
    return Solver(name, default_steps(name, process), default_spacing(process))


def _value(key: str, text: str, kind: Any) -> Any:
    try:
        value = kind(text)
    except ValueError as error:
        wanted = "a whole number" if kind is int else "a number"
        raise SpecError(f"{key}={text}: expected {wanted}") from error
    if isinstance(value, float) and math.isnan(value):
        raise SpecError(f"{key}={text}: expected a number")
    return value
