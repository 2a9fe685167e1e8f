"""A run's folder, readable without this package.

config.yaml         every setting
environment.jsonl   versions, machine and git state, a row for each start
metrics.jsonl       a row for each log point
samples/            pictures
checkpoints/        see checkpoint.py
"""

import json
import os
import platform
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

import noisewise
from noisewise.plain_files import inside, locked, make_folder, open_own, read_lines, replace_file, sweep, sync, writing
from noisewise.training import checkpoint
from noisewise.training.config import Config
from noisewise.training.options import as_yaml, changed, load_config

COMPARISON = "comparison.json"  # that compare writes into its folder


def settings_of(folder: Path) -> Path:
    """The file of settings of the run in a folder, or an error that says what folder to give."""
    file = folder / "config.yaml"
    if file.is_file():
        return file
    if (folder / COMPARISON).is_file():
        raise FileNotFoundError(f"{folder} is no run: it holds a comparison, so give one of its runs, in {folder / 'runs'}")
    raise FileNotFoundError(f"{folder} is no run: it has no config.yaml; give the folder that noisewise train wrote")


class RunFolder:
    """Creates, locks, reads and appends to a run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file, self.metrics_file = path / "config.yaml", path / "metrics.jsonl"
        self.checkpoints, self.samples = path / "checkpoints", path / "samples"
        self._lock: IO[str] | None = None

    def begin(self, config: Config, resume: bool) -> list[str]:
        """Make the folder, or check that the run in it is the one to be resumed; returns which settings it changes."""
        others: list[str] = []
        if self.config_file.exists():
            if not resume:
                raise FileExistsError(f"{self.path} holds a run already: continue it with --resume, or give another --out")
            pinned, others = changed(load_config(self.config_file), config)
            if pinned:
                raise ValueError(
                    f"{self.path} cannot be resumed with other settings: {'; '.join(pinned)}. Start a new run with --out"
                )
        elif (self.path / COMPARISON).exists():
            raise FileExistsError(f"{self.path} holds a comparison, whose runs are in {self.path / 'runs'}: give another --out")
        elif not resume and (self.metrics_file.exists() or self.checkpoints.exists()):
            raise FileExistsError(f"{self.path} holds what a run has left, but no config.yaml: give another --out")
        with writing(f"--out {self.path}", self.path):
            make_folder(self.path)
            for name in ("checkpoints", "samples"):
                inside(self.path, self.path / name)
            self._lock = locked(self.path)  # two processes in one folder would destroy each other's checkpoints
            _OPEN.add(self)
            sweep(self.path)
            sweep(self.samples)
            if not self.config_file.exists():
                self.write_config(config)
            self._append(self.path / "environment.jsonl", environment())
        return others

    def write_config(self, config: Config) -> None:
        """The settings that hold from now on; for a run that is resumed only when that has succeeded."""
        replace_file(self.config_file, as_yaml(config))

    def end(self) -> None:
        """Let others use the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def log(self, row: dict[str, Any], durable: bool = False) -> None:
        """Append a row to metrics.jsonl; a `durable` one survives a power cut at once, others with the next checkpoint."""
        self._append(self.metrics_file, row)
        if durable:
            self.sync()

    def sync(self) -> None:
        """Flush all that was written so far, apart from checkpoints, to the disk."""
        for name in ("metrics.jsonl", "environment.jsonl", ""):
            sync(self.path / name)

    def commit(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        skipped: int = 0,
        shards: checkpoint.Shards | None = None,
    ) -> Path:
        """Write a checkpoint, after all that it claims to have happened: whatever survives a power cut, fits together."""
        self.sync()
        return checkpoint.save(self.checkpoints, step, tensors, state, skipped, shards)

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl; lines that are none are left out."""
        return [line.row for line in read_lines(self.metrics_file) if line.row is not None and _is_ours(line.row)]

    def forget_after(self, step: int, tell: Callable[[str], None] = lambda message: None) -> None:
        """Drop the rows of steps that will be made again; damaged lines go into another file, and `tell` is told."""
        lines = list(read_lines(self.metrics_file))
        rows = [line.row for line in lines if line.row is not None and _is_ours(line.row)]
        damaged = [line for line in lines if not line.torn and (line.row is None or not _is_ours(line.row))]
        if damaged:
            aside = self.path / "metrics.damaged.jsonl"
            with open(open_own(aside, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
                file.writelines(line.text for line in damaged)
            sync(aside)
            which = ", ".join(str(line.number) for line in damaged[:5]) + (", ..." if len(damaged) > 5 else "")
            tell(
                f"{self.metrics_file}: damaged in line {which}; moved to {aside.name}, and going on with the {len(rows)} others"
            )
        last = max((row.get("step", 0) for row in rows), default=0)
        if step == 0 < last:
            tell(f"{self.path} has no checkpoint: it begins again, and its log up to step {last} is dropped")
        if self.metrics_file.exists():
            replace_file(self.metrics_file, "".join(json.dumps(row) + "\n" for row in rows if row.get("step", 0) <= step))

    @staticmethod
    def _append(path: Path, row: dict[str, Any]) -> None:
        with open(open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "ab+") as file:
            if file.tell():  # a line that a kill or a full disk has cut off must not take this one with it
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(row).encode() + b"\n")


def _is_ours(row: dict[str, Any]) -> bool:
    """Whether the numbers that a run goes on by are numbers."""
    return type(row.get("step", 0)) is int and type(row.get("share", 0)) in (int, float)


_OPEN: weakref.WeakSet[RunFolder] = weakref.WeakSet()


def _end_in_child() -> None:
    """A forked reading process may outlive a killed run for a while, and must not hold its lock for so long."""
    for folder in list(_OPEN):
        folder.end()


os.register_at_fork(after_in_child=_end_in_child)


def environment() -> dict[str, Any]:
    """What a result depends on besides its configuration."""
    cuda = torch.cuda.is_available()
    return {
        "noisewise": noisewise.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "threads": torch.get_num_threads(),
        "arguments": sys.argv[1:],
        "git": git_state(),
    }


def git_state() -> str | None:
    """The commit of the current folder, with "+" if there are changes; None outside a repository.

    "?" where only a command that the repository itself names (a filter) could tell: it may be somebody else's.
    """
    try:
        commit = _git("rev-parse", "HEAD")
        if _git("config", "--local", "--includes", "--name-only", "--get-regexp", r"^(filter\.|include)", check=False):
            return commit + "?"
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str, check: bool = True) -> str:
    command = ["git", "-c", "core.fsmonitor=false", *arguments]
    quiet = {**os.environ, "GIT_NO_LAZY_FETCH": "1", "GIT_OPTIONAL_LOCKS": "0"}
    return subprocess.run(command, capture_output=True, text=True, check=check, timeout=10, env=quiet).stdout.strip()
