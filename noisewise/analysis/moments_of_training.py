"""What analyses look at: a model with its data and optimizer, at some moments of its training.

A finished run is looked at in its checkpoints; a preset is trained on the spot.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from noisewise.models.trust import check_trusted
from noisewise.study.budget import with_budget
from noisewise.training import checkpoint
from noisewise.training.components import build_parts
from noisewise.training.config import Config
from noisewise.training.options import config_parser, parse_config, with_files
from noisewise.training.parallel import make_accelerator
from noisewise.training.trainer import Trainer


def add_subject(parser: argparse.ArgumentParser, *, budget: str = "2000it", points: int = 4) -> None:
    """The options that choose what to look at."""
    parser.add_argument(
        "--run", type=Path, help="the folder of a run, also as the first word: looked at in all its checkpoints"
    )
    parser.add_argument("--preset", action="append", default=[], help="or train this preset, and look at it on the way")
    parser.add_argument("--trust", action="append", default=[], metavar="NAME", help="a model of --run that may be imported")
    parser.add_argument("--budget", help=f"of that training: steps (1000it) or seconds (30s); default: {budget}")
    parser.add_argument("--points", type=int, help=f"moments of it, evenly spaced, besides the start; default: {points}")
    parser.set_defaults(of_preset={"budget": budget, "points": points})


def chosen_config(options: argparse.Namespace, rest: list[str]) -> Config:
    """The configuration of the run or the preset, with whatever settings of noisewise train follow."""
    if (options.run is None) == (not options.preset):
        raise ValueError("give the folder of a run, or --preset NAME")
    for name, default in options.of_preset.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
        elif options.run is not None:
            raise ValueError(f"--{name} is for a --preset, which is trained now; a --run is looked at in its checkpoints")
    if options.run is not None and not (options.run / "config.yaml").is_file():
        raise FileNotFoundError(f"{options.run} is no run: it has no config.yaml; give the folder that noisewise train wrote")
    parser = config_parser(prog="noisewise analyze")
    stored = None if options.run is None else options.run / "config.yaml"
    own = ["--run", "--preset", "--budget", "--points", "--out", "--trust"]
    config = parse_config(parser, with_files(rest, options.preset), own, stored)
    return replace(config, log=replace(config.log, trackers=[], samples_every=0))


@contextmanager
def opened(config: Config) -> Iterator[Trainer]:
    """A trainer at step 0 that writes nothing to the disk."""
    trainer = Trainer(config, build_parts(config), make_accelerator(config))
    try:
        yield trainer
    finally:
        trainer.close()


def moments(options: argparse.Namespace, rest: list[str], tell: Callable[[str], None]) -> Iterator[Trainer]:
    """One trainer, yielded at each moment: a run's checkpoints, or the start and `points` shares of the budget of a preset.

    What the caller does to it in between must leave it as it was.
    """
    config = chosen_config(options, rest)
    if options.run is not None:
        check_trusted(config.model.name, options.run / "config.yaml", options.trust)
        yield from _checkpoints(config, options.run, tell)
    else:
        yield from _trained(with_budget(config, options.budget), options.points)


def _checkpoints(config: Config, folder: Path, tell: Callable[[str], None]) -> Iterator[Trainer]:
    steps = checkpoint.steps_in(folder / "checkpoints")
    if not steps:
        raise FileNotFoundError(f"{folder} has no checkpoint yet: let the run train for longer")
    if len(steps) < 3:
        tell(f"{folder} has kept {len(steps)} checkpoint{'s' * (len(steps) > 1)}; train with --checkpoint.keep_every for more")
    with opened(config) as trainer:
        for step in steps:
            trainer.load(checkpoint.load(folder / "checkpoints" / checkpoint.name_of(step)))
            yield trainer


def _trained(config: Config, points: int) -> Iterator[Trainer]:
    if points < 1:
        raise ValueError(f"--points must be >= 1, got {points}")
    with opened(config) as trainer:
        yield trainer
        share, walk = 1, trainer.run()
        for _ in walk:
            now = trainer.step / config.steps if config.seconds is None else trainer.seconds / config.seconds
            if now >= share / points and share < points:
                share = int(now * points) + 1
                yield trainer
        yield trainer
