"""Files of a run folder, which may be somebody else's: plain ones of a sensible size, and never written through a link;
errors that name the option which names the place; and rows of JSON that may be damaged.

What is written is durable when `sync` has been called for the file and for each folder that names it.
"""

import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

LARGEST_TEXT = 64 * 2**20  # bytes; settings and manifests have a few thousand
LOCK = ".lock"
NOT_THERE = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # what file systems say that cannot flush a folder
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # and those that cannot lock a file


class FolderInUse(OSError):
    """Another process works in the folder."""


def read_plain(path: Path, most: int = LARGEST_TEXT) -> bytes:
    """The content of a file; an OSError for what is none, such as a pipe that would never end, and for one beyond `most`."""
    with _open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(f"{path} has {size:,} bytes, more than the {most:,} that such a file may have")
        return file.read(most)


def _open_plain(path: Path) -> IO[bytes]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no plain file")
    return os.fdopen(descriptor, "rb")


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


def locked(folder: Path) -> IO[str]:
    """The lock of a folder, which no other process has until it is closed; FolderInUse if one has it."""
    lock = os.fdopen(open_own(folder / LOCK, os.O_RDWR | os.O_CREAT), "r+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        if isinstance(error, BlockingIOError):
            raise FolderInUse(f"{folder} is in use by another process: wait for it, or give another --out") from None
        if error.errno in NO_LOCKS:
            raise OSError(
                f"{folder} lies on a file system without locks ({error.strerror}), where another process could write into it "
                "unseen: give an --out on another"
            ) from None
        raise
    return lock


def open_new(path: Path) -> IO[bytes]:
    """A temporary file of ours, open for writing; what a killed process has left in its place is removed, a link too."""
    path.unlink(missing_ok=True)
    return open(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")


@contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[IO[bytes]]:
    """A file to write: after the block it replaces the one at `path`, or the old one is left, whatever happens.

    Without `durable` a power cut soon after may empty it, which many small files are quicker for.
    """
    # a name of its own: processes of other machines and containers, which write here too, can have this one's number
    temporary = path.with_name(f".{path.name}-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        with open_new(temporary) as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
        if durable:
            sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_file(path: Path, content: str | bytes | memoryview, durable: bool = True) -> None:
    """Write a file so that it is either the old one or the new one; see `replacing`."""
    with replacing(path, durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def sweep(folder: Path) -> None:
    """Remove the temporary files of a folder that a killed process has left, also one that had this one's number."""
    for path in folder.glob(".*-*"):
        left = re.fullmatch(r"\..+\.(?:yaml|jsonl|json|html|csv|npy|png)-(\d{1,9})(?:-[0-9a-f]{8})?", path.name)
        gone = left and (int(left[1]) == os.getpid() or not os.path.exists(f"/proc/{left[1]}"))
        if gone and not path.is_dir():
            path.unlink(missing_ok=True)


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


@contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """Within the block only `path` and what lies in it is written; an error of the system says so, and names no temporary file.

    Args:
        what: how the user knows it, such as "--out runs/first".
        path: the file or folder.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:  # it has words of its own
            raise
        raise OSError(f"{what} cannot be written: {_reason(path, error)}") from error


def _reason(path: Path, error: OSError) -> str:
    there = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))  # Path.exists may raise
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return f"{there} is a {'file' if os.path.exists(there) else 'link that leads nowhere'}, not a folder"
    if error.errno == errno.EISDIR:
        return f"{path} is a folder, not a file"
    folder = there if there.is_dir() else there.absolute().parent
    return f"{folder} does not take it ({error.strerror})"


# Files of one JSON object a line, which may be cut off by a kill, edited, or rotten -------------------------------------


LONGEST = 64 * 2**20  # bytes of a line


@dataclass(frozen=True)
class Line:
    """A line of such a file."""

    number: int  # from 1
    text: bytes
    row: dict[str, Any] | None  # None if it is damaged

    @property
    def torn(self) -> bool:
        """Whether it is the last one, cut off by a kill or a full disk."""
        return self.row is None and not self.text.endswith(b"\n")


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a file, none if it is not there; an OSError for what is no such file at all."""
    try:
        file = _open_plain(path)
    except FileNotFoundError:
        return
    with file:
        number = 0
        while text := file.readline(LONGEST):
            number += 1
            if len(text) == LONGEST:
                raise OSError(f"{path}: line {number} has more than {LONGEST:,} bytes, so it is no file of rows")
            if text.strip():
                yield Line(number, text, _row(text))


def _row(text: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(text.decode())
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, without lines that are none."""
    return [line.row for line in read_lines(path) if line.row is not None]
