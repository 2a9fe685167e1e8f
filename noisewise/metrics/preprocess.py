"""From 8-bit images to what a feature network takes.

FID depends on the resizing more than on many a model, so every result names it:

- ``pytorch-fid``: bilinear without antialiasing, corners not aligned, then 2x - 1. What most papers report; the default.
- ``clean-fid``: Pillow's antialiased bicubic on unrounded values clipped to [0, 255], then (x - 128) / 128.
- ``dinov2``: TensorFlow 1's bilinear resizing to 224 x 224 and ImageNet's mean and deviation, as torch-fidelity; for FD-DINOv2.
- ``digits``: no resizing, [-1, 1], one channel; for the classifier of the embedded 8 x 8 digits, never for FID.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from noisewise.metrics import dinov2 as dinov2_network
from noisewise.metrics.inception import SIZE


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
