"""Pictures of samples, small enough for many of them to stand in one page."""

import base64
import io
import re
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from noisewise.looking.palette import Method
from noisewise.report.charts import thinned
from noisewise.report.subject import Subject
from noisewise.study.outcome import Outcome
from noisewise.study.summary import judged

BUDGET = 1_700_000  # characters of all pictures together
ECONOMIES = ((None, 5, 80), (1, 5, 80), (1, 4, 70), (1, 4, 50), (1, 3, 40))  # seeds, rows and columns, quality: tried in turn
WIDEST = 400  # pixels
MOMENTS = 8  # of one run


@dataclass(frozen=True)
class Picture:
    """A run's samples at a moment of its training."""

    method: Method
    process: str
    seed: int
    share: float  # of the budget
    step: int
    path: Path
    value: float | None = None  # what the run was judged by then


@dataclass(frozen=True)
class Shown:
    """A picture as it stands in the page."""

    picture: Picture
    address: str
    size: tuple[int, int]


def pictures_of(subject: Subject) -> list[Picture]:
    """All pictures that there are: of evaluations, or, for a run without any, of its training."""
    found = []
    for run in subject.comparison.outcomes:
        method = next(method for method in subject.methods if method.name == run.sampler)
        evaluated = [one for one in run.evaluations if one.picture is not None and inside(run.folder, one.picture)]
        for one in evaluated:
            path, value = run.folder / (one.picture or ""), judged(one, subject.metric)
            known = value if isfinite(value) else None
            found.append(Picture(method, run.process, run.seed, one.share, one.step, path, known))
        if subject.single and not evaluated:
            found += _drawn_in_training(run, method)
    return [picture for picture in found if picture.path.is_file()]


def inside(folder: Path, name: str) -> bool:
    """Whether a path that a file names stays in its folder."""
    return (folder / name).resolve().is_relative_to(folder.resolve())


def _drawn_in_training(run: Outcome, method: Method) -> list[Picture]:
    """samples/step-00001000.png and so on."""
    paths = sorted((run.folder / "samples").glob("step-*.png"))
    steps = [(int(match[1]), path) for path in paths if (match := re.fullmatch(r"step-(\d+)", path.stem))]
    last = max((step for step, _ in steps), default=1)
    return [Picture(method, run.process, run.seed, step / last, step, path) for step, path in thinned(steps, MOMENTS)]


def encoded(pictures: list[Picture], budget: int = BUDGET) -> list[Shown]:
    """The pictures, as good as fits: first without other seeds than the first, then fewer samples and rougher ones."""
    opened = [(picture, pixels) for picture in pictures if (pixels := read_pixels(picture.path)) is not None]
    opened.sort(key=lambda pair: -pair[0].share)  # if nothing helps, the last moments are those that matter
    shown: list[Shown] = []
    for seeds, side, quality in ECONOMIES:
        kept = sorted({picture.seed for picture, _ in opened})[:seeds]
        wanted = [(picture, pixels) for picture, pixels in opened if picture.seed in kept]
        shown, left = [], budget
        for picture, pixels in wanted:
            one = _shown(picture, corner(pixels, side), quality)
            left -= len(one.address)
            if left < 0:
                break
            shown.append(one)
        if len(shown) == len(wanted):
            break
    return shown


def read_pixels(path: Path) -> NDArray[np.uint8] | None:
    """The pixels of a picture, small ones as they were before they were enlarged; None if it cannot be read."""
    if not path.is_file():  # a pipe would never end
        return None
    try:
        with Image.open(path) as file:
            pixels = np.asarray(file.convert("RGB"))
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    for factor in (8, 4, 2):
        if pixels.shape[0] % factor == 0 and pixels.shape[1] % factor == 0:
            small = pixels[::factor, ::factor]
            if small.size and np.array_equal(small.repeat(factor, 0).repeat(factor, 1), pixels):
                return small
    return pixels


def corner(pixels: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """The first rows and columns of a grid of samples with white lines between them; anything else as it is."""
    period = _period(pixels)
    return pixels[: side * period + 1, : side * period + 1] if period else pixels


def _period(pixels: NDArray[np.uint8]) -> int:
    """The distance of the white lines of a grid of samples; 0 if it is none."""
    white = [(pixels == 255).all((axis, 2)) for axis in (1, 0)]  # rows, columns
    periods = [next((p for p in range(5, len(line)) if (len(line) - 1) % p == 0 and line[::p].all()), 0) for line in white]
    return periods[0] if periods[0] == periods[1] else 0


def _shown(picture: Picture, pixels: NDArray[np.uint8], quality: int) -> Shown:
    image = Image.fromarray(pixels)
    if period := _period(pixels):  # nothing lies between samples: the page chooses its colour
        between = np.full(pixels.shape[:2], 255, np.uint8)
        between[::period] = between[:, ::period] = 0
        image.putalpha(Image.fromarray(between))
    small = image.width <= 96  # every pixel is seen
    if image.width > WIDEST:
        image = image.resize((WIDEST, max(1, round(image.height * WIDEST / image.width))), Image.Resampling.LANCZOS)
    return Shown(picture, webp(image, lossless=small, quality=quality), image.size)


def webp(image: Image.Image, **settings: Any) -> str:
    """An image as an address that holds it."""
    file = io.BytesIO()
    image.save(file, "WEBP", method=4, **settings)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()
