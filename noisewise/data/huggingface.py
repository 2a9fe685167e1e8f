"""Pictures from the `datasets` package: a name on the hub, or a folder written by `save_to_disk`."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noisewise.data.pixels import SCALE, UNREADABLE, check_options, to_array
from noisewise.data.source import Rows, Source, of_arrays


class HuggingFace(Source):
    """A `datasets.Dataset` with a column of pictures and perhaps one of class labels, both found by their type."""

    image = True

    def __init__(
        self,
        dataset: Any,
        name: str,
        *,
        image: str | None = None,
        label: str | None = None,
        labels: bool = True,
        size: int | None = None,
        channels: int = 3,
    ) -> None:
        check_options(size, channels)
        if len(dataset) == 0:
            raise ValueError(f"{name} is empty")
        column = find_column(dataset, "Image", image)
        if column is None:
            raise ValueError(f"{name} has no column of pictures among {', '.join(dataset.features)}: set image to its name")
        self.name, self.size, self.channels = name, size, channels
        self.image_column = column
        self.label_column = find_column(dataset, "ClassLabel", label) if labels else None
        self.classes = dataset.features[self.label_column].num_classes if self.label_column else 0
        self.dataset = dataset.select_columns([self.image_column, *([self.label_column] if self.label_column else [])])
        self.shape: tuple[int, ...] = ()
        self.shape = self._picture(self._row(0)[self.image_column], 0).shape

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def nbytes(self) -> int:
        return len(self) * int(np.prod(self.shape))

    def read(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        try:
            batch = self.dataset[rows.tolist()]
        except UNREADABLE:
            for row in rows.tolist():  # the package does not say which one it cannot decode
                self._row(row)
            raise
        pictures = zip(batch[self.image_column], rows, strict=True)
        values = torch.from_numpy(np.stack([self._picture(picture, row) for picture, row in pictures]))
        if not self.label_column:
            return values, None
        labels = np.array([-1 if label is None else label for label in batch[self.label_column]], np.int64)
        if labels.min() < 0:
            raise ValueError(f"{self.name} has no label in row {int(rows[labels.argmin()])}: set labels to false")
        return values, torch.from_numpy(labels)

    def _row(self, row: int) -> dict[str, Any]:
        """One row, decoded."""
        try:
            return self.dataset[row]
        except UNREADABLE as error:
            raise ValueError(self._unreadable(row, error)) from error

    def _unreadable(self, row: int, error: BaseException) -> str:
        return f"cannot read the picture in row {row} of {self.name}: {error}; put a sound one there, or begin a run without it"

    def _picture(self, picture: Any, row: int) -> np.ndarray:
        if picture is None:
            raise ValueError(f"{self.name} has no picture in row {row}")
        try:
            array = to_array(picture, self.size, self.channels)
        except UNREADABLE as error:
            raise ValueError(self._unreadable(row, error)) from error
        if self.shape and array.shape != self.shape:
            raise ValueError(f"row {row} of {self.name} has shape {array.shape}, others {self.shape}: {SCALE}")
        return array

    def fingerprint(self) -> str:
        return of_arrays([], f"{self.dataset._fingerprint} {len(self)} {self.shape} {self.size} {self.classes}")


def find_column(dataset: Any, kind: str, name: str | None) -> str | None:
    """The column of this type: the one named, or the only one there is; None where there is none."""
    found = [column for column, feature in dataset.features.items() if type(feature).__name__ == kind]
    if name is not None:
        if name not in found:
            raise ValueError(f"{name!r} is no column of type {kind}; there are: {', '.join(found) or 'none'}")
        return name
    if len(found) > 1:
        raise ValueError(
            f"several columns are of type {kind}: {', '.join(found)}; set {'image' if kind == 'Image' else 'label'}"
        )
    return found[0] if found else None


def open_huggingface(
    path: Path | str,
    split: str,
    *,
    config: str | None = None,
    image: str | None = None,
    label: str | None = None,
    labels: bool = True,
    size: int | None = None,
    channels: int = 3,
) -> HuggingFace:
    """A dataset by its name on the hub (and `config`), or by the folder that `save_to_disk` wrote.

    Args:
        path: the name or the folder.
        split: which split.
        config: the configuration, for datasets that have several.
        image: the column of pictures, where there are several.
        label: the column of labels, where there are several.
        labels: whether to read labels at all.
        size: scale the central square of each picture to size x size; without it all must be of one size.
        channels: 1 (grey) or 3 (colour).
    """
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError("Hugging Face data need the datasets package: pip install 'noisewise[datasets]'") from error
    folder = Path(path)
    if (folder / "dataset_dict.json").is_file():
        parts = datasets.load_from_disk(str(folder))
        if split not in parts:
            raise ValueError(f"{path} has no split {split!r}: choose one of {', '.join(parts)}")
        dataset = parts[split]
    elif (folder / "state.json").is_file():
        if split != "train":
            raise ValueError(f"{path} holds one dataset without splits: use train, or save a DatasetDict to have {split!r}")
        dataset = datasets.load_from_disk(str(folder))
    else:
        try:
            dataset = datasets.load_dataset(str(path), config, split=split)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise ValueError(f"cannot load {path} ({split}): {error}") from error
    return HuggingFace(dataset, folder.name, image=image, label=label, labels=labels, size=size, channels=channels)
