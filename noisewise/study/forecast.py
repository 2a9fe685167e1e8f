"""How long measuring takes, said before it begins; and fewer images where Inception would keep a CPU busy for hours."""

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from noisewise.data import Source
from noisewise.metrics.distances import Network, choose_network
from noisewise.metrics.features import features
from noisewise.study.measure import CPU_IMAGES, CPU_REAL_IMAGES, HELD_OUT, LEVELS

TRIED = 8  # images in a measurement


def needs_inception(source: Source | None, device: torch.device) -> bool:
    """Whether images like these are measured by Inception on a CPU."""
    return source is not None and source.image and source.name != "digits" and device.type == "cpu"


def said_fewer(images: int, planned: int, option: str) -> str:
    """That fewer images are measured than was planned, and what that means."""
    return (
        f"FID of {images} images and {CPU_REAL_IMAGES:,} real ones, not of {planned:,} and all: Inception is slow on a CPU. "
        f"Such figures are far too high and compare with each other alone; {option} {planned} asks for all"
    )


def seconds_of(call: Callable[[], object], tries: int = 2) -> float:
    """The shorter of two calls: the first one also allocates."""
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def forward_seconds(call: Callable[..., Tensor], shape: Sequence[int], classes: int = 0) -> float:
    """What an evaluation of the network takes for one image."""
    x, times = torch.zeros(TRIED, *shape), torch.full((TRIED,), 0.5)
    labels = torch.zeros(TRIED, dtype=torch.int64) if classes else None
    with torch.no_grad():
        return seconds_of(lambda: call(x, times, labels)) / TRIED


def feature_seconds(network: Network, shape: Sequence[int]) -> float:
    """What the features of one image take."""
    images = torch.full((TRIED, *shape), 128, dtype=torch.uint8)
    return seconds_of(lambda: features(images, network.module, network.preprocessing, "cpu", batch=TRIED)) / TRIED


def evaluation_seconds(
    call: Callable[..., Tensor], source: Source, classes: int, images: int, solver_steps: int
) -> tuple[float, float]:
    """On a CPU: what each evaluation of a comparison takes, and the statistics of real images, made once."""
    forward = forward_seconds(call, source.shape, classes)
    each = forward * (images * solver_steps + LEVELS * HELD_OUT)
    if not source.image:
        return each, 0.0
    try:
        feature = feature_seconds(choose_network(source, "cpu"), source.shape)
    except FileNotFoundError:  # without Inception's weights there is no FID
        return each, 0.0
    real = len(source) if images > CPU_IMAGES else min(len(source), CPU_REAL_IMAGES)
    return each + images * feature, real * feature * (source.name != "digits")


def about(seconds: float) -> str:
    """A time in words."""
    for size, name in ((3600, "hour"), (60, "minute")):
        if seconds >= 1.5 * size:
            return f"about {math.ceil(seconds / size)} {name}s"
    return f"about {max(math.ceil(seconds), 1)} s"
