"""How far one set of images is from another: FID and its relatives, on the same features.

====================  ===========================================================================================
metric                what it is
====================  ===========================================================================================
fid                   Fréchet distance of Inception features; digits-frechet with the digits' own, fd_dinov2 with DINOv2's
kid                   unbiased polynomial MMD, mean and deviation over subsets
precision_recall      Kynkäänniemi et al. 2019, k = 3
density_coverage      Naeem et al. 2020, k = 5
infinity              the Fréchet distance at infinitely many samples (Chong & Forsyth 2020)
interval              95 % interval of the Fréchet distance by resampling the generated images
error                 its standard error, from the first-order change with each image: quick
sliced                sliced Wasserstein distance of pixels
====================  ===========================================================================================
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from noisewise import distributed
from noisewise.data import Source
from noisewise.data.source import spread
from noisewise.generation.images import to_uint8
from noisewise.metrics import digits_features, dinov2, inception
from noisewise.metrics.features import feature_batches
from noisewise.metrics.frechet import Moments, bootstrap, fid_infinity, moments_distance, standard_error
from noisewise.metrics.inception import load_inception
from noisewise.metrics.kid import kid
from noisewise.metrics.neighbours import OF_DENSITY, OF_PRECISION, density_coverage, precision_recall
from noisewise.metrics.reference import Key, Reference, collect, reference
from noisewise.metrics.sliced import sliced_wasserstein
from noisewise.streams import bits

METRICS = ("fid", "kid", "precision_recall", "density_coverage", "infinity", "interval", "error", "sliced")
NEED_FEATURES = ("kid", "precision_recall", "density_coverage", "infinity", "interval", "error")
NEED_REAL_FEATURES = ("kid", "precision_recall", "density_coverage")
FEWEST = {"precision_recall": OF_PRECISION + 1, "density_coverage": OF_DENSITY + 1}  # images of both kinds
SLICED_IMAGES = 2000  # pixels of so many images are compared

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Network:
    """A feature network with its name, the preprocessing it takes, and what its Fréchet distance is called."""

    module: nn.Module
    id: str
    preprocessing: str
    metric: str
    dim: int = inception.DIM  # how many features it gives


FEATURES = ("inception", "dinov2")
"""Feature networks that can be asked for."""


def choose_network(
    source: Source,
    device: torch.device | str,
    preprocessing: str = "pytorch-fid",
    weights: Path | None = None,
    features: str = "inception",
) -> Network:
    """Inception, or DINOv2; for the embedded digits, which neither understands, their own classifier."""
    if features not in FEATURES:
        raise ValueError(f"unknown features {features!r}: choose from {', '.join(FEATURES)}")
    if features == "dinov2":
        if preprocessing == "clean-fid":
            raise ValueError("clean-fid is a way to resize images for Inception; DINOv2 has one of its own")
        vit, name = dinov2.load_dinov2(weights, device)
        return Network(vit, name, "dinov2", dinov2.METRIC, len(vit.norm.weight))
    if source.name == "digits" and source.shape == (1, 8, 8):
        if preprocessing == "clean-fid":
            raise ValueError("clean-fid is a way to resize images for Inception; the digits have a network of their own")
        module, name = digits_features.load_digits_classifier(device)
        return Network(module, name, "digits", digits_features.METRIC, digits_features.DIM)
    module, name = load_inception(weights, device)
    return Network(module, name, preprocessing, "fid")


def source_images(source: Source, batch: int = 500, count: int | None = None, mine: bool = True) -> Iterator[Tensor]:
    """The images of a source, uint8, batch by batch; with several processes each gets every n-th batch if `mine`.

    With a `count` below their number, so many of them, spread over all: data may be sorted by class.
    """
    rows = spread(len(source), count)
    rank, world = (distributed.rank(), distributed.world_size()) if mine else (0, 1)
    for first in range(rank * batch, len(rows), batch * world):
        yield to_uint8(source.decode(source.read(rows[first : first + batch])[0]))


def real_statistics(
    source: Source,
    network: Network,
    device: torch.device | str,
    *,
    keep_features: bool = False,
    cache: Path | None = None,
    batch: int = 128,
    progress: Progress | None = None,
    count: int | None = None,
) -> Reference:
    """Statistics of the real images, or of `count` of them spread over all, from the cache if they were made before."""
    check_real(source)
    some = count is not None and count < len(source)
    key = Key(f"{source.fingerprint()}{f'-{count}' * some}", network.id, network.preprocessing)
    images = source_images(source, batch, count)
    return reference(
        images, key, network.module, device, folder=cache, keep_features=keep_features, batch=batch, progress=progress
    )


def compare_images(
    images: Iterable[Tensor],
    real: Reference,
    network: Network,
    device: torch.device | str,
    metrics: Iterable[str] = ("fid",),
    *,
    real_pixels: Tensor | None = None,
    batch: int = 128,
    seed: int = 0,
    tf32: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The distances of generated images to real ones; with several processes, each hands over its own share.

    Args:
        images: uint8 images in batches.
        real: statistics of the real ones, with features where a metric needs them.
        network: what made those statistics.
        device: where to compute.
        metrics: names from `METRICS`.
        real_pixels: real images (n, ...) uint8, for "sliced".
        batch: images at a time.
        seed: of subsets and resamples.
        tf32: let the network use TF32 where torch's settings allow it: faster, and FID moves by about 0.001.
        progress: told how many images this process has done.
    """
    metrics = check_metrics(metrics)
    if "sliced" in metrics and real_pixels is None:
        raise ValueError("the sliced Wasserstein distance needs real_pixels")
    if any(metric in NEED_REAL_FEATURES for metric in metrics) and real.features is None:
        raise ValueError("the statistics of the real images were kept without features; make them with keep_features=True")
    keep = any(metric in NEED_FEATURES for metric in metrics)
    pixels: list[Tensor] = []

    def watched() -> Iterator[Tensor]:
        for part in images:
            if "sliced" in metrics:
                pixels.append(part.cpu())
                if sum(map(len, pixels)) > 2 * SLICED_IMAGES:
                    pixels[:] = [some_of(torch.cat(pixels))]
            yield part

    parts = feature_batches(watched(), network.module, network.preprocessing, device, batch=batch, progress=progress, tf32=tf32)
    moments, kept = collect(parts, keep)
    dim = real.moments.dim
    total = (moments or Moments(dim)).synchronised()
    if total.count < 2:
        raise ValueError(f"a distance needs at least 2 images, got {total.count}")
    found = distributed.gather_rows(torch.cat([*kept, torch.zeros(0, dim)])) if keep else None
    result: dict[str, Any] = {"images": total.count, "real_images": real.moments.count}
    if "fid" in metrics:
        # statistics from the cache lie on the CPU, those of this device's features do not
        real_moments = Moments(dim, total.mean.device)
        real_moments.merge(real.moments)
        result[network.metric] = moments_distance(total, real_moments)
    if found is not None:
        result |= feature_metrics(metrics, found, real, network.metric, seed)
        if "error" in metrics:  # two decompositions, which a GPU makes faster
            place = total.mean.device
            result[f"{network.metric}_error"] = standard_error(found.to(place), real.moments.mean, real.moments.cov)
    if real_pixels is not None and "sliced" in metrics:
        none = real_pixels[:0].cpu()  # for a process without images, which must take part in the gathering all the same
        made = some_of(distributed.gather_rows(some_of(torch.cat(pixels)) if pixels else none))
        result["sliced_wasserstein"] = sliced_wasserstein(_flat(made), _flat(some_of(real_pixels)), seed=seed)
    return result


