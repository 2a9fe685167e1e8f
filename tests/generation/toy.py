"""A model, images and noise for the tests of the solvers."""

import torch


def toy(x, time):
    """A model that is not linear in anything."""
    t = time.to(x.dtype).view(-1, *[1] * (x.ndim - 1))
    return torch.tanh(1.3 * x + 0.1 * torch.cos(t / 100)) + 0.2 * torch.sin(3 * x) * x.roll(1, -1)


def images(seed=0, shape=(4, 3, 4, 4)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_order(like, seed=1):
    """Noise drawn as a scheduler draws it, from a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    return lambda step: torch.randn(like.shape, generator=generator)
