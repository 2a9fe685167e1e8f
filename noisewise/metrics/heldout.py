"""Held-out loss at each noise level: the same images, the same noise and the same levels for every model.

Two models, two runs or two machines can be compared to the last digits that their arithmetic has in common.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from noisewise.data import Source
from noisewise.feedback import preserved_random_state
from noisewise.generation.replay import replayed
from noisewise.looking.validation import NOISE_SEED, Levels, Optimum, Validation, batch_sums, from_sums, level_grid
from noisewise.objective import Objective
from noisewise.streams import stream_key


@torch.no_grad()
def held_out_losses(
    model: Any,
    objective: Objective,
    source: Source,
    *,
    levels: Levels = 50,
    images: int | None = None,
    classes: int = 0,
    batch: int = 500,
    device: torch.device | str = "cpu",
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
    optimal: Optimum | None = None,
) -> Validation:
    """Evaluate a model, in evaluation mode, on images of `source`.

    Args:
        model: called as model(x, time), or model(x, time, labels) if it knows classes; on CUDA the forward pass of a module is
            recorded and replayed, see `noisewise.generation.replay`.
        objective: what it was trained to predict.
        source: held-out data.
        levels: how many noise levels, in the middle of equal intervals of u; or others, as for `validate`.
        images: how many images at each level, see `Source.some`; all of them by default.
        classes: how many classes the model knows; 0 for none.
        batch: how many at a time.
        device: where the model is.
        seed: of the noise.
        progress: told how many losses were computed.
        optimal: the loss of a perfect model: the result then knows what is `reducible`.
    """
    for name, value in (("batch", batch), ("images", 1 if images is None else images)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    grid = level_grid(levels, objective.process)
    check_classes(source, classes)
    chosen = source.some(images)
    call, table = replayed(model), []
    for first in range(0, len(chosen), batch):
        rows = chosen[first : first + batch]
        values, labels = source.read(rows)
        x0 = decoded(source, values, rows.tolist(), seed ^ NOISE_SEED).to(device)
        told = (labels.to(device),) if classes and labels is not None else ()

        def losses_at(told: tuple[Tensor, ...], u: Tensor, noise: Tensor, x0: Tensor = x0) -> Tensor:
            return objective.losses(call, x0, u, noise, *told)

        table.append(batch_sums(losses_at, told, x0, first, grid, seed, progress=progress))
    return from_sums(torch.stack(table).cpu(), objective, grid, optimal)


def check_classes(source: Source, classes: int) -> None:
    """A model that was told the classes must be told them again."""
    if classes and not source.classes:
        raise ValueError(f"the model is told the class of each sample, but the held-out data ({source.name}) have no labels")
    if classes and source.classes > classes:
        raise ValueError(f"the held-out data ({source.name}) have {source.classes} classes, but the model knows {classes}")


def decoded(source: Source, values: Tensor, rows: list[int], seed: int) -> Tensor:
    """Samples, one by one on the CPU: what a source draws (from the posterior of a latent) depends on the row alone."""
    samples = []
    with preserved_random_state():
        for row, value in zip(rows, values, strict=True):
            torch.default_generator.manual_seed(stream_key(seed, row) >> 1)
            samples.append(source.decode(value[None]))
    return torch.cat(samples)
