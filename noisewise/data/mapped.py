"""A .npy file read through a memory map."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
