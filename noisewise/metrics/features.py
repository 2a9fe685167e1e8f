"""Images in, features out: batch by batch, in float32, without TF32 unless asked for."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from noisewise.metrics.preprocess import find_preprocessing
from noisewise.precision import full_float32

Images = Tensor | Iterable[Tensor]


def batches(images: Images, size: int) -> Iterator[Tensor]:
    """Batches of at most `size` images from one tensor or from batches of any size."""
    for part in [images] if isinstance(images, Tensor) else images:
        if len(part):
            yield from part.split(size)


def feature_batches(
    images: Images,
    network: nn.Module,
    preprocessing: str = "pytorch-fid",
    device: torch.device | str = "cpu",
    *,
    batch: int = 128,
    progress: Callable[[int], None] | None = None,
    tf32: bool = False,
) -> Iterator[Tensor]:
    """Features (n, d) of each batch, on `device`; `progress` is told how many images have been done.

    Args:
        images: uint8 (n, channels, height, width), whole or in batches.
        network: from `load_inception` or `load_digits_classifier`, on `device`.
        preprocessing: a name in `PREPROCESSING`.
        device: where to compute.
        batch: images at a time.
        progress: called after every batch.
        tf32: leave torch's TF32 settings as they are; faster on recent GPUs, and a little off.
    """
    if batch < 1:
        raise ValueError(f"batch must be >= 1, got {batch}")
    prepare, done = find_preprocessing(preprocessing), 0
    for part in batches(images, batch):
        with torch.inference_mode(), nullcontext() if tf32 else full_float32():
            found = network(prepare(part.to(device, non_blocking=True)))
        done += len(part)
        yield found.clone()  # an ordinary tensor: those of inference mode cannot be changed outside it
        if progress is not None:
            progress(done)


def features(images: Images, network: nn.Module, *settings: Any, **more: Any) -> Tensor:
    """The features (n, d) of all images, float32 on the CPU; arguments as for `feature_batches`."""
    found = [part.cpu() for part in feature_batches(images, network, *settings, **more)]
    if not found:
        raise ValueError("there are no images to take features of")
    return torch.cat(found)
