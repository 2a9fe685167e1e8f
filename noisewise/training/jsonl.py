"""Files of one JSON object a line, which may be damaged: cut off by a kill, edited, or rotten."""

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no plain file")
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
