"""Rows of result files: appended one by one, without places on somebody's machine, and without numbers that JSON lacks."""

import json
import math
import re
from pathlib import Path
from typing import Any

PLACE = re.compile(r"""(?<![\w.:/~])/(?:[^\s/'"<>,:;()]+/)*([^\s/'"<>,:;()]+)/?""")  # an absolute path within a text, not a URL


def append(path: Path, row: dict[str, Any]) -> None:
    """Write a row at the end of a file."""
    with path.open("a") as file:
        file.write(json.dumps(publishable(row), allow_nan=False) + "\n")


def publishable(value: Any) -> Any:
    """The value with the last part alone of absolute paths, also within a text, and None for what is not finite."""
    if isinstance(value, dict):
        return {key: publishable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [publishable(inner) for inner in value]
    if isinstance(value, str):
        return PLACE.sub(r"\1", value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
