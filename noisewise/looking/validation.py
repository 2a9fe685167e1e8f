"""Validation loss at each noise level: the same samples, the same noise and the same levels every time it is called.

A training loss is noisy because every step draws other noise levels, other noise and other data. Here all three are fixed: two
steps of a run, two runs or two machines can be compared level by level, and what differs is the model.

    found = validate(model, loader, objective)                          # model(input, time, *the rest of the batch)
    found = validate(model, loader, objective, levels="mlperf")         # eight fixed levels
    found = validate(losses_at, loader, objective, model=model)         # losses_at(batch, u, noise) -> one loss a sample
"""

import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import RandomSampler

from noisewise import distributed
from noisewise.batches import Where, data_of, moved, shares
from noisewise.feedback import preserved_random_state
from noisewise.levels import check_per_sample, middles
from noisewise.objective import Objective
from noisewise.processes import Process
from noisewise.streams import checked_seed, normals, stream_key
from noisewise.weighting import Weighting

NOISE_SEED = 0x6C6F7373  # "loss": apart from the noise of generated images

LossesAt = Callable[[Any, Tensor, Tensor], Tensor]
"""(batch, u, noise) -> (B,) losses of the batch's samples, noised to the levels u with that noise."""


class Optimum(Protocol):
    """What knows the loss of a perfect model, as `noisewise.metrics.optimal_loss.OptimalLoss` does."""

    def at(self, u: Tensor, objective: Objective | None = None) -> Tensor:
        """That loss at the levels u, in the units of an objective."""
        ...


Levels = int | str | Sequence[float] | Tensor
"""How many levels, the name of some, or the levels u themselves."""
MLPERF = 8  # levels, at t = 0, 1/8, ... 7/8


def level_grid(levels: Levels, process: Process) -> Tensor:
    """The levels u, least noise first, in double precision.

    A number n, or "quantiles(n)": the middles of n equal intervals of u. "mlperf": u = 0, 1/8, ... 7/8, the levels of MLPerf's
    FLUX.1 benchmark. "log_snr(n)": n levels evenly spaced in log SNR, between those of the middles of the first and the last of
    n equal intervals of u.
    """
    if isinstance(levels, str):
        return _named_grid(levels, process)
    if isinstance(levels, Integral):
        if levels < 1:
            raise ValueError(f"levels must be >= 1, got {levels}")
        return middles(int(levels), dtype=torch.float64)
    try:
        u = torch.as_tensor(levels, dtype=torch.float64).cpu()
    except (TypeError, ValueError, RuntimeError):
        u = torch.empty(0)
    if u.ndim != 1 or not len(u) or not bool(((u >= 0) & (u <= 1)).all()) or not bool((u.diff() > 0).all()):
        raise ValueError("levels must be rising numbers u in [0, 1], least noise first; process.u_of_time(time) makes them")
    return u


def _named_grid(name: str, process: Process) -> Tensor:
    match = re.fullmatch(r"(mlperf)|(quantiles|log_snr)\((\d+)\)", name.replace(" ", ""))
    if match is None:
        raise ValueError(f"unknown levels {name!r}: use mlperf, quantiles(n) or log_snr(n), as in log_snr(20), or a number")
    if match[1]:
        return torch.arange(MLPERF, dtype=torch.float64) / MLPERF
    even = level_grid(int(match[3]), process)
    if match[2] == "quantiles":
        return even
    ends = process.log_snr(even[[0, -1]].float()).clamp(-30, 30)
    u = process.u_of_log_snr(torch.linspace(float(ends[0]), float(ends[1]), len(even), dtype=torch.float64))
    if len(u.unique()) < len(u):
        raise ValueError(f"{name} has {len(u.unique())} different levels on {process}: ask for no more")
    return u


