"""What all learning samplers share: a density over strata, the target, the floor, the count of losses that are not finite."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from noisewise import distributed
from noisewise.levels import first_ticks, middles
from noisewise.objective import Objective
from noisewise.processes import Process, check_process, check_same
from noisewise.running import RunningLoss, Skipped
from noisewise.samplers.base import Sampler, fine_grid
from noisewise.samplers.correction import target_ratio
from noisewise.samplers.histogram import Histogram
from noisewise.weighting import Weighting, is_fixed

LOOK = 50  # steps between two looks at what was left out of learning: each waits for the device


def split_objective(
    given: Process | Objective, objective: Objective | None, place: str = "first"
) -> tuple[Process, Objective | None]:
    """The process and the objective, which may be given in one or beside each other."""
    if not isinstance(given, Objective):
        process = check_process(given, f"the {place} argument must be a Process, such as DDPM.linear(), or an Objective")
        if objective is not None:
            check_same(process, objective.process, "the objective")
        return process, objective
    if objective not in (None, given):
        raise ValueError("the objective is given twice, in place of the process and as objective=: leave one out")
    return given.process, given


def check_weighting(given: Any, name: str) -> Weighting:
    """The weighting itself, if it is one."""
    if isinstance(given, Weighting):
        return given
    hint = f"; noisewise.spec.build_weighting({given!r}) makes one" if isinstance(given, str) else ""
    raise TypeError(f"{name} must be a Weighting, such as MinSNR(), got {repr(given)[:80]}{hint}")


class Learner(Sampler):
    """A sampler whose density is learned during training.

    Args:
        table: the strata, uniform at first.
        weighting: the loop's loss weighting. Pass *unweighted* losses and name it here (a spec such as "adaptive+minsnr"
            does so); None means no weighting.
        target: the weighting of the objective to lower; by default the loop's.
        objective: what the losses measure, to translate weights; by default the usual prediction of the process.
        floor: the share of uniform draws, so that no noise level is starved.
    """

    table: Histogram
    constant = False
    has_target = True

    def __init__(
        self,
        process: Process,
        table: Histogram,
        *,
        weighting: Weighting | None = None,
        target: Weighting | None = None,
        objective: Objective | None = None,
        floor: float = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(process, table=table, **common)
        if not 0 <= floor <= 1:
            raise ValueError(f"floor must lie in [0, 1], got {floor}")
        for name, given in (("weighting", weighting), ("target", target)):
            if given is not None:
                check_weighting(given, name)
        self.objective = objective or Objective(process)
        # in tuples: these belong to the training loop, not to the sampler's state
        self._weightings = (weighting, weighting if target is None else target)
        self._means: tuple[Tensor, Tensor] | None = None  # of the target and of the loop's weighting
        self._tables: dict[tuple[Hashable, torch.device], tuple[Tensor, Tensor]] = {}
        self._fixed_weights = all(is_fixed(one) for one in self._weightings)
        self._model: tuple[nn.Module, ...] = ()
        self._optimizer: tuple[torch.optim.Optimizer, ...] = ()
        self.floor = floor
        self.skipped = Skipped()

    def advance(self) -> None:
        """Count a step, and now and then warn of losses that were left out."""
        super().advance()
        if self.step % LOOK == 0:
            for part in self.modules():
                if isinstance(part, Skipped | RunningLoss):
                    part.warn()

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> "Learner":
        self._model = (model,)
        self._optimizer = () if optimizer is None else (optimizer,)
        return self

    @property
    def model(self) -> nn.Module | None:
        """The model that was attached, if any."""
        return self._model[0] if self._model else None

    def attached(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model and its optimizer, or an error that says how to show them to the sampler."""
        if not self._model or not self._optimizer:
            raise RuntimeError(
                f"{type(self).__name__} trains for a few steps and takes them back: call sampler.attach(model, optimizer) once "
                "before the first observe()"
            )
        return self._model[0], self._optimizer[0]

    @property
    def target(self) -> Weighting | None:
        """What is to fall; None for the losses as they are handed over."""
        return self._weightings[1]

    def retarget(self, target: Weighting) -> None:
        """Let another objective fall from here on."""
        self._weightings = (self._weightings[0], target)
        self._tables.clear()
        self._means = None

    def on_target(self, losses: Tensor, u: Tensor) -> Tensor:
        """Losses weighted by the target."""
        return self._weighted(1, losses, u)

    def target_of_plain(self, u: Tensor) -> Tensor | None:
        """What `on_target` multiplies losses by; None where it takes them as they are."""
        return None if self.target is None else self._weights(1, u)

    def in_training(self, losses: Tensor, u: Tensor) -> Tensor:
        """Losses weighted as the training loop weights them."""
        return self._weighted(0, losses, u)

    def target_weight(self, u: Tensor) -> Tensor:
        weighting, target = self._weightings
        return torch.ones_like(u) if target is weighting else self._tabled("over the loop's", self._target_ratio, u)

    def _target_ratio(self, u: Tensor) -> Tensor:
        if self._means is None or self._means[0].device != u.device or not self._fixed_weights:
            target, loop = self._both(fine_grid(self.process, u.device))
            self._means = target.mean(), loop.mean()
        return target_ratio(*self._both(u), *self._means)

    def _both(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of the target and of the loop."""
        ones = torch.ones_like(u)
        return self.on_target(ones, u), self.in_training(ones, u)

    def _weighted(self, which: int, losses: Tensor, u: Tensor) -> Tensor:
        return losses if self._weightings[which] is None else self._weights(which, u) * losses

    def _weights(self, which: int, u: Tensor) -> Tensor:
        weighting = self._weightings[which]
        assert weighting is not None
        return self._tabled(which, lambda u: weighting.weights(self.objective, u).detach(), u)

    def _tabled(self, name: Hashable, function: Callable[[Tensor], Tensor], u: Tensor) -> Tensor:
        """function(u); where there are timesteps and the weights are fixed, looked up: it is needed at every step, and small
        kernels are what a sampler costs on a GPU."""
        steps = self.process.steps
        if steps is None or not self._fixed_weights:
            return function(u)
        if (name, u.device) not in self._tables:
            self._tables[name, u.device] = first_ticks(steps, u.device), function(middles(steps, u.device))
        ticks, values = self._tables[name, u.device]
        return values[torch.bucketize((u * 2**24).round().to(ticks), ticks, right=True)]

    def propose(self, mass: Tensor) -> None:
        """Take new masses of the strata, before the floor; masses that are no density leave it as it was."""
        total = mass.sum()
        usable = torch.isfinite(total) & (total > 0)
        floored = (1 - self.floor) * mass / total.clamp(min=1e-30) + self.floor * self.table.widths.to(mass)
        self.table.set(torch.where(usable, floored, self.table.mass.to(mass)))

    def count_bad(self, losses: Tensor | None) -> None:
        """Count this step's losses that are not finite; for samplers that learn from something else."""
        if losses is not None:
            self.skipped.count(distributed.gather_sum((~torch.isfinite(losses)).sum()))

    def check_losses(self, losses: Tensor | None) -> Tensor:
        """The losses, or an error that says why this sampler cannot do without them."""
        if losses is None:
            raise ValueError(f"{type(self).__name__} learns from the losses: call observe(draw, losses.detach(), ...)")
        return losses
