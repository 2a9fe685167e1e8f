"""Sets of generated images on disk, made chunk by chunk: what is there is not made again, by however many processes.

FOLDER/generation.json   how they were made; another way in the same folder is refused
FOLDER/00000123.png      an image a file ("png"), or
FOLDER/chunk-00000.npy   an array of uint8 (n, channels, height, width) for every `chunk` images ("npy")
"""

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from noisewise import distributed
from noisewise.generation.guidance import check_interval
from noisewise.generation.images import Decoder, check_label, generate_batches, to_uint8
from noisewise.generation.solvers import Solver, default_solver
from noisewise.generation.trained import Trained
from noisewise.plain_files import read_plain, replace_file, replacing, sweep
from noisewise.precision import full_float32
from noisewise.training.run_folder import COMPARISON

FORMATS = ("png", "npy")
PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
RECORD = "generation.json"
PNG_END = b"IEND\xaeB\x60\x82"


class ImageSet:
    """The images 0 .. count - 1 of one model, solver and seed, in a folder."""

    def __init__(self, folder: Path, record: dict[str, Any]) -> None:
        self.folder, self.record = folder, record
        self.count, self.chunk, self.format = int(record["count"]), int(record["chunk"]), str(record["format"])

    @property
    def settings(self) -> dict[str, Any]:
        """What the images depend on: not how many there are, nor how they are cut into files."""
        return {name: value for name, value in self.record.items() if name not in ("count", "chunk")}

    @property
    def key(self) -> str:
        """Eight digits that differ between sets made in different ways."""
        return hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:8]

    def begin(self) -> None:
        """Make the folder, or check that what is in it was made in the same way.

        More or fewer images may be asked for than before, and the files stay cut as they are.
        """
        path = self.folder / RECORD
        for file, what in (("config.yaml", "a run"), (COMPARISON, "a comparison")):
            if (self.folder / file).exists():
                raise FileExistsError(f"{self.folder} holds {what}: give another --out")
        sweep(self.folder)
        if path.exists():
            before = self._before()
            differing = [name for name, value in self.settings.items() if before.get(name) != value]
            if differing:
                raise ValueError(
                    f"{self.folder} holds images made with another {', '.join(differing)} "
                    f"({before.get(differing[0])!r}, not {self.record[differing[0]]!r}): give another --out, or remove it"
                )
            self.record["chunk"] = self.chunk = int(before["chunk"])
            kept = {**self.record, "count": max(self.count, int(before["count"]))}
        elif any(self.folder.glob("*.png" if self.format == "png" else "chunk-*.npy")):
            raise FileExistsError(f"{self.folder} holds images of unknown origin (no {RECORD}): give another --out")
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            kept = self.record
        replace_file(path, json.dumps(kept, indent=1))

    def _before(self) -> dict[str, Any]:
        """How the images in the folder were made."""
        path = self.folder / RECORD
        try:
            record = json.loads(read_plain(path))
            if int(record["chunk"]) < 1 or int(record["count"]) < 1:
                raise ValueError("counts below 1")
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path} is damaged ({error}): remove {self.folder}, or give another --out") from error
        return dict(record)

    def chunks(self) -> list[range]:
        """The images of each chunk, the last of which may be smaller."""
        return [range(first, min(first + self.chunk, self.count)) for first in range(0, self.count, self.chunk)]

    def remove(self) -> None:
        """Delete all chunks, what a kill has left and the folder, once they were put together elsewhere."""
        for pattern in ("chunk-*.npy", ".chunk-*", f".{RECORD}-*", RECORD):
            for path in self.folder.glob(pattern):
                path.unlink()
        self.folder.rmdir()

    def image_file(self, number: int) -> Path:
        return self.folder / f"{number:08d}.png"

    def chunk_file(self, chunk: range) -> Path:
        return self.folder / f"chunk-{chunk.start // self.chunk:05d}.npy"

    def has(self, chunk: range) -> bool:
        """Whether all images of a chunk are there, and whole."""
        if self.format == "png":
            return all(_is_whole_png(self.image_file(number)) for number in chunk)
        if not self.chunk_file(chunk).is_file():
            return False
        try:
            return len(np.load(self.chunk_file(chunk), mmap_mode="r", allow_pickle=False)) >= len(chunk)
        except (OSError, ValueError, EOFError):  # not there, or cut off
            return False

    def write(self, chunk: range, images: Tensor) -> None:
        """Keep the images of a chunk, uint8; each file appears whole or not at all."""
        values = images.cpu().numpy()
        if self.format == "png":
            for number, image in zip(chunk, values, strict=True):
                picture = Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0))
                with replacing(self.image_file(number), durable=False) as file:
                    picture.save(file, format="PNG")
        else:
            buffer = io.BytesIO()  # written to a file by numpy itself, a full disk would be an error without a reason
            np.save(buffer, values, allow_pickle=False)
            replace_file(self.chunk_file(chunk), buffer.getbuffer(), durable=False)

    def batches(self) -> Iterator[Tensor]:
        """All images, chunk by chunk, uint8 (n, channels, height, width)."""
        for chunk in self.chunks():
            yield self.read(chunk)

    def read(self, chunk: range) -> Tensor:
        """The images of one chunk."""
        if self.format == "npy":
            return torch.from_numpy(np.load(self.chunk_file(chunk), allow_pickle=False)[: len(chunk)])
        pictures = [np.atleast_3d(np.asarray(Image.open(self.image_file(number)))) for number in chunk]
        return torch.from_numpy(np.stack(pictures).transpose(0, 3, 1, 2).copy())


