"""The optimal loss: what is left of the loss at each noise level when the model is perfect.

With x_t = alpha x0 + sigma noise and x0 one of N samples, each as likely, the best prediction of x0 is the posterior mean

    D(x_t) = sum_i p_i x_i,    p_i proportional to exp(-|x_t - alpha x_i|^2 / (2 sigma^2)),

and its loss is the mean variance of the posterior, J = E[sum_i p_i |x_i - D|^2] (arXiv 2506.13763). It depends on the data and
on r^2 = SNR alone. With d = x_i - x_g from the sample g that made x_t, the log of p_i / p_g is -r^2 |d|^2 / 2 + r d.noise: two
matrix products serve all levels, and nothing is lost to cancellation where there is little noise.

With a part S of the samples as references, the others' weights are multiplied by c = (N - 1) / |S without g|: numerator and
denominator of D are then unbiased, and all is exact for S = everything. Two bounds hold for any S, in the mean:

    low    c = 1. Who knows that g is in S has a smaller variance.
    high   g left out of S: E|x_g - D_S(x_t)|^2, the loss of some model that never saw x_g. So it is also no less than the
           optimal loss on new data of the same kind, while J itself is no more. Where x_t shrunk towards the mean of the data
           is a better guess, that counts instead: s^2 / (1 + r^2 s^2) an element, with s^2 the variance of the data. Most of
           its noise is |x_g|^2, shrunk by (1 + r^2 s^2)^2; that has a known mean and is subtracted.
"""

import hashlib
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noisewise.data import Source
from noisewise.feedback import preserved_random_state
from noisewise.levels import middles
from noisewise.metrics.reference import cache_folder
from noisewise.objective import Objective, bounded, eps_error_per_prediction_error
from noisewise.plain_files import replace_file
from noisewise.precision import full_float32
from noisewise.processes import Process
from noisewise.streams import checked_seed, normals, stream_key

FORMAT = "noisewise-optimal-1"
STREAM = 0x6F7074696D616C  # "optimal": the noise and the choices made here
GROUPS = 16  # of draws, each with references of its own: their means tell the standard error
MOST = 1 << 23  # weights in memory at a time
READ = 8192  # samples that are read, or turned to double precision, at a time
REFERENCES, DRAWS = 20_000, 1000  # of the commands
FILE = "optimal.json"  # in the folder of a run
COLLAPSED = 0.1
"""From this chance of meeting one sample twice on, the optimum is that of a model that remembers its data."""

CURVES, COUNTS = ("loss", "error", "low", "high"), ("samples", "references", "draws")


@dataclass(frozen=True)
class OptimalLoss:
    """The loss of a perfect model at some noise levels, in the units of `objective`; float64 on the CPU."""

    objective: Objective
    u: Tensor
    log_snr: Tensor
    """Clamped to where it is finite."""
    loss: Tensor
    error: Tensor
    """The standard error of the loss, over draws of (sample, noise) and of references."""
    low: Tensor
    """No more than the optimal loss, in the mean; equal to `loss` if all samples were references."""
    high: Tensor
    """No less than it, nor than that of new data of the same kind: the loss of a model that never saw the sample."""
    collapse: Tensor
    """The chance that two guesses from the posterior are the same sample: 1 if x_t gives its sample away."""
    samples: int
    references: int
    draws: int

    @property
    def exact(self) -> bool:
        """Whether all samples were references: the only error is that of the draws."""
        return self.references >= self.samples

    @property
    def effective(self) -> Tensor:
        """How many samples x_t leaves possible."""
        return 1 / self.collapse

    @property
    def memorised(self) -> Tensor:
        """Where the optimum is that of remembering the samples, and says nothing about new ones."""
        return self.collapse > COLLAPSED

    def at(self, u: Tensor, objective: Objective | None = None) -> Tensor:
        """The optimal loss at other levels, of this or another objective: only the data and log SNR matter.

        Between levels the v-loss is taken as linear in log SNR, and as constant outside: it has a limit at either end.
        """
        other = objective or self.objective
        lam = _log_snr(other.process, u.detach().double().cpu())
        v = self.loss / _per_x0(self.log_snr, self.objective) * (1 + self.log_snr.exp())
        order = self.log_snr.argsort(descending=True)
        found = np.interp(-lam.numpy(), -self.log_snr[order].numpy(), v[order].numpy())
        return torch.from_numpy(found) / (1 + lam.exp()) * _per_x0(lam, other)

    def state(self) -> dict[str, Any]:
        """Plain numbers for a file: curves of the loss of x0, from which those of every prediction follow."""
        factor = _per_x0(self.log_snr, self.objective)
        curves = {name: (getattr(self, name) / factor).tolist() for name in CURVES}
        levels = {name: getattr(self, name).tolist() for name in ("u", "log_snr", "collapse")}
        return {"format": FORMAT} | {name: getattr(self, name) for name in COUNTS} | levels | curves


