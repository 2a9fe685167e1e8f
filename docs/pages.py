"""What the scripts that draw for these pages share."""

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

DOCS = Path(__file__).parent
BENCHMARKS = DOCS.parent / "benchmarks"
RESULTS = BENCHMARKS / "results"
sys.path.insert(0, str(BENCHMARKS))
from rows import spec_now as spec_now  # noqa: E402


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a file of results."""
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines() if line]


def fill_in(page: Path, tables: Mapping[str, Callable[[], list[str]]]) -> None:
    """Make each table between `<!-- table: NAME -->` and `<!-- end -->` of a page anew."""
    text = page.read_text()
    for name, make in tables.items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda m, make=make: m[1] + "\n" + "\n".join(make()) + "\n\n" + m[2], text, flags=re.S)
        if count != 1:
            raise ValueError(f"{page.name} must have one table {name}, not {count}")
    page.write_text(text)


def smaller(source: Path, name: str, width: int, colours: int) -> None:
    """Put the picture among those of the pages, with at most so many pixels across, and colours unless 0."""
    with Image.open(source) as image:
        picture = image.convert("RGB")
    if picture.width > width:
        picture = picture.resize((width, round(picture.height * width / picture.width)), Image.Resampling.LANCZOS)
    path = DOCS / "img" / f"{name}.png"
    picture = picture.quantize(colours, kmeans=4, dither=Image.Dither.NONE) if colours else picture
    picture.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")