def _is_whole_png(path: Path) -> bool:
    """Whether a file is there and ends as PNG files do."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            file.seek(-len(PNG_END), os.SEEK_END)
            return file.read() == PNG_END
    except OSError:
        return False


def image_set(
    trained: Trained,
    folder: Path,
    count: int,
    *,
    solver: Solver | None = None,
    seed: int = 0,
    label: int | None = None,
    guidance: float = 1.0,
    interval: tuple[float, float] = (0.0, 1.0),
    chunk: int = 500,
    format: str = "npy",
    precision: str = "fp32",
    autoencoder: str | None = None,
) -> ImageSet:
    """A set of images of a trained model, to be made by `fill`; `autoencoder` names that of the decoder, if not the usual."""
    if count < 1 or chunk < 1:
        raise ValueError(f"count and chunk must be >= 1, got {count} and {chunk}")
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}: choose one of {', '.join(FORMATS)}")
    if not trained.image and trained.latents is None:
        raise ValueError("this model does not make images; use noisewise.generation.images from Python to get its samples")
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}: choose one of {', '.join(PRECISIONS)}")
    check_label(label, trained.classes)
    if guidance != 1 and not trained.classes:
        raise ValueError("guidance needs a model that was trained with classes (model.conditional); leave it at 1")
    if guidance != 1 and not trained.config.model.label_dropout:
        raise ValueError(
            "guidance needs a model that was also trained without classes, and this one has seen them always "
            "(model.label_dropout=0); leave it at 1"
        )
    check_interval(interval)
    solver = solver or default_solver(trained.objective.process)
    solver.grid(trained.objective.process)  # raises if it asks for more than the process has
    record = {
        "count": count,
        "step": trained.step,
        "weights": trained.weights,
        "sha256": trained.digest,
        "solver": solver.spec,
        "seed": seed,
        "label": label,
        "guidance": guidance,
        "interval": list(interval),
        "chunk": chunk,
        "format": format,
        "precision": precision,
        "autoencoder": autoencoder,
    }
    return ImageSet(folder, record)


def fill(
    images: ImageSet,
    trained: Trained,
    *,
    device: torch.device | str = "cpu",
    decoder: Decoder | None = None,
    batch: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Make what is missing of a set; with several processes each makes every n-th chunk.

    Args:
        images: the set.
        trained: the model it is a set of.
        device: where the model is.
        decoder: turns latents into images, for models of latents.
        batch: images at a time; a whole chunk by default.
        progress: told how many images are done or were there already, over this process's chunks.
    """
    record = images.record
    solver = Solver.parse(record["solver"], trained.objective.process)
    with distributed.together():
        if distributed.rank() == 0:
            images.begin()
    images.chunk = int(images._before()["chunk"])
    precision = PRECISIONS[record["precision"]]
    kind = torch.device(device).type
    for chunk in images.chunks()[distributed.rank() :: distributed.world_size()]:
        if not images.has(chunk):
            with full_float32() if precision is None else torch.autocast(kind, precision):
                batches = generate_batches(
                    trained.call,
                    trained.objective,
                    trained.shape,
                    chunk,
                    solver=solver,
                    seed=record["seed"],
                    classes=trained.classes,
                    label=record["label"],
                    guidance=record["guidance"],
                    interval=tuple(record["interval"]),
                    batch=batch or len(chunk),
                    device=device,
                    clip=trained.clip,
                )
                samples = torch.cat([samples for _, samples in batches])
            images.write(chunk, to_uint8(samples if decoder is None else decoder(samples)))
        if progress is not None:
            progress(len(chunk))
    distributed.barrier()
