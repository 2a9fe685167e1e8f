"""Samples of a run while it trains, with its averaged weights and the solvers that its configuration plans; training is not
touched."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from noisewise import distributed
from noisewise.generation.images import generate_batches, save_grid
from noisewise.generation.replay import Replay
from noisewise.generation.solvers import Solver, default_solver
from noisewise.plain_files import inside
from noisewise.processes import Process
from noisewise.spec import build_process
from noisewise.training.config import Config
from noisewise.training.run import Run


def evaluation_solver(config: Config) -> Solver:
    """How a run's images are made when it is evaluated: `evaluation.solver`, or the usual one of its process."""
    process, named = build_process(config.process), config.evaluation.solver
    return _fitting(Solver.parse(named, process) if named else default_solver(process), process)


def quick_solver(config: Config) -> Solver:
    """The same along the way: `evaluation.quick_solver`, or the usual one with `log.sample_steps` steps."""
    process, named, steps = build_process(config.process), config.evaluation.quick_solver, config.log.sample_steps
    if named:
        return _fitting(Solver.parse(named, process), process)
    return replace(default_solver(process), steps=min(steps, process.steps or steps))


def headline_solver(config: Config) -> Solver:
    """How the images of a comparison's headline figure are made: as when the run is evaluated, if that is said."""
    return evaluation_solver(config) if config.evaluation.solver else quick_solver(config)


def _fitting(solver: Solver, process: Process) -> Solver:
    solver.grid(process)  # raises if it asks for more than the process has
    return solver


def draw_samples(run: Run) -> Path | None:
    """Generate `log.samples` samples and draw them into the run's samples/; nothing if they are no images."""
    if not run.config.log.samples or not run.trainer.parts.source.image:
        return None
    images, path = run_samples(run, run.config.log.samples), run.folder.samples / f"step-{run.trainer.step:08d}.png"
    with distributed.together():
        if run.main:
            save_grid(images, inside(run.folder.path, path))
    return path


def run_samples(
    run: Run, count: int, check: Callable[[int], None] | None = None, *, first: int = 0, solver: Solver | None = None
) -> Tensor:
    """Samples of the averaged weights, from number `first` on, made by all processes together when the model is sharded.

    `check` is told how many evaluations of the network were made since the last time, each of a batch, and may raise to end it:
    after each of them, on a GPU, where they are recorded, after each batch. Without a `solver` it is the quick one.
    """
    trainer, parts, solver = run.trainer, run.trainer.parts, solver or quick_solver(run.config)
    made, recorded = [], run.trainer.device.type == "cuda"

    def call(*inputs: Any) -> Tensor:
        if check is not None and not recorded:
            check(1)
        return trainer.call(*inputs)

    with run.averaged():
        for _, samples in generate_batches(
            Replay(call, trainer.network),
            trainer.objective,
            parts.source.shape,
            range(first, first + count),
            classes=parts.classes,
            solver=solver,
            seed=run.config.seed,
            device=trainer.device,
            clip=1.0 if parts.source.image else None,
        ):
            made.append(samples)
            if check is not None and recorded:
                check(solver.steps)
    return torch.cat(made)
