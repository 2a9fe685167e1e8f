"""Statistics of a data set, computed once and kept.

A reference belongs to one (data, network, preprocessing); all three are in the name of its file and inside it, with a digest
of the numbers. A file that does not hold what its key promises is not used: it is computed again, with a warning.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from noisewise import distributed
from noisewise.metrics.features import Images, feature_batches
from noisewise.metrics.frechet import Moments
from noisewise.plain_files import replace_file
from noisewise.training.tensor_files import digest

FORMAT = "noisewise-reference-1"


@dataclass(frozen=True)
class Key:
    """What a reference is a reference of."""

    data: str
    network: str
    preprocessing: str

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"reference-{hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:24]}.safetensors"


@dataclass(frozen=True)
class Reference:
    """Moments of a data set's features, and the features themselves (float32) where they were kept."""

    key: Key
    moments: Moments
    features: Tensor | None = None


def cache_folder() -> Path:
    """XDG_CACHE_HOME/noisewise, or ~/.cache/noisewise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "noisewise"


def save_reference(reference: Reference, folder: Path | str | None = None) -> Path:
    """Write a reference under its key, whole or not at all."""
    path = Path(folder or cache_folder()) / reference.key.file
    moments = reference.moments
    tensors = {"mean": moments.mean, "scatter": moments.scatter}
    if reference.features is not None:
        tensors["features"] = reference.features
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    about = {"format": FORMAT, **asdict(reference.key), "count": str(moments.count), "sha256": digest(tensors)}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, save(tensors, about))
    return path


def load_reference(key: Key, folder: Path | str | None = None) -> Reference | None:
    """The reference kept under this key; None if there is none. ValueError if the file is damaged or of something else."""
    path = Path(folder or cache_folder()) / key.file
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for name, value in {"format": FORMAT, **asdict(key)}.items():
        if about.get(name) != value:
            raise ValueError(f"{path} is of another {name}: {about.get(name)!r}, not {value!r}")
    if about.get("sha256") != digest(tensors):
        raise ValueError(f"{path} is damaged: its numbers do not have the digest written into it")
    moments = Moments(len(tensors["mean"]))
    moments.count, moments.mean, moments.scatter = int(about["count"]), tensors["mean"], tensors["scatter"]
    return Reference(key, moments, tensors.get("features"))


def _find(key: Key, folder: Path | str | None, keep_features: bool) -> Reference | None:
    try:
        found = load_reference(key, folder)
    except ValueError as error:
        warnings.warn(f"{error}; computing the reference again", stacklevel=3)
        return None
    return None if found is not None and keep_features and found.features is None else found


def collect(parts: Iterable[Tensor], keep_features: bool) -> tuple[Moments | None, list[Tensor]]:
    """This rank's moments of features in batches (None without any) and, if wanted, the features."""
    moments: Moments | None = None
    kept = []
    for part in parts:
        if moments is None:
            moments = Moments(part.shape[1], "cpu" if part.device.type == "mps" else part.device)  # MPS has no float64
        moments.update(part)
        if keep_features:
            kept.append(part.cpu())
    return moments, kept


def reference(
    images: Images,
    key: Key,
    network: nn.Module,
    device: torch.device | str = "cpu",
    *,
    folder: Path | str | None = None,
    keep_features: bool = False,
    batch: int = 128,
    progress: Callable[[int], None] | None = None,
) -> Reference:
    """The reference of a data set: from the cache if it is there and whole, else computed and kept.

    On several ranks every rank passes its own share of the images and gets the statistics of all; the first rank writes.

    Args:
        images: uint8 images, whole or in batches; not touched when the cache has them.
        key: data fingerprint (of all images, on every rank the same), network id, name of the preprocessing.
        network: the network of `key.network`, on `device`.
        device: where to compute features.
        folder: where references are kept; the user's cache folder if not given.
        keep_features: keep the features too, for KID, precision and recall (n x d x 4 bytes).
        batch: images at a time.
        progress: told how many images this rank has done.
    """
    found = _find(key, folder, keep_features)
    have = distributed.gather_sum(torch.tensor([int(found is not None)]))
    if found is not None and int(have) == distributed.world_size():
        return found
    parts = feature_batches(images, network, key.preprocessing, device, batch=batch, progress=progress)
    moments, kept = collect(parts, keep_features)
    dim = distributed.largest(moments.dim if moments else 0, torch.device("cpu"))
    if dim == 0:
        raise ValueError("there are no images to make a reference of")
    total = (moments or Moments(dim)).synchronised()  # a rank without images has nothing to add, but must take part
    rows = distributed.gather_rows(torch.cat([*kept, torch.zeros(0, dim)])) if keep_features else None
    made = Reference(key, total, rows)
    if distributed.rank() == 0:
        try:
            save_reference(made, folder)
        except (OSError, SafetensorError) as error:  # what was asked for is there all the same; a full disk is either
            warnings.warn(f"the statistics could not be kept for the next time: {error}", stacklevel=2)
    return made
