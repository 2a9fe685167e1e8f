"""Checkpoints that do not stop training: a copy of the state is made between two steps, and written in the background.

One save is under way at a time, so there is one copy at most. It lies in memory that a GPU copies into on its own (pinned), and
is used again for the next save.
"""

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from noisewise import distributed
from noisewise.training import checkpoint
from noisewise.training.run_folder import RunFolder
from noisewise.training.tensor_files import Description, Rows, shard_name, write_tensors

Tensors = Mapping[str, Mapping[str, Tensor]]


class Saver:
    """Writes in a thread of its own: `begin`, `done`, `result`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._found: Any = None
        self._memory: dict[tuple[str, str], Tensor] = {}

    def begin(self, tensors: Tensors, write: Callable[[Tensors], Any]) -> None:
        """Copy the tensors as they are now, and let `write` have them in the background; `result` is what it returns."""
        assert self._thread is None, "one save at a time, and its result is taken before the next"
        copies = {
            part: {name: self._copied(part, name, value) for name, value in values.items()} for part, values in tensors.items()
        }
        copied: torch.cuda.Event | None = None
        if any(value.is_cuda for values in tensors.values() for value in values.values()):
            copied = torch.cuda.Event()
            copied.record()

        def work() -> None:
            try:
                if copied is not None:
                    copied.synchronize()
                self._found = write(copies)
            except BaseException as error:  # told in the training thread
                self._error = error

        self._thread = threading.Thread(target=work, name="checkpoint")
        self._thread.start()

    def _copied(self, part: str, name: str, value: Tensor) -> Tensor:
        kept = self._memory.get((part, name))
        if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
            kept = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self._memory[part, name] = kept
        return kept.copy_(value.detach(), non_blocking=True)

    @property
    def busy(self) -> bool:
        """Whether a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    def result(self) -> Any:
        """What the last save gave, or the error that it ended with; waits for it."""
        self.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._found

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


@dataclass(frozen=True)
class Pending:
    """A save in the background."""

    step: int

    def complete(self, written: Any) -> None:
        """Do what is left to do when all ranks have written theirs."""


@dataclass(frozen=True)
class PendingShards(Pending):
    """One whose ranks each write their own rows; the first rank then writes the rest, and gives the checkpoint its name."""

    folder: RunFolder
    temporary: Path
    plain: Tensors  # parts that are alike on all ranks
    indices: dict[str, dict[str, list[Rows]]]
    state: dict[str, Any]
    failing: int

    def complete(self, written: list[Description]) -> None:
        """Collect sizes and checksums, and commit; a collective call."""
        mine = [torch.tensor([*bytes.fromhex(one["sha256"]), *one["bytes"].to_bytes(8, "little")]) for one in written]
        rows, world = distributed.gather_rows(torch.stack(mine)).tolist(), distributed.world_size()
        if distributed.rank() == 0:
            names = [shard_name(part, rank, world) for rank in range(world) for part in self.indices]
            files = {
                name: {"bytes": int.from_bytes(bytes(row[32:]), "little"), "sha256": bytes(row[:32]).hex()}
                for name, row in zip(names, rows, strict=True)
            }
            shards = checkpoint.Shards(self.temporary, files, self.indices)
            self.folder.commit(self.step, self.plain, self.state, self.failing, shards)


def begin_shards(
    saver: Saver, folder: RunFolder, step: int, tensors: Tensors, state: dict[str, Any], failing: int
) -> PendingShards:
    """Let every rank write its own rows in the background: none ever holds the whole. A collective call."""
    rank, world = distributed.rank(), distributed.world_size()
    with distributed.together():
        if rank == 0:
            checkpoint.begin(folder.checkpoints, step)
    owner = int(distributed.from_first_rank(torch.tensor([os.getpid()])))
    temporary = checkpoint.temporary_folder(folder.checkpoints, step, owner)
    sharded = [part for part, values in tensors.items() if any(map(distributed.is_sharded, values.values()))]
    indices = {part: {name: _rows(part, value, world) for name, value in tensors[part].items()} for part in sharded}
    mine = {
        part: {
            name: distributed.own_rows(value) if distributed.is_sharded(value) else value
            for name, value in tensors[part].items()
            if rank == 0 or distributed.is_sharded(value)
        }
        for part in sharded
    }
    plain = {
        part: {name: value.detach().cpu().clone() for name, value in values.items()}
        for part, values in tensors.items()
        if part not in sharded
    }

    def write(copies: Tensors) -> list[Description]:
        with checkpoint.cleaning_up(folder.checkpoints, temporary, step):
            return [write_tensors(temporary / shard_name(part, rank, world), values) for part, values in copies.items()]

    saver.begin(mine, write)
    return PendingShards(step, folder, temporary, plain, indices, state, failing)


def _rows(part: str, value: Tensor, world: int) -> list[Rows]:
    """Which file holds which rows of a tensor; what is not sharded lies in the first."""
    if not distributed.is_sharded(value):
        return [(shard_name(part, 0, world), 0, len(value) if value.ndim else 0)]
    places = [distributed.rows_of_rank(len(value), rank, world) for rank in range(world)]
    rows = [(shard_name(part, rank, world), *place) for rank, place in enumerate(places) if place[0] < place[1]]
    return rows or [(shard_name(part, 0, world), 0, 0)]
