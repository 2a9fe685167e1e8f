"""Loss weights: how much the loss at a noise level counts, as opposed to how often the level is drawn.

Every weight is a function w of log SNR that multiplies the **eps-loss**. `Weighting.weighted` translates it to the model's
prediction. Pure functions first, then the modules that the registry names.

Weightings multiply: ``MinSNR() * Learned()``.
"""

import math
from collections.abc import Callable, Hashable
from functools import partial

import torch
from torch import Tensor, nn

from noisewise.levels import check_size, check_u, interval, middles
from noisewise.objective import Objective, bounded, eps_error_per_prediction_error
from noisewise.process_curves import BELLS, bell_masses, scaled_variance_increment, vanishing_point
from noisewise.processes import DDPM, Process
from noisewise.running import KeepsPrecision


def min_snr(log_snr: Tensor, gamma: float = 5.0) -> Tensor:
    """Hang et al. 2023: min(SNR, gamma) / SNR (so min(SNR, gamma) / (SNR + 1) for v and min(SNR, gamma) for x0)."""
    return (math.log(gamma) - bounded(log_snr)).clamp(max=0).exp()


def soft_min_snr(log_snr: Tensor, gamma: float = 5.0) -> Tensor:
    """Crowson et al. 2024: the smooth version, (SNR gamma / (SNR + gamma)) / SNR."""
    return torch.sigmoid(math.log(gamma) - bounded(log_snr))


def p2(log_snr: Tensor, k: float = 1.0, gamma: float = 1.0) -> Tensor:
    """Choi et al. 2022: 1 / (k + SNR)^gamma."""
    return (k + bounded(log_snr).exp()) ** -gamma


def debiased(log_snr: Tensor) -> Tensor:
    """Yu et al. 2024: 1 / sqrt(SNR)."""
    return (-bounded(log_snr) / 2).exp()


def edm(log_snr: Tensor, sigma_data: float = 0.5) -> Tensor:
    """Karras et al. 2022: (s^2 + sigma_data^2) / (s sigma_data)^2 on the denoiser's x0-loss, s^2 = 1 / SNR."""
    x0_weight = (-bounded(log_snr)).exp() + sigma_data**2
    return x0_weight / sigma_data**2


def sigma_sqrt(log_snr: Tensor) -> Tensor:
    """Esser et al. 2024 (SD3): 1 / t^2 on the flow loss, where t = sigma / (alpha + sigma)."""
    t = torch.sigmoid(-bounded(log_snr) / 2)
    return t**-2 / eps_error_per_prediction_error(log_snr, "flow")


def cosmap(log_snr: Tensor) -> Tensor:
    """Esser et al. 2024 (SD3): 2 / (pi (1 - 2t + 2t^2)) on the flow loss."""
    t = torch.sigmoid(-bounded(log_snr) / 2)
    return 2 / (math.pi * (1 - 2 * t + 2 * t**2)) / eps_error_per_prediction_error(log_snr, "flow")


class Weighting(nn.Module):
    """A weight of the eps-loss at each u."""

    def forward(self, objective: Objective, u: Tensor) -> Tensor:
        """(N,) weights of the eps-loss."""
        raise NotImplementedError

    def total(self, eps_losses: Tensor, objective: Objective, u: Tensor) -> Tensor:
        """(N,) weighted losses, from eps-losses."""
        return self(objective, u).to(eps_losses) * eps_losses

    def weights(self, objective: Objective, u: Tensor) -> Tensor:
        """(N,) weights of the objective's own loss."""
        return objective.per_prediction(self(objective, u), u)

    def weighted(self, losses: Tensor, objective: Objective, u: Tensor) -> Tensor:
        """(N,) weighted losses, from the objective's own unweighted losses."""
        return self.total(objective.per_prediction(losses, u), objective, u)

    def __mul__(self, other: "Weighting") -> "Weighting":
        return WeightProduct(self, other)


