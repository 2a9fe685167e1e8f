"""Results that nobody measured."""

import torch

from noisewise.study.measure import Measured


def measured(sampler, seed, distance, loss=0.5, shape=(1, 8, 8)):
    return Measured(
        sampler=sampler,
        seed=seed,
        steps=100,
        seconds=2.0,
        steps_per_second=50.0,
        metric=None if distance is None else "digits-frechet",
        distance=distance,
        held_out=[loss * 1.5, loss * 0.5],
        samples=torch.zeros(4, *shape),
    )
