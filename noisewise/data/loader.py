"""Batches as a pure function of (seed, position), the same for any number of ranks and any way of reading.

Positions count samples from the start of training, over all ranks. Epochs follow one another without dropping a remainder, so
a batch may span two; each epoch visits each row once. Flips and label dropout are decided by a hash of (seed, position).
"""

import signal
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from noisewise.data.source import Rows, Source
from noisewise.streams import GOLDEN, MASK, bits, stream_key, uniforms

# The order of the data ------------------------------------------------------------------------------------------------


# A pure function of (seed, position): nothing to advance or save, and resuming is exact. Position p is row
# permutation(epoch)[p mod n] of epoch p // n. The numbers behind it are SplitMix64's, as for the samplers, and not numpy's,
# whose permutations may change between its versions.
ORDER, FLIP, DROP = 1, 2, 3  # the streams of one seed
HELD = 2  # permutations kept: a batch may span two epochs


def permutation(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order in which the n rows are visited in this epoch."""
    return torch.argsort(bits(stream_key(seed, ORDER, epoch), n), stable=True).numpy()


def decisions(seed: int, stream: int, position: int, count: int, share: float, device: torch.device | str) -> Tensor:
    """For each of `count` positions from this one on, whether something of probability `share` happens to it."""
    key = (stream_key(seed, stream) + position * GOLDEN) & MASK  # the stream of this seed, entered at `position`
    return uniforms(key, count, device) < share


class Order:
    """Which rows lie at which positions; holds at most two permutations."""

    def __init__(self, n: int, seed: int) -> None:
        self.n, self.seed = n, seed
        self.held: dict[int, NDArray[np.int64]] = {}

    def rows(self, position: int, count: int) -> NDArray[np.int64]:
        """The rows at positions position .. position + count."""
        parts = []
        while count:
            epoch, offset = divmod(position, self.n)
            part = self._permutation(epoch)[offset : offset + count]
            parts.append(part)
            position, count = position + len(part), count - len(part)
        return np.concatenate(parts)

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self.held:
            while len(self.held) >= HELD:
                del self.held[min(self.held)]
            self.held[epoch] = permutation(self.n, self.seed, epoch)
        return self.held[epoch]


# Three ways to bring raw values to the device, which give the same values: from a copy there, read here, by workers ---


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


# The batches ----------------------------------------------------------------------------------------------------------


RESIDENT_SHARE = 0.25  # of the free memory of a CUDA device


class Batches:
    """This rank's share of global micro-batches, decoded on the device.

    Args:
        source: the data.
        batch: the number of samples of one global micro-batch, over all ranks.
        seed: of the order, the flips and the label dropout.
        device: where samples are wanted.
        rank: of this process; it takes the rank-th contiguous part of each batch.
        world: the number of processes.
        flip: mirror half of the pictures left to right.
        label_dropout: the share of labels replaced by `source.classes`, for classifier-free guidance.
        resident: keep all raw values on the device. By default on CUDA if they take less than a quarter of its free memory;
            on the CPU data that are in memory are read from there.
        workers: processes that read data which are not resident; 0 reads in this process.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch: int,
        seed: int,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world: int = 1,
        flip: bool = False,
        label_dropout: float = 0.0,
        resident: bool | None = None,
        workers: int = 2,
    ) -> None:
        if not 0 <= rank < world:
            raise ValueError(f"rank must lie in 0 .. world - 1, got rank {rank} of {world}")
        if batch < 1 or batch % world:
            raise ValueError(f"batch must be a positive multiple of the {world} ranks, got {batch}")
        if flip and not source.image:
            raise ValueError(f"flip mirrors pictures, but {source.name} holds none: unset flip")
        if not 0 <= label_dropout <= 1:
            raise ValueError(f"label_dropout is a share from 0 to 1, got {label_dropout}")
        if label_dropout and not source.classes:
            raise ValueError(f"label_dropout drops labels, but {source.name} has none: set it to 0")
        if workers < 0:
            raise ValueError(f"workers must be 0 or more, got {workers}")
        self.source, self.batch, self.seed, self.device = source, batch, seed, torch.device(device)
        self.rank, self.share = rank, batch // world
        self.flip, self.label_dropout = flip, label_dropout
        self.order = Order(len(source), seed)
        self.resident = fits(source, self.device) if resident is None else resident
        self._feed: Feed | None = self._choose_feed(workers)

    def _choose_feed(self, workers: int) -> Feed:
        at_hand = self.source.in_memory and self.device.type == "cpu"  # a copy would gain nothing
        if self.resident and not at_hand:
            return Resident(self.source, self.order, self.share, self.device, workers)
        if self.source.in_memory or workers == 0:
            return Direct(self.source, self.order, self.share, self.device)
        return Workers(self.source, self.order, self.share, self.device, workers, step=self.batch)

    def get(self, position: int) -> tuple[Tensor, Tensor | None]:
        """Float32 samples and int64 labels of this rank's part of positions position .. position + batch."""
        if position < 0:
            raise ValueError(f"positions count from 0, got {position}")
        if self._feed is None:
            raise ValueError("these batches are closed: make new ones")
        start = position + self.rank * self.share
        values, labels = self._feed.get(start)
        if self.flip:
            mirrored = self._decide(FLIP, start, 0.5).view(-1, *[1] * (values.ndim - 1))
            values = torch.where(mirrored, values.flip(-1), values)
        if self.label_dropout and labels is not None:
            labels = labels.masked_fill(self._decide(DROP, start, self.label_dropout), self.source.classes)
        return self.source.decode(values), labels

    def _decide(self, stream: int, start: int, share: float) -> Tensor:
        return decisions(self.seed, stream, start, self.share, share, self.device)

    def close(self) -> None:
        """End the reading processes and let go of resident data."""
        if self._feed is not None:
            self._feed.close()
        self._feed = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def fits(source: Source, device: torch.device) -> bool:
    """Whether to keep all raw values on the device, when the user does not say."""
    if device.type == "cuda":
        return source.nbytes < RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]
    return source.in_memory
