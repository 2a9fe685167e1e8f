"""Checkpoints that survive anything: a kill at any moment, a full disk, a flipped bit.

    checkpoints/step-00001000/
        model.safetensors  ema.safetensors  optimizer.safetensors  ...   tensors, one file for each part
        state.json                                                       numbers
        manifest.json                                                    format, step, size and SHA-256 of every file

What is sharded over processes (FSDP2) lies in a file for each of them, with an index of the rows that each holds:

        model-00000-of-00002.safetensors  model-00001-of-00002.safetensors  model.index.json

A checkpoint is written to a temporary folder, flushed to the disk, and renamed: under its final name it is always whole. Before
it is used, every file is compared with the manifest. Only safetensors and JSON are ever read: no file can run code.

One that was saved while steps were being skipped is marked: its weights may be what makes them fail. It is the last to be
taken, and no reason to remove another.
"""

import errno
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from noisewise import distributed
from noisewise.plain_files import make_folder, read_plain, sync
from noisewise.training.tensor_files import (
    INDEX,
    Description,
    Rows,
    stored_parts,
    write_tensors,
    writing_hashed,
)

FORMAT = 1
NAME = re.compile(r"step-(\d{8,18})")
TEMPORARY = "writing-"
UNUSABLE = "unusable-"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or cannot be used, with the reason."""


@dataclass(frozen=True)
class Checkpoint:
    """What was saved at one step: tensors by part and name, and everything else as JSON."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    state: dict[str, Any]
    path: Path
    digests: dict[str, str]  # the SHA-256 of each part's file, or of those of its shards


def name_of(step: int) -> str:
    return f"step-{step:08d}"


@dataclass(frozen=True)
class Shards:
    """Files that the ranks have written into the temporary folder of a checkpoint, each its own."""

    temporary: Path
    files: dict[str, Description]
    indices: dict[str, dict[str, list[Rows]]]  # by part


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    skipped: int = 0,
    shards: Shards | None = None,
) -> Path:
    """Write a checkpoint and return its path; a whole one of the same step is left as it is.

    `skipped` is how many steps in a row have failed just before it. Raises CheckpointError, with all earlier checkpoints as
    they were, if it cannot be written. `shards` are there already.
    """
    final = folder / name_of(step)
    if final.exists() and is_whole(final):
        if shards is not None:
            shutil.rmtree(shards.temporary, ignore_errors=True)
        return final
    temporary = begin(folder, step) if shards is None else shards.temporary
    objects: dict[str, Mapping[str, Any]] = {"state.json": state}
    if shards is not None:
        objects |= {f"{part}{INDEX}": index for part, index in shards.indices.items()}
    with cleaning_up(folder, temporary, step):
        files = {f"{part}.safetensors": write_tensors(temporary / f"{part}.safetensors", tensors[part]) for part in tensors}
        files |= {name: _write(temporary / name, value) for name, value in objects.items()}
        files |= shards.files if shards is not None else {}
        marked = {"skipped": skipped} if skipped else {}
        _write(temporary / "manifest.json", {"format": FORMAT, "step": step, **marked, "files": dict(sorted(files.items()))})
        sync(temporary)
        set_aside(final)  # it is broken, if it is there
        temporary.rename(final)
        sync(folder)
    return final


def temporary_folder(folder: Path, step: int, process: int) -> Path:
    return folder / f"{TEMPORARY}{name_of(step)}-{process}"


def begin(folder: Path, step: int) -> Path:
    """Make the temporary folder of a checkpoint, which nobody takes for one."""
    temporary = temporary_folder(folder, step, os.getpid())
    with cleaning_up(folder, temporary, step):
        make_folder(folder)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    return temporary


@contextmanager
def cleaning_up(folder: Path, temporary: Path, step: int) -> Iterator[None]:
    """Where the block cannot write, nothing is left of it, and a CheckpointError names the last good checkpoint."""
    try:
        yield
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        good = newest_name(folder)
        kept = f"The last good checkpoint is {folder / good}" if good else "There is no earlier checkpoint"
        room = "; free some space and go on with --resume" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ""
        raise CheckpointError(f"the checkpoint of step {step} could not be written: {error}. {kept}{room}") from error


