"""Files of a run folder, which may be somebody else's: plain ones of a sensible size, and never written through a link.

What is written is durable when `sync` has been called for the file and for each folder that names it.
"""

import errno
import os
import stat
from pathlib import Path

LARGEST_TEXT = 64 * 2**20  # bytes; settings and manifests have a few thousand
NOT_THERE = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # what file systems say that cannot flush a folder


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


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk; one that is not there has nothing to flush."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (stat.S_ISDIR(os.fstat(descriptor).st_mode) and error.errno in NOT_THERE):
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """A folder and those above it, if they are not there; they stay after a power cut."""
    new = [path for path in (folder, *folder.absolute().parents) if not os.path.lexists(path)]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(new):
        sync(path.absolute().parent)
