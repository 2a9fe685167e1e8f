"""8-bit images in, features out: batch by batch, in float32, without TF32 unless asked for.

FID depends on the resizing more than on many a model, so every result names it:

- ``pytorch-fid``: bilinear without antialiasing, corners not aligned, then 2x - 1. What most papers report; the default.
- ``clean-fid``: Pillow's antialiased bicubic on unrounded values clipped to [0, 255], then (x - 128) / 128.
- ``dinov2``: TensorFlow 1's bilinear resizing to 224 x 224 and ImageNet's mean and deviation, as torch-fidelity; for FD-DINOv2.
- ``digits``: no resizing, [-1, 1], one channel; for the classifier of the embedded 8 x 8 digits, never for FID.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noisewise.metrics import dinov2 as dinov2_network
from noisewise.metrics.inception import SIZE, Inception, folded
from noisewise.precision import full_float32


def check_images(images: Tensor) -> Tensor:
    """`images` itself if it is a batch of 8-bit grey or colour images."""
    if images.dtype != torch.uint8:
        raise TypeError(f"images must be uint8, got {images.dtype}: round samples in [-1, 1] with to_uint8 first")
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        hint = ": channels come before height and width" if images.ndim == 4 and images.shape[-1] in (1, 3) else ""
        raise ValueError(f"images must be (n, 1 or 3, height, width), got {tuple(images.shape)}{hint}")
    if 0 in images.shape[2:]:
        raise ValueError(f"images of shape {tuple(images.shape)} have no pixels")
    return images


def pytorch_fid(images: Tensor) -> Tensor:
    """Bilinear, no antialiasing, to (n, 3, 299, 299) in [-1, 1]."""
    scaled = F.interpolate(check_images(images).float() / 255, (SIZE, SIZE), mode="bilinear", align_corners=False)
    return (2 * scaled - 1).expand(-1, 3, -1, -1)


def clean_fid(images: Tensor) -> Tensor:
    """Antialiased bicubic (torch's equals Pillow's), to (n, 3, 299, 299) in [-1, 1)."""
    scaled = F.interpolate(check_images(images).float(), (SIZE, SIZE), mode="bicubic", align_corners=False, antialias=True)
    return ((scaled.clamp(0, 255) - 128) / 128).expand(-1, 3, -1, -1)


def digits(images: Tensor) -> Tensor:
    """Grey 8 x 8 images to (n, 1, 8, 8) in [-1, 1]."""
    if check_images(images).shape[1:] != (1, 8, 8):
        raise ValueError(f"digits must be (n, 1, 8, 8), got {tuple(images.shape)}")
    if len(images) > 1 and int(images.max()) <= 16:
        raise ValueError(
            "no digit is brighter than 16 of 255: these are counts of 0 to 16, multiply them by 255 / 16 and round"
        )
    return images.float() / 127.5 - 1


def dinov2(images: Tensor) -> Tensor:
    """To (n, 3, 224, 224), normalised as DINOv2 takes them."""
    return dinov2_network.prepare(check_images(images))


PREPROCESSING: dict[str, Callable[[Tensor], Tensor]] = {
    "pytorch-fid": pytorch_fid,
    "clean-fid": clean_fid,
    "dinov2": dinov2,
    "digits": digits,
}
OF_INCEPTION = ("pytorch-fid", "clean-fid")
"""Ways to resize for Inception; the other networks have one each."""


def find_preprocessing(name: str) -> Callable[[Tensor], Tensor]:
    """The function of this name."""
    if name not in PREPROCESSING:
        raise ValueError(f"unknown preprocessing {name!r}; there are {', '.join(PREPROCESSING)}")
    return PREPROCESSING[name]


Images = Tensor | Iterable[Tensor]
_FOLDED: WeakKeyDictionary[nn.Module, Inception] = WeakKeyDictionary()


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
        tf32: leave torch's TF32 settings as they are, and let Inception have fewer kernels on a GPU; several times as fast on
            recent ones, and a little off.
    """
    if batch < 1:
        raise ValueError(f"batch must be >= 1, got {batch}")
    prepare, done = find_preprocessing(preprocessing), 0
    call = _quick(network, torch.device(device)) if tf32 else network
    for part in batches(images, batch):
        with torch.inference_mode(), nullcontext() if tf32 else full_float32():
            found = call(prepare(part.to(device, non_blocking=True)))
        done += len(part)
        yield found.clone()  # an ordinary tensor: those of inference mode cannot be changed outside it
        if progress is not None:
            progress(done)


def _quick(network: nn.Module, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Inception with fewer kernels, for images with channels last; another network, or one that cuDNN has no such kernels for,
    as it is."""
    if type(network) is not Inception or device.type != "cuda":
        return network
    quick = _FOLDED.get(network)
    if quick is None or next(quick.buffers()).device != next(network.buffers()).device:
        quick = folded(network)
        try:
            with torch.inference_mode():
                quick(torch.zeros(2, 3, SIZE, SIZE, device=device).contiguous(memory_format=torch.channels_last))
        except RuntimeError:
            return network
        _FOLDED[network] = quick
    return lambda images: quick(images.contiguous(memory_format=torch.channels_last))


def features(images: Images, network: nn.Module, *settings: Any, **more: Any) -> Tensor:
    """The features (n, d) of all images, float32 on the CPU; arguments as for `feature_batches`."""
    found = [part.cpu() for part in feature_batches(images, network, *settings, **more)]
    if not found:
        raise ValueError("there are no images to take features of")
    return torch.cat(found)
