"""Does a sample's reward tell what that sample did? The reward against the gain that the sample caused, by leaving it out.

One training step is made with the whole batch, and once more without each of some samples (weight 0 in the loss). What the
objective loses without a sample is the gain that this sample caused; its reward is the change of its own loss over the step
with all of them, as in Algorithm 2 of arXiv 2411.09998.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from noisewise.analysis.gain_quality import pearson, spearman
from noisewise.analysis.trial import FixedNoise, in_evaluation, rewound
from noisewise.feedback import evaluate
from noisewise.samplers.base import Draw, Sampler
from noisewise.training.trainer import Trainer

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
