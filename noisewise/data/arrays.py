"""Arrays in .npy (memory-mapped), .npz or .safetensors files: pictures, signals, latents, points.

Labels are the key "labels" of the same file or, beside x.npy, the file x_labels.npy. uint8 arrays are pictures, (N, H, W, C)
or (N, C, H, W), told apart by which axis is 1, 3 or 4; floats are taken as they are, of any shape.
"""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file

from noisewise.data.source import ArraySource, Mapped, load_npy

ENDINGS = (".npy", ".npz", ".safetensors")
KEYS = ("images", "data", "values")
CHANNELS = (1, 3, 4)
Labelled = tuple[NDArray[Any] | Mapped, NDArray[Any] | None]


def open_array(
    path: Path,
    split: str,
    *,
    key: str | None = None,
    classes: int | None = None,
    channels_last: bool | None = None,
    pictures: bool | None = None,
) -> ArraySource:
    """An array whose first axis counts the samples.

    Args:
        path: the file, or a folder with train.npy and test.npy (or .npz, .safetensors).
        split: "train", or the name of another file beside it.
        key: which array of an .npz or .safetensors file; not needed if it is called images, data or values, or is alone.
        classes: how many classes there are; one more than the largest label when absent.
        channels_last: whether the last axis holds the channels; needed only where the shape leaves it open.
        pictures: whether floats are pictures in [-1, 1] that can be drawn and flipped; uint8 pictures always are.
    """
    file = split_file(path, split)
    key = None if key is None else str(key)  # a key such as 0 arrives as a number
    beside = file.with_name(f"{file.stem}_labels.npy")
    found: Labelled
    if file.suffix == ".npy":
        found = Mapped(file), load_npy(beside) if beside.is_file() else None
    else:
        found = pick(file, load_many(file), key)
    values, labels = found
    if values.dtype == np.uint8:
        channels_last, shape = picture_layout(file, values.shape, channels_last)
    else:
        shape = None
        if channels_last and len(values.shape) < 3:
            raise ValueError(f"{file} has shape {values.shape}, which has no axis of channels: unset channels_last")
        if channels_last is None and len(values.shape) == 4 and [size in CHANNELS for size in values.shape[1:]] == [0, 0, 1]:
            warnings.warn(
                f"{file} has shape {values.shape} and is read as {values.shape[1]} channels of {values.shape[2]} x "
                f"{values.shape[3]}; if the last axis holds the channels, set channels_last to true, else to false",
                stacklevel=2,
            )
    source = ArraySource(
        file.stem, values, labels, classes=classes, channels_last=bool(channels_last), shape=shape, image=False
    )
    drawable = len(source.shape) == 3 and source.shape[0] in (1, 3)
    if pictures and not drawable:
        raise ValueError(f"{file} holds samples of shape {source.shape}, not pictures of 1 or 3 channels: unset pictures")
    source.image = drawable and (values.dtype == np.uint8 if pictures is None else pictures)
    return source


def split_file(path: Path, split: str) -> Path:
    """The file of a split: the path itself for train, otherwise the file of the split's name beside or below it."""
    if not path.exists():
        raise FileNotFoundError(f"no such file or folder: {path}")
    if path.is_file() and path.suffix not in ENDINGS:
        raise ValueError(f"{path} is no array file: give one of {', '.join(ENDINGS)}")
    if path.is_file() and split in ("train", path.stem):
        return path
    folder = path.parent if path.is_file() else path
    for ending in ENDINGS:
        if (folder / (split + ending)).is_file():
            return folder / (split + ending)
    missing = f"no file {split}.npy, {split}.npz or {split}.safetensors"
    if path.is_file():
        remedy = f"put one there, or give a folder with train.npy and {split}.npy"
        raise FileNotFoundError(f"{path} has {missing} beside it, and so no split {split!r}: {remedy}")
    raise FileNotFoundError(f"{folder.absolute()} has {missing}, and so no split {split!r}: put one there")


def load_many(file: Path) -> dict[str, NDArray[Any]]:
    """All arrays of an .npz or .safetensors file."""
    if file.suffix == ".npz":
        try:
            with np.load(file, allow_pickle=False) as content:
                return {name: content[name] for name in content.files}
        except Exception as error:  # damaged archives raise errors of zip, zlib and numpy
            raise ValueError(f"{file} is not an .npz file of plain numbers ({error}); save it with numpy.savez") from error
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a .safetensors file ({error})") from error
    return {name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy() for name, tensor in tensors.items()}


def pick(file: Path, content: dict[str, NDArray[Any]], key: str | None) -> Labelled:
    """The array of values, and the labels if there are any."""
    labels = content.get("labels")
    others = [name for name in content if name != "labels"]
    found = [key] if key is not None else [name for name in KEYS if name in content] or others
    if len(found) != 1 or found[0] not in others:
        wanted = f"no array {key!r}" if key is not None else "no array that is plainly the data"
        raise ValueError(f"{file} has {wanted}: set key to one of {', '.join(others) or '(it is empty)'}")
    return content[found[0]], labels


def picture_layout(file: Path, shape: tuple[int, ...], last: bool | None) -> tuple[bool, tuple[int, ...] | None]:
    """Whether channels come last, and the shape of one sample where an axis has to be added."""
    if len(shape) == 3:
        if last is not None:
            raise ValueError(f"{file} has shape {shape}, grey pictures without an axis of channels: unset channels_last")
        return False, (1, *shape[1:])
    if len(shape) != 4:
        return bool(last), None
    first, final = shape[1] in CHANNELS, shape[3] in CHANNELS
    if last is None and first == final:
        why = "either" if first else "neither"
        raise ValueError(
            f"{file} has shape {shape}: {why} axis 1 or axis 3 may be the channels; set channels_last to say which"
        )
    return final if last is None else last, None
