"""Where the runs of a comparison are executed. `LAUNCHERS` is the registry."""

import argparse
from pathlib import Path

from noisewise.study.job import Launcher
from noisewise.study.launch.local import Local
from noisewise.study.launch.ray import Ray
from noisewise.study.launch.slurm import Slurm

LAUNCHERS: dict[str, type[Launcher]] = {"local": Local, "slurm": Slurm, "ray": Ray}


def add_launcher_options(parser: argparse.ArgumentParser) -> None:
    """--launcher, and what each of them takes."""
    parser.add_argument("--launcher", choices=list(LAUNCHERS), default="local", help="where to run")
    for launcher in LAUNCHERS.values():
        launcher.add_options(parser)


def chosen_launcher(options: argparse.Namespace, folder: Path, samplers: int) -> Launcher:
    """The launcher that the command line asks for; options of another one are an error, not ignored."""
    chosen = LAUNCHERS[options.launcher]
    for name, launcher in LAUNCHERS.items():
        for option in launcher.options:
            if option not in chosen.options and getattr(options, option) is not None:
                raise ValueError(f"--{option.replace('_', '-')} is for --launcher {name}, not {options.launcher}")
    return chosen.from_options(options, folder, samplers)


__all__ = ["LAUNCHERS", "Launcher", "Local", "Ray", "Slurm", "add_launcher_options", "chosen_launcher"]
