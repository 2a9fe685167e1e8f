"""The adaptive sampler: learn, while training, which noise levels reduce the objective most (arXiv 2411.09998).

Estimators differ in how they learn; floor, target, correction, state, collapse guard and diagnostics are shared, here.
"""

import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from noisewise.diagnostics import even_edges
from noisewise.objective import Objective, Prediction
from noisewise.processes import Process
from noisewise.samplers.adaptive.estimator import Estimator
from noisewise.samplers.adaptive.loss import LossEstimator
from noisewise.samplers.base import Draw, LossAt, Sampler
from noisewise.samplers.correction import Correction
from noisewise.samplers.histogram import Histogram
from noisewise.weighting import Weighting

ESTIMATORS: dict[str, type[Estimator]] = {"loss": LossEstimator}


class AdaptiveSampler(Sampler):
    """A density over strata of u that is learned during training.

    Args:
        process: the noising process.
        estimator: how to learn; one of `ESTIMATORS`. Its own options may follow as keywords.
        target: the weighting whose objective is to fall fastest; None takes the losses as they are handed over.
        floor: the share of uniform mass, so that no noise level is ever starved.
        strata: how many intervals of u are told apart (no more than a discrete process has timesteps).
        over: "u" for intervals of equal reference probability, "log_snr" for intervals of equal log SNR.
        prediction: what the losses measure, to translate the target's weight.
        correction: importance weights; "unbiased" keeps the objective what it was.
    """

    constant = False

    def __init__(
        self,
        process: Process,
        estimator: str = "loss",
        *,
        target: Weighting | None = None,
        floor: float = 0.2,
        strata: int = 20,
        over: str = "u",
        prediction: Prediction = "eps",
        correction: str | Correction = "unbiased",
        draws: str = "independent",
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(process, correction=correction, draws=draws, seed=seed)
        if estimator not in ESTIMATORS:
            raise ValueError(f"unknown estimator {estimator!r}: choose one of {', '.join(ESTIMATORS)}")
        if not 0 <= floor <= 1:
            raise ValueError(f"floor must lie in [0, 1], got {floor}")
        known = inspect.signature(ESTIMATORS[estimator]).parameters
        strange = [name for name in options if name not in known]
        if strange:
            raise ValueError(f"the {estimator} estimator has no setting {strange[0]!r}; it takes {', '.join(list(known)[1:])}")
        edges = stratum_edges(process, strata, over)
        self.objective = Objective(process, prediction)
        self.target = target
        self.floor = floor
        self.table = Histogram((edges[1:] - edges[:-1]).double(), None if over == "u" else edges)
        self.estimator = ESTIMATORS[estimator](self.table.edges, **options)

    @staticmethod
    def option_sources() -> list[type[Estimator]]:
        """Where the settings in `options` are documented, for spec strings."""
        return list(ESTIMATORS.values())

    def density(self, u: Tensor, x0: Tensor | None = None) -> Tensor:
        return self.table.density(u)

    def quantile(self, v: Tensor, x0: Tensor | None = None) -> Tensor:
        return self.table.quantile(v)

    def feedback(self, draw: Draw, losses: Tensor | None, loss_at: LossAt | None) -> AbstractContextManager[None]:
        return self.estimator.feedback(self, draw, losses, loss_at)

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> "AdaptiveSampler":
        self.estimator.attach(model, optimizer)
        return self

    def on_target(self, losses: Tensor, u: Tensor) -> Tensor:
        """Losses weighted by the target."""
        return losses if self.target is None else self.target.weights(self.objective, u).detach() * losses

    def propose(self, mass: Tensor) -> None:
        """Take a new density from the estimator: masses of the strata, before the floor."""
        total = mass.sum()
        uniform = self.table.widths.to(mass)
        usable = torch.isfinite(total) & (total > 0)
        share = torch.where(usable, mass / total.clamp(min=1e-30), uniform)
        self.table.set((1 - self.floor) * share + self.floor * uniform)


def stratum_edges(process: Process, strata: int, over: str) -> Tensor:
    """Edges of the strata in u, in the middle of no timestep."""
    if strata < 1:
        raise ValueError(f"strata must be >= 1, got {strata}")
    if over == "u":
        return even_edges(min(strata, process.steps or strata))
    if over != "log_snr":
        raise ValueError(f'over must be "u" or "log_snr", got {over!r}')
    fine = process.steps or 4096
    log_snr = process.log_snr_edges(torch.arange(fine + 1, dtype=torch.float64) / fine).clamp(-20, 20)
    wanted = torch.linspace(float(log_snr[0]), float(log_snr[-1]), strata + 1, dtype=torch.float64)[1:-1]
    inner = torch.searchsorted(-log_snr, -wanted).unique()
    return torch.cat([torch.zeros(1), inner[(inner > 0) & (inner < fine)] / fine, torch.ones(1)])
