"""What is measured of a finished run: the quality of its images and its loss at each noise level."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from noisewise.evaluation.digits_features import METRIC, digits_features
from noisewise.evaluation.frechet import frechet_distance
from noisewise.evaluation.generate import generate
from noisewise.evaluation.heldout import held_out_losses
from noisewise.evaluation.solvers import default_solver
from noisewise.training.data import open_data
from noisewise.training.parts import open_source
from noisewise.training.run import Run


@dataclass(frozen=True)
class Measured:
    """One run, measured."""

    sampler: str
    seed: int
    steps: int
    seconds: float
    steps_per_second: float
    distance: float | None  # of generated images to the data's, see `distance_name`
    held_out: list[float]  # loss by noise level, least noise first
    samples: Tensor  # a few images

    def row(self) -> dict[str, Any]:
        """As a row of results.jsonl."""
        return {key: value for key, value in asdict(self).items() if key != "samples"}

    @property
    def loss(self) -> float:
        return sum(self.held_out) / len(self.held_out)


DISTANCE = METRIC
"""Fréchet distance between features of a small classifier of digits: not FID, whose network knows photographs only."""


def measure(run: Run, *, images: int = 2000, levels: int = 20, shown: int = 25) -> Measured:
    """Generate with the averaged weights and compare with the data; the test images give the held-out loss."""
    trainer = run.trainer
    config, device, objective = run.config, trainer.device, trainer.objective
    settings: dict[str, Any] = {"classes": trainer.parts.classes, "device": device}
    trainer.network.eval()
    with trainer.ema.applied(), run.accelerator.autocast():
        held_out = held_out_losses(trainer.call, objective, open_source(config, "test"), levels=levels, **settings)
        process = objective.process
        solver = default_solver(process)
        solver = replace(solver, steps=min(config.log.sample_steps, process.steps or solver.steps))
        samples = generate(
            trainer.call, objective, trainer.parts.source.shape, images, solver=solver, seed=config.seed, batch=200, **settings
        )
    return Measured(
        config.sampler,
        config.seed,
        trainer.step,
        trainer.seconds,
        trainer.step / trainer.seconds,
        digits_distance(samples) if config.data.source == "digits" else None,
        held_out.loss.tolist(),
        samples[:shown].float().cpu(),
    )


def digits_distance(samples: Tensor) -> float:
    """The distance of these images to all digits."""
    source = open_data("digits", split="all")
    real = source.decode(source.read(torch.arange(len(source)).numpy())[0])
    (m1, c1), (m2, c2) = ((f.double().mean(0), f.double().T.cov()) for f in map(digits_features, (samples.cpu(), real)))
    return frechet_distance(m1, c1, m2, c2)
