"""noisewise analyze: look inside training.

noisewise analyze increments --schedules linear,cosine
noisewise analyze gradients --preset digits --budget 1000it
"""

import argparse
import importlib
from pathlib import Path
from typing import Any

from noisewise.analysis import ANALYSES
from noisewise.analysis.output import FORMATS, write_analysis


def main(arguments: list[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="noisewise analyze",
        description="Look inside training: each analysis writes pictures and their data.",
        allow_abbrev=False,
    )
    kinds = parser.add_subparsers(dest="analysis", required=True)
    # the modules are imported for their options only when one of them is asked for
    asked = [name for name in ANALYSES if name in arguments[:1]]
    for name, what in ANALYSES.items():
        kind = kinds.add_parser(name, help=what, description=what, allow_abbrev=False)
        kind.add_argument("--out", type=Path, default=Path("out") / "analysis", help="a folder for pictures and data")
        kind.add_argument("--formats", default="png,svg", help=f"of the pictures: {', '.join(FORMATS)}")
        if name in asked:
            _module(name).add_options(kind)
    options, rest = parser.parse_known_args(arguments)
    formats = options.formats.split(",")
    if unknown := [kind for kind in formats if kind not in FORMATS]:
        raise ValueError(f"--formats {unknown[0]!r}: choose from {', '.join(FORMATS)}")
    analysis = _module(options.analysis).analyse(options, rest)
    paths = write_analysis(analysis, options.out, formats)
    print("\n".join([*analysis.says, *map(str, paths)]))
    return 0


def _module(name: str) -> Any:
    return importlib.import_module(f"noisewise.analysis.{name}")
