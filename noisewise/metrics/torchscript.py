"""The tensors of a TorchScript archive, read without running any of its code.

Such a file is a zip: raw storages under data/, and a pickle that says which module holds which. The pickle is read by an
unpickler that knows tensors and plain containers only; everything else it names becomes an empty `Node` or is refused.
Ours, because `torch.jit.load` runs the code in the file, and `torch.load(weights_only=True)` does not read such files.
"""

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STORAGES = {"FloatStorage": torch.float32, "DoubleStorage": torch.float64, "LongStorage": torch.int64}


class Node:
    """What is left of a scripted module: its attributes."""


def _tensor(storage: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Tensor:
    return storage.as_strided(size, stride, offset)


def _same(value: Any, *_: Any) -> Any:
    return value


KNOWN = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _same,
    ("torch.jit._pickle", "build_intlist"): _same,
    ("torch.jit._pickle", "build_doublelist"): _same,
    ("torch.jit._pickle", "build_boollist"): _same,
    ("torch.jit._pickle", "build_tensorlist"): _same,
    ("torch.jit._pickle", "restore_type_tag"): _same,
    **{("torch", name): dtype for name, dtype in STORAGES.items()},
}


class _Reader(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(archive.open(f"{root}data.pkl"))
        self.archive, self.root = archive, root

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "__torch__":
            return Node
        try:
            return KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no network's weights need") from None

    def persistent_load(self, pid: Any) -> Tensor:
        _, dtype, key, *_ = pid
        return torch.frombuffer(bytearray(self.archive.read(f"{self.root}data/{key}")), dtype=dtype)


def _walk(node: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in vars(node).items():
        if isinstance(value, Tensor):
            yield prefix + name, value
        elif isinstance(value, Node):
            yield from _walk(value, f"{prefix}{name}.")


def root_of(path: Path) -> str | None:
    """The folder inside a TorchScript archive that holds everything; None if the file is something else."""
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    roots = [name.removesuffix("data.pkl") for name in names if name.endswith("data.pkl")]
    return next((root for root in roots if any(name.startswith(f"{root}code/") for name in names)), None)


def read_torchscript(path: Path) -> dict[str, Tensor]:
    """Parameters and buffers by their dotted names."""
    root = root_of(path)
    if root is None:
        raise ValueError(f"{path} is not a TorchScript archive")
    try:
        with zipfile.ZipFile(path) as archive:
            return {name: tensor.clone() for name, tensor in _walk(_Reader(archive, root).load())}
    except Exception as error:  # a damaged pickle can raise almost anything
        raise ValueError(f"{path} cannot be read as TorchScript weights: {error}") from error
