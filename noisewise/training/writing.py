"""Errors of files that cannot be written, in the user's words: which option names the place, and what is wrong with it."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
    there = next(place for place in (path, *path.absolute().parents) if os.path.exists(place))  # Path.exists may raise
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return f"{there} is a file, not a folder"
    if error.errno == errno.EISDIR:
        return f"{path} is a folder, not a file"
    folder = there if there.is_dir() else there.absolute().parent
    return f"{folder} does not take it ({error.strerror})"
