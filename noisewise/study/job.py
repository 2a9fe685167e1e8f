"""A run that a comparison needs, who sees to it, and the small files of its folder: what it is doing, and why it failed."""

import argparse
import importlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from noisewise.plain_files import read_plain, replace_file
from noisewise.study.outcome import FAILURE, LOG, Failure, checked, read_outcome, write_failure
from noisewise.training.checkpoint import steps_in
from noisewise.training.config import Config
from noisewise.training.signals import StopRequest

ROWS = 20  # of metrics that a short run has at least
STATUS = "status.json"
TAIL = 20  # lines of the log that go into a failure


def with_budget(config: Config, budget: str) -> Config:
    """The configuration with "30s" or "1000it" as its end."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?=s)|\d+(?=it))(s|it)", budget)
    if not match or not float(match[1]) > 0:
        raise ValueError(f"--budget {budget!r}: give seconds as in 30s, or steps as in 1000it")
    if match[2] == "it":
        log = replace(config.log, every=min(config.log.every, max(1, int(match[1]) // ROWS)))
        return replace(config, steps=int(match[1]), epochs=None, seconds=None, log=log)
    return replace(config, steps=10**9, epochs=None, seconds=float(match[1]))


@dataclass(frozen=True)
class Job:
    """A run that a comparison needs."""

    config: Config  # `out` is set
    evaluate_at: tuple[float, ...]
    images: int
    headline: int | None = None  # images of one more distance at the end

    @property
    def folder(self) -> Path:
        return Path(self.config.out or "")

    @property
    def status(self) -> str:
        """What the run's folder says of it, as in `Outcome`."""
        return read_outcome(self.folder).status if (self.folder / "config.yaml").is_file() else "unfinished"


class Launcher(ABC):
    """Sees to it that jobs are done: afterwards each run is finished, has a failure in its folder, or was told to stop.

    What a run has done is read from its folder, so that it does not matter who did it, or how often it was interrupted.
    """

    options: ClassVar[tuple[str, ...]]  # names of its command-line options

    @staticmethod
    @abstractmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """The options that it takes; all are None unless given."""

    @classmethod
    @abstractmethod
    def from_options(cls, options: argparse.Namespace, folder: Path, samplers: int) -> "Launcher":
        """What the command line asks for, for a comparison in this folder."""

    @abstractmethod
    def launch(self, jobs: Sequence[Job], stop: StopRequest) -> None:
        """Do the jobs."""

    @staticmethod
    def package(name: str, extra: str) -> Any:
        """The package that does the work, or an error that names the extra."""
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ValueError(f"--launcher {extra} needs {name}: pip install 'noisewise[{extra}]'") from error

    def farewell(self) -> str:
        """What to say when it was asked to stop."""
        return "the runs are saved; the same command goes on with them"


@dataclass(frozen=True)
class Status:
    """A moment of a run."""

    state: str  # "training", "evaluating" or "waiting" (for its turn)
    step: int
    seconds: float
    note: str = ""  # how far an evaluation is

    def write(self, folder: Path) -> None:
        """Replace the file; without waiting for the disk, since nothing depends on it."""
        replace_file(folder / STATUS, json.dumps(asdict(self)), durable=False)

    @staticmethod
    def read(folder: Path) -> "Status | None":
        """The last moment that was written down; None if there is none that can be read."""
        try:
            return checked(Status, json.loads(read_plain(folder / STATUS)))
        except (OSError, ValueError, TypeError, RecursionError):
            return None


def forget_status(folder: Path) -> None:
    """Remove what a process that is gone said last."""
    (folder / STATUS).unlink(missing_ok=True)


def explained(error: Exception) -> str:
    """The reason of a failure in a sentence."""
    message = " ".join(str(error).split()) or type(error).__name__
    starved = isinstance(error, MemoryError | torch.cuda.OutOfMemoryError) or "can't allocate memory" in message
    return f"out of memory: {message}" if starved else message


def record_failure(job: Job, message: str, step: int | None = None, log: Path | None = None) -> None:
    """Leave the reason, with the end of the log (that of the run, unless another is given), in the run's folder."""
    log = log or job.folder / LOG
    lines = log.read_text(errors="replace").splitlines()[-TAIL:] if log.is_file() else []
    write_failure(job.folder, job.config, Failure(message, step, "\n".join(lines)))


def is_false_start(folder: Path) -> bool:
    """Whether a run failed before its first checkpoint: nothing would be lost if it began again with other settings."""
    return (folder / FAILURE).is_file() and not steps_in(folder / "checkpoints")


def forget_failure(folder: Path) -> None:
    """A run is to be tried again, and what it said last is out of date."""
    if is_false_start(folder):
        (folder / "config.yaml").unlink(missing_ok=True)
    (folder / FAILURE).unlink(missing_ok=True)
    forget_status(folder)
