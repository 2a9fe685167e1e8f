"""What analyses look at: a model with its data and optimizer, at some moments of its training; and what they try on it there.

A finished run is looked at in its checkpoints; a preset is trained on the spot.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from noisewise.data import Source
from noisewise.feedback import Snapshot, preserved_random_state, set_aside_gradients
from noisewise.levels import middles
from noisewise.looking.validation import evaluation_mode
from noisewise.metrics.heldout import decoded
from noisewise.models.build import check_trusted
from noisewise.processes import Process
from noisewise.samplers import Sampler
from noisewise.samplers.histogram import Histogram
from noisewise.streams import normals, stream_key
from noisewise.study.job import with_budget
from noisewise.training import checkpoint
from noisewise.training.components import build_parts, open_source
from noisewise.training.config import Config
from noisewise.training.options import config_parser, parse_config, with_files
from noisewise.training.parallel import make_accelerator
from noisewise.training.run_folder import settings_of
from noisewise.training.trainer import Trainer


def add_subject(parser: argparse.ArgumentParser, *, budget: str = "2000it", points: int = 4) -> None:
    """The options that choose what to look at."""
    parser.add_argument(
        "--run", type=Path, help="the folder of a run, also as the first word; all its checkpoints are analysed"
    )
    parser.add_argument("--preset", action="append", default=[], help="or train this preset and analyse it on the way")
    parser.add_argument("--trust", action="append", default=[], metavar="NAME", help="allow importing the model NAME of --run")
    parser.add_argument("--budget", help=f"length of that training: steps (1000it) or seconds (30s); default: {budget}")
    parser.add_argument("--points", type=int, help=f"moments of it to analyse, besides the start; default: {points}")
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
    parser = config_parser(prog="noisewise analyze")
    stored = None if options.run is None else settings_of(options.run)
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


# Trying something there and taking it back, with a loss that is the same before and after but for the parameters ------


CHOOSE = 0x63686F6F7365  # "choose": the stream of seeds that picks rows


@contextmanager
def rewound(trainer: Trainer) -> Iterator[None]:
    """Whatever the block trains is taken back bit for bit: weights, optimizer, average, sampler, counters, random state."""
    snapshot = Snapshot(trainer.model, trainer.optimizer)
    sampler, mode = trainer.sampler, trainer.network.training
    modules = (sampler, trainer.weighting, trainer.monitor, trainer.guard)
    states = [deepcopy(module.state_dict()) for module in modules]
    average = {name: value.clone() for name, value in trainer.ema.average.items()}
    counters = trainer.step, trainer.samples, trainer.ema.updates
    scaler = trainer.accelerator.scaler
    scale = None if scaler is None else deepcopy(scaler.state_dict())
    try:
        with preserved_random_state(), set_aside_gradients(trainer.parameters):
            yield
    finally:
        trainer.sampler = sampler
        for module, state in zip(modules, states, strict=True):
            module.load_state_dict(state)
        snapshot.restore()
        for name, value in average.items():
            trainer.ema.average[name].copy_(value)
        trainer.step, trainer.samples, trainer.ema.updates = counters
        trainer.network.train(mode)
        if scaler is not None:
            scaler.load_state_dict(scale)


def forget_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Set Adam's running mean of gradients to zero: else a trial would also go on with what was trained before it."""
    for entries in optimizer.state.values():
        if "exp_avg" in entries:
            entries["exp_avg"].zero_()


