"""What a data set is to the trainer: rows of raw values, and how raw values become samples in model space.

Raw values stay as small as they are stored (uint8 pictures, float16 latents) until they lie on the training device; only
there does `decode` make float32 of them.
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# A .npy file read through a memory map --------------------------------------------------------------------------------


def load_npy(path: Path, mapped: bool = False) -> NDArray[Any]:
    """A .npy file, never unpickled."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no plain file")
    try:
        return np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except FileNotFoundError:
        raise FileNotFoundError(f"no such file: {path}") from None
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a .npy file of plain numbers ({error}); save it again with numpy.save") from error


class Mapped:
    """An array on disk of which only the rows asked for are read. It pickles as its path, not as its content."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._array = load_npy(path, mapped=True)
        self.shape, self.dtype, self.nbytes = self._array.shape, self._array.dtype, self._array.nbytes

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        return np.asarray(self._array[rows])

    def __reduce__(self) -> tuple[Any, ...]:
        return Mapped, (self.path,)


# Sources --------------------------------------------------------------------------------------------------------------


Rows = NDArray[np.int64]
LARGEST = 1.001  # of floats in [-1, 1], with some rounding


class Source(ABC):
    """A data set of `len(source)` samples, each read by its row number."""

    name: str
    shape: tuple[int, ...]
    """The shape of one sample as the model sees it."""
    classes: int = 0
    """Labels run from 0 to classes - 1; 0 means that there are none."""
    image: bool = False
    """Whether samples are pictures: they can be drawn, and flipped left to right."""
    in_memory: bool = False
    """Whether the raw values already lie in this process's memory."""
    shuffled: bool = False
    """Whether the order of the samples tells nothing: the first ones stand for all."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Raw values (n, ...) and int64 labels (n,) of these rows, on the CPU."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The size of all raw values, as `read` returns them."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A short hash of what the data are, wherever they are stored; a key for caches."""

    def decode(self, values: Tensor) -> Tensor:
        """Float32 samples in model space from raw values, on whatever device they are: bytes go to [-1, 1]."""
        return values.float() / 127.5 - 1 if values.dtype == torch.uint8 else values.float()

    def some(self, count: int | None) -> Rows:
        """At most so many rows, which stand for all of them; data that are not shuffled may be sorted by class."""
        return np.arange(min(count or len(self), len(self))) if self.shuffled else spread(len(self), count)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}: {len(self)} samples of shape {self.shape}, {self.classes} classes)"


def spread(size: int, count: int | None) -> Rows:
    """At most `count` row numbers, spread over all; all of them by default."""
    return np.arange(size) if count is None or count >= size else np.linspace(0, size - 1, count).astype(np.int64)


