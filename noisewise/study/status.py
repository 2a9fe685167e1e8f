"""What a run is doing right now, in a small file of its folder that everybody may read while it works."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from noisewise.study.reading import checked
from noisewise.training.plain_files import open_new, read_plain

STATUS = "status.json"


@dataclass(frozen=True)
class Status:
    """A moment of a run."""

    state: str  # "training", "evaluating" or "waiting" (for its turn)
    step: int
    seconds: float

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