class WeightProduct(Weighting):
    """The product of weightings; a learned one always acts last."""

    def __init__(self, *factors: Weighting) -> None:
        super().__init__()
        flat: list[nn.Module] = []
        for factor in factors:
            flat.extend(factor.factors if isinstance(factor, WeightProduct) else [factor])
        flat = [factor for factor in flat if not isinstance(factor, NoWeight)] or [NoWeight()]
        self.factors: nn.ModuleList = nn.ModuleList(sorted(flat, key=lambda part: isinstance(part, Learned)))

    def forward(self, objective: Objective, u: Tensor) -> Tensor:
        weight = torch.ones_like(u)
        for factor in self.factors:
            weight = weight * factor(objective, u)
        return weight

    def total(self, eps_losses: Tensor, objective: Objective, u: Tensor) -> Tensor:
        for factor in self.factors:
            assert isinstance(factor, Weighting)
            eps_losses = factor.total(eps_losses, objective, u)
        return eps_losses


class NoWeight(Weighting):
    """Weight 1 on the loss of whatever the model predicts, as in most training scripts."""

    def forward(self, objective: Objective, u: Tensor) -> Tensor:
        return 1 / objective.per_prediction(torch.ones_like(check_u(u)), u)


class Simple(Weighting):
    """Weight 1 on the eps-loss whatever the model predicts (Ho et al. 2020, Eq. 14)."""

    def forward(self, objective: Objective, u: Tensor) -> Tensor:
        return torch.ones_like(check_u(u))


class OfLogSNR(Weighting):
    """Any non-negative function of log SNR, which is clamped to +-30 first."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        values = function(torch.linspace(-30, 30, 601, device="cpu"))
        if not bool((torch.isfinite(values) & (values >= 0)).all()):
            raise ValueError("a weighting must be finite and nowhere negative for log SNRs from -30 to 30")
        self.function = function

    def forward(self, objective: Objective, u: Tensor) -> Tensor:
        weight = self.function(bounded(objective.process.log_snr(u)))
        if weight.shape != u.shape:
            raise ValueError(f"a weighting must return one weight a sample, {tuple(u.shape)}, got {tuple(weight.shape)}")
        return weight


class MinSNR(OfLogSNR):
    """Min-SNR-gamma (Hang et al. 2023): 1 where SNR <= gamma, gamma / SNR above."""

    def __init__(self, gamma: float = 5.0) -> None:
        _check_positive("gamma", gamma)
        super().__init__(partial(min_snr, gamma=gamma))
        self.gamma = gamma


class SoftMinSNR(OfLogSNR):
    """The smooth Min-SNR of Crowson et al. 2024: gamma / (SNR + gamma)."""

    def __init__(self, gamma: float = 5.0) -> None:
        _check_positive("gamma", gamma)
        super().__init__(partial(soft_min_snr, gamma=gamma))


class P2(OfLogSNR):
    """P2 (Choi et al. 2022): 1 / (k + SNR)^gamma."""

    def __init__(self, k: float = 1.0, gamma: float = 1.0) -> None:
        _check_positive("k", k)
        super().__init__(partial(p2, k=k, gamma=gamma))


class Debiased(OfLogSNR):
    """Debiased estimation (Yu et al. 2024): 1 / sqrt(SNR)."""

    def __init__(self) -> None:
        super().__init__(debiased)


class EDMWeight(Weighting):
    """EDM's weight (Karras et al. 2022): 1 on the loss of the "edm" prediction.

    Args:
        sigma_data: the standard deviation of the data; by default the objective's.
    """

    def __init__(self, sigma_data: float | None = None) -> None:
        super().__init__()
        if sigma_data is not None:
            _check_positive("sigma_data", sigma_data)
        self.sigma_data = sigma_data

    def forward(self, objective: Objective, u: Tensor) -> Tensor:
        return edm(objective.process.log_snr(u), objective.sigma_data if self.sigma_data is None else self.sigma_data)


class SigmaSqrt(OfLogSNR):
    """SD3's sigma_sqrt (Esser et al. 2024): 1 / t^2 on the flow loss."""

    def __init__(self) -> None:
        super().__init__(sigma_sqrt)


class CosMapWeight(OfLogSNR):
    """SD3's cosmap (Esser et al. 2024): 2 / (pi (1 - 2t + 2t^2)) on the flow loss."""

    def __init__(self) -> None:
        super().__init__(cosmap)