def remembered(found: OptimalLoss) -> list[str]:
    """A sentence on the levels where the optimum is that of remembering the data; none if there are no such levels."""
    levels = found.u[found.memorised].tolist()
    if not levels:
        return []
    return [
        f"At {len(levels)} of {len(found.u)} levels, u = {min(levels):.3f} to {max(levels):.3f}, a noised sample leaves fewer "
        f"than {1 / COLLAPSED:.0f} training samples possible: there a perfect model remembers its data, and the optimal loss "
        "says nothing about new data."
    ]


def from_state(state: dict[str, Any], objective: Objective) -> OptimalLoss:
    """What `state()` returned, in the units of an objective; on another process, at the u that have the same log SNR."""
    if state.get("format") != FORMAT:
        raise ValueError(f"this is no optimal loss: its format is {state.get('format')!r}, not {FORMAT!r}")
    levels = {name: torch.tensor(state[name], dtype=torch.float64) for name in ("u", "log_snr", "collapse", *CURVES)}
    if len({len(curve) for curve in levels.values()}) != 1:
        raise ValueError("the curves of this optimal loss are not of one length")
    log_snr = levels["log_snr"]
    if not torch.allclose(_log_snr(objective.process, levels["u"]), log_snr):
        levels["u"] = objective.process.u_of_log_snr(log_snr)
    factor = _per_x0(log_snr, objective)
    loss, error, low, high = (levels[name] * factor for name in CURVES)
    samples, references, draws = (int(state[name]) for name in COUNTS)
    return OptimalLoss(objective, levels["u"], log_snr, loss, error, low, high, levels["collapse"], samples, references, draws)


