"""A folder of pictures, whose sub-folders may be the classes.

Splits: `train` is the sub-folder of that name if all sub-folders are splits, otherwise everything except the sub-folder
`test`; any other split is the sub-folder of that name.
"""

import os
import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from noisewise.data.pixels import SCALE, UNREADABLE, check_options, to_array, verify
from noisewise.data.source import Rows, Source, of_files

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
SPLIT_NAMES = {"train", "test", "val", "valid", "validation"}
REMEDY = "mend or remove it, or leave such files out: --data.options '{skip_corrupt: true}' (--skip-corrupt of evaluate)"
IN_A_RUN = "put a sound one in its place, and a run goes on with --resume; skip_corrupt would have left it out from the start"


class Folder(Source):
    """Pictures of one folder, read when asked for.

    Args:
        root: the folder; `files` lie below it.
        files: the pictures.
        labels: the class of each, if there are classes.
        classes: how many classes there are.
        size: scale the central square of each to size x size; without it all must be of one size.
        channels: 1 (grey) or 3 (colour).
        skip_corrupt: decode all files at once and leave out those that fail, with a warning; otherwise only beginnings and ends
            are looked at now, and a file damaged in between is an error when it is read.
    """

    image = True

    def __init__(
        self,
        root: Path,
        files: list[Path],
        labels: list[int] | None = None,
        classes: int = 0,
        *,
        size: int | None = None,
        channels: int = 3,
        skip_corrupt: bool = False,
    ) -> None:
        check_options(size, channels)
        self.name, self.root, self.size, self.channels, self.classes = root.name, root, size, channels, classes
        kept, sizes = survey(files, skip_corrupt)
        self.files = [files[i] for i in kept]
        self.labels = None if labels is None else np.array([labels[i] for i in kept], np.int64)
        height, width = (size, size) if size is not None else one_size(self.files, sizes)
        self.shape = (channels, height, width)

    def __len__(self) -> int:
        return len(self.files)

    @property
    def nbytes(self) -> int:
        return len(self.files) * int(np.prod(self.shape))

    def read(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        values = np.stack([self._picture(self.files[row]) for row in rows])
        return torch.from_numpy(values), None if self.labels is None else torch.from_numpy(self.labels[rows])

    def _picture(self, file: Path) -> np.ndarray:
        try:
            with Image.open(file) as picture:
                array = to_array(picture, self.size, self.channels)
        except UNREADABLE as error:
            raise ValueError(f"cannot read {file}: {error}; {IN_A_RUN}") from error
        if array.shape != self.shape:
            raise ValueError(f"{file} has changed since the folder was opened: shape {array.shape}, not {self.shape}")
        return array

    def fingerprint(self) -> str:
        labels = "" if self.labels is None else self.labels.tolist()
        return of_files(self.files, self.root, facts=f"{self.shape} {self.size} {self.classes} {labels}")


def survey(files: list[Path], skip_corrupt: bool) -> tuple[list[int], list[tuple[int, int]]]:
    """Which files are sound, and the height and width of each of those."""
    kept, sizes, corrupt = [], [], []
    for number, path in enumerate(files):
        try:
            with path.open("rb") as file:
                sizes.append(verify(file, thoroughly=skip_corrupt))
            kept.append(number)
        except UNREADABLE as error:
            if not skip_corrupt:
                raise ValueError(f"cannot read {path}: {error}; {REMEDY}") from error
            corrupt.append(path)
    if corrupt:
        warnings.warn(
            f"left out {len(corrupt)} of {len(files)} pictures that cannot be read, such as {corrupt[0]}", stacklevel=2
        )
    if not kept:
        raise ValueError(f"none of the {len(files)} pictures can be read, such as {files[0]}")
    return kept, sizes


def one_size(files: list[Path], sizes: list[tuple[int, int]]) -> tuple[int, int]:
    """The size that all pictures have."""
    usual = max(set(sizes), key=sizes.count) if len(set(sizes)) > 1 else sizes[0]
    for file, size in zip(files, sizes, strict=True):
        if size != usual:
            raise ValueError(f"{file} is {size[1]}x{size[0]} pixels, others {usual[1]}x{usual[0]}: {SCALE}")
    return usual


def open_folder(
    path: Path, split: str, *, size: int | None = None, channels: int = 3, labels: bool = False, skip_corrupt: bool = False
) -> Folder:
    """Pictures (png, jpg, webp, bmp) below a folder; with `labels` its sub-folders are the classes, in alphabetical order."""
    check_options(size, channels)
    root, left_out = split_folder(path, split)
    files = pictures_below(root, left_out)
    if not files:
        raise FileNotFoundError(f"{root} holds no pictures: looked for {', '.join(ENDINGS)}, also in sub-folders")
    numbers, classes = None, 0
    if labels:
        names = class_names(*split_folder(path, "train")) or class_names(root, left_out)  # a test set may lack a class
        numbers, classes = label_files(files, root, names), len(names)
    return Folder(root, files, numbers, classes, size=size, channels=channels, skip_corrupt=skip_corrupt)


def split_folder(path: Path, split: str) -> tuple[Path, str | None]:
    """The folder of a split, and the sub-folder of it that belongs to another."""
    if not path.is_dir():
        raise FileNotFoundError(f"no such folder: {path}")
    if split != "train":
        if not (path / split).is_dir():
            raise FileNotFoundError(
                f"{path} has no sub-folder {split!r}, so there is no such split: move some of the pictures there, say a tenth"
            )
        return path / split, None
    inside = {entry.name for entry in path.iterdir() if entry.is_dir() and not hidden(entry.name)}
    if "train" in inside and inside <= SPLIT_NAMES:  # otherwise "train" may well be a class, beside "bus" and "tram"
        return path / "train", None
    return path, "test"


def pictures_below(root: Path, left_out: str | None) -> list[Path]:
    """All pictures below a folder, in an order that does not depend on the file system."""
    files = []
    for folder, inside, names in os.walk(root, followlinks=True):
        if Path(folder) == root and left_out in inside:
            inside.remove(left_out)
        here = Path(folder).resolve()
        inside[:] = [
            name
            for name in inside
            if not hidden(name) and not here.is_relative_to(Path(folder, name).resolve())  # a link upwards
        ]
        files += [Path(folder, name) for name in names if name.lower().endswith(ENDINGS) and not hidden(name)]
    return sorted(files, key=lambda file: file.relative_to(root).parts)


def hidden(name: str) -> bool:
    """Whether a file or folder is a by-product of other programs, such as .ipynb_checkpoints."""
    return name.startswith(".") or name == "__MACOSX"


def class_names(root: Path, left_out: str | None) -> list[str]:
    """The sub-folders that hold pictures."""
    folders = sorted(entry for entry in root.iterdir() if entry.is_dir() and entry.name != left_out and not hidden(entry.name))
    return [folder.name for folder in folders if pictures_below(folder, None)]


def label_files(files: list[Path], root: Path, names: list[str]) -> list[int]:
    """The number of the sub-folder that each file lies in."""
    numbers = {name: number for number, name in enumerate(names)}
    labels = []
    for file in files:
        first = file.relative_to(root).parts[0]
        if first not in numbers:
            raise ValueError(
                f"{file} lies in none of the class folders ({', '.join(names)}): move it into one, or unset labels"
            )
        labels.append(numbers[first])
    return labels
