"""What docs/generate.py writes into the pages, a module for each source of numbers, and what these modules share."""

import csv
import json
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent
BENCHMARKS = DOCS.parent / "benchmarks"
RESULTS = BENCHMARKS / "results"
sys.path.append(str(BENCHMARKS))
from rows import spec_now as spec_now  # noqa: E402
from rows import text_of as text_of  # noqa: E402


@cache
def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a file of results; numbers are numbers in those of a .csv too."""
    text = (RESULTS / name).read_text()
    if name.endswith(".csv"):
        return [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(text.splitlines())]
    return [json.loads(line) for line in text.splitlines() if line]


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def table(heads: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    return "\n".join([_line(heads), "|---" * len(heads) + "|", *map(_line, lines)])


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