@dataclass(frozen=True)
class Validation:
    """Mean losses at fixed noise levels, least noise first; by default in the middle of equal intervals of u."""

    u: Tensor
    loss: Tensor
    error: Tensor
    """The standard error of each mean: how far other samples and other noise would move it."""
    samples: int
    objective: Objective
    optimal: Tensor | None = None
    """The loss of a perfect model at each level, where it was given."""

    @property
    def reducible(self) -> Tensor:
        """What is left to learn at each level: the loss, less that of a perfect model of the training data.

        At little noise that model remembers its data (`OptimalLoss.memorised`); new data cannot get there.
        """
        if self.optimal is None:
            raise ValueError("the optimal loss is not known: give validate(..., optimal=optimal_loss(objective, data))")
        return self.loss - self.optimal

    @property
    def time(self) -> Tensor:
        """What the model is fed at each level."""
        return self.objective.process.time(self.u.float())

    @property
    def log_snr(self) -> Tensor:
        """ln(alpha^2 / sigma^2) at each level."""
        return self.objective.process.log_snr(self.u.float())

    @property
    def even(self) -> bool:
        """Whether the levels are the middles of equal intervals of u."""
        return is_even(self.u)

    @property
    def mean(self) -> float:
        """Over all levels: the loss of uniform sampling, if they are the middles of equal intervals of u."""
        return float(self.loss.mean())

    @property
    def quartiles(self) -> list[float]:
        """The mean loss in each quarter of u (for DDPM: of the timesteps), least noise first."""
        return self.parts(4)

    def parts(self, count: int) -> list[float]:
        """The mean loss in each of that many equal intervals of u, least noise first."""
        if count < 1:
            raise ValueError(f"count must be >= 1, got {count}")
        return self._parts(self.loss, count)

    def _parts(self, values: Tensor, count: int) -> list[float]:
        if not self.even:  # the mean of the levels inside, nan where there is none
            part = (self.u * count).long().clamp(max=count - 1)
            return [float(values[part == i].mean()) for i in range(count)]
        low = torch.arange(len(self.u), dtype=torch.float64) / len(self.u)
        start = torch.arange(count, dtype=torch.float64)[:, None] / count
        inside = torch.minimum(low + 1 / len(self.u), start + 1 / count) - torch.maximum(low, start)
        share = inside.clamp(min=0) * count  # a level may lie in two parts
        return torch.where(share > 1e-9, share * values, 0.0).sum(1).tolist()

    def weighted(self, weighting: Weighting, objective: Objective | None = None) -> float:
        """The mean with a weight on each level."""
        weights = weighting.weights(objective or self.objective, self.u.float())
        return float((weights.double().cpu() * self.loss).mean())

    def row(self, prefix: str = "validation/", levels: bool = False) -> dict[str, float]:
        """Plain numbers for a tracker: loss, loss_q0 (least noise) to loss_q3, and each level's if asked for.

        Of levels that are not spread evenly over u: loss, and loss_t125 and the like, by what the model is fed.
        """
        found = {"loss": self.mean} | {f"loss_q{i}": value for i, value in enumerate(self.quartiles)}
        if self.optimal is not None:
            found["reducible"] = float(self.reducible.mean())
        if not self.even:
            names = [f"loss_t{float(time):.4g}" for time in self.time]
            found = {"loss": self.mean} | dict(zip(names, self.loss.tolist(), strict=True))
            if self.optimal is not None:
                left = zip(names, self.reducible.tolist(), strict=True)
                found |= {"reducible": float(self.reducible.mean())} | {"reducible" + name[4:]: value for name, value in left}
        elif levels:
            digits = len(str(len(self.u) - 1))
            found |= {f"loss_by_level/{i:0{digits}d}": value for i, value in enumerate(self.loss.tolist())}
        return {prefix + name: value for name, value in found.items()}

    def lines(self, count: int = 10) -> list[str]:
        """A small table for the terminal: the mean loss in that many intervals of u, with the times they stand for; each
        level, if they are not spread evenly.

        Where the optimal loss is known it stands beside, and what is left to learn.
        """
        count = min(count, len(self.u))
        columns = {"loss": self.loss}
        if self.optimal is not None:
            columns |= {"optimal": self.optimal, "reducible": self.reducible}
        if self.even:
            times = [f"{float(time):.4g}" for time in self.objective.process.time(torch.arange(count + 1) / count)]
            names = [f"{a} to {b}" for a, b in pairwise(times)]
            values = [self._parts(column, count) for column in columns.values()]
        else:
            names = [f"{float(time):.4g}" for time in self.time]
            values = [column.tolist() for column in columns.values()]
        parts = [[f"{value:.5f}" for value in column] for column in values]
        means = [f"{float(column.mean()):.5f}" for column in columns.values()]
        rows = [(name, *cells) for name, cells in zip(names, zip(*parts, strict=True), strict=True)]
        table = [("t", *columns), *rows, ("mean", *means)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]


