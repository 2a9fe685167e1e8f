"""Pictures to latents, once, before training: `encode` writes a folder that the `latents` source reads.

The autoencoder is one of diffusers. The folder is made as <out>.partial and renamed when complete. After an interruption the
same call goes on where it stopped: progress.json says how many rows are safely on disk. Of two calls at a time the second is
refused.
"""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, VQModel
from numpy.typing import NDArray
from torch import Tensor

from noisewise.data.latents import INDEX, VERSION
from noisewise.data.source import Source
from noisewise.plain_files import LOCK, locked, read_plain, replace_file, sweep

KINDS = {"AutoencoderKL": AutoencoderKL, "VQModel": VQModel}
SCALE_OF_SD = 0.18215  # diffusers' default for every VQModel too, which LDM does not rescale (Rombach et al. 2022, D.1)


class Encoder:
    """AutoencoderKL gives the mean and standard deviation of its posterior, VQModel its latents before quantisation."""

    def __init__(self, model: Any, kind: str) -> None:
        self.model, self.kind = model, kind
        config = model.config
        if getattr(config, "latents_mean", None) or getattr(config, "latents_std", None):
            raise ValueError(
                "this autoencoder scales each channel by its own latents_mean and latents_std, which is not supported"
            )
        self.scale = float(getattr(config, "scaling_factor", None) or 1.0)
        if kind == "VQModel" and self.scale == SCALE_OF_SD:
            self.scale = 1.0
        self.shift = float(getattr(config, "shift_factor", None) or 0.0)
        self.has_std = kind == "AutoencoderKL"
        self.device, self.dtype = next((p.device, p.dtype) for p in model.parameters())

    def latent_shape(self, source: Source) -> list[int]:
        """The shape of one latent of this source's pictures, which must suit the autoencoder."""
        config = self.model.config
        factor = 2 ** (len(config.block_out_channels) - 1)
        if not source.image:
            raise ValueError(f"only pictures can be encoded, and {source.name} holds none")
        channels, height, width = source.shape
        if channels != config.in_channels:
            raise ValueError(
                f"the autoencoder takes {config.in_channels} channels, {source.name} has {channels}: "
                f"open the data with channels={config.in_channels}, or choose another autoencoder"
            )
        if height % factor or width % factor:
            raise ValueError(
                f"the autoencoder shrinks pictures {factor} times, which {height}x{width} does not allow: "
                f"open the data with a size that is a multiple of {factor}"
            )
        depth = config.latent_channels if self.has_std else config.vq_embed_dim or config.latent_channels
        return [depth, height // factor, width // factor]

    @torch.no_grad()
    def __call__(self, pictures: Tensor) -> dict[str, Tensor | None]:
        """`mean` and `std` in float32, without the scaling factor."""
        output = self.model.encode(pictures.to(self.dtype))
        if not self.has_std:
            return {"mean": output.latents.float(), "std": None}
        return {"mean": output.latent_dist.mean.float(), "std": output.latent_dist.std.float()}


def load_autoencoder(name: str, subfolder: str | None, device: torch.device | str, dtype: torch.dtype) -> Encoder:
    """The autoencoder of a local folder or of the hub, of the class that its config names; only safetensors are read."""
    where = name if subfolder is None else f"{name} (subfolder {subfolder})"
    try:
        kind = AutoencoderKL.load_config(name, subfolder=subfolder).get("_class_name")
    except OSError as error:
        raise ValueError(f"no autoencoder at {where}: {error}; if it is a pipeline, give subfolder='vae'") from error
    if kind not in KINDS:
        raise ValueError(f"{where} is a {kind}, not one of {', '.join(KINDS)}; if it is a pipeline, give subfolder='vae'")
    try:
        model = KINDS[kind].from_pretrained(name, subfolder=subfolder, torch_dtype=dtype, use_safetensors=True)
    except OSError as error:
        raise ValueError(f"cannot load {where}: {error}") from error
    return Encoder(model.to(device).eval().requires_grad_(False), kind)


# From pictures to latents, on disk ------------------------------------------------------------------------------------


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
    check_new(out)
    partial = partial_of(out)
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
    partial.mkdir(parents=True, exist_ok=True)
    with locked(partial):
        check_new(out)  # another call may have ended meanwhile
        sweep(partial)
        done = begin(partial, settings)
        arrays = open_arrays(partial, settings, encoder.has_std, fresh=done is None)
        fill(arrays, source, encoder, partial, settings, done or 0, save_every, progress)
        del arrays
        replace_file(partial / INDEX, json.dumps(settings, indent=1))
        partial.rename(out)
        (out / PROGRESS).unlink()
        (out / LOCK).unlink()
    return out


def partial_of(out: Path) -> Path:
    """Where it is made."""
    return out.with_name(out.name + ".partial")


def check_new(out: Path) -> None:
    """Raise FileExistsError for a folder that is there."""
    if out.exists():
        raise FileExistsError(f"{out} exists already: choose another folder, or remove it to encode again")


def begin(partial: Path, settings: dict[str, Any]) -> int | None:
    """How many rows an interrupted run has left; None to start from the beginning."""
    try:
        found = json.loads(read_plain(partial / PROGRESS))
        done, before = int(found["done"]), dict(found["settings"])
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError):
        raise damaged(partial, PROGRESS) from None
    if not 0 <= done <= settings["count"]:
        raise damaged(partial, PROGRESS)
    if before != settings:
        different = sorted(name for name in settings if before.get(name) != settings[name])
        raise ValueError(f"{partial} was begun with other settings ({', '.join(different)}): repeat the old call, or remove it")
    return done


