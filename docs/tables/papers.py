"""What `noisewise reproduce` found."""

from typing import Any

from noisewise.papers import STUDIES
from noisewise.papers.arxiv_2411_09998 import SHORT

from . import rows, table


def found(scale: str) -> str:
    """A line for each table and figure: what the paper says, and what we found at a scale."""
    ours: dict[str, dict[str, Any]] = {row["item"]: row for row in rows(f"reproduce_{scale}.jsonl")}
    lines = []
    for name, study in STUDIES.items():
        here = ours[name]["found"] if name in ours else "not run"
        lines.append([study.source.rpartition(", ")[2], f"`noisewise reproduce {name}`", study.says, here])
    return table(["what", "command", "the paper", "found"], [[cell.replace("|", "\\|") for cell in line] for line in lines])


def notes() -> str:
    """What differs, for each of them."""
    lines = [[f"`{name}`", " ".join(note for note in study.notes if note != SHORT)] for name, study in STUDIES.items()]
    return table(["item", "what differs, or is left open"], [[cell.replace("|", "\\|") for cell in line] for line in lines])
