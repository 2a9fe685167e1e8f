"""Processes on this machine that take turns.

The runs of one group (all samplers of one schedule and seed) are alive together, and only one of them works at a time: each
advances by a slice of the budget, then the next, so that whatever else the machine does hits all of them alike.
"""

import argparse
import os
import re
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from noisewise.study.job import Job
from noisewise.study.launch.launcher import Launcher
from noisewise.study.launch.process import Share, Worker
from noisewise.training.signals import StopRequest

SLICES = 20  # turns that each run gets


@dataclass(frozen=True)
class Local(Launcher):
    """The jobs in processes of this machine.

    Args:
        turns: runs that are alive together and take turns; 1 gives each the whole budget in one go.
        jobs: groups of such runs that work at the same time, each with its part of the cores and a GPU of its own if there are
            several.
        memory: bytes that each run may use.
    """

    turns: int = 1
    jobs: int = 1
    memory: int | None = None

    options = ("turns", "jobs", "memory")

    def __post_init__(self) -> None:
        for name in ("turns", "jobs"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be >= 1, got {getattr(self, name)}")

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--turns", type=int, help="local: runs that take turns on the machine; default: one of each sampler"
        )
        parser.add_argument("--jobs", type=int, help="local: so many at the same time; default: 1, as their clocks need quiet")
        parser.add_argument("--memory", help="local: the most that a run may use, of the GPU if it trains there, as in 8GiB")

    @classmethod
    def from_options(cls, options: argparse.Namespace, folder: Path, samplers: int) -> "Local":
        turns = samplers if options.turns is None else options.turns
        memory = None if options.memory is None else size_in_bytes(options.memory)
        return cls(turns, 1 if options.jobs is None else options.jobs, memory)

    def launch(self, jobs: Sequence[Job], stop: StopRequest) -> None:
        waiting = deque(groups(jobs, self.turns))
        slots = min(self.jobs, len(waiting))
        with ThreadPoolExecutor(max(slots, 1)) as pool:
            try:
                for slot in [pool.submit(self._serve_slot, number, waiting, stop) for number in range(slots)]:
                    slot.result()
            except BaseException:
                stop.name = stop.name or "interrupted"  # or leaving the block would wait for all the others
                raise

    def _serve_slot(self, number: int, waiting: deque[list[Job]], stop: StopRequest) -> None:
        share = Share(max(1, torch.get_num_threads() // self.jobs), self.memory, gpu_of(number))
        while not stop.requested:
            try:
                group = waiting.popleft()
            except IndexError:
                return
            take_turns(group, share, stop, 1 if self.turns == 1 else SLICES)


def take_turns(jobs: Sequence[Job], share: Share, stop: StopRequest, slices: int = SLICES) -> None:
    """All runs of a group begin; each advances by a slice of the budget, then the next one, until all have ended."""
    workers: list[Worker] = []
    try:
        for job in jobs:  # one after the other, and none trains before all are ready: nobody disturbs a clock
            workers.append(Worker(job, share))
            workers[-1].listen(stop)
        for turn in range(1, slices + 1):
            for worker in workers:
                if not worker.ended and not stop.requested:
                    worker.advance(turn / slices, stop)
    finally:
        for worker in workers:
            if not worker.ended:
                worker.pipe.close()  # all of them save at the same time
        for worker in workers:
            worker.end(stop)


def groups(jobs: Sequence[Job], size: int) -> list[list[Job]]:
    """Jobs of the same schedule and seed belong together, at most so many."""
    together: dict[tuple[str, int], list[Job]] = {}
    for job in jobs:
        together.setdefault((job.config.process, job.config.seed), []).append(job)
    return [group[i : i + size] for group in together.values() for i in range(0, len(group), size)]


def gpu_of(slot: int) -> str | None:
    """The GPU for a slot of the machine; None if there is no choice."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    return names[slot % len(names)] if len(names) > 1 else None


def size_in_bytes(text: str) -> int:
    """ "8GiB" or "500MB" as a number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT])(i?)B", text)
    if not match or not float(match[1]) > 0:
        raise ValueError(f"--memory {text!r}: give a size as in 8GiB or 500MB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** ("KMGT".index(match[2]) + 1))
