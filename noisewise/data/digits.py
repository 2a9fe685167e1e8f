"""The 8x8 handwritten digits that come with the package: 1,797 grey pictures of values 0 to 16, ten classes.

E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998, CC BY 4.0.
"""

from pathlib import Path

import numpy as np
from torch import Tensor

from noisewise.data.loader import permutation
from noisewise.data.source import ArraySource

FILE = Path(__file__).with_name("digits.npz")
TRAIN = 1500
SPLITS = {"train": slice(0, TRAIN), "test": slice(TRAIN, None), "all": slice(None)}


class Digits(ArraySource):
    """The digits: `train` is a fixed shuffled 1,500 of them, `test` the other 297, `all` both."""

    shuffled = True

    def __init__(self, split: str = "train") -> None:
        if split not in SPLITS:
            raise ValueError(f"digits has no split {split!r}: choose one of {', '.join(SPLITS)}")
        with np.load(FILE, allow_pickle=False) as file:
            images, labels = file["images"], file["labels"]
        rows = permutation(len(images), seed=0, epoch=0)[SPLITS[split]]
        super().__init__("digits", images[rows][:, None], labels[rows], classes=10, image=True)

    def decode(self, values: Tensor) -> Tensor:
        return values.float() / 8 - 1


def open_digits(path: Path | None, split: str) -> Digits:
    """The built-in digits."""
    if path is not None:
        raise ValueError(
            f"the digits come with noisewise and take no path, got {str(path)!r}: leave it out, or say what "
            "lies there, as in --data.source folder (or cifar10, array, latents, huggingface)"
        )
    return Digits(split)
