"""CIFAR-10 (Krizhevsky 2009) in either of its official layouts: 32x32 colour pictures, ten classes.

cifar-10-batches-bin: records of 3,073 bytes, a label and then 3 x 32 x 32 values. cifar-10-batches-py: Python 2 pickles of
{data: (N, 3072) uint8, labels: list}, read by an unpickler that knows arrays and nothing else.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisewise.data.source import ArraySource

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
RECORD = 1 + PIXELS
CLASSES = 10
SPLITS = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
LAYOUTS = {"cifar-10-batches-bin": ".bin", "cifar-10-batches-py": ""}
Records = tuple[NDArray[np.uint8], NDArray[np.uint8]]


def open_cifar10(path: Path, split: str) -> ArraySource:
    """CIFAR-10 from the folder cifar-10-batches-bin or cifar-10-batches-py, or from the folder that holds one of them."""
    if split not in SPLITS:
        raise ValueError(f"CIFAR-10 has no split {split!r}: choose one of {', '.join(SPLITS)}")
    folder, ending = _find(path, SPLITS[split][0])
    files = [folder / (name + ending) for name in SPLITS[split]]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}: unpack the CIFAR-10 archive again")
    records = [(read_binary if ending else read_pickled)(file) for file in files]
    images = np.concatenate([images for images, _ in records])
    labels = np.concatenate([labels for _, labels in records])
    source = ArraySource("cifar10", images, labels, classes=CLASSES, image=True)
    source.shuffled = True
    return source


def _find(path: Path, first: str) -> tuple[Path, str]:
    """The folder with the batch files and how their names end."""
    if not path.is_dir():
        raise FileNotFoundError(f"no such folder: {path}; give the unpacked cifar-10-batches-bin or cifar-10-batches-py")
    for folder in (path, *(path / name for name in LAYOUTS)):
        for ending in LAYOUTS.values():
            if (folder / (first + ending)).is_file():
                return folder, ending
    raise FileNotFoundError(f"{path} holds no CIFAR-10: looked for {first}.bin and {first}, also in {' and '.join(LAYOUTS)}")


def read_binary(file: Path) -> Records:
    """Pictures and labels of one file of the binary layout."""
    raw = np.fromfile(file, np.uint8)
    if len(raw) == 0 or len(raw) % RECORD:
        raise ValueError(
            f"{file} has {len(raw)} bytes, not a whole number of records of {RECORD}: is it cut off, or CIFAR-100?"
        )
    records = raw.reshape(-1, RECORD)
    return records[:, 1:].reshape(-1, *SHAPE), _labels(records[:, 0], file)


def read_pickled(file: Path) -> Records:
    """Pictures and labels of one file of the python layout."""
    content = load_arrays(file)
    data, labels = (content.get(b"data"), content.get(b"labels")) if isinstance(content, dict) else (None, None)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != PIXELS:
        raise ValueError(f"{file} is not a CIFAR-10 batch: it needs data of {PIXELS} uint8 values a picture")
    if not isinstance(labels, list) or len(labels) != len(data) or not all(type(label) is int for label in labels):
        raise ValueError(f"{file} is not a CIFAR-10 batch: it needs one label for each of its {len(data)} pictures")
    return data.reshape(-1, *SHAPE), _labels(np.array(labels), file)


def _labels(labels: NDArray[Any], file: Path) -> NDArray[np.uint8]:
    bad = (labels < 0) | (labels >= CLASSES)
    if bad.any():
        raise ValueError(f"{file} has label {labels[bad][0]} in record {int(bad.argmax())}, but CIFAR-10's run from 0 to 9")
    return labels.astype(np.uint8)


def _empty_array(*_: object) -> NDArray[np.int8]:
    """In place of numpy's own _reconstruct: the state that follows in the pickle says the shape, type and content."""
    return np.zeros(0, np.int8)


class ArrayUnpickler(pickle.Unpickler):
    """Reads arrays, lists, dicts, strings and numbers; anything else in the file is refused, not run."""

    ALLOWED = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _empty_array,
        ("numpy._core.multiarray", "_reconstruct"): _empty_array,
        ("numpy", "ndarray"): None,  # named, never called
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Only what an array needs."""
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it wants to run {module}.{name}, which no CIFAR-10 file does; do not trust it")
        return self.ALLOWED[module, name]


def load_arrays(file: Path) -> Any:
    """The content of a Python 2 pickle that holds arrays and plain values alone."""
    try:
        return ArrayUnpickler(io.BytesIO(file.read_bytes()), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise almost anything
        raise ValueError(f"{file} is not a CIFAR-10 python batch: {error}") from error