def load(path: Path, lazy: bool = False) -> Checkpoint:
    """Read a checkpoint; raises CheckpointError with the reason if it is torn, changed, foreign or too new.

    A `lazy` one has its tensors read when they are asked for, whole or in part: a process of several need not hold them all.
    """
    try:
        _check_plain_file(path, "manifest.json")
        manifest = json.loads(read_plain(path / "manifest.json"))
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{path.name} has format {manifest['format']}, this version of noisewise reads {FORMAT}: "
                "resume it with the version that wrote it"
            )
        step, files = manifest["step"], dict(manifest["files"])
        if isinstance(step, bool) or name_of(step) != path.name:
            raise CheckpointError(f"{path.name}: its manifest is that of step {step}")
        if "state.json" not in files:
            raise CheckpointError(f"{path.name}: its manifest does not name state.json")
        for name, expected in files.items():
            if Path(name).name != name or not name.endswith((".safetensors", ".json")):
                raise CheckpointError(f"{path.name}: its manifest names {name!r}, which is no file of a checkpoint")
            _check_plain_file(path, name)
            if _description(path / name) != expected:
                raise CheckpointError(f"{path.name}: {name} is not what was written (size or checksum differ)")
        state = json.loads(read_plain(path / "state.json"))
        found = stored_parts(path, files)
        tensors = found if lazy else {part: {name: values[name] for name in values} for part, values in found.items()}
        digests = {part: _digest_of([str(files[name]["sha256"]) for name in values.files]) for part, values in found.items()}
    except CheckpointError:
        raise
    except (OSError, ValueError, LookupError, TypeError, RecursionError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path.name}: state.json is not an object")
    return Checkpoint(step, tensors, state, path, digests)


def load_if_there(path: Path, lazy: bool = False) -> Checkpoint | None:
    """A checkpoint, or None if it was removed before it was read."""
    try:
        return load(path, lazy)
    except CheckpointError:
        if path.exists():
            raise
        return None


def _check_plain_file(path: Path, name: str) -> None:
    """A link or a pipe could lead anywhere, or never end."""
    if not (path / name).is_file() or (path / name).is_symlink():
        raise CheckpointError(f"{path.name}: {name} is missing")


def is_whole(path: Path) -> bool:
    """Whether a checkpoint can be used."""
    try:
        load(path, lazy=True)
    except CheckpointError:
        return False
    return True


def steps_in(folder: Path) -> list[int]:
    """The steps with a checkpoint, oldest first."""
    if not folder.is_dir():
        return []
    steps = [int(match[1]) for path in folder.iterdir() if (match := NAME.fullmatch(path.name))]
    return sorted(step for step in steps if (folder / name_of(step)).exists())  # not for step-000000001


def good_steps_in(folder: Path) -> list[int]:
    """The steps with a checkpoint that is not marked as saved while steps were being skipped, oldest first."""
    return [step for step in steps_in(folder) if not _is_marked(folder / name_of(step))]


def _is_marked(path: Path) -> bool:
    try:
        _check_plain_file(path, "manifest.json")
        return bool(json.loads(read_plain(path / "manifest.json")).get("skipped"))
    except (CheckpointError, OSError, ValueError, AttributeError, RecursionError):
        return False  # what is wrong with it will be said when it is loaded


def newest_name(folder: Path) -> str | None:
    """The name of the newest good checkpoint that is whole."""
    return next((name_of(step) for step in reversed(good_steps_in(folder)) if is_whole(folder / name_of(step))), None)


