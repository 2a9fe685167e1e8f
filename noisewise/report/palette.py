"""One look for each method, everywhere: colours that the colour-blind can tell apart, with dashes where they repeat."""

from collections.abc import Sequence
from dataclasses import dataclass

BASELINE = "#5b6470"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # of Okabe and Ito, best contrast first
DASHES = ("", "6 3", "2 2.5", "8 3 2 3")  # SVG's lengths of strokes and gaps; each serves for all colours once
RAMP = ("#a9cfe8", "#6aa9d2", "#2f7fb5", "#0b4a78")  # moments of one run, the last one darkest


@dataclass(frozen=True)
class Method:
    """A sampler, or a moment of training, with its look; `index` ties together all that is drawn of it (-1: always shown)."""

    index: int
    name: str
    colour: str
    dash: str = ""


def methods_named(names: Sequence[str]) -> dict[str, Method]:
    """A look for each name; the first is the baseline and grey."""
    made = {}
    for i, name in enumerate(names):
        turn, place = divmod(i - 1, len(COLOURS))
        made[name] = Method(i, name, COLOURS[place], DASHES[turn % len(DASHES)]) if i else Method(0, name, BASELINE)
    return made


def moments_named(names: Sequence[str]) -> list[Method]:
    """Shades of one colour, for up to four moments of one run."""
    return [Method(-1, name, colour) for name, colour in zip(names, RAMP[-len(names) :], strict=True)]
