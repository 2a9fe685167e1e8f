"""Safetensors files as checkpoints have them: written tensor by tensor with their checksum, read whole or by rows.

The library's own writer holds a second copy of all tensors as bytes, and a checksum afterwards reads the file once more.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import safe_open
from torch import Tensor

from noisewise.plain_files import open_new, read_plain

Description = dict[str, Any]  # bytes and sha256 of a file
Rows = tuple[str, int, int]  # a file, and the first row and the one after the last that it holds

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
INDEX = ".index.json"


class Hashed:
    """A file that is being written, and the checksum of what is in it so far."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._sum, self._size = file, hashlib.sha256(), 0

    def write(self, data: Any) -> None:
        self._file.write(data)
        self._sum.update(data)
        self._size += len(data)

    @property
    def description(self) -> Description:
        return {"bytes": self._size, "sha256": self._sum.hexdigest()}


@contextmanager
def writing_hashed(path: Path) -> Iterator[Hashed]:
    """A new file, flushed to the disk after the block."""
    with open_new(path) as file:
        yield Hashed(file)
        file.flush()
        os.fsync(file.fileno())


def write_tensors(path: Path, values: Mapping[str, Tensor]) -> Description:
    """Write tensors into a safetensors file, one after the other; returns its size and checksum."""
    header: dict[str, Any] = {}
    names, place = sorted(values, key=lambda name: (-values[name].element_size(), name)), 0  # so that all are aligned
    for name in names:
        value = values[name]
        if value.dtype not in DTYPES:
            raise TypeError(f"{name} is {value.dtype}, which safetensors files cannot hold")
        end = place + value.numel() * value.element_size()
        header[name] = {"dtype": DTYPES[value.dtype], "shape": list(value.shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with writing_hashed(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            if values[name].numel():
                file.write(values[name].detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return file.description


def digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 of named tensors: names, types, shapes and values."""
    total = hashlib.sha256()
    for name in sorted(state):
        value = state[name].detach().cpu().contiguous()
        total.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        total.update(value.view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


class StoredPart(Mapping[str, Tensor]):
    """The tensors of a part, in one file or in shards, read when they are asked for.

    Args:
        folder: of the checkpoint.
        files: that hold it.
        index: of shards: the rows of each tensor that each file holds.
    """

    def __init__(self, folder: Path, files: Sequence[str], index: Mapping[str, Sequence[Rows]] | None = None) -> None:
        self.folder, self.files, self.index = folder, list(files), index
        self._opened: dict[str, Any] = {}
        self._names = list(index) if index is not None else self._open(files[0]).keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Tensor:
        if self.index is None:
            return self._open(self.files[0]).get_tensor(name)
        pieces = self.index[name]
        found = [self._open(file).get_tensor(name) for file, _, _ in pieces]
        if len(found) > 1 and any(len(one) != stop - start for one, (_, start, stop) in zip(found, pieces, strict=True)):
            raise ValueError(f"the index of {name} does not fit its shards")
        return found[0] if len(found) == 1 else torch.cat(found)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        if self.index is None:
            return tuple(self._open(self.files[0]).get_slice(name).get_shape())
        file, *_ = self.index[name][0]
        shape = tuple(self._open(file).get_slice(name).get_shape())
        return (self.index[name][-1][2], *shape[1:]) if shape else shape

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows `first` to before `last` of a tensor: no other byte of it is read."""
        pieces = self.index[name] if self.index is not None else [(self.files[0], 0, self.shape(name)[0])]
        found: list[Tensor] = []
        for file, start, stop in pieces:
            low = min(max(first, start), stop)
            high = min(max(last, low), stop)
            if low < high or not found:  # of no rows at all there is one piece without any
                found.append(self._open(file).get_slice(name)[low - start : high - start])
                if len(found[-1]) != high - low:  # or a single row would be repeated where others are missing
                    raise ValueError(f"the index of {name} does not fit its shards")
        return torch.cat(found)

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            self._opened[file] = safe_open(self.folder / file, "pt")
        return self._opened[file]


def shard_name(part: str, rank: int, world: int) -> str:
    return f"{part}-{rank:05d}-of-{world:05d}.safetensors"


def stored_parts(folder: Path, files: Mapping[str, Any]) -> dict[str, StoredPart]:
    """The parts of a checkpoint whose manifest names these files; ValueError if an index does not fit them."""
    indexed = [name.removesuffix(INDEX) for name in files if name.endswith(INDEX)]
    found, taken = {}, set()
    for part in indexed:
        index = json.loads(read_plain(folder / f"{part}{INDEX}"))
        shards = [name for name in files if name.startswith(f"{part}-") and name.endswith(".safetensors")]
        if not isinstance(index, dict) or not all(isinstance(pieces, list) and pieces for pieces in index.values()):
            raise ValueError(f"the index of {part} is not one")
        for name, pieces in index.items():
            place = 0
            for file, start, stop in pieces:
                if file not in shards or type(start) is not int or type(stop) is not int or start != place or stop < start:
                    raise ValueError(f"the index of {part} is not one: {name}")
                place = stop
        taken |= {*shards}
        found[part] = StoredPart(folder, sorted(shards), index)
    plain = [name for name in files if name.endswith(".safetensors") and name not in taken]
    return {**{name.removesuffix(".safetensors"): StoredPart(folder, [name]) for name in plain}, **found}
