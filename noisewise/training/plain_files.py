"""Files of a run folder, which may be somebody else's: plain ones of a sensible size, and never written through a link."""

import os
import stat
from pathlib import Path

LARGEST_TEXT = 64 * 2**20  # bytes; settings and manifests have a few thousand


def read_plain(path: Path, most: int = LARGEST_TEXT) -> bytes:
    """The content of a file; an OSError for what is none, such as a pipe that would never end, and for one beyond `most`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is no plain file")
        if found.st_size > most:
            raise OSError(f"{path} has {found.st_size:,} bytes, more than the {most:,} that such a file may have")
        return file.read(most)
