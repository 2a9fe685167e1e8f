"""Files of a run folder, which may be somebody else's: plain ones of a sensible size, and never written through a link.

What is written is durable when `sync` has been called for the file and for each folder that names it.
"""

import errno
import os
import stat
from pathlib import Path
from typing import IO

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


def open_own(path: Path, flags: int) -> int:
    """A descriptor of a file of ours in a run folder; a link, a pipe or a device in its place is refused, not opened."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, or a pipe that nobody reads
            raise OSError(_not_ours(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(_not_ours(path))
    return descriptor


def open_new(path: Path) -> IO[bytes]:
    """A temporary file of ours, open for writing; what a killed process has left in its place is removed, a link too."""
    path.unlink(missing_ok=True)
    return open(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")


def inside(folder: Path, path: Path) -> Path:
    """The path itself, if nothing between the folder and it, itself included, is a link that leads elsewhere."""
    for part in (path, *path.parents) if ".." not in path.relative_to(folder).parts else ():
        if part == folder:
            return path
        if part.is_symlink():
            raise OSError(_not_ours(part))
    raise ValueError(f"{path} is not in {folder}")


def _not_ours(path: Path) -> str:
    return f"{path} is a link, or no plain file: what is written there would end up elsewhere. Remove it, or use another folder"
