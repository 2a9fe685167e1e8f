"""One set of colours for every picture: those of Okabe and Ito, which the colour-blind can tell apart."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

GREY = "#5b6470"  # the baseline
PALE = "#bbbbbb"  # what counts for nothing
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # best contrast first
DASHES = ((), (6.0, 3.0), (2.0, 2.5), (8.0, 3.0, 2.0, 3.0))  # strokes and gaps; each serves for all colours once
MOMENTS = ("#f0b450", "#dc7b4f", "#ac5c93", "#4a6fb8")  # from early to late, seen on white and on black
AROUND_UNIFORM = ("#0b3c5d", "#5497c4", "#f1efe9", "#e39350", "#7a2a08")  # far below, as often as uniform, far above


@dataclass(frozen=True)
class Method:
    """A sampler, or a moment of training, with its look; `index` ties together all that is drawn of it (-1: always shown)."""

    index: int
    name: str
    colour: str
    dash: tuple[float, ...] = ()


def methods_named(names: Sequence[str]) -> dict[str, Method]:
    """A look for each name; the first is the baseline and grey."""
    made = {}
    for i, name in enumerate(names):
        turn, place = divmod(i - 1, len(COLOURS))
        made[name] = Method(i, name, COLOURS[place], DASHES[turn % len(DASHES)]) if i else Method(0, name, GREY)
    return made


def moments_named(names: Sequence[str]) -> list[Method]:
    """Moments of one run, early ones bright and late ones dark."""
    return [Method(-1, name, colour) for name, colour in zip(names, moment_colours(len(names)), strict=True)]


def moment_colours(count: int) -> list[str]:
    """So many colours from early to late; one alone is the late one."""
    anchors = np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in MOMENTS])
    places = np.linspace(0, len(MOMENTS) - 1, count) if count > 1 else np.full(count, len(MOMENTS) - 1.0)
    blended = [np.interp(places, range(len(MOMENTS)), part) for part in anchors.T]
    return ["#" + "".join(f"{round(part):02x}" for part in colour) for colour in zip(*blended, strict=True)]
