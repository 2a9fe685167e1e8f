"""Latents of an autoencoder, written by `encode`: index.json, mean.npy, std.npy (unless there is none) and labels.npy."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noisewise.data.source import Mapped, Rows, Source, check_labels, load_npy, of_files

INDEX = "index.json"
VERSION = 1
NEEDED = ("version", "autoencoder", "shape", "count", "classes", "scale", "shift", "source")


class Latents(Source):
    """Posterior means and standard deviations; `decode` draws from them and scales: (mean + std * noise - shift) * scale.

    Raw values are (n, 2, ...), the mean and the deviation, or (n, 1, ...) where there is no deviation.
    """

    def __init__(self, folder: Path) -> None:
        index = read_index(folder)
        self.name, self.folder = folder.name, folder
        self.autoencoder: str = index["autoencoder"]
        self.subfolder: str | None = index.get("subfolder")
        self.shape = tuple(index["shape"])
        self.classes, self.scale, self.shift = int(index["classes"]), float(index["scale"]), float(index["shift"])
        self._parts = [Mapped(folder / name) for name in ("mean.npy", "std.npy") if (folder / name).is_file()]
        for part in self._parts:
            if part.shape != (index["count"], *self.shape):
                raise ValueError(
                    f"{part.path} has shape {part.shape}, but {INDEX} says {(index['count'], *self.shape)}: encode again"
                )
        if not self._parts or self._parts[0].path.name != "mean.npy":
            raise FileNotFoundError(f"{folder} lacks mean.npy: encode the data again")
        self._labels = check_labels(self.name, load_npy(folder / "labels.npy"), len(self)) if self.classes else None

    def __len__(self) -> int:
        return len(self._parts[0])

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def read(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        values = torch.from_numpy(np.stack([part[rows] for part in self._parts], axis=1))
        return values, None if self._labels is None else torch.from_numpy(self._labels[rows])

    def decode(self, values: Tensor) -> Tensor:
        mean = values[:, 0].float()
        if values.shape[1] > 1:
            std = values[:, 1].float()
            mean = mean + std * torch.randn_like(std)
        return (mean - self.shift) * self.scale

    def fingerprint(self) -> str:
        files = [self.folder / INDEX, *(part.path for part in self._parts)]
        labels = [] if self._labels is None else [self.folder / "labels.npy"]
        return of_files(files + labels, self.folder)


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a folder of latents."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no such folder: {folder}; latents are written by noisewise's encode")
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(f"{folder} has no {INDEX}, so it holds no latents: write them with noisewise's encode")
    try:
        index = json.loads((folder / INDEX).read_text())
    except ValueError as error:
        raise ValueError(f"{folder / INDEX} is not JSON ({error}): encode the data again") from error
    missing = [name for name in NEEDED if name not in index] if isinstance(index, dict) else list(NEEDED)
    if missing:
        raise ValueError(f"{folder / INDEX} lacks {', '.join(missing)}: encode the data again")
    if index["version"] != VERSION:
        raise ValueError(f"{folder} is of format {index['version']}, this noisewise reads {VERSION}: encode the data again")
    return index


def open_latents(path: Path, split: str) -> Latents:
    """A folder written by encode; or one that holds such a folder for each split."""
    if (path / split).is_dir():
        return Latents(path / split)
    if split != "train":
        raise FileNotFoundError(f"{path} has no sub-folder {split!r}, so there is no such split: encode it to {path / split}")
    return Latents(path)