class RangeSampler(Sampler):
    """A share of the draws from the interval [low, high] of u, the rest from all of [0, 1].

    It stands in for a run's sampler, `instead_of`: where that carries a target of its own, these draws count by it too.
    """

    def __init__(
        self,
        process: Process,
        low: float,
        high: float,
        share: float = 1.0,
        seed: int = 0,
        instead_of: Sampler | None = None,
    ) -> None:
        check_range(low, high)
        if not 0 < share <= 1:
            raise ValueError(f"the share of the batch in the range must lie in (0, 1], got {share}")
        edges = torch.tensor(sorted({0.0, low, high, 1.0}), dtype=torch.float64)
        inside = (edges[:-1] >= low) & (edges[1:] <= high)
        table = Histogram((1 - share) * edges.diff() + share * inside * edges.diff() / (high - low), edges)
        super().__init__(process, table=table, seed=seed)
        self._target: Callable[[Tensor], Tensor] | None = None
        if instead_of is not None and instead_of.correction.kind == "target":
            self._target = instead_of.target_weight

    def _weight(self, u: Tensor, density: Tensor, cells: tuple[Tensor, Tensor] | None = None) -> Tensor:
        return torch.ones_like(u) if self._target is None else self._target(u)


def check_range(low: float, high: float) -> None:
    """Refuse what is no interval of u."""
    if not 0 <= low < high <= 1:
        raise ValueError(f"a range of noise levels is LOW,HIGH with 0 <= LOW < HIGH <= 1, got {low:g},{high:g}")


@dataclass(frozen=True)
class FixedNoise:
    """Samples with noise that never changes, to be evaluated at several noise levels."""

    x0: Tensor
    labels: Tensor | None
    u: Tensor  # the noise levels
    held_out: bool  # whether the samples are none of the training's
    seed: int = 0

    @property
    def size(self) -> int:
        """How many samples one evaluation passes through the model."""
        return len(self.u) * len(self.x0)

    @torch.no_grad()
    def losses(self, trainer: Trainer, most: int = 512) -> Tensor:
        """(levels, samples) plain losses of the model as it is now, in evaluation mode; `most` at a time where possible."""
        images, parts = torch.arange(len(self.x0), device=self.x0.device), []
        with evaluation_mode(trainer.network):
            for levels in torch.arange(len(self.u)).split(max(1, most // len(images))):
                noise = torch.cat([normals(self.seed, images, level, tuple(self.x0.shape[1:])) for level in levels.tolist()])
                u = self.u[levels].to(self.x0.device).repeat_interleave(len(images))
                x0 = self.x0.repeat(len(levels), *[1] * (self.x0.ndim - 1))
                labels = None if self.labels is None else self.labels.repeat(len(levels))
                values = trainer.objective.losses(trainer.call, x0, u, noise, labels)
                parts.append(values.double().cpu().view(len(levels), -1))
        return torch.cat(parts)


def level_middles(levels: int) -> Tensor:
    """The noise levels that --levels asks for."""
    if levels < 1:
        raise ValueError(f"--levels must be >= 1, got {levels}")
    return middles(levels)


def fixed_noise(trainer: Trainer, levels: int, images: int, tell: Callable[[str], None]) -> FixedNoise:
    """Held-out samples where the data have a test set, else training samples; the same ones for every call."""
    if images < 2:
        raise ValueError(f"--images must be >= 2, to tell a change from noise, got {images}")
    u = level_middles(levels)
    held_out = True
    try:
        source = open_source(trainer.config, "test")
    except (ValueError, FileNotFoundError, KeyError) as error:
        tell(f"no test set ({error}): losses are those of training samples, with noise that is not seen in training")
        source, held_out = trainer.parts.source, False
    generator = torch.Generator().manual_seed(CHOOSE)
    rows = torch.randperm(len(source), generator=generator)[:images]
    x0, labels = read(source, rows, trainer)
    return FixedNoise(x0, labels, u, held_out, stream_key(CHOOSE) >> 1)


def read(source: Source, rows: Tensor, trainer: Trainer) -> tuple[Tensor, Tensor | None]:
    """Those rows as samples on the trainer's device, with labels if its model takes them."""
    values, labels = source.read(rows.numpy())
    x0 = decoded(source, values, rows.tolist(), CHOOSE).to(trainer.device)
    told = labels.to(trainer.device) if trainer.parts.classes and labels is not None else None
    return x0, told