@torch.no_grad()
def validate(
    model_or_losses: nn.Module | LossesAt,
    batches: Iterable[Any],
    objective: Objective,
    *,
    model: nn.Module | None = None,
    levels: Levels = 50,
    per_sample: int | None = None,
    x0: Where = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    optimal: Optimum | None = None,
) -> Validation:
    """Losses of held-out data by noise level; sample i meets level k with noise that depends on (seed, k, i) alone.

    With several processes call it on all of them, with the same batches: they share the work, every sample counts once and all
    of them get the same numbers. The caller's random state is left as it was.

    Args:
        model_or_losses: a module, called as model(input, time, *the rest of the batch); or a function (batch, u, noise) that
            returns one loss a sample, for any other call.
        batches: x0, or tuples that begin with x0; the same samples in the same order each time (do not shuffle).
        objective: what the losses measure.
        model: the module inside a function, put into evaluation mode meanwhile.
        levels: how many noise levels, in the middle of equal intervals of u; or "mlperf", "quantiles(n)" or "log_snr(n)"
            (see `level_grid`); or the levels u themselves.
        per_sample: at how many of them each sample is evaluated, spread evenly and in turns; at all by default.
        x0: where x0 is in a batch that is no tuple: its key, or a function that looks it up.
        device: where to move the batches; that of the module, if one is given first.
        seed: of the noise.
        optimal: the loss of a perfect model, from `noisewise.metrics.optimal_loss`: the result then knows what is `reducible`.
    """
    _check_arguments(model_or_losses, batches, objective)
    if optimal is not None and not hasattr(optimal, "at"):
        raise TypeError(f"optimal must be what optimal_loss(objective, data) returns, got {type(optimal).__name__}")
    grid = level_grid(levels, objective.process)
    if per_sample is not None and not 1 <= per_sample <= len(grid):
        raise ValueError(f"per_sample must lie between 1 and levels={len(grid)}, got {per_sample}")
    seed = checked_seed(seed)
    losses_at, place = model_or_losses, device
    if isinstance(model_or_losses, nn.Module):
        losses_at = _calling(model_or_losses, objective)
        place = device or next((parameter.device for parameter in model_or_losses.parameters()), None)
    sums = []
    with distributed.together(), preserved_random_state(seed), evaluation_mode(model_or_losses, model):
        for first, counts, batch in shares(batches, x0):
            here = batch if place is None else moved(batch, place)
            found = batch_sums(losses_at, here, data_of(here, x0), first, grid, seed, per_sample)
            sums.append(found if counts else torch.zeros_like(found))
    # in the order of the batches, so that the additions, and with them the bits, are those of one process
    table = distributed.gather_rows(torch.stack(sums)).cpu().unflatten(0, (-1, len(sums))).transpose(0, 1).flatten(0, 1)
    return from_sums(table, objective, grid, optimal, per_sample)


def is_even(u: Tensor) -> bool:
    """Whether levels are the middles of equal intervals of u."""
    return torch.equal(u, middles(len(u), dtype=torch.float64))


