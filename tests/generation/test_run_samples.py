"""Samples of a run while it trains."""

from dataclasses import replace

import pytest
import torch

from noisewise.generation.images import generate
from noisewise.generation.run_samples import evaluation_solver, headline_solver, quick_solver, run_samples
from noisewise.generation.solvers import Solver, default_solver
from noisewise.models import build_model
from noisewise.processes import DDPM
from noisewise.training.config import EvaluationConfig, ModelConfig
from noisewise.training.run import Run
from tests.training.tiny import DIT, differing, tensors, tiny


def test_the_solvers_of_a_configuration():
    usual, steps = default_solver(DDPM.linear()), replace(default_solver(DDPM.linear()), steps=4)
    config = tiny()
    assert [make(config) for make in (evaluation_solver, headline_solver, quick_solver)] == [usual, steps, steps]
    full, quick = Solver("heun", 5, "karras"), Solver("ddpm", 3, options={"variance": "fixed_large"})
    config = tiny(evaluation=EvaluationConfig(solver=full.spec, quick_solver=quick.spec))
    assert [make(config) for make in (evaluation_solver, headline_solver, quick_solver)] == [full, full, quick]
    too_many = tiny(evaluation=EvaluationConfig(solver="ddim:steps=1001", quick_solver="ddim:steps=1001"))
    for make in (evaluation_solver, headline_solver, quick_solver):
        with pytest.raises(ValueError, match="only 1000 timesteps"):
            make(too_many)


def test_samples_come_from_the_averaged_weights(tmp_path):
    config = tiny(out=str(tmp_path / "run"), model=ModelConfig(name="dit", options=DIT, conditional=True))
    run = Run(replace(config, log=replace(config.log, sample_steps=4)))
    for _ in run.advance():
        pass
    own_weights = tensors(run.trainer, "model")
    images = run_samples(run, 5)
    assert differing(own_weights, tensors(run.trainer, "model")) == []
    solver = replace(default_solver(run.trainer.objective.process), steps=4)
    model = build_model("dit", DIT, shape=(1, 8, 8), classes=10).eval()
    made = {}
    for part in ("ema", "model"):
        model.load_state_dict(run.trainer.tensors()["model"] | run.trainer.tensors()[part])
        with torch.no_grad():
            made[part] = generate(model, run.trainer.objective, (1, 8, 8), 5, classes=10, solver=solver, seed=0)
    assert torch.equal(images, made["ema"])
    assert not torch.allclose(images, made["model"], atol=1e-3)
    run.close()
