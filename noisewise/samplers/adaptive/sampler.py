"""The adaptive sampler: learn, while training, which noise levels reduce the objective most (arXiv 2411.09998).

Estimators differ in how they learn; strata, floor, target, correction and state are shared.
"""

import inspect
import math
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from noisewise import distributed
from noisewise.feedback import replayed
from noisewise.levels import check_size
from noisewise.objective import Objective
from noisewise.processes import Process
from noisewise.running import RunningLoss
from noisewise.samplers.adaptive.cut import ERROR, GROW, PACE, followed
from noisewise.samplers.adaptive.estimator import Estimator, LossEstimator
from noisewise.samplers.adaptive.lookahead import LookaheadEstimator
from noisewise.samplers.adaptive.reinforce import ReinforceEstimator
from noisewise.samplers.base import Draw, LossAt
from noisewise.samplers.correction import Correction
from noisewise.samplers.histogram import Histogram, edges_around
from noisewise.samplers.learning import Learner, split_objective
from noisewise.weighting import MinSNR, Weighting

ESTIMATORS: dict[str, type[Estimator]] = {
    "loss": LossEstimator,
    "reinforce": ReinforceEstimator,
    "lookahead": LookaheadEstimator,
}


class AdaptiveSampler(Learner):
    """A density over strata of u that is learned during training.

    Args:
        process: the objective (process and prediction); or only the process, if the prediction is its usual one.
        estimator: how to learn: one of `ESTIMATORS`, or a class. Its settings may follow as keywords.
        floor: the share of uniform draws, which keeps importance weights bounded; by default 0.35 for `loss`, 0.2 for the
            others.
        strata: how many intervals of u, at most one per timestep; by default the estimator's own.
        over: "u" or "log_snr": what the intervals are equal in.
        correction: importance weights; by default "target" for `loss`, which trains the target, and "none" for the others,
            so that the sampler acts as a weighting.
        target: the weighting of the objective to lower; by default the loop's. If the loop has none: Min-SNR with
            correction="target", whose gamma moves (`error`), else the plain loss.
        draws: how a batch is drawn; by default stratified, so that each batch covers all noise levels.
        error: the gamma of the default target is 5, or more where the model is still wrong: it goes to the SNR at which the
            squared error in x0 is this share of the data's mean square; by default 0.07. If given, a Min-SNR target that is
            named moves too.
        grow: steps before gamma moves: structure first, then detail; by default 2,000.
        steady: steps until `error` begins to fall, in proportion to 1 / steps, so that gamma rises in a long training, and
            the objective ends near the plain one; by default it does not fall.
        collapse: a density narrower than this, exp(entropy), restarts as uniform, with a warning.
        settings: `weighting`, `objective` and `seed`, as of all learning samplers; and the estimator's own.
    """

    def __init__(
        self,
        process: Process | Objective,
        estimator: str | type[Estimator] = "loss",
        *,
        floor: float | None = None,
        strata: int | None = None,
        over: str = "u",
        correction: str | Correction | None = None,
        target: Weighting | None = None,
        draws: str = "stratified",
        error: float | None = None,
        grow: int | None = None,
        steady: int | None = None,
        collapse: float = 0.02,
        **settings: Any,
    ) -> None:
        process, settings["objective"] = split_objective(process, settings.get("objective"))
        if isinstance(estimator, str) and estimator not in ESTIMATORS:
            raise ValueError(f"unknown estimator {estimator!r}: choose one of {', '.join(ESTIMATORS)}")
        learned_by = ESTIMATORS[estimator] if isinstance(estimator, str) else estimator
        own = {name: settings.pop(name) for name in list(settings) if name in _settings_of(learned_by)}
        for name in settings:
            takers = [other for other, kind in ESTIMATORS.items() if name in _settings_of(kind)]
            if takers:
                which = estimator if isinstance(estimator, str) else estimator.__name__
                raise ValueError(f"{name} is a setting of the {takers[0]} estimator, not of {which}")
        edges = stratum_edges(process, learned_by.strata if strata is None else strata, over)
        table = Histogram((edges[1:] - edges[:-1]).double(), edges)
        correction = Correction.parse(learned_by.correction if correction is None else correction)
        floor = learned_by.floor if floor is None else floor
        own_target = correction.kind == "target" and target is None and settings.get("weighting") is None
        if own_target:
            target = MinSNR()
        super().__init__(process, table, floor=floor, correction=correction, target=target, draws=draws, **settings)
        self.estimator = learned_by(table.edges, **own)
        self.conditional = self.estimator.conditional
        if not 0 <= collapse < 1:
            raise ValueError(f"collapse must lie in [0, 1), got {collapse}")
        self.collapse = collapse
        self._let_gamma_move(error, grow, steady, own_target)
        self.register_buffer("collapses", torch.zeros((), dtype=torch.int64))
        self.collapses: Tensor

    def _let_gamma_move(self, error: float | None, grow: int | None, steady: int | None, own_target: bool) -> None:
        """Keep by what the gamma of a Min-SNR target goes, if it does, and where it is; `own_target`: nobody named one."""
        self.error, self.grow = ERROR if error is None else error, GROW if grow is None else grow
        self.steady = math.inf if steady is None else steady
        if not 0 < self.error <= 1:
            raise ValueError(f"error must lie in (0, 1], got {error}")
        if min(self.grow, self.steady) < 1:
            raise ValueError(f"grow and steady must be >= 1, got {self.grow} and {self.steady}")
        movable = isinstance(self.estimator, LossEstimator) and self.objective.loss == "mse"
        asked = [name for name, value in {"error": error, "grow": grow, "steady": steady}.items() if value is not None]
        if asked and not (movable and isinstance(self.target, MinSNR)):
            raise ValueError(
                f"{asked[0]} moves the gamma of a Min-SNR target, by mse losses and the loss "
                "estimator: name no other target or weighting than minsnr"
            )
        self.first_gamma = (self.target if isinstance(self.target, MinSNR) else MinSNR()).gamma
        self.moves = bool(asked) or (movable and own_target)
        # also where gamma stays: recipes of all targets go on from each other's states
        self.register_buffer("gamma", torch.tensor(self.first_gamma, dtype=torch.float32))
        self.register_buffer("power", torch.zeros((), dtype=torch.float32))  # the data's mean square, once it was seen
        self.gamma: Tensor
        self.power: Tensor
        self._aim()

    @staticmethod
    def option_sources() -> list[type]:
        """Where the settings that the signature collects are documented, for spec strings."""
        return list(ESTIMATORS.values())

    def feedback(self, draw: Draw, losses: Tensor | None, loss_at: LossAt | None) -> AbstractContextManager[None]:
        if not isinstance(self.estimator, LossEstimator):  # which counts them itself
            self.count_bad(losses)
        return self.estimator.feedback(self, draw, losses, loss_at)

    def settle(self, mass: Tensor) -> None:
        """Take the masses that an estimator has learned (for all data, or the mean over a batch), unless they have collapsed.

        Called at updates only: unless `collapse` is 0 it waits for the device.
        """
        mass = mass.detach().double()
        mass = mass / mass.sum().clamp(min=1e-30)
        widths = self.table.widths.double()
        width = float(torch.exp(-torch.special.xlogy(mass, mass / widths).sum())) if self.collapse else math.inf
        if width < self.collapse:
            warnings.warn(
                f"the adaptive sampler has collapsed at step {self.step}: all but {width:.2%} of the noise levels were "
                "given up. It starts again from uniform; a larger floor or entropy, or a smaller policy lr, prevents this",
                RuntimeWarning,
                stacklevel=2,
            )
            self.collapses += 1
            self.estimator.reset()
            mass = widths
        self.propose(mass)

    def see(self, mean_square: Tensor) -> None:
        """Take in the mean square of this rank's batch. Data that are no numbers, or all 0, do not count, and a single batch
        that is far too large counts little."""
        known = torch.isfinite(mean_square) & (mean_square > 0)
        total, count = distributed.gather_sum(torch.stack([torch.where(known, mean_square, 0.0), known.to(mean_square)]))
        now = total / count
        power = torch.where(self.power > 0, torch.lerp(self.power, torch.minimum(now, 10 * self.power), 0.1), now)
        self.power.copy_(torch.where(count > 0, power, self.power))

    def follow(self, running: RunningLoss) -> None:
        """Let the gamma of the default target go on to where the model's error says, never below where it began; `running` has
        losses weighted with the target."""
        if not self.wants_mean_square():
            return
        gamma, power = max(float(self.gamma), self.first_gamma), float(self.power)
        if power > 0:
            error = self.error * min(1.0, self.steady / (self.step + 1))
            goal = followed(running, self.objective, gamma, error, power)
            self.gamma.fill_(gamma * (max(goal, self.first_gamma) / gamma) ** PACE)
            self._aim()

    def wants_mean_square(self) -> bool:
        """Whether this step's update moves gamma."""
        step, estimator = self.step + 1, self.estimator
        return self.moves and step >= self.grow and isinstance(estimator, LossEstimator) and estimator.due(step)

    def _aim(self) -> None:
        """Train Min-SNR's objective with this gamma from here on, if it moves."""
        gamma = max(float(self.gamma), self.first_gamma)
        if self.moves and not (isinstance(self.target, MinSNR) and self.target.gamma == gamma):
            self.retarget(MinSNR(gamma))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.setdefault(prefix + "gamma", self.gamma.new_tensor(self.first_gamma))  # states of before
        state_dict.setdefault(prefix + "power", self.power.new_zeros(()))
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._aim()

    # Densities that depend on the data ------------------------------------------------------------------------------

    def masses(self, x0: Tensor) -> Tensor:
        """(B, K) masses with the floor, of an estimator that looks at the data."""
        return (1 - self.floor) * self.estimator.masses(x0) + self.floor * self.table.widths

    def density(self, u: Tensor, x0: Tensor | None = None) -> Tensor:
        if x0 is None or not self.conditional:
            return self.table.density(u)
        with torch.no_grad():
            return self.estimator.rows(self, x0).density(u)

    @torch.no_grad()
    def marginal(self, u: Tensor, x0: Tensor | None = None) -> Tensor:
        if x0 is None or not self.conditional:
            return self.table.density(u)
        return (self.masses(x0).mean(0) / self.table.widths)[self.table.bin(u)]

    def quantile(self, v: Tensor, x0: Tensor | None = None) -> Tensor:
        return self._draw(v, x0)[0]

    def _draw(self, v: Tensor, x0: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if x0 is None or not self.conditional:
            return super()._draw(v, None)
        u, density = replayed(self._draw_rows, self.estimator, v, x0)
        mass = self.masses(x0) if self.correction.needs_mean else None
        return u, density, self._weight(u, density, None if mass is None else (mass, mass / self.table.widths))

    def _draw_rows(self, v: Tensor, x0: Tensor) -> tuple[Tensor, Tensor]:
        """u and its density, for a density that depends on the data."""
        rows = self.estimator.rows(self, x0)
        u = rows.quantile(v)
        return u, rows.density(u)

    def _kept(self, x0: Tensor | None) -> Tensor | None:
        return x0 if self.conditional else None


def _settings_of(estimator: type[Estimator]) -> list[str]:
    return [name for name in inspect.signature(estimator).parameters if name != "edges"]


def stratum_edges(process: Process, strata: int, over: str) -> Tensor:
    """Edges of the strata in u; a discrete process is never cut inside a timestep."""
    if strata < 1:
        raise ValueError(f"strata must be >= 1, got {strata}")
    check_size("strata", strata)
    if over not in ("u", "log_snr"):
        raise ValueError(f'over must be "u" or "log_snr", got {over!r}')
    fine = process.steps or 4096
    if over == "u":
        inner = torch.arange(1, strata, dtype=torch.float64) * fine / strata
        return edges_around(inner.round() if process.steps else inner, fine)
    log_snr = process.log_snr_edges(torch.arange(fine + 1, dtype=torch.float64) / fine).clamp(-20, 20)
    wanted = torch.linspace(float(log_snr[0]), float(log_snr[-1]), strata + 1, dtype=torch.float64)[1:-1]
    return edges_around(torch.searchsorted(-log_snr, -wanted), fine)