class OfProcess(Weighting):
    """A weight that is tabulated once for each process: an entry a timestep, or for each of `grid` intervals of u.

    Args:
        settings: all that its table depends on, besides the process.
    """

    grid = 4096

    def __init__(self, *settings: Hashable) -> None:
        super().__init__()
        self._key = (type(self).__name__, *settings)

    def forward(self, objective: Objective, u: Tensor) -> Tensor:
        table = objective.process.cached(self._key, u, lambda: self._made(objective.process))
        return table[interval(u, len(table))]

    def _made(self, process: Process) -> Tensor:
        with torch.device("cpu"):  # whatever the caller's default device
            return self.table(process)

    def table(self, process: Process) -> Tensor:
        """The weights, least noise first."""
        raise NotImplementedError


class VLB(OfProcess):
    """The variational bound's own weight, c_t = beta_t^2 / (2 s_t^2 alpha_t (1 - abar_t)), divided by its mean over t.

    In continuous time c is -(1/2) d log_snr / du, the limit of both variances (Kingma et al. 2021, Eq. 18), evaluated no
    nearer to u = 0 and 1 than 1/8192, where some processes have infinite rates.

    Args:
        variance: the generating variance s_t^2: "large" is beta_t, "small" the posterior variance (at t = 0, where that is
            zero, the variance of t = 1, as improved diffusion does).
        clip: an upper bound on the weight, in units of its mean. On the cosine schedule the last c_t is almost a
            thousand times the mean and would dominate a target; None for the exact bound.
        normalise: False for c_t itself, whose sum over t times the eps-loss is the bound in nats per element (without the
            prior and decoder terms).
    """

    def __init__(self, variance: str = "large", clip: float | None = None, normalise: bool = True) -> None:
        super().__init__(variance, clip, normalise)
        if variance not in ("large", "small"):
            raise ValueError(f'variance must be "large" or "small", got {variance!r}')
        if clip is not None and not clip >= 1:
            raise ValueError(f"clip is in units of the mean weight and must be >= 1, got {clip}")
        self.variance, self.clip, self.normalise = variance, clip, normalise

    def table(self, process: Process) -> Tensor:
        if isinstance(process, DDPM):
            raw = vlb_coefficients(process, self.variance)
        else:
            raw = -process.log_snr_rate(middles(process.steps or self.grid, dtype=torch.float64)) / 2
        if self.clip is not None:
            raw = clip_to_mean(raw, self.clip)
        return raw / raw.mean() if self.normalise else raw


def vlb_coefficients(process: DDPM, variance: str = "large") -> Tensor:
    """c_t in float64: the weight of the eps-loss (a mean over elements) in the variational bound, in nats per element."""
    beta, bar = process.betas, process.alphas_cumprod
    before = torch.cat([bar.new_ones(1), bar[:-1]])
    spread = beta
    if variance == "small":
        spread = beta * (1 - before) / (1 - bar)
        spread = torch.cat([spread[1:2] if len(spread) > 1 else beta[:1], spread[1:]])
    c = beta**2 / (2 * spread * (1 - beta) * (1 - bar))
    if torch.isinf(c[-1]):  # zero terminal SNR: the eps-loss says nothing there, and its weight is its neighbour's
        c[-1] = c[-2] if len(c) > 1 else 1.0
    return c


def clip_to_mean(values: Tensor, clip: float) -> Tensor:
    """The values cut off at `clip` times the mean of what is left, the largest such cut."""
    low, high = 0.0, float(values.max())
    for _ in range(100):
        cap = (low + high) / 2
        low, high = (low, cap) if cap > clip * float(values.clamp(max=cap).mean()) else (cap, high)
    return values.clamp(max=high)


class Bell(OfProcess):
    """A bell over log SNR, as a weight of the eps-loss with mean 1 over u: the same objective on every process.

    It is what drawing log SNR from the bell would train.

    Args:
        location: the log SNR of the middle.
        scale: of the bell: Laplace's, or the standard deviation.
        shape: "laplace" or "normal".
    """

    def __init__(self, location: float = 0.0, scale: float = 0.5, shape: str = "laplace") -> None:
        super().__init__(location, scale, shape)
        _check_positive("scale", scale)
        if shape not in BELLS:
            raise ValueError(f"shape must be one of {', '.join(BELLS)}, got {shape!r}")
        self.location, self.scale, self.shape = location, scale, shape

    def table(self, process: Process) -> Tensor:
        mass = bell_masses(process, self.shape, self.location, self.scale, process.steps or self.grid)
        return mass / mass.mean()


