"""Data for training: `open_data` gives a `Source`, `Batches` its batches in an order that depends on the seed alone."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from noisewise.data.arrays import open_array
from noisewise.data.cifar10 import open_cifar10
from noisewise.data.digits import open_digits
from noisewise.data.huggingface import open_huggingface
from noisewise.data.image_folder import open_folder
from noisewise.data.latents import open_latents
from noisewise.data.loader import Batches
from noisewise.data.source import Source, Synthetic
from noisewise.words import unknown

__all__ = ["SOURCES", "Batches", "Source", "Synthetic", "open_data", "open_named"]

SOURCES: dict[str, Callable[..., Source]] = {
    "digits": open_digits,
    "cifar10": open_cifar10,
    "folder": open_folder,
    "array": open_array,
    "latents": open_latents,
    "huggingface": open_huggingface,
}

PATHS = {
    "cifar10": "the unpacked folder cifar-10-batches-bin or cifar-10-batches-py",
    "folder": "a folder of pictures",
    "array": "a .npy, .npz or .safetensors file, or a folder with train.npy and test.npy",
    "latents": "a folder written by noisewise's encode",
    "huggingface": "the name of a dataset on the hub, or a folder written by save_to_disk",
}
"""What to give as the path, for the sources that need one."""


def open_data(
    source: str, path: str | Path | None = None, *, split: str = "train", options: Mapping[str, Any] = MappingProxyType({})
) -> Source:
    """Open a data set.

    Args:
        source: one of `SOURCES`.
        path: where the data lie; see `PATHS`.
        split: "train", "test" or another that the data have.
        options: settings of the source: the keyword arguments of its opener.
    """
    if source not in SOURCES:
        raise ValueError(unknown("data source", source, SOURCES))
    if path is None and source in PATHS:
        raise ValueError(f"data source {source!r} needs a path: {PATHS[source]}")
    opener = SOURCES[source]
    check_option_names(source, opener, options)
    # a hub name such as "owner/name" must not be turned into a path of the machine's own kind
    place = path if path is None or source == "huggingface" else Path(path).expanduser()
    return opener(place, split, **options)


def open_named(named: str, *, split: str = "train", options: Mapping[str, Any] = MappingProxyType({})) -> Source:
    """The data set that "SOURCE:PATH" names; the other arguments are those of `open_data`."""
    source, _, path = named.partition(":")
    if source not in SOURCES:
        raise ValueError(f"data {named!r}: write SOURCE:PATH with a source of {', '.join(SOURCES)}")
    return open_data(source, path or None, split=split, options=options)


def check_option_names(source: str, opener: Callable[..., Source], options: Mapping[str, Any]) -> None:
    """Refuse options that the opener does not have, and list those it has."""
    known = option_names(opener)
    unknown = [name for name in options if name not in known]
    if unknown:
        has = f"it has {', '.join(known)}" if known else "it has none"
        raise ValueError(f"data source {source!r} has no option {', '.join(map(repr, unknown))}: {has}")


def option_names(opener: Callable[..., Source]) -> list[str]:
    """The options that an opener has."""
    parameters = inspect.signature(opener).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def leaving_out_corrupt(source: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with `skip_corrupt` set, if the source has it: only files of images can be corrupt one by one."""
    has_it = source in SOURCES and "skip_corrupt" in option_names(SOURCES[source])
    return {**options, "skip_corrupt": True} if has_it else dict(options)
