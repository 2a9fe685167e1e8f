"""Samples from a trained model: image i depends on the seed and on i alone, not on the batch it is made in."""

import io
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from noisewise.generation.guidance import denoiser
from noisewise.generation.replay import replayed
from noisewise.generation.solvers import Solver, default_solver
from noisewise.objective import Objective
from noisewise.plain_files import make_folder, replace_file
from noisewise.streams import normals

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


# As pictures ----------------------------------------------------------------------------------------------------------


def grid(samples: Tensor, columns: int | None = None, gap: int | None = None, enlarge: int | None = None) -> NDArray[np.uint8]:
    """(N, C, H, W) samples in [-1, 1] (or uint8) as one (H, W, 3) picture; small ones are enlarged by whole pixels."""
    if samples.ndim != 4 or samples.shape[1] not in (1, 3) or not len(samples):
        raise ValueError(f"a grid needs samples of shape (N, 1 or 3, H, W), got {tuple(samples.shape)}")
    columns = columns or math.ceil(math.sqrt(len(samples)))
    rows = math.ceil(len(samples) / columns)
    enlarge = enlarge or max(1, round(32 / samples.shape[-1]))
    gap = enlarge if gap is None else gap
    images = to_uint8(samples).cpu().expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
    images = images.repeat(enlarge, 1).repeat(enlarge, 2)
    height, width = images.shape[1:3]
    picture = np.full((rows * (height + gap) + gap, columns * (width + gap) + gap, 3), 255, np.uint8)
    for i, image in enumerate(images):
        top, left = gap + (i // columns) * (height + gap), gap + (i % columns) * (width + gap)
        picture[top : top + height, left : left + width] = image
    return picture


def save_grid(samples: Tensor, path: Path, columns: int | None = None) -> Path:
    """Draw samples in [-1, 1], or uint8 images, into a PNG file."""
    picture = io.BytesIO()
    Image.fromarray(grid(samples, columns)).save(picture, "PNG")
    make_folder(path.parent)
    replace_file(path, picture.getvalue())
    return path


# From latents back to images, with the autoencoder that made them -----------------------------------------------------


Decoder = Callable[[Tensor], Tensor]


def make_decoder(
    latents: dict[str, Any],
    device: torch.device | str,
    autoencoder: str | None = None,
    subfolder: str | None = None,
    batch: int = 16,
) -> Decoder:
    """Samples of a model of latents -> images in [-1, 1].

    Args:
        latents: what the checkpoint says about them: autoencoder, subfolder, scale, shift.
        device: where to decode.
        autoencoder: another place to find it.
        subfolder: of that place.
        batch: latents at a time: images are much larger.
    """
    from noisewise.data.encoding import load_autoencoder

    place, inner = (autoencoder, subfolder) if autoencoder else (latents["autoencoder"], latents["subfolder"])
    model = load_autoencoder(place, inner, device, torch.float32).model
    scale, shift = float(latents["scale"]), float(latents["shift"])

    @torch.no_grad()
    def decode(samples: Tensor) -> Tensor:
        parts = [model.decode(part.to(device) / scale + shift).sample for part in samples.float().split(batch)]
        return torch.cat(parts).clamp(-1, 1)

    return decode
