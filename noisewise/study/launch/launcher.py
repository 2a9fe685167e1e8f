"""What all launchers have in common."""

import argparse
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from noisewise.study.job import Job
from noisewise.training.signals import StopRequest


class Launcher(ABC):
    """Sees to it that jobs are done: afterwards each run is finished, has a failure in its folder, or was told to stop.

    What a run has done is read from its folder, so that it does not matter who did it, or how often it was interrupted.
    """

    options: ClassVar[tuple[str, ...]]  # names of its command-line options

    @staticmethod
    @abstractmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """The options that it takes; all are None unless given."""

    @classmethod
    @abstractmethod
    def from_options(cls, options: argparse.Namespace, folder: Path, samplers: int) -> "Launcher":
        """What the command line asks for, for a comparison in this folder."""

    @abstractmethod
    def launch(self, jobs: Sequence[Job], stop: StopRequest) -> None:
        """Do the jobs."""

    def farewell(self) -> str:
        """What to say when it was asked to stop."""
        return "the runs are saved; the same command goes on with them"
