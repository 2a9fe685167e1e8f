"""Batches as a pure function of (seed, position), the same for any number of ranks and any way of reading.

Positions count samples from the start of training, over all ranks. Epochs follow one another without dropping a remainder, so
a batch may span two; each epoch visits each row once. Flips and label dropout are decided by a hash of (seed, position).
"""

from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from noisewise.data.feeds import Direct, Feed, Resident, Workers
from noisewise.data.order import DROP, FLIP, Order, decisions
from noisewise.data.source import Source

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
