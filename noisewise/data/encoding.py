"""Pictures to latents, once, before training: `encode` writes a folder that the `latents` source reads.

The folder is made as <out>.partial and renamed when complete. After an interruption the same call goes on where it stopped:
progress.json says how many rows are safely on disk.
"""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noisewise.data.autoencoder import Encoder, load_autoencoder
from noisewise.data.latents import INDEX, VERSION
from noisewise.data.source import Source

PROGRESS = "progress.json"
STORES = ("float16", "float32")


def encode(
    source: Source,
    autoencoder: str,
    out: str | Path,
    *,
    batch: int = 32,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    store: str = "float16",
    subfolder: str | None = None,
    save_every: int = 16,
    progress: Callable[[int], None] | None = None,
) -> Path:
    """Encode all pictures of a source with a diffusers AutoencoderKL or VQModel; returns the folder.

    Args:
        source: the pictures.
        autoencoder: a local folder or the name on the hub; its config says which class it is.
        out: the folder to write, which must not exist.
        batch: pictures encoded at a time.
        device: where to encode.
        dtype: in which to encode.
        store: in which to keep latents, "float16" or "float32".
        subfolder: of the autoencoder ("vae" for most pipelines).
        save_every: batches between two points from which an interrupted run can go on.
        progress: called with the number of rows done after each batch.
    """
    out = Path(out)
    if out.exists():
        raise FileExistsError(f"{out} exists already: choose another folder, or remove it to encode again")
    partial = out.with_name(out.name + ".partial")
    if store not in STORES:
        raise ValueError(f"store must be one of {', '.join(STORES)}, got {store!r}")
    if batch < 1 or save_every < 1:
        raise ValueError(f"batch and save_every must be at least 1, got {batch} and {save_every}")
    encoder = load_autoencoder(autoencoder, subfolder, device, dtype)
    settings = {
        "version": VERSION,
        "autoencoder": autoencoder,
        "subfolder": subfolder,
        "kind": encoder.kind,
        "scale": encoder.scale,
        "shift": encoder.shift,
        "shape": encoder.latent_shape(source),
        "count": len(source),
        "classes": source.classes,
        "store": store,
        "dtype": str(dtype).removeprefix("torch."),
        "batch": batch,  # the last bits of a latent may depend on it
        "source": {"name": source.name, "fingerprint": source.fingerprint()},
    }
    done = begin(partial, settings)
    arrays = open_arrays(partial, settings, encoder.has_std, fresh=done is None)
    fill(arrays, source, encoder, partial, settings, done or 0, save_every, progress)
    del arrays
    write_json(partial / INDEX, settings)
    partial.rename(out)
    (out / PROGRESS).unlink()
    return out


def begin(partial: Path, settings: dict[str, Any]) -> int | None:
    """How many rows an interrupted run has left; None to start from the beginning."""
    partial.mkdir(parents=True, exist_ok=True)
    try:
        found = json.loads((partial / PROGRESS).read_text())
    except FileNotFoundError:
        return None
    if found["settings"] != settings:
        different = sorted(name for name in settings if found["settings"].get(name) != settings[name])
        raise ValueError(f"{partial} was begun with other settings ({', '.join(different)}): repeat the old call, or remove it")
    return int(found["done"])


def open_arrays(partial: Path, settings: dict[str, Any], has_std: bool, fresh: bool) -> dict[str, NDArray[Any]]:
    """The files to fill, memory-mapped."""
    latents = (settings["store"], (settings["count"], *settings["shape"]))
    layout = {"mean": latents}
    if has_std:
        layout["std"] = latents
    if settings["classes"]:
        layout["labels"] = ("int64", (settings["count"],))
    if not fresh:
        return {name: np.lib.format.open_memmap(partial / f"{name}.npy", mode="r+") for name in layout}
    needed = sum(math.prod(shape) * np.dtype(dtype).itemsize for dtype, shape in layout.values())
    free = shutil.disk_usage(partial).free
    if needed > free:  # a full disk under a memory map would kill the process without a word
        raise ValueError(f"the latents need {needed / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free at {partial.parent}")
    return {
        name: np.lib.format.open_memmap(partial / f"{name}.npy", mode="w+", dtype=dtype, shape=shape)
        for name, (dtype, shape) in layout.items()
    }


def fill(
    arrays: dict[str, NDArray[Any]],
    source: Source,
    encoder: Encoder,
    partial: Path,
    settings: dict[str, Any],
    done: int,
    save_every: int,
    progress: Callable[[int], None] | None,
) -> None:
    """Encode from row `done` on; progress is noted only once the rows are on disk."""
    batch, n = settings["batch"], len(source)
    for number, start in enumerate(range(done, n, batch), 1):
        rows = np.arange(start, min(start + batch, n))
        values, labels = source.read(rows)
        found: dict[str, Tensor | None] = {**encoder(source.decode(values.to(encoder.device))), "labels": labels}
        for name, array in arrays.items():
            part = found[name]
            assert part is not None
            array[rows] = checked(part.cpu().numpy(), array.dtype, start)
        if number % save_every == 0 or rows[-1] == n - 1:
            for array in arrays.values():
                array.flush()  # type: ignore[attr-defined]
            write_json(partial / PROGRESS, {"done": int(rows[-1]) + 1, "settings": settings})
        if progress is not None:
            progress(int(rows[-1]) + 1)


def checked(part: NDArray[Any], dtype: np.dtype[Any], start: int) -> NDArray[Any]:
    """The values in the type they are stored in, which must hold them."""
    with np.errstate(over="ignore"):
        stored = part.astype(dtype)
    if not np.isfinite(stored).all():
        raise ValueError(
            f"latents from row {start} on are not finite in {dtype}: use store='float32', or dtype float32 to encode"
        )
    return stored


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a file at once, so that a kill leaves the old one or the new one."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
