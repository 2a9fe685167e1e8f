"""The solvers that a configuration plans for its evaluations."""

from dataclasses import replace

from noisewise.generation.solvers import Solver, default_solver
from noisewise.processes import Process
from noisewise.spec import build_process
from noisewise.training.config import Config


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