def some_of(pixels: Tensor) -> Tensor:
    """At most `SLICED_IMAGES` of these images, chosen by their own pixels: whatever their order, and whoever has made them."""
    flat = pixels.flatten(1)
    numbers = bits(0, flat.shape[1], flat.device)
    keys = torch.cat([(part.long() * numbers).sum(1) for part in flat.split(64)])
    return pixels[keys.argsort()[:SLICED_IMAGES]]


def feature_metrics(metrics: tuple[str, ...], found: Tensor, real: Reference, name: str, seed: int) -> dict[str, Any]:
    """Those that need the features themselves."""
    result: dict[str, Any] = {}
    mean, cov = real.moments.mean, real.moments.cov
    # subsets and resamples are drawn by row: in an order of the rows' own, they do not depend on who made which images
    found = found[found[:, 0].argsort(stable=True)]
    if "kid" in metrics and real.features is not None:
        size = min(1000, len(found), len(real.features))
        result["kid"] = asdict(kid(found, real.features, size=size, seed=seed))
    if "precision_recall" in metrics and real.features is not None:
        result["precision_recall"] = asdict(precision_recall(real.features, found))
    if "density_coverage" in metrics and real.features is not None:
        result["density_coverage"] = asdict(density_coverage(real.features, found))
    if "infinity" in metrics:
        result[f"{name}_infinity"] = asdict(fid_infinity(found, mean, cov, seed=seed))
    if "interval" in metrics:
        result[f"{name}_interval"] = asdict(bootstrap(found, mean, cov, seed=seed))
    return result


def check_metrics(metrics: Iterable[str]) -> tuple[str, ...]:
    """The names, if all are known."""
    metrics = tuple(metrics)
    unknown = [metric for metric in metrics if metric not in METRICS]
    if unknown:
        raise ValueError(f"unknown metric {unknown[0]!r}: choose from {', '.join(METRICS)}")
    return metrics


def check_counts(metrics: Iterable[str], network: Network, images: int, real_images: int) -> None:
    """Refuse what cannot be measured with so many images, before they are generated."""
    more = "a run generates more with a larger --count"
    for metric in metrics:
        if metric == "infinity" and images < network.dim + 2:
            raise ValueError(
                f"infinity needs at least {network.dim + 2} images, as the network has {network.dim} features, "
                f"got {images}; {more}"
            )
        if min(images, real_images) < FEWEST.get(metric, 2):
            raise ValueError(
                f"{metric} needs at least {FEWEST.get(metric, 2)} images of either kind, "
                f"got {images} and {real_images} real ones; {more}"
            )


def check_real(source: Source) -> None:
    """Refuse data that are no images."""
    if not source.image:
        raise ValueError(f"{source.name} holds no images: name the data to compare with by --data")


def _flat(pixels: Tensor) -> Tensor:
    return pixels.flatten(1).float() / 127.5 - 1
