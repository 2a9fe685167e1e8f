"""Analyses as the command line asks for them."""

from noisewise.analysis.output import Analysis
from noisewise.commands.parser import Parser

OWN = ["--model.name", "tests.training.tiny:Own", "--model.options", "{}", "--device", "cpu", "--batch", "16"]
SHORT = ["--preset", "digits", "--budget", "4it", "--points", "2"]  # later words win


def asked(analysis, *words) -> Analysis:
    """What an analysis finds with these words; those that are no options of its own are settings of the trainer."""
    parser = Parser()
    analysis.add_options(parser)
    return analysis.analyse(*parser.parse_known_args(list(map(str, words))))
