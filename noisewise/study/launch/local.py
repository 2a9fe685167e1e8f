"""Processes on this machine that take turns.

The runs of one group (all samplers of one schedule and seed) are alive together, and only one of them works at a time: each
advances by a slice of the budget, then the next, so that whatever else the machine does hits all of them alike. The launcher
sends "advance to this share of the budget" through a pipe and waits for the answer. A closed pipe tells a worker to save and
end, whether the launcher closed it or was killed.
"""

import argparse
import multiprocessing
import os
import re
import resource
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from noisewise.study.job import Job, Launcher, Status, forget_status, record_failure
from noisewise.training.signals import StopRequest

# A run in a process of its own: both ends of the pipe between it and its launcher -------------------------------------


LISTEN = 0.2  # seconds between two looks at the pipe while training
READY = "ready"  # a worker's answer when it waits for its turn; any other answer is its last
PRELOADED = ("noisewise.study.launch.preload",)
IF_USED = ("diffusers.models.unets.unet_2d",)
ONE_AT_A_TIME = threading.Lock()  # multiprocessing loses an exit status when two threads ask for it


@dataclass(frozen=True)
class Share:
    """The part of the machine that a worker may use."""

    threads: int
    memory: int | None = None  # bytes
    gpu: str | None = None  # as in CUDA_VISIBLE_DEVICES

    def take(self) -> None:
        """Limit this process; to be called before it uses a GPU."""
        os.environ["OMP_NUM_THREADS"] = str(self.threads)
        torch.set_num_threads(self.threads)
        if self.gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.gpu

    def limit_memory(self, device: str) -> None:
        """Let what wants more memory, of the GPU if that is what trains, fail in this process alone."""
        if self.memory is None:
            return
        if device != "cpu" and torch.cuda.is_available():
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.memory / total))
        elif self.memory < 1.2 * (used := data_size()):
            raise ValueError(f"--memory is {self.memory / 2**20:.0f} MiB, but a process needs {used / 2**20:.0f} to begin with")
        else:
            resource.setrlimit(resource.RLIMIT_DATA, (self.memory, self.memory))


def data_size() -> int:
    """Bytes that count against RLIMIT_DATA in this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmData:"))) * 1024


class Line(StopRequest):
    """A worker's end of the pipe: when it may advance, and whether it is to stop."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self.pipe = pipe
        self._next = 0.0

    def __enter__(self) -> "Line":
        super().__enter__()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher too, which closes the pipe
        return self

    @property
    def requested(self) -> bool:
        if self.name is None and time.monotonic() >= self._next:
            self._next = time.monotonic() + LISTEN
            if self.pipe.poll():  # nothing but the end comes while a worker has its turn
                self.name = "told to stop"
        return self.name is not None

    def turns(self) -> Iterator[float]:
        """The shares to advance to, one after the other."""
        try:
            while True:
                self.pipe.send(READY)
                yield self.pipe.recv()
        except (EOFError, OSError):
            self.name = self.name or "told to stop"


def serve(job: Job, pipe: Connection, share: Share) -> None:
    """The whole life of a worker process."""
    from noisewise.study.worker import logged, work  # only workers need what trains and measures

    with logged(job.folder), Line(pipe) as line:
        share.take()
        try:
            share.limit_memory(job.config.device)
            end = work(job, line.turns(), line)
        except ValueError as error:
            record_failure(job, str(error))
            end = "failed"
        with suppress(OSError):  # nobody may be left to hear it
            pipe.send(end)


class Worker:
    """The launcher's end of a worker."""

    def __init__(self, job: Job, share: Share) -> None:
        context = multiprocessing.get_context("forkserver")  # nobody forks a process that uses threads or a GPU
        # some package asks on import whether there is a GPU: without this, no process forked after that could use one
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        context.set_forkserver_preload([*PRELOADED, *(name for name in IF_USED if name in sys.modules)])
        self.job, self.ended = job, False
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(job, other, share))
        # Ctrl-C is the launcher's, which closes the pipe: the server of forks and its workers, which inherit the mask, begin
        # with seconds of imports. The tracker is started before, since it unblocks what it has blocked.
        resource_tracker.ensure_running()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with ONE_AT_A_TIME:
                self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        other.close()

    def advance(self, share: float, stop: StopRequest) -> None:
        """Give it a turn, and wait until it is over."""
        with suppress(OSError):
            self.pipe.send(share)
        self.listen(stop)

    def listen(self, stop: StopRequest) -> None:
        """Wait for an answer; if asked to stop, tell it."""
        while not (ready := wait([self.pipe, self.process.sentinel], timeout=0.1)):
            if stop.requested:
                return self.end(stop)
        answer = None
        if self.pipe in ready:
            with suppress(EOFError, OSError):
                answer = self.pipe.recv()
        if answer != READY:
            self._bury(answer, stop)
        return None

    def end(self, stop: StopRequest) -> None:
        """Tell it to save, and wait until it is gone."""
        if not self.ended:
            self.pipe.close()
            self._bury("stopped", stop)

    def _bury(self, answer: str | None, stop: StopRequest) -> None:
        """Wait for the end of the process, and leave the reason in the run's folder if it could not."""
        while not wait([self.process.sentinel], timeout=0.2):
            if stop.urgent:  # the checkpoint before stays
                self.process.kill()
        with ONE_AT_A_TIME:
            self.process.join()
        self.pipe.close()
        self.ended = True
        status = Status.read(self.job.folder)
        step = None if status is None else status.step
        forget_status(self.job.folder)
        if stop.urgent:
            return
        if answer is None or self.process.exitcode:
            record_failure(self.job, cause_of_death(self.process.exitcode or 0), step)
        elif answer == "stopped" and not _comes(stop):
            record_failure(self.job, "it was told to stop by a signal, and is saved", step)


def _comes(stop: StopRequest) -> bool:
    """Whether the launcher is asked to stop too: a signal to a whole group may reach a worker a moment before."""
    end = time.monotonic() + 1.0
    while not stop.requested and time.monotonic() < end:
        time.sleep(0.02)
    return stop.requested


def cause_of_death(code: int) -> str:
    """What an exit status says."""
    if code >= 0:
        return f"its process ended with status {code} before the run did"
    name = signal.Signals(-code).name
    return f"its process was killed by {name}" + (
        ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
    )


# The launcher ---------------------------------------------------------------------------------------------------------


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
        parser.add_argument("--turns", type=int, help="local: how many runs take turns; default: one of each sampler")
        parser.add_argument("--jobs", type=int, help="local: runs at the same time; default: 1, for comparable times")
        parser.add_argument("--memory", help="local: memory limit of a run, such as 8GiB; GPU memory if it trains there")

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
            if stop.requested:
                break
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
