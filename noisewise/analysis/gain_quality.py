"""How well changes at a few noise levels stand for the change at all of them: selection, approximation, correlation."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from noisewise.samplers.adaptive.selection import SELECTIONS, Selection

RANDOM_SETS = 20


def largest_variance(changes: Tensor, size: int) -> Tensor:
    """The columns that vary most."""
    return changes.double().var(0).topk(size).indices


CHOICES: dict[str, Selection] = {**SELECTIONS, "largest_variance": largest_variance}


@dataclass(frozen=True)
class Quality:
    """Correlations, over steps, of the approximate gain with the true one."""

    selection: str
    size: int  # |S|
    few_pearson: float  # all samples, the levels of S
    few_spearman: float
    one_pearson: float  # one sample, the levels of S; mean over samples
    one_spearman: float
    low: float  # of few_pearson: the 10th and 90th percentile over random sets, itself for other selections
    high: float
    chance: float  # few_pearson if all levels were independent and varied alike: a part always correlates with its whole
    steps: int

    def row(self) -> dict[str, Any]:
        """For the table."""
        return asdict(self)


def pearson(a: Tensor, b: Tensor) -> Tensor:
    """Of each column of `a` with that of `b`, 0 where one of them is constant."""
    a, b = a.double() - a.double().mean(0), b.double() - b.double().mean(0)
    norm = a.norm(dim=0) * b.norm(dim=0)
    return torch.where(norm > 0, (a * b).sum(0) / norm.clamp(min=1e-300), 0.0).clamp(-1, 1)


def ranks(values: Tensor) -> Tensor:
    """Within each column; equal values share the mean of their ranks."""
    columns = values.T.contiguous()
    ordered = columns.sort(1).values
    return (torch.searchsorted(ordered, columns) + torch.searchsorted(ordered, columns, right=True)).double().T / 2


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Pearson's correlation of ranks."""
    return pearson(ranks(a), ranks(b))


def rolling_sets(changes: Tensor, size: int, queue: int, queue_images: int, select: Selection) -> Tensor:
    """(steps - queue, size): the levels selected for each step from the `queue` steps before it.

    A row of the queue is the mean change of `queue_images` samples, other ones at every step.
    """
    steps, _, images = changes.shape
    some = (torch.arange(steps)[:, None] * queue_images + torch.arange(queue_images)) % images
    rows = torch.stack([changes[step][:, some[step]].mean(1) for step in range(steps)])
    return torch.stack([select(rows[step - queue : step], size) for step in range(queue, steps)])


def random_sets(levels: int, size: int, steps: int, seed: int) -> Tensor:
    """(steps, size): one random set of levels, the same for each step."""
    return torch.randperm(levels, generator=torch.Generator().manual_seed(seed))[:size].expand(steps, size)


def quality(changes: Tensor, sets: Tensor, selection: str) -> Quality:
    """Of one choice of levels, (steps, size), for those steps' changes, (steps, levels, samples)."""
    images = changes.shape[2]
    single = changes.gather(1, sets[:, :, None].expand(-1, -1, images)).mean(1)  # (steps, samples): rewards
    of_sample = changes.mean(1)
    truth = of_sample.mean(1, keepdim=True)
    # a sample is part of the mean over all samples: only the others can be predicted
    others = (truth * images - of_sample) / max(images - 1, 1)
    few = single.mean(1, keepdim=True)
    found = float(pearson(few, truth)[0])
    return Quality(
        selection,
        sets.shape[1],
        found,
        float(spearman(few, truth)[0]),
        float(pearson(single, others).mean()),
        float(spearman(single, others).mean()),
        found,
        found,
        math.sqrt(sets.shape[1] / changes.shape[1]),
        len(changes),
    )


def qualities(changes: Tensor, sizes: list[int], queue: int, queue_images: int = 1) -> list[Quality]:
    """Of every selection and size, and of all levels; `changes` is (steps, levels, samples), weighted by the target."""
    steps, levels, _ = changes.shape
    if steps <= queue:
        raise ValueError(f"{steps} steps leave none to predict after a queue of {queue}")
    later, found = changes[queue:], []
    for size in sizes:
        for name, select in CHOICES.items():
            found.append(quality(later, rolling_sets(changes, size, queue, queue_images, select), name))
        found.append(_of_random_sets(later, [random_sets(levels, size, len(later), seed) for seed in range(RANDOM_SETS)]))
    every = torch.arange(levels).expand(len(later), levels)
    return [*found, quality(later, every, "all")]


def _of_random_sets(changes: Tensor, sets: list[Tensor]) -> Quality:
    each = [quality(changes, one, "random") for one in sets]

    def mean(field: Callable[[Quality], float]) -> float:
        return sum(map(field, each)) / len(each)

    few = torch.tensor([one.few_pearson for one in each])
    return Quality(
        "random",
        each[0].size,
        mean(lambda one: one.few_pearson),
        mean(lambda one: one.few_spearman),
        mean(lambda one: one.one_pearson),
        mean(lambda one: one.one_spearman),
        float(few.quantile(0.1)),
        float(few.quantile(0.9)),
        each[0].chance,
        each[0].steps,
    )
