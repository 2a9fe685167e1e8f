"""Noising processes: x_u = alpha(u) * x0 + sigma(u) * noise.

A noise level is u in [0, 1], a quantile of the process's own training density: uniform u is the baseline of the paper that
introduced the process. **u = 0 is the least noise and u = 1 the most, for every process.**

=========  =========================================  ===================================
process    u stands for                               the model's time input (``time(u)``)
=========  =========================================  ===================================
DDPM       timestep floor(u * T)                      the integer timestep
VP         t in [eps, 1], linear beta(t)              t * time_scale
VE         sigma_min * (sigma_max / sigma_min) ** u   sigma
EDM        ln sigma = mean + std * Phi^-1(u)          ln(sigma) / 4
Flow       t, with x_t = (1 - t) x0 + t noise         t * time_scale, or (1 - t) * time_scale with data_at=1
=========  =========================================  ===================================

log SNR means ln(alpha^2 / sigma^2); it falls as u grows. It may be infinite where a process says so (flow at u = 0 and
u = 1, a schedule with zero terminal SNR); the weightings define their limits there.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, Literal, SupportsIndex

import torch
from torch import Tensor

from noisewise.levels import check_floating, check_range, check_size, check_u, edges_between, interval, middles, over_samples


class Process(ABC):
    """A noising process; u runs from the least noise (0) to the most (1)."""

    steps: int | None = None  # the number of discrete timesteps, None in continuous time
    usual_prediction: Literal["eps", "flow", "edm"] = "eps"  # what models of this process are mostly trained to predict
    data_at: Literal[0, 1] = 0  # the end of time where the data are: 1 turns a velocity round

    @abstractmethod
    def time(self, u: Tensor) -> Tensor:
        """The model's time input."""

    @abstractmethod
    def u_of_time(self, time: Tensor) -> Tensor:
        """The inverse of `time` (the middle of the timestep's interval for discrete processes)."""

    @abstractmethod
    def scales(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """(alpha, sigma): the coefficients of the data and of the noise."""

    @abstractmethod
    def log_snr(self, u: Tensor) -> Tensor:
        """ln(alpha^2 / sigma^2)."""

    @abstractmethod
    def log_snr_rate(self, u: Tensor) -> Tensor:
        """d log_snr / du, never positive (for discrete processes: over one timestep's interval)."""

    @abstractmethod
    def u_of_log_snr(self, log_snr: Tensor) -> Tensor:
        """The inverse of `log_snr`, clamped to [0, 1]."""

    def __repr__(self) -> str:
        return type(self).__name__

    def log_snr_edges(self, u_edges: Tensor) -> Tensor:
        """log SNR at the edges of intervals of u, least noise first (a discrete process rounds them to its timesteps)."""
        return self.log_snr(u_edges)

    def cached(self, key: Hashable, like: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """A constant of this process, computed once for each device and type."""
        cache: dict[Hashable, Tensor] = self.__dict__.setdefault("_cache", {})
        placed = (key, like.device, like.dtype)
        if placed not in cache:
            cache[placed] = compute().to(like.dtype).to(like.device)
        return cache[placed]

    def add_noise(self, x0: Tensor, noise: Tensor, u: Tensor) -> Tensor:
        """x_u for a batch of any shape; `noise` has the shape of `x0`, `u` one entry per sample."""
        check_floating(x0)
        if noise.shape != x0.shape:
            raise ValueError(f"noise must have the shape of x0, {tuple(x0.shape)}, got {tuple(noise.shape)}")
        if u.shape != x0.shape[:1]:
            raise ValueError(f"u must have one entry a sample, ({len(x0)},), got {tuple(u.shape)}")
        alpha, sigma = (over_samples(s, x0) for s in self.scales(check_range(u)))
        return alpha * x0 + sigma * noise


def check_process(given: Any, which: str = "the first argument must be a Process, such as DDPM.linear()") -> Process:
    """The process itself, if it is one."""
    if isinstance(given, Process):
        return given
    known = isinstance(given, str) and given.partition(":")[0] in PROCESSES
    hint = f"; noisewise.spec.build_process({given!r}) makes one" if known else "; call it: ...()" if callable(given) else ""
    raise TypeError(f"{which}, got {repr(given)[:80]}{hint}")


def check_same(process: Process, other: Process, whose: str) -> None:
    """Raise ValueError unless a u is the same noise level on both, and time has one direction."""
    u = middles(100)
    alike = (process.steps, process.data_at) == (other.steps, other.data_at)
    if process is other or (alike and torch.allclose(process.log_snr(u), other.log_snr(u))):
        return
    raise ValueError(
        f"{whose} is of another process: the same u is another noise level on {other} than on {process}; make both of one"
    )


class Discrete(Process):
    """A process of T noise levels, each an equal interval of u, from tables of their scales."""

    steps: int

    def _tabulate(self, alpha: Tensor, sigma: Tensor, log_snr: Tensor, **more: Tensor) -> None:
        """Take what each level has, least noise first; `more` are tables of the process's own."""
        self.steps = len(log_snr)
        edges = edges_between(log_snr)
        rate = (edges[1:] - edges[:-1]) * self.steps
        self._tables = {"alpha": alpha, "sigma": sigma, "log_snr": log_snr, "edges": edges, "rate": rate, **more}

    def index(self, u: Tensor) -> Tensor:
        """The timestep floor(u * T), exact for float32 u at both edges of every interval; u = 1 is the last timestep."""
        return interval(u, self.steps)

    def _at(self, table: str, u: Tensor) -> Tensor:
        return self._place(table, u)[self.index(u)]

    def _place(self, table: str, like: Tensor) -> Tensor:
        return self.cached(table, like, lambda: self._tables[table])

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
        return self._place("edges", u_edges)[(check_u(u_edges) * self.steps).round().long()]


class DDPM(Discrete):
    """A discrete schedule of T betas; u addresses timestep floor(u * T), t = 0 the least noise.

    Args:
        betas: noise variances beta_t, T of them, each in (0, 1]; a last beta of 1 means zero terminal SNR. What looks
            like alphas or alphas_cumprod is refused.
    """

    def __init__(self, betas: Tensor) -> None:
        given: object = betas
        if isinstance(given, str):
            raise TypeError(
                f"DDPM takes a vector of betas, got {given[:80]!r}: write DDPM.linear(), DDPM.cosine() or DDPM.quadratic()"
            )
        betas = torch.as_tensor(betas, device="cpu").detach().double()
        if betas.ndim != 1 or len(betas) == 0:
            raise ValueError(f"betas must be a vector of at least one value, got shape {tuple(betas.shape)}")
        if not bool(((betas > 0) & (betas <= 1)).all()):
            raise ValueError("betas must lie in (0, 1]; is this a table of alphas_cumprod? then use DDPM.from_alphas_cumprod")
        if len(betas) >= 10 and float(betas[0]) > 0.9 and float(betas[-1]) == float(betas.min()) < float(betas[0]):
            raise ValueError(
                f"betas cannot begin at {float(betas[0]):.4g} and fall from there, to {float(betas[-1]):.4g}: is this a table "
                "of alphas_cumprod? then use DDPM.from_alphas_cumprod; or of alphas? then hand over 1 - alphas"
            )
        if bool((betas[:-1] == 1).any()):
            raise ValueError("only the last beta may be 1: after it nothing is left of the data")
        self._init_tables(betas, torch.cumprod(1 - betas, 0))

    def _init_tables(self, betas: Tensor, alphas_cumprod: Tensor) -> None:
        self.betas, self.alphas_cumprod = betas, alphas_cumprod
        log_snr = torch.log(alphas_cumprod) - torch.log1p(-alphas_cumprod)
        self._tabulate(alphas_cumprod.sqrt(), (1 - alphas_cumprod).sqrt(), log_snr)

    @classmethod
    def linear(cls, steps: int = 1000, beta_start: float = 1e-4, beta_end: float = 0.02) -> "DDPM":
        """Ho et al. 2020: betas evenly spaced."""
        return cls(torch.linspace(beta_start, beta_end, _at_least_one(steps), dtype=torch.float64, device="cpu"))

    @classmethod
    def quadratic(cls, steps: int = 1000, beta_start: float = 1e-4, beta_end: float = 0.02) -> "DDPM":
        """Square roots of the betas evenly spaced (diffusers' "scaled_linear")."""
        if not (beta_start >= 0 and beta_end >= 0):
            raise ValueError(f"betas must lie in (0, 1], got beta_start={beta_start} and beta_end={beta_end}")
        return cls(torch.linspace(beta_start**0.5, beta_end**0.5, _at_least_one(steps), dtype=torch.float64, device="cpu") ** 2)

    @classmethod
    def cosine(cls, steps: int = 1000, offset: float = 0.008, max_beta: float = 0.999) -> "DDPM":
        """Nichol & Dhariwal 2021, Eq. 17."""
        t = torch.arange(_at_least_one(steps) + 1, dtype=torch.float64, device="cpu") / steps
        bar = torch.cos((t + offset) / (1 + offset) * math.pi / 2) ** 2
        return cls((1 - bar[1:] / bar[:-1]).clamp(max=max_beta))

    @classmethod
    def from_alphas_cumprod(cls, alphas_cumprod: Tensor) -> "DDPM":
        """From the cumulative products, which must fall; a last value of 0 means zero terminal SNR."""
        bar = torch.as_tensor(alphas_cumprod, device="cpu").detach().double()
        if bar.ndim != 1 or len(bar) == 0:
            raise ValueError(f"alphas_cumprod must be a vector of at least one value, got shape {tuple(bar.shape)}")
        before = torch.cat([bar.new_ones(1), bar[:-1]])
        if not bool(((bar >= 0) & (bar < before)).all()):
            raise ValueError("alphas_cumprod must fall from below 1 and never be negative")
        self = cls.__new__(cls)
        self._init_tables(1 - bar / before, bar)
        return self

    @classmethod
    def from_diffusers(cls, scheduler: Any) -> "DDPM":
        """From the `alphas_cumprod` of a diffusers scheduler, zero terminal SNR included."""
        bar = getattr(scheduler, "alphas_cumprod", None)
        if bar is None:
            raise TypeError(
                f"{type(scheduler).__name__} has no alphas_cumprod, so it is not a DDPM-style scheduler; "
                "use Flow() for flow-matching schedulers and EDM() for EDM ones"
            )
        rescaled = getattr(getattr(scheduler, "config", None), "rescale_betas_zero_snr", False)
        if rescaled and float(bar[-1]) == 2.0**-24:  # some solvers write this for zero, more than the timestep before may have
            bar = torch.cat([bar[:-1], bar.new_zeros(1)])
        return cls.from_alphas_cumprod(bar)

    def time(self, u: Tensor) -> Tensor:
        return self.index(u)

    def u_of_time(self, time: Tensor) -> Tensor:
        if time.is_floating_point() and time.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"timesteps must be integers or float32, got {time.dtype}, which cannot hold them all")
        return (time.to(torch.float32) + 0.5) / self.steps

    def __repr__(self) -> str:
        return (
            f"DDPM(T={self.steps}, log SNR {float(self._tables['log_snr'][0]):.2f} to {float(self._tables['log_snr'][-1]):.2f})"
        )


def _at_least_one(steps: int) -> int:
    if not isinstance(steps, SupportsIndex):
        raise ValueError(f"the number of timesteps must be a whole one, got {steps}")
    if steps < 1:
        raise ValueError(f"a schedule needs at least one timestep, got {steps}")
    return check_size("steps", steps)


class VP(Process):
    """Song et al. 2021: beta(t) = beta_min + t (beta_max - beta_min) in continuous time, t = eps + u (1 - eps)."""

    def __init__(self, beta_min: float = 0.1, beta_max: float = 20.0, eps: float = 1e-5, time_scale: float = 1.0) -> None:
        if not 0 <= beta_min < beta_max or not 0 <= eps < 1:
            raise ValueError(f"VP needs 0 <= beta_min < beta_max and 0 <= eps < 1, got {beta_min}, {beta_max}, {eps}")
        if not time_scale > 0:
            raise ValueError(f"time_scale must be positive, got {time_scale}")
        self.beta_min, self.beta_max, self.eps, self.time_scale = beta_min, beta_max, eps, time_scale

    def _t(self, u: Tensor) -> Tensor:
        return self.eps + check_u(u) * (1 - self.eps)

    def _rise(self, t: Tensor) -> Tensor:
        """-2 ln alpha: the integral of beta from 0 to t."""
        return t * (self.beta_min + 0.5 * t * (self.beta_max - self.beta_min))

    def time(self, u: Tensor) -> Tensor:
        return self._t(u) * self.time_scale

    def u_of_time(self, time: Tensor) -> Tensor:
        return (time / self.time_scale - self.eps) / (1 - self.eps)

    def scales(self, u: Tensor) -> tuple[Tensor, Tensor]:
        rise = self._rise(self._t(u))
        return torch.exp(-rise / 2), torch.sqrt(-torch.expm1(-rise))

    def log_snr(self, u: Tensor) -> Tensor:
        return -torch.log(torch.expm1(self._rise(self._t(u))))

    def log_snr_rate(self, u: Tensor) -> Tensor:
        t = self._t(u)
        beta = self.beta_min + t * (self.beta_max - self.beta_min)
        return -(1 - self.eps) * beta / -torch.expm1(-self._rise(t))

    def u_of_log_snr(self, log_snr: Tensor) -> Tensor:
        rise = torch.nn.functional.softplus(-log_snr.clamp(-1e4, 1e4)).clamp(min=1e-30)  # ln(1 + 1/SNR)
        slope = self.beta_max - self.beta_min
        t = 2 * rise / (self.beta_min + torch.sqrt(self.beta_min**2 + 2 * slope * rise))
        return ((t - self.eps) / (1 - self.eps)).clamp(0, 1)


class VE(Process):
    """Song et al. 2021: alpha = 1, sigma geometric from sigma_min to sigma_max."""

    def __init__(self, sigma_min: float = 0.01, sigma_max: float = 50.0) -> None:
        if not 0 < sigma_min < sigma_max:
            raise ValueError(f"VE needs 0 < sigma_min < sigma_max, got {sigma_min} and {sigma_max}")
        self.sigma_min, self.sigma_max = sigma_min, sigma_max
        self._span = math.log(sigma_max / sigma_min)

    def time(self, u: Tensor) -> Tensor:
        return self.scales(u)[1]

    def u_of_time(self, time: Tensor) -> Tensor:
        return torch.log(time / self.sigma_min) / self._span

    def scales(self, u: Tensor) -> tuple[Tensor, Tensor]:
        sigma = self.sigma_min * torch.exp(check_u(u) * self._span)
        return torch.ones_like(sigma), sigma

    def log_snr(self, u: Tensor) -> Tensor:
        return -2 * (math.log(self.sigma_min) + check_u(u) * self._span)

    def log_snr_rate(self, u: Tensor) -> Tensor:
        return torch.full_like(check_u(u), -2 * self._span)

    def u_of_log_snr(self, log_snr: Tensor) -> Tensor:
        return ((-log_snr / 2 - math.log(self.sigma_min)) / self._span).clamp(0, 1)


class EDM(Process):
    """Karras et al. 2022: alpha = 1, ln sigma ~ N(mean, std^2); u is its quantile, kept inside [tail, 1 - tail]."""

    usual_prediction = "edm"
    tail = 1e-6  # Phi^-1 is infinite at 0 and 1; at 1e-6 it is -4.75

    def __init__(self, mean: float = -1.2, std: float = 1.2) -> None:
        if not std > 0:
            raise ValueError(f"EDM needs std > 0, got {std}")
        self.mean, self.std = mean, std

    def _log_sigma(self, u: Tensor) -> Tensor:
        return self.mean + self.std * torch.special.ndtri(check_u(u).clamp(self.tail, 1 - self.tail))

    def time(self, u: Tensor) -> Tensor:
        return self._log_sigma(u) / 4

    def u_of_time(self, time: Tensor) -> Tensor:
        return torch.special.ndtr((4 * time - self.mean) / self.std)

    def scales(self, u: Tensor) -> tuple[Tensor, Tensor]:
        sigma = self._log_sigma(u).exp()
        return torch.ones_like(sigma), sigma

    def log_snr(self, u: Tensor) -> Tensor:
        return -2 * self._log_sigma(u)

    def log_snr_rate(self, u: Tensor) -> Tensor:
        z = (self._log_sigma(u) - self.mean) / self.std
        return -2 * self.std * math.sqrt(2 * math.pi) * torch.exp(z * z / 2)

    def u_of_log_snr(self, log_snr: Tensor) -> Tensor:
        return torch.special.ndtr((-log_snr / 2 - self.mean) / self.std)


class Flow(Process):
    """Rectified flow: x_u = (1 - u) x0 + u noise.

    Args:
        time_scale: 1000 for models fed t * 1000 (SD3, Flux).
        data_at: 0 for t = u and the velocity noise - x0; 1 for the other direction of time, t = 1 - u and x0 - noise, as in
            torchcfm and SiT. u = 0 is the least noise for both.
    """

    usual_prediction = "flow"

    def __init__(self, time_scale: float = 1.0, data_at: Literal[0, 1] = 0) -> None:
        if not time_scale > 0:
            raise ValueError(f"time_scale must be positive, got {time_scale}")
        if data_at not in (0, 1):
            raise ValueError(f"data_at must be 0 or 1, the time at which there is no noise, got {data_at!r}")
        self.time_scale, self.data_at = time_scale, data_at

    def time(self, u: Tensor) -> Tensor:
        return (1 - check_u(u) if self.data_at else check_u(u)) * self.time_scale

    def u_of_time(self, time: Tensor) -> Tensor:
        t = time / self.time_scale
        return 1 - t if self.data_at else t

    def __repr__(self) -> str:
        return "Flow(data_at=1)" if self.data_at else "Flow"

    def scales(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return 1 - check_u(u), u

    def log_snr(self, u: Tensor) -> Tensor:
        return 2 * (torch.log1p(-check_u(u)) - torch.log(u))

    def log_snr_rate(self, u: Tensor) -> Tensor:
        return -2 / (check_u(u) * (1 - u))

    def u_of_log_snr(self, log_snr: Tensor) -> Tensor:
        return torch.sigmoid(-log_snr / 2)


PROCESSES: dict[str, Callable[..., Process]] = {
    "linear": DDPM.linear,
    "cosine": DDPM.cosine,
    "quadratic": DDPM.quadratic,
    "vp": VP,
    "ve": VE,
    "edm": EDM,
    "flow": Flow,
}
"""The names of spec strings."""