def newest(folder: Path, tell: Callable[[str], None], lazy: bool = False) -> Checkpoint | None:
    """The newest good checkpoint that is whole; `tell` is told of each that is not. None if there is none at all.

    One that vanishes on the way is no broken one: a run that trains removes old ones when it has written new ones.
    """
    broken: set[int] = set()
    while steps := [step for step in steps_in(folder) if step not in broken]:
        doubtful = set(steps) - set(good_steps_in(folder))
        last = max(steps, key=lambda step: (step not in doubtful, step))
        path = folder / name_of(last)
        try:
            if found := load_if_there(path, lazy):
                if doubtful and max(doubtful) > last:
                    tell(f"{name_of(max(doubtful))} was saved while steps were failing; taking {name_of(last)}")
                elif last in doubtful:
                    tell(f"{name_of(last)} was saved while steps were failing, but there is no other")
                return found
        except CheckpointError as error:
            broken.add(last)
            tell(f"{error}; trying the one before")
    if broken:
        raise CheckpointError(
            f"none of the {len(broken)} checkpoints in {folder} can be used: the run has to be trained again, in another folder"
        )
    return None


def named(folder: Path, step: int, lazy: bool = False) -> Checkpoint:
    """The checkpoint of a step that the user has named, good or not."""
    found = load_if_there(folder / name_of(step), lazy) if step in steps_in(folder) else None
    if found is None:
        there = ", ".join(map(str, steps_in(folder))) or "none"
        raise FileNotFoundError(f"{folder} has no checkpoint of step {step}; it has {there}")
    return found


def newest_for_all(folder: Path, tell: Callable[[str], None], lazy: bool = False) -> Checkpoint | None:
    """On every rank the checkpoint that is the newest good one to the first rank: a run may go on writing meanwhile."""
    while True:
        found: Checkpoint | None = None
        with distributed.together():
            if distributed.rank() == 0:
                found = newest(folder, tell, lazy)
        step = int(distributed.from_first_rank(torch.tensor([-1 if found is None else found.step])))
        if step < 0:
            return None
        path = folder / name_of(step)
        with distributed.together():
            found = found or load_if_there(path, lazy)
        if not distributed.largest(int(found is None), torch.device("cpu")):
            return found
        if int(distributed.from_first_rank(torch.tensor([int(path.exists())]))):  # else the run has removed it: look again
            raise CheckpointError(
                f"{path} is there for the first process, but not for all: a run's folder must be one that all share"
            )


def prune(folder: Path, keep: int, keep_every: int = 0) -> None:
    """Remove all but the newest `keep` good checkpoints, what came after them, and those at multiples of `keep_every`."""
    good = good_steps_in(folder)
    for step in steps_in(folder) if good else []:
        if step < good[-1] and step not in good[-keep:] and (not keep_every or step % keep_every):
            # first out of sight, so that a kill on the way leaves no half of a checkpoint under its name
            doomed = (folder / name_of(step)).rename(folder / f"{TEMPORARY}removed-{step}-{os.getpid()}")
            shutil.rmtree(doomed, ignore_errors=True)


def set_aside(path: Path) -> None:
    """Rename a checkpoint that cannot be used, so that it is neither counted as one of the newest nor lost."""
    if path.exists():
        names = (f"{UNUSABLE}{path.name}" + (f"-{n}" if n else "") for n in itertools.count())
        path.rename(next(place for name in names if not (place := path.with_name(name)).exists()))


def set_aside_diverged(folder: Path, last_made: int) -> str | None:
    """After steps kept failing, set aside what may make them fail; the name of the newest checkpoint that is left.

    That of the last step that was made counts too: no step was made from its weights. It stays if there is none before it.
    """
    before = [step for step in good_steps_in(folder) if step < last_made]
    set_aside_after(folder, last_made - 1 if before else last_made)
    return newest_name(folder)


def set_aside_after(folder: Path, step: int) -> None:
    """Set aside the checkpoints of later steps, which were passed over."""
    for later in steps_in(folder):
        if later > step:
            set_aside(folder / name_of(later))


def sweep(folder: Path) -> None:
    """Remove what a killed process left half-written."""
    for path in folder.glob(f"{TEMPORARY}*"):
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)


def _digest_of(digests: list[str]) -> str:
    """One for all files of a part."""
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _write(path: Path, value: Mapping[str, Any]) -> Description:
    with writing_hashed(path) as file:
        file.write(json.dumps(value, indent=1).encode())
    return file.description


def _description(path: Path) -> Description:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