class ChangeAware(OfProcess):
    """SpeeD's weight (Wang et al. 2024): (1 - lam) + (2 lam - 1) g(t) while the process still changes, 1 after that.

    g is the increment of 1 - abar, scaled to [0, 1]. 0.5 <= lam <= 1 keeps the weight within [1 - lam, lam].

    Args:
        lam: how much faster change counts more.
        tau: the weight is 1 from this timestep on; by default derived from the process. Use the same as `speed:tau=...`.
    """

    def __init__(self, lam: float = 0.6, tau: int | None = None) -> None:
        super().__init__(lam, tau)
        if not 0.5 <= lam <= 1:
            raise ValueError(f"lam must lie in [0.5, 1], got {lam}: outside, the weight turns negative or upside down")
        if tau is not None and not tau > 0:
            raise ValueError(f"tau must be positive, got {tau}")
        check_size("tau", tau or 0, 2**53)
        self.lam, self.tau = lam, tau

    def table(self, process: Process) -> Tensor:
        increment = scaled_variance_increment(process)
        weight = (1 - self.lam) + (2 * self.lam - 1) * increment
        tau = vanishing_point(process) if self.tau is None else self.tau
        return torch.where(torch.arange(len(weight)) < tau, weight, 1.0)


class Learned(KeepsPrecision, Weighting):
    """Learned uncertainty (Karras et al. 2024, EDM2): loss / exp(s(log SNR)) + s(log SNR), s trained with the model.

    Give its parameters to the optimizer. At the optimum every noise level contributes 1.
    """

    def __init__(self, features: int = 128, seed: int = 0) -> None:
        super().__init__()
        if features < 1:
            raise ValueError(f"features must be >= 1, got {features}")
        check_size("features", features, 10_000)
        generator = torch.Generator().manual_seed(seed)
        with torch.device("cpu"):  # as the generator
            self.register_buffer("frequencies", torch.randn(features, generator=generator, dtype=torch.float32))
            self.register_buffer("phases", 2 * math.pi * torch.rand(features, generator=generator, dtype=torch.float32))
            self.coefficients = nn.Parameter(torch.zeros(features, dtype=torch.float32))

    def log_variance(self, log_snr: Tensor) -> Tensor:
        """s(log SNR), zero before training."""
        frequencies, phases = self.get_buffer("frequencies"), self.get_buffer("phases")
        angle = bounded(log_snr).to(frequencies)[:, None] / 8 * frequencies + phases  # c_noise = -log SNR / 8 for EDM
        return (torch.cos(angle) * self.coefficients).sum(1) * math.sqrt(2)  # a product of matrices autocast would make bf16

    def forward(self, objective: Objective, u: Tensor) -> Tensor:
        return torch.exp(-self.log_variance(objective.process.log_snr(u)))

    def total(self, eps_losses: Tensor, objective: Objective, u: Tensor) -> Tensor:
        s = self.log_variance(objective.process.log_snr(u))
        return eps_losses * torch.exp(-s) + s


WEIGHTINGS: dict[str, Callable[..., Weighting]] = {
    "none": NoWeight,
    "simple": Simple,
    "minsnr": MinSNR,
    "soft_minsnr": SoftMinSNR,
    "p2": P2,
    "debiased": Debiased,
    "vlb": VLB,
    "edm_weight": EDMWeight,
    "sigma_sqrt": SigmaSqrt,
    "cosmap_weight": CosMapWeight,
    "bell": Bell,
    "change_aware": ChangeAware,
    "learned": Learned,
}
"""The names of spec strings."""


def is_fixed(weighting: Weighting | None) -> bool:
    """Whether a weighting is known to be a function of the noise level that never changes: no parameters, no code of others."""
    factors = weighting.factors if isinstance(weighting, WeightProduct) else [weighting]
    return all(one is None or (type(one) in WEIGHTINGS.values() and next(one.parameters(), None) is None) for one in factors)


def _check_positive(name: str, value: float) -> None:
    if not 0 < value <= 1e30:
        raise ValueError(f"{name} must be positive and at most 1e30, got {value}")