@torch.no_grad()
def optimal_loss(
    objective: Objective,
    data: Tensor | Source,
    levels: int | Tensor = 50,
    *,
    labels: Tensor | None = None,
    classes: bool = False,
    flip: bool = False,
    references: int | None = None,
    draws: int = DRAWS,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> OptimalLoss:
    """The irreducible loss of a data set at each noise level.

    Args:
        objective: the process, and what the losses measure; its loss must be "mse".
        data: samples, (N, ...) of floats, or a source of them.
        levels: how many noise levels, in the middle of equal intervals of u; or the values of u.
        labels: the class of each sample, if the model is told it; those of a source are its own.
        classes: whether the model is told the classes of a source.
        flip: whether the mirror image of each sample counts as one more.
        references: how many samples stand for all of them; None for all.
        draws: noised samples at each level, the same ones at all of them.
        seed: of the draws, and of the references.
        device: where to compute.
        progress: told how many draws were done, at how many levels (a product).
    """
    _check_loss(objective)
    for name, value, least in (("references", 1 if references is None else references, 1), ("draws", draws, 2)):
        if value < least:
            raise ValueError(f"{name} must be >= {least}, got {value}")
    u = (middles(levels, dtype=torch.float64) if isinstance(levels, int) else levels.detach().double().cpu()).contiguous()
    if u.ndim != 1 or not len(u):
        raise ValueError(f"levels must be a number >= 1 or a vector of u, got {levels}")
    place = torch.device(device)
    place = torch.device("cpu") if place.type == "mps" else place  # double precision is needed
    population = _Population(data, labels, classes, flip, place)
    log_snr = _log_snr(objective.process, u)
    ratios = (log_snr / 2).exp().tolist()
    count = min(references or len(population), len(population))
    exact, key = count == len(population), stream_key(STREAM, checked_seed(seed))
    parts = _spread(len(population), draws, key).chunk(1 if exact else min(GROUPS, draws))
    tables, variances, first, refs = [], [], 0, None
    with full_float32():
        for number, rows in enumerate(parts):
            if refs is None or not exact:
                refs = _References(population, _subset(len(population), count, stream_key(key, 1 + number)))
            variances.append(refs.lengths.mean())
            tables.append(_draws(population, refs, rows, first, ratios, key, progress))
            first += len(rows)
    table = torch.cat(tables)
    loss, low, high, collapse = table.mean(0)
    apart = table if exact else torch.stack([part.mean(0) for part in tables])  # what is independent
    error = apart[:, 0].std(0) / len(apart) ** 0.5
    variance = torch.stack(variances).mean().cpu()
    high = torch.minimum(high, variance / (1 + log_snr.exp() * variance / population.size)).maximum(loss)
    factor = _per_x0(log_snr, objective) / population.size
    loss, error, low, high = (curve * factor for curve in (loss, error, low, high))
    return OptimalLoss(objective, u, log_snr, loss, error, low, high, collapse, len(population), count, draws)


def _log_snr(process: Process, u: Tensor) -> Tensor:
    """log SNR in double precision, finite."""
    return bounded(process.log_snr(u.float()).double())


def _per_x0(log_snr: Tensor, objective: Objective) -> Tensor:
    """The loss of this prediction for a loss of 1 in x0."""
    return log_snr.exp() / eps_error_per_prediction_error(log_snr, objective.prediction, objective.sigma_data)


class _Population:
    """The samples that x0 is drawn from, as flat rows; from N on they are mirror images."""

    def __init__(self, data: Tensor | Source, labels: Tensor | None, classes: bool, flip: bool, device: torch.device) -> None:
        if isinstance(data, Tensor) and (not data.is_floating_point() or data.ndim < 2 or not data.numel()):
            raise ValueError(f"data must be floats of shape (N, ...), got {data.dtype} of shape {tuple(data.shape)}")
        if flip and (data.ndim < 3 if isinstance(data, Tensor) else not data.image):
            raise ValueError("flip mirrors pictures, but these data hold none: unset flip")
        if labels is not None and (not isinstance(data, Tensor) or labels.shape != data.shape[:1]):
            raise ValueError("labels must be one a row of a tensor of data; a source has its own (classes=True)")
        if classes and (isinstance(data, Tensor) or not data.classes):
            raise ValueError("classes=True is for a source with labels; give labels= with a tensor")
        self.data, self.flip, self.classes, self.device = data, flip, classes, device
        self._labels = labels
        self.unflipped = len(data)
        self.size = int(np.prod(data.shape[1:] if isinstance(data, Tensor) else data.shape))
        if self.labelled:
            self.class_sizes = torch.bincount(self.labels(torch.arange(self.unflipped))) * (1 + flip)

    def __len__(self) -> int:
        return self.unflipped * (1 + self.flip)

    @property
    def labelled(self) -> bool:
        return self.classes or self._labels is not None

    def labels(self, rows: Tensor) -> Tensor:
        rows = rows % self.unflipped
        if self._labels is not None:
            return self._labels.cpu().long()[rows]
        assert isinstance(self.data, Source), "labels come with the data"
        parts = (self.data.read(part.numpy())[1] for part in rows.split(READ))
        return torch.cat([part for part in parts if part is not None])

    def take(self, rows: Tensor) -> Tensor:
        """Rows as (n, size) float32 on the device."""
        return torch.cat([self._take(part).to(self.device) for part in rows.split(READ)])

    def _take(self, rows: Tensor) -> Tensor:
        inside = rows % self.unflipped
        if isinstance(self.data, Tensor):
            found = self.data[inside.to(self.data.device)].float().cpu()
        else:
            values, _ = self.data.read(inside.numpy())
            with preserved_random_state(STREAM):  # of latents, one sample each
                found = self.data.decode(values)
        if self.flip:
            mirrored = (rows >= self.unflipped).view(-1, *[1] * (found.ndim - 1))
            found = torch.where(mirrored, found.flip(-1), found)
        return found.flatten(1)


class _References:
    """The samples that stand for all, around their mean."""

    def __init__(self, population: _Population, rows: Tensor) -> None:
        self.rows, self.values = rows.to(population.device), population.take(rows)
        self.centre = self.values.mean(0)
        self.values -= self.centre
        self.lengths = torch.cat([part.double().square().sum(1) for part in self.values.split(READ)])
        self.labels = population.labels(rows).to(population.device) if population.labelled else None

    def products(self, left: Tensor) -> Tensor:
        """(len(left), references) in double precision."""
        return torch.cat([left @ part.double().T for part in self.values.split(READ)], 1)


def _draws(
    population: _Population,
    refs: _References,
    rows: Tensor,
    first: int,
    ratios: list[float],
    key: int,
    progress: Callable[[int], None] | None,
) -> Tensor:
    """(draws, 4, levels) on the CPU: squared errors of x0, summed over elements, as loss, low and high; and the collapse."""
    found = []
    for part in rows.split(max(1, MOST // len(refs.rows))):
        numbers = torch.arange(first, first + len(part), device=population.device)
        first += len(part)
        noise = normals(key, numbers, 0, (population.size,))
        x0 = population.take(part) - refs.centre
        others, log_c = _others(population, refs, part)
        distances, along = _compare(refs, x0, noise, others)
        each = torch.stack([_level(refs.values, x0, distances, along, log_c, ratio) for ratio in ratios], -1)
        variance = refs.lengths.mean()
        shrunk = (1 + torch.tensor(ratios, device=x0.device) ** 2 * variance / population.size) ** -2
        each[:, 2] -= (x0.double().square().sum(1) - variance)[:, None] * shrunk
        found.append(each.cpu())
        if progress is not None:
            progress(len(part) * len(ratios))
    return torch.cat(found)


def _others(population: _Population, refs: _References, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Which references could have been drawn instead, and the log of how many samples each of them stands for."""
    others, there = refs.rows != rows.to(refs.rows.device)[:, None], torch.tensor([len(population)])
    if refs.labels is not None:
        labels = population.labels(rows)
        others &= refs.labels == labels.to(others.device)[:, None]
        there = population.class_sizes[labels]
    per = (there.to(others.device) - 1) / others.sum(1).clamp(min=1).double()
    return others, per.log().clamp(min=0)  # a sample that is alone in its class has no others to count


def _compare(refs: _References, x0: Tensor, noise: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """|d|^2 and d.noise with d = x_i - x_g; where i is none of the others, 0 and -inf."""
    g, eps = x0.double(), noise.double()
    distances = refs.products(g).mul_(-2).add_(refs.lengths).add_(g.square().sum(1, keepdim=True)).clamp_(min=0)
    along = refs.products(eps).sub_((g * eps).sum(1, keepdim=True))
    return distances.masked_fill_(~others, 0.0).float(), along.masked_fill_(~others, -torch.inf).float()


def _level(values: Tensor, x0: Tensor, distances: Tensor, along: Tensor, log_c: Tensor, ratio: float) -> Tensor:
    """(draws, 4) at one level."""
    logits = torch.add(along * ratio, distances, alpha=-(ratio**2) / 2)
    total = logits.logsumexp(1, keepdim=True)
    p = (logits - total).exp_().nan_to_num_(0.0)  # of the others alone; 0 if there are none
    gap = (x0 - p @ values).double().square().sum(1)
    spread, twice = (p * distances).sum(1).double(), p.square().sum(1).double()
    total = total[:, 0].double()

    def variance(share: Tensor) -> Tensor:
        return (share * spread - share**2 * gap).clamp(min=0)

    share = torch.sigmoid(total + log_c)  # of the others in the posterior; the rest is x_g's
    collapse = (1 - share) ** 2 + share**2 * twice / log_c.exp()
    return torch.stack([variance(share), variance(torch.sigmoid(total)), gap, collapse], 1)


def _spread(count: int, draws: int, key: int) -> Tensor:
    """Rows to draw, each about as often as any other, in a random order."""
    order = torch.randperm(count, generator=_generator(key))
    return order.repeat(-(-draws // count))[:draws]


def _subset(count: int, size: int, key: int) -> Tensor:
    """So many rows of all, without replacement."""
    if size == count:
        return torch.arange(count)
    return torch.randperm(count, generator=_generator(key))[:size].sort().values


def _generator(key: int) -> torch.Generator:
    return torch.Generator().manual_seed(key >> 1)


def _check_loss(objective: Objective) -> None:
    if objective.loss != "mse":
        raise ValueError(f"the posterior mean is optimal for loss='mse' alone, got {objective.loss!r}")


# Kept on disk ---------------------------------------------------------------------------------------------------------


def kept_optimal_loss(
    objective: Objective,
    source: Source,
    levels: int | Tensor = 50,
    *,
    classes: bool = False,
    flip: bool = False,
    references: int | None = None,
    draws: int = DRAWS,
    seed: int = 0,
    device: torch.device | str = "cpu",
    folder: Path | str | None = None,
    progress: Callable[[int], None] | None = None,
) -> OptimalLoss:
    """`optimal_loss` of a source, from the cache if it is there, else computed and kept; all predictions share a file."""
    _check_loss(objective)
    count = len(source) * (1 + flip)
    u = middles(levels, dtype=torch.float64) if isinstance(levels, int) else levels
    settings: dict[str, Any] = {
        "format": FORMAT,
        "data": source.fingerprint(),
        "log_snr": _log_snr(objective.process, u).tolist(),
        "classes": classes,
        "flip": flip,
        "references": min(references or count, count),
        "draws": draws,
        "seed": seed,
    }
    name = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:24]
    path = Path(folder or cache_folder()) / f"optimal-{name}.json"
    try:
        return load_optimal_loss(path, objective)
    except FileNotFoundError:
        pass
    except ValueError as error:
        warnings.warn(f"{error}; computing the optimal loss again", stacklevel=2)
    made = optimal_loss(
        objective,
        source,
        levels,
        classes=classes,
        flip=flip,
        references=references,
        draws=draws,
        seed=seed,
        device=device,
        progress=progress,
    )
    try:
        save_optimal_loss(made, path)
    except OSError as error:  # what was asked for is there all the same
        warnings.warn(f"the optimal loss could not be kept for the next time: {error}", stacklevel=2)
    return made


def save_optimal_loss(found: OptimalLoss, path: Path) -> None:
    """Write it as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(found.state()))


def load_optimal_loss(path: Path, objective: Objective) -> OptimalLoss:
    """What was saved there; FileNotFoundError if nothing was, ValueError if it is something else or damaged."""
    try:
        return from_state(json.loads(path.read_text()), objective)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
