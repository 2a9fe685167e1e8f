"""Runs that take milliseconds: a configuration, and models of a user's own."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from noisewise.training import checkpoint
from noisewise.training.components import build_parts
from noisewise.training.config import Config, DataConfig, EMAConfig, LogConfig, ModelConfig, OptimizerConfig
from noisewise.training.parallel import make_accelerator
from noisewise.training.trainer import Trainer

DIT = {"patch": 4, "width": 16, "depth": 1, "heads": 2}


def tiny(**changes) -> Config:
    """Twelve steps on the digits; `changes` are of the configuration itself."""
    config = Config(
        name="tiny",
        sampler="uniform",
        steps=12,
        batch=16,
        device="cpu",
        precision="fp32",
        data=DataConfig(source="digits"),
        model=ModelConfig(name="dit", options=DIT),
        optimizer=OptimizerConfig(lr=1e-2, warmup=4),
        ema=EMAConfig(decay=0.8, ramp=False),
        log=LogConfig(every=4, trackers=[], samples=4, sample_steps=4),
    )
    return replace(config, **changes)


def own(name: str, **options) -> ModelConfig:
    """A model of this file, named as users name theirs."""
    return ModelConfig(name=f"tests.training.tiny:{name}", options=options)


def trainer_of(config: Config) -> Trainer:
    config.check()
    return Trainer(config, build_parts(config), make_accelerator(config))


def advance(trainer: Trainer, until: int) -> list[dict]:
    """Train to a step and return the rows of metrics on the way, without what depends on the clock."""
    rows = []
    for row in trainer.run():
        if row is not None:
            rows.append({key: value for key, value in row.items() if key not in ("seconds", "steps_per_second")})
        if trainer.step >= until:
            break
    assert trainer.step == until
    return rows


def saved(trainer: Trainer, folder: Path) -> checkpoint.Checkpoint:
    """What comes back of a checkpoint on the disk."""
    return checkpoint.load(checkpoint.save(folder, trainer.step, trainer.tensors(), trainer.state()))


def tensors(trainer: Trainer, *parts: str) -> dict[str, Tensor]:
    """Copies of all tensors of a run (or of some parts), by part and name."""
    every = trainer.tensors()
    return {f"{part}/{name}": value.clone() for part in parts or every for name, value in every[part].items()}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names of the tensors that are not the same bit for bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


class Own(nn.Module):
    """A user's model: nothing of ours, and no shape among its arguments."""

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.into, self.out = nn.Conv2d(2, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        plane = (time.float() / 1000).view(-1, 1, 1, 1).expand(-1, 1, *x.shape[2:])
        return self.out(self.dropout(torch.relu(self.into(torch.cat([x, plane], 1)))))


class Classed(Own):
    """Has a place for each class, and for `more`."""

    def __init__(self, classes: int, more: int = 1) -> None:
        super().__init__()
        self.table = nn.Embedding(classes + more, 1)

    def forward(self, x: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        return super().forward(x, time) + self.table(labels)[:, :, None, None]


class Normed(Own):
    """Keeps running statistics of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return super().forward(self.norm(x), time)


class Poisoned(Own):
    """Gives NaN at timesteps from `low` to below `high`."""

    def __init__(self, low: int = 0, high: int = 0) -> None:
        super().__init__()
        self.low, self.high = low, high

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        bad = ((time >= self.low) & (time < self.high)).view(-1, 1, 1, 1)
        return super().forward(x, time) + torch.where(bad, torch.nan, 0.0)


class Recording(Own):
    """Remembers what it was given in training."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.seen.append((x.detach().clone(), time.clone()))
        return super().forward(x, time)


class Remembering(Own):
    """Has state that is no tensor."""

    def get_extra_state(self) -> dict:
        return {"calls": 0}

    def set_extra_state(self, state: dict) -> None: ...
