"""Three ways to bring raw values to the device: from a copy that lies there, read in this process, read by workers.

All give the same values for the same positions; `Batches` chooses between them.
"""

import signal
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from noisewise.data.order import Order
from noisewise.data.source import Rows, Source

Raw = tuple[Tensor, Tensor | None]
CHUNK_BYTES = 1 << 24  # read at a time while filling a resident copy
PREFETCH = 4  # batches that each worker prepares ahead


class Feed(Protocol):
    """Raw values and labels, on the device, of `share` positions from `start` on."""

    def get(self, start: int) -> Raw: ...

    def close(self) -> None: ...


class Resident:
    """All raw values lie on the device; only row numbers travel, without waiting for the device."""

    def __init__(self, source: Source, order: Order, share: int, device: torch.device, workers: int) -> None:
        self.order, self.share, self.device = order, share, device
        self.values, self.labels = load_all(source, device, workers)

    def get(self, start: int) -> Raw:
        rows = to_device(torch.from_numpy(self.order.rows(start, self.share)), self.device)
        return self.values[rows], None if self.labels is None else self.labels[rows]

    def close(self) -> None:
        del self.values, self.labels


class Direct:
    """Rows are read in this process when they are asked for."""

    def __init__(self, source: Source, order: Order, share: int, device: torch.device) -> None:
        self.source, self.order, self.share, self.device = source, order, share, device

    def get(self, start: int) -> Raw:
        return raw_to_device(self.source.read(self.order.rows(start, self.share)), self.device)

    def close(self) -> None:
        pass


class Workers:
    """Rows are read ahead by other processes; a position out of sequence starts them anew from there."""

    def __init__(self, source: Source, order: Order, share: int, device: torch.device, workers: int, step: int) -> None:
        self.source, self.order, self.share, self.device, self.workers, self.step = source, order, share, device, workers, step
        self.stream: Iterator[Raw] | None = None
        self.expected = -1

    def get(self, start: int) -> Raw:
        if self.stream is None or start != self.expected:
            self.close()
            self.stream = stream(self.source, self._rows_from(start), self.workers, self.device)
        running, self.stream = self.stream, None  # kept only if it delivers: after an error it is at its end
        raw = next(running)
        self.stream, self.expected = running, start + self.step
        return raw_to_device(raw, self.device)

    def _rows_from(self, start: int) -> Iterator[Rows]:
        while True:
            yield self.order.rows(start, self.share)
            start += self.step

    def close(self) -> None:
        self.stream = None  # the loader's iterator ends its processes when nothing refers to it


class _Reader(Dataset[Any]):
    """Reads a batch of rows; an error travels as a value, so that its message arrives without a worker's traceback."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getitem__(self, rows: Rows) -> Raw | Exception:
        try:
            return self.source.read(rows)
        except (ValueError, OSError) as error:
            return error


def _unchanged(item: Any) -> Any:
    return item


def _ignore_terminations(_: int) -> None:
    """A scheduler asks all processes of a group to end; the run saves first, and needs its readers until then."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def stream(source: Source, batches: Iterable[Rows], workers: int, device: torch.device) -> Iterator[Raw]:
    """Raw values of each batch of rows, read by worker processes."""
    loader = DataLoader(
        _Reader(source),
        batch_size=None,
        sampler=batches,
        num_workers=workers,
        collate_fn=_unchanged,
        pin_memory=device.type == "cuda",
        prefetch_factor=PREFETCH,
        worker_init_fn=_ignore_terminations,
        generator=torch.Generator(),  # or it would draw from the caller's random state
    )
    for item in loader:
        if isinstance(item, Exception):
            raise item
        yield item


def load_all(source: Source, device: torch.device, workers: int) -> Raw:
    """All raw values and labels, on the device; files are read by workers, chunk by chunk."""
    n = len(source)
    size = max(1, CHUNK_BYTES * n // max(1, source.nbytes))
    chunks = [torch.arange(i, min(i + size, n)).numpy() for i in range(0, n, size)]
    parallel = workers > 0 and not source.in_memory and len(chunks) > 1
    parts = stream(source, chunks, workers, device) if parallel else map(source.read, chunks)
    values: Tensor | None = None
    labels: Tensor | None = None
    for chunk, (some, their_labels) in zip(chunks, parts, strict=True):
        if values is None:
            try:
                values = torch.empty((n, *some.shape[1:]), dtype=some.dtype, device=device)
            except torch.OutOfMemoryError as error:
                raise ValueError(
                    f"{source.name} ({source.nbytes / 1e9:.1f} GB) does not fit on {device}: unset resident"
                ) from error
            labels = None if their_labels is None else torch.empty(n, dtype=torch.int64, device=device)
        place = slice(int(chunk[0]), int(chunk[-1]) + 1)
        values[place] = some.to(device)
        if labels is not None and their_labels is not None:
            labels[place] = their_labels.to(device)
    assert values is not None
    return values, labels


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, without waiting for it."""
    if device.type == "cuda" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def raw_to_device(raw: Raw, device: torch.device) -> Raw:
    """Values and labels on the device, without waiting for it."""
    values, labels = raw
    return to_device(values, device), None if labels is None else to_device(labels, device)