def damaged(partial: Path, name: str) -> ValueError:
    """What to do if an interrupted run has left no such file."""
    return ValueError(f"{partial / name} is damaged: remove {partial} to encode from the start")


def open_arrays(partial: Path, settings: dict[str, Any], has_std: bool, fresh: bool) -> dict[str, NDArray[Any]]:
    """The files to fill, memory-mapped."""
    latents = (settings["store"], (settings["count"], *settings["shape"]))
    layout = {"mean": latents}
    if has_std:
        layout["std"] = latents
    if settings["classes"]:
        layout["labels"] = ("int64", (settings["count"],))
    if not fresh:
        return {name: left_array(partial, f"{name}.npy", *like) for name, like in layout.items()}
    needed = sum(math.prod(shape) * np.dtype(dtype).itemsize for dtype, shape in layout.values())
    free = shutil.disk_usage(partial).free
    if needed > free:  # a full disk under a memory map would kill the process without a word
        raise ValueError(f"the latents need {needed / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free at {partial.parent}")
    return {
        name: np.lib.format.open_memmap(partial / f"{name}.npy", mode="w+", dtype=dtype, shape=shape)
        for name, (dtype, shape) in layout.items()
    }


def left_array(partial: Path, name: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """A file to go on with, memory-mapped."""
    try:
        array = np.lib.format.open_memmap(partial / name, mode="r+")
    except (OSError, ValueError):
        raise damaged(partial, name) from None
    if (array.dtype, array.shape) != (np.dtype(dtype), shape):
        raise damaged(partial, name)
    return array


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
    """Encode from row `done` on; progress is noted only once the rows are on disk, and when the user interrupts."""
    batch, n = settings["batch"], len(source)
    try:
        for number, start in enumerate(range(done, n, batch), 1):
            rows = np.arange(start, min(start + batch, n))
            values, labels = source.read(rows)
            found: dict[str, Tensor | None] = {**encoder(source.decode(values.to(encoder.device))), "labels": labels}
            for name, array in arrays.items():
                part = found[name]
                assert part is not None
                array[rows] = checked(part.cpu().numpy(), array.dtype, start)
            done = int(rows[-1]) + 1
            if number % save_every == 0 or done == n:
                note(done, arrays, partial, settings)
            if progress is not None:
                progress(done)
    except KeyboardInterrupt:
        if done:
            note(done, arrays, partial, settings)
        raise


def note(done: int, arrays: dict[str, NDArray[Any]], partial: Path, settings: dict[str, Any]) -> None:
    """Flush the rows to the disk, and say how many are there."""
    for array in arrays.values():
        array.flush()  # type: ignore[attr-defined]
    replace_file(partial / PROGRESS, json.dumps({"done": done, "settings": settings}, indent=1))


def checked(part: NDArray[Any], dtype: np.dtype[Any], start: int) -> NDArray[Any]:
    """The values in the type they are stored in, which must hold them."""
    with np.errstate(over="ignore"):
        stored = part.astype(dtype)
    if not np.isfinite(stored).all():
        raise ValueError(
            f"latents from row {start} on are not finite in {dtype}: use store='float32', or dtype float32 to encode"
        )
    return stored