class ArraySource(Source):
    """Samples that are the rows of one array, in memory or memory-mapped.

    Args:
        name: what to call the data.
        values: (N, ...) of uint8 or floats.
        labels: (N,) whole numbers, if any.
        classes: how many classes there are; one more than the largest label when absent.
        image: whether samples are pictures.
        channels_last: whether the last axis holds the channels; samples are given with the channels first.
        shape: the shape to give samples, where it differs (a channel axis added to grey pictures).
    """

    def __init__(
        self,
        name: str,
        values: NDArray[np.generic] | Mapped,
        labels: NDArray[np.generic] | None = None,
        *,
        classes: int | None = None,
        image: bool = False,
        channels_last: bool = False,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        if values.dtype != np.uint8 and values.dtype.kind != "f":
            raise ValueError(f"{name} holds {values.dtype}: save it as uint8 (pictures) or as floats (anything else)")
        if len(values.shape) < 2 or 0 in values.shape:
            raise ValueError(
                f"{name} has shape {values.shape}: it needs an axis of samples and at least one more, none of them empty"
            )
        self.name, self.image, self.channels_last = name, image, channels_last
        self._values = values
        self._native = values.dtype.newbyteorder("=")
        self._labels = None if labels is None else check_labels(name, labels, len(values))
        self.classes = 0 if self._labels is None else count_classes(name, self._labels, classes)
        inner = tuple(values.shape[1:])
        self.shape = shape or ((inner[-1], *inner[:-1]) if channels_last else inner)
        self.in_memory = not isinstance(values, Mapped)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def nbytes(self) -> int:
        return self._values.nbytes

    def read(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        batch = self._values[rows]
        if self.channels_last:
            batch = np.moveaxis(batch, -1, 1)
        batch = np.ascontiguousarray(batch, dtype=self._native).reshape(len(rows), *self.shape)
        if batch.dtype.kind == "f":
            self._check_values(batch.reshape(len(rows), -1), rows)
        return torch.from_numpy(batch), None if self._labels is None else torch.from_numpy(self._labels[rows])

    def _check_values(self, batch: NDArray[Any], rows: Rows) -> None:
        largest = np.abs(batch).max(1)
        finite = np.isfinite(largest)
        if not finite.all():
            raise ValueError(f"{self.name} holds NaN or infinity in row {int(rows[~finite][0])}: mend or remove it")
        if self.image and (largest > LARGEST).any():
            raise ValueError(
                f"{self.name} holds {largest.max():g} in row {rows[largest.argmax()]}, but pictures of floats lie in [-1, 1], "
                "or they could not be drawn: scale them, or unset pictures"
            )

    def fingerprint(self) -> str:
        labels = [] if self._labels is None else [self._labels]
        facts = f"{self.shape} {self.classes} {self.channels_last}"
        if isinstance(self._values, Mapped):
            return of_files([self._values.path], root=self._values.path, facts=facts + of_arrays(labels))
        return of_arrays([self._values, *labels], facts=facts)


class Synthetic(ArraySource):
    """For dry runs, noise from a fixed seed: uint8 as pictures are stored, or normal float32 (`floats=True`)."""

    shuffled = True

    def __init__(self, shape: tuple[int, ...], classes: int = 0, *, count: int = 64, floats: bool = False) -> None:
        generator = np.random.default_rng(0)
        size = (count, *shape)
        values: NDArray[np.generic]
        values = generator.standard_normal(size, np.float32) if floats else generator.integers(0, 256, size, np.uint8)
        labels = np.arange(count) % classes if classes else None
        image = not floats and len(shape) == 3 and shape[0] in (1, 3)
        super().__init__("synthetic", values, labels, classes=classes or None, image=image)


def check_labels(name: str, labels: NDArray[np.generic], count: int) -> NDArray[np.int64]:
    """Labels as int64, one a sample."""
    if labels.dtype.kind not in "iu" or labels.shape != (count,):
        raise ValueError(f"the labels of {name} must be {count} whole numbers, got {labels.dtype} of shape {labels.shape}")
    if int(labels.min()) < 0:
        raise ValueError(f"the labels of {name} must not be negative, got {int(labels.min())}")
    return labels.astype(np.int64)


def count_classes(name: str, labels: NDArray[np.int64], classes: int | None) -> int:
    """The number of classes, which is at least what the labels need."""
    needed = int(labels.max()) + 1
    if classes is not None and classes < needed:
        raise ValueError(f"{name} has a label {needed - 1}, so it needs at least {needed} classes, got classes={classes}")
    return needed if classes is None else classes


# Fingerprints: of content in memory; of names, sizes and samples of bytes on disk -------------------------------------


DIGITS = 16  # hexadecimal: 64 bits
EDGE = 1 << 16  # bytes looked at, at either end of a file
LOOKED_INTO = 64  # files whose bytes are looked at, evenly spread; the rest by name and size


def of_arrays(arrays: Iterable[NDArray[np.generic]], facts: str = "") -> str:
    """The hash of all content of the arrays, and of some facts about how it is read."""
    digest = hashlib.sha256(facts.encode())
    for array in arrays:
        digest.update(f"|{array.dtype.str}{array.shape}|".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:DIGITS]


def of_files(files: Sequence[Path], root: Path, facts: str = "") -> str:
    """The hash of files' names below `root`, their sizes, and the first and last bytes of some of them."""
    digest = hashlib.sha256(facts.encode())
    every = max(1, -(-len(files) // LOOKED_INTO))
    for number, path in enumerate(files):
        size = path.stat().st_size
        digest.update(b"|" + os.fsencode(path.relative_to(root).as_posix()) + f"|{size}|".encode())  # names need not be UTF-8
        if number % every == 0 or number == len(files) - 1:
            digest.update(_edges(path, size))
    return digest.hexdigest()[:DIGITS]


def _edges(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        first = file.read(EDGE)
        file.seek(max(EDGE, size - EDGE))
        return first + file.read(EDGE)
