"""A run that a comparison needs, and the small files of its folder: what it is doing right now, and why it failed."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from noisewise.study.outcome import FAILURE, LOG, Failure, checked, write_failure
from noisewise.training.checkpoint import steps_in
from noisewise.training.config import Config
from noisewise.training.plain_files import open_new, read_plain

STATUS = "status.json"
TAIL = 20  # lines of the log that go into a failure


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


@dataclass(frozen=True)
class Status:
    """A moment of a run."""

    state: str  # "training", "evaluating" or "waiting" (for its turn)
    step: int
    seconds: float
    note: str = ""  # how far an evaluation is

    def write(self, folder: Path) -> None:
        """Replace the file; without waiting for the disk, since nothing depends on it."""
        temporary = folder / f".{STATUS}-{os.getpid()}"
        with open_new(temporary) as file:
            file.write(json.dumps(asdict(self)).encode())
        temporary.replace(folder / STATUS)

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
