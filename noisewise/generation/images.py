"""Samples from a trained model: image i depends on the seed and on i alone, not on the batch it is made in."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from noisewise.generation.guidance import denoiser
from noisewise.generation.replay import replayed
from noisewise.generation.solvers import Solver, default_solver
from noisewise.noise import normals
from noisewise.objective import Objective

BATCH = 500  # images at a time


def generate_batches(
    model: Any,
    objective: Objective,
    shape: tuple[int, ...],
    images: Sequence[int],
    *,
    solver: Solver | None = None,
    seed: int = 0,
    classes: int = 0,
    label: int | None = None,
    guidance: float = 1.0,
    interval: tuple[float, float] = (0.0, 1.0),
    batch: int = BATCH,
    device: torch.device | str = "cpu",
    clip: float | None = 1.0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Generate the images with these numbers, batch by batch, as (numbers, samples).

    Args:
        model: called as model(x, time), or model(x, time, labels) if it knows classes; on CUDA the forward pass of a module is
            recorded and replayed, see `noisewise.generation.replay`.
        objective: what it was trained to predict.
        shape: of one sample.
        images: the numbers of the images wanted.
        solver: by default the process's usual one.
        seed: another seed is another set of images.
        classes: how many classes the model knows; 0 for none.
        label: the class of all images; by default image i has class i mod classes.
        guidance: strength of classifier-free guidance; 1 is none.
        interval: the u in which to guide.
        batch: how many at a time.
        device: where the model is.
        clip: bound of the estimates of x0 on the way (1 for images in [-1, 1]); None for latents.
    """
    if batch < 1:
        raise ValueError(f"batch must be >= 1, got {batch}")
    check_label(label, classes)
    solver, call = solver or default_solver(objective.process), replayed(model)
    for first in range(0, len(images), batch):
        numbers = torch.tensor(list(images[first : first + batch]), dtype=torch.int64)
        here = numbers.to(device, non_blocking=True)  # or the host would wait for the batch before
        labels = None
        if classes:
            labels = here % classes if label is None else torch.full_like(here, label)
        estimate = denoiser(call, objective, labels, guidance=guidance, null_label=classes or None, interval=interval)

        def noise(draw: int, here: Tensor = here) -> Tensor:
            return normals(seed, here, draw, shape)

        yield numbers, solver.generate(estimate, objective.process, noise, clip=clip)


def check_label(label: int | None, classes: int) -> None:
    """Refuse a class that a model does not know."""
    if label is not None and not classes:
        raise ValueError(f"label {label} was asked for, but the model was trained without classes: leave it out")
    if label is not None and not 0 <= label < classes:
        raise ValueError(f"label {label} is not one of the model's {classes} classes (from 0)")


def generate(model: Any, objective: Objective, shape: tuple[int, ...], count: int, **settings: Any) -> Tensor:
    """The first `count` images, in one tensor; settings as for `generate_batches`."""
    if count < 1:
        raise ValueError(f"count must be >= 1, got {count}")
    return torch.cat([samples for _, samples in generate_batches(model, objective, shape, range(count), **settings)])


def to_uint8(images: Tensor) -> Tensor:
    """Model samples in [-1, 1] rounded to 8 bits, as a file would hold them; uint8 images as they are."""
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point():
        raise TypeError(f"images must be uint8, or float in [-1, 1], got {images.dtype}")
    if not bool(torch.isfinite(images).all()):
        raise ValueError("images hold NaN or infinite values: the model that made them has diverged")
    return ((images.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
