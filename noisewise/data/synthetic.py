"""Noise in the shape of data, for dry runs: no file is needed and nothing is learned."""

import numpy as np
from numpy.typing import NDArray

from noisewise.data.source import ArraySource


class Synthetic(ArraySource):
    """A few samples of noise from a fixed seed: uint8 as pictures are stored, or normal float32 (`floats=True`)."""

    def __init__(self, shape: tuple[int, ...], classes: int = 0, *, count: int = 64, floats: bool = False) -> None:
        generator = np.random.default_rng(0)
        size = (count, *shape)
        values: NDArray[np.generic]
        values = generator.standard_normal(size, np.float32) if floats else generator.integers(0, 256, size, np.uint8)
        labels = np.arange(count) % classes if classes else None
        image = not floats and len(shape) == 3 and shape[0] in (1, 3)
        super().__init__("synthetic", values, labels, classes=classes or None, image=image)
