"""Samples as pictures."""

import io
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from noisewise.generation.images import to_uint8
from noisewise.training.plain_files import make_folder
from noisewise.training.run_folder import replace_file


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
