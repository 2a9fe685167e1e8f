"""Look inside training: each analysis writes pictures and their data. Figures in brackets are those of arXiv 2411.09998.

noisewise analyze increments --schedules linear,cosine
noisewise analyze gradients runs/first
noisewise analyze gradients --preset digits --budget 1000it
"""

import argparse
import importlib
import itertools
from pathlib import Path

from noisewise.analysis import ANALYSES, FORMATS
from noisewise.commands.parser import Parser


def add_options(parser: Parser) -> None:
    parser.description = __doc__
    parser.set_defaults(settings=[])
    common = Parser(add_help=False)
    common.add_argument("--out", type=Path, default=Path("out") / "analysis", help="folder for pictures and data")
    common.add_argument("--formats", default="png,svg", help=f"formats of the pictures: {', '.join(FORMATS)}")
    parser.add_subcommands("analyses", "analysis", ANALYSES, "noisewise.analysis", common)


def take_run(args: argparse.Namespace) -> None:
    """Words before the settings name the run, as for the other commands; `--run` does the same."""
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), args.settings))
    if not words or not hasattr(args, "run"):
        return
    if args.run:
        raise ValueError(f"name the run once: {words[0]}, or --run")
    several = isinstance(args.run, list)
    if len(words) > 1 and not several:
        raise ValueError(f"one run at a time, got {' and '.join(words)}")
    args.run, args.settings = [Path(word) for word in words] if several else Path(words[0]), args.settings[len(words) :]


def run(args: argparse.Namespace) -> int:
    from noisewise.analysis.output import write_analysis

    if args.analysis is None:
        args.parser.error(f"choose an analysis: {', '.join(ANALYSES)}")
    take_run(args)
    formats = args.formats.split(",")
    if unknown := [kind for kind in formats if kind not in FORMATS]:
        raise ValueError(f"--formats {unknown[0]!r}: choose from {', '.join(FORMATS)}")
    analysis = importlib.import_module(f"noisewise.analysis.{args.analysis}").analyse(args, args.settings)
    paths = write_analysis(analysis, args.out, formats)
    print("\n".join([*analysis.says, *map(str, paths)]))
    return 0