def batch_sums(
    losses_at: LossesAt,
    batch: Any,
    x0: Tensor,
    first: int,
    grid: Tensor,
    seed: int,
    per_sample: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """(3, levels): the sums of the losses and of their squares, and their number, for the samples from number `first` on."""
    count, device = len(x0), torch.device("cpu") if x0.device.type == "mps" else x0.device  # double precision is needed
    at, levels = grid.float().to(x0.device), len(grid)
    numbers = torch.arange(first, first + count, device=device)
    sums = torch.zeros(3, levels, dtype=torch.float64, device=device)  # there until the end: the host need not wait
    for level in range(levels) if per_sample is None else turns(first, count, levels, per_sample, seed):
        noise = normals(seed ^ NOISE_SEED, numbers, level, tuple(x0.shape[1:])).to(x0)
        which = level if isinstance(level, int) else torch.tensor(level, device=x0.device)
        u = at[which].expand(count).contiguous()
        losses = check_per_sample(losses_at(batch, u, noise), u).detach().to(device).double()
        terms = [losses, losses.square(), torch.ones_like(losses)]
        if isinstance(which, int):
            sums[:, which] += torch.stack([term.sum() for term in terms])
        else:
            met = which.to(device) == torch.arange(levels, device=device)[:, None]
            sums += torch.stack([torch.where(met, term, 0.0).sum(1) for term in terms])
        if progress is not None:
            progress(count)
    return sums


def turns(first: int, count: int, levels: int, per_sample: int, seed: int) -> Iterator[list[int]]:
    """The level of each sample, `per_sample` times: evenly spread, and each level once in so many samples as there are levels.

    Where a run of so many samples begins is drawn, lest every n-th sample, perhaps all of one class, meet the same levels.
    """
    starts = [stream_key(NOISE_SEED, seed, number // levels) + number for number in range(first, first + count)]
    for turn in range(per_sample):
        yield [(start + turn * levels // per_sample) % levels for start in starts]


def from_sums(
    table: Tensor, objective: Objective, u: Tensor, optimal: Optimum | None = None, per_sample: int | None = None
) -> Validation:
    """Means and standard errors from the sums of each batch, at the levels u."""
    levels = table.shape[-1]
    total = torch.zeros_like(table[0])
    for sums in table:
        total += sums
    count = total[2]
    if not bool(count.all()):
        raise ValueError(
            f"{int((count == 0).sum())} of {levels} levels got no sample: give at least {-(-levels // (per_sample or levels))} "
            "samples, ask for fewer levels, or raise per_sample"
        )
    mean = total[0] / count
    variance = (total[1] / count - mean**2).clamp(min=0) * count / (count - 1).clamp(min=1)
    samples = round(float(count.sum()) / (per_sample or levels))
    best = None if optimal is None else optimal.at(u, objective)
    return Validation(u, mean, (variance / count).sqrt(), samples, objective, best)


@contextmanager
def evaluation_mode(*parts: Any) -> Iterator[None]:
    """Modules without dropout and with fixed statistics; afterwards each of their parts is in the mode it was in."""
    before = [(module, module.training) for part in parts if isinstance(part, nn.Module) for module in part.modules()]
    try:
        for module, _ in before:
            module.training = False
        yield
    finally:
        for module, mode in before:
            module.training = mode


def _check_arguments(model_or_losses: Any, batches: Any, objective: Any) -> None:
    if not callable(model_or_losses):
        raise TypeError(f"the model, or a function (batch, u, noise), must come first, got {type(model_or_losses).__name__}")
    if not isinstance(model_or_losses, nn.Module) and not _takes_three(model_or_losses):
        raise TypeError(
            "a function is called as losses_at(batch, u, noise), which this one does not take, and returns one loss a sample: "
            "for a model that is a function hand over lambda batch, u, noise: objective.losses(model, batch, u, noise)"
        )
    if isinstance(batches, Tensor):
        raise TypeError("batches must be several, got one tensor: hand over x0.split(64), or list(x0) if its rows are batches")
    if not isinstance(objective, Objective):
        raise TypeError(
            f"the objective must be an Objective, as Objective(DDPM.linear(), 'eps') is, got {type(objective).__name__}"
        )
    if isinstance(getattr(batches, "sampler", None), RandomSampler):
        warnings.warn(
            "this loader shuffles, so every call pairs the samples with other noise: make it with shuffle=False",
            RuntimeWarning,
            stacklevel=4,  # torch.no_grad stands between
        )


def _takes_three(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with three arguments, as far as its signature is known."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # of what is not written in Python, or says nonsense of itself
        return True
    try:
        signature.bind(None, None, None)
    except TypeError:
        return False
    return True


def _calling(model: nn.Module, objective: Objective) -> LossesAt:
    def losses_at(batch: Any, u: Tensor, noise: Tensor) -> Tensor:
        if isinstance(batch, Tensor):
            return objective.losses(model, batch, u, noise)
        if isinstance(batch, tuple | list):
            return objective.losses(model, batch[0], u, noise, *batch[1:])
        raise TypeError(
            f"how the model takes a batch that is a {type(batch).__name__} is not known: instead of the model hand over a "
            "function (batch, u, noise) that returns objective.losses(model, x0, u, noise, ...), and the model as model="
        )

    return losses_at
