"""Short hashes of data: of the content where it is in memory, of names, sizes and samples of bytes where it is on disk."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

DIGITS = 16  # hexadecimal: 64 bits
EDGE = 1 << 16  # bytes looked at, at either end of a file
LOOKED_INTO = 64  # files whose bytes are looked at, evenly spread; the rest by name and size


def of_text(text: str) -> str:
    """The hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


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
