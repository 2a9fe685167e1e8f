"""How well changes at a few noise levels stand for the change at all of them (selection, approximation, correlation), and
whether a sample's reward tells what that sample did."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from noisewise.analysis.moments_of_training import FixedNoise, in_evaluation, rewound
from noisewise.feedback import evaluate
from noisewise.samplers.adaptive.selection import SELECTIONS, Selection
from noisewise.samplers.base import Draw, Sampler
from noisewise.training.trainer import Trainer

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
    names = ("few_pearson", "few_spearman", "one_pearson", "one_spearman")
    means = {name: sum(getattr(one, name) for one in each) / len(each) for name in names}
    few = torch.tensor([one.few_pearson for one in each])
    return replace(each[0], **means, low=float(few.quantile(0.1)), high=float(few.quantile(0.9)))


# Credit: a reward against the gain that its sample caused, found by leaving it out ------------------------------------


# One training step is made with the whole batch, and once more without each of some samples (weight 0 in the loss). What the
# objective loses without a sample is the gain that this sample caused; its reward is the change of its own loss over the step
# with all of them, as in Algorithm 2 of arXiv 2411.09998.
STREAM = 0x637265646974  # "credit": the noise of the rewards


@dataclass(frozen=True)
class Credit:
    """Correlations over samples of the reward, on the levels of S and on all, with the gain caused."""

    size: int  # |S|
    few: tuple[float, float]  # Pearson, Spearman
    every: tuple[float, float]
    levels: int
    samples: int

    def rows(self) -> list[dict[str, Any]]:
        """For the table of the predictor."""
        both = ((self.size, self.few), (self.levels, self.every))
        return [
            {"selection": "credit", "size": size, "one_pearson": found[0], "one_spearman": found[1], "steps": self.samples}
            for size, found in both
        ]

    def finding(self) -> str:
        """In words."""
        return (
            f"over {self.samples} samples of one batch, the reward correlates {self.few[0]:+.2f} with the gain that the sample "
            f"itself caused ({self.every[0]:+.2f} with all levels; chance alone gives up to ±{2 / self.samples**0.5:.2f})."
        )


class Without:
    """A sampler that gives one row of its first batch no weight."""

    def __init__(self, sampler: Sampler, row: int) -> None:
        self.sampler, self.row, self.drawn = sampler, row, False

    def sample(self, x0: Tensor) -> Draw:
        """As the sampler, but for that row."""
        draw = self.sampler.sample(x0)
        if self.drawn:
            return draw
        self.drawn = True
        return replace(draw, weight=draw.weight.index_fill(0, torch.tensor([self.row], device=draw.weight.device), 0.0))

    def observe(self, *args: Any) -> AbstractContextManager[None]:
        """As the sampler."""
        return self.sampler.observe(*args)


def leave_one_out(
    trainer: Trainer, fixed: FixedNoise, weight: Tensor, count: int, advance: Callable[[], None] = lambda: None
) -> tuple[Tensor, Tensor]:
    """For the first `count` samples of the next batch: (count, levels) rewards, and the (count,) gains that each caused."""
    device, levels = trainer.device, len(fixed.u)
    x0, labels = trainer.batches.get(trainer.samples)
    loss_at = trainer.loss_at(x0, labels if trainer.parts.classes else None)
    rows = torch.arange(count, device=device).repeat_interleave(levels)
    u = fixed.u.to(device).repeat(count)
    probe = partial(evaluate, loss_at, rows, u, most=512, seed=STREAM % 2**31, model=trainer.model)
    with in_evaluation(trainer.network):
        before = probe()
    with rewound(trainer):
        trainer.training_step()
        with in_evaluation(trainer.network):
            after = probe()
        reached = _objective(trainer, fixed, weight)
    caused = []
    for row in range(count):
        with rewound(trainer):
            trainer.sampler = cast(Sampler, Without(trainer.sampler, row))
            trainer.training_step()
            caused.append(_objective(trainer, fixed, weight) - reached)
        advance()
    return (before - after).double().cpu().view(count, levels) * weight, torch.tensor(caused, dtype=torch.float64)


def _objective(trainer: Trainer, fixed: FixedNoise, weight: Tensor) -> float:
    return float((weight[:, None] * fixed.losses(trainer)).mean())


def credit_of(rewards: Tensor, caused: Tensor, selected: Tensor) -> Credit:
    """The correlations, for the levels `selected` and for all."""
    few, every = (
        (float(pearson(values[:, None], caused[:, None])[0]), float(spearman(values[:, None], caused[:, None])[0]))
        for values in (rewards[:, selected].mean(1), rewards.mean(1))
    )
    return Credit(len(selected), few, every, rewards.shape[1], len(caused))
