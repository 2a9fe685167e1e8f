"""Without a GPU a replay is the call itself; what is computed with it equals a plain loop to the last digit."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from noisewise import DDPM, EDM, Objective
from noisewise.data import open_data
from noisewise.generation.images import generate
from noisewise.generation.replay import Replay, replayed
from noisewise.generation.solvers import default_solver
from noisewise.metrics.heldout import NOISE_SEED, held_out_losses
from noisewise.streams import normals
from noisewise.training.fast.recording import Premise
from tests.models.small_models import CLASSES, SHAPE, batch, small, stirred

OBJECTIVES = [Objective(DDPM.linear()), Objective(EDM(), "edm")]


@pytest.fixture(scope="module")
def model():
    return stirred(small("dit", classes=CLASSES))


def test_on_the_cpu_every_call_is_made(model):
    (x, time), heard = batch(), []

    def call(*inputs):
        heard.append(inputs)
        return model(*inputs)

    replay = Replay(call, model)
    with torch.no_grad():
        found = [replay(x, time, None) for _ in range(4)]
    assert len(heard) == 4
    assert all(torch.equal(one, model(x, time)) for one in found)
    assert (replay.recorded, replay.why_not) == (0, None)


def test_modules_are_replayed_and_functions_are_left_alone(model):
    def function(x, time):
        return model(x, time)

    assert replayed(function) is function
    own = replayed(model)
    assert isinstance(own, Replay)
    assert replayed(own) is own


def test_a_negative_number_of_calls_is_an_error(model):
    with pytest.raises(ValueError, match="after must be >= 0, got -1"):
        Replay(model, model, after=-1)


def parts():
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.BatchNorm2d(4), nn.Dropout())).eval()


def train_a_step(module):
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.add_(1)


@pytest.mark.parametrize("change", [train_a_step, nn.Module.eval, lambda module: module.load_state_dict(parts().state_dict())])
def test_recordings_hold_while_weights_are_changed_in_place(change):
    module = parts()
    premise = Premise(module)
    change(module)
    assert premise.holds()


CHANGES = {
    "another type": nn.Module.double,
    "other parameters": lambda module: module.load_state_dict(parts().state_dict(), assign=True),
    "another buffer": lambda module: setattr(module[1][0], "running_mean", torch.zeros(4)),
    "another part": lambda module: module[1].__setitem__(1, nn.Dropout().eval()),
    "a part less": lambda module: module.__delitem__(0),
    "another mode of a part": lambda module: module[1][1].train(),
    "a hook": lambda module: module[1].register_forward_hook(lambda *_: None),
    "a hook before": lambda module: module[0].register_forward_pre_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_recordings_do_not_hold_where_a_graph_would_go_on_with_what_was(change):
    module = parts()
    premise = Premise(module)
    assert premise.holds()
    CHANGES[change](module)
    assert not premise.holds()


@torch.no_grad()
def test_ddim_equals_its_formula_step_by_step(model):
    objective, process = OBJECTIVES[0], OBJECTIVES[0].process
    solver = replace(default_solver(process), steps=5)
    u = [*solver.grid(process), None]
    labels = torch.arange(6) % CLASSES
    x = float(process.scales(u[0])[1]) * normals(3, torch.arange(6), 0, SHAPE)
    for now, then in pairwise(u):
        alpha, sigma = (scale.expand(6) for scale in process.scales(now))
        eps = model(x, process.time(now).expand(6), labels)
        x0 = ((x - sigma.float().view(-1, 1, 1, 1) * eps) / alpha.float().view(-1, 1, 1, 1)).clamp(-1, 1)
        a, s = (1.0, 0.0) if then is None else (float(scale) for scale in process.scales(then))
        ratio = s / float(sigma[0])
        x = ratio * x + (a - float(alpha[0]) * ratio) * x0
    assert torch.equal(generate(model, objective, SHAPE, 6, solver=solver, seed=3, classes=CLASSES), x)


@torch.no_grad()
@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.prediction)
def test_held_out_losses_equal_a_loop_that_fetches_every_loss(model, objective):
    source, levels, count = open_data("digits", split="test"), 6, 25
    found = held_out_losses(model, objective, source, levels=levels, images=count, classes=CLASSES, batch=10)
    sums = torch.zeros(2, levels, dtype=torch.float64)
    for first in range(0, count, 10):
        rows = np.arange(first, min(first + 10, count))
        values, labels = source.read(rows)
        for level in range(levels):
            noise = normals(NOISE_SEED, torch.from_numpy(rows), level, source.shape)
            u = torch.tensor((level + 0.5) / levels, dtype=torch.float64).float().expand(len(rows))
            losses = objective.losses(model, source.decode(values), u, noise, labels).double()
            sums[:, level] += torch.stack([losses.sum(), losses.square().sum()])
    assert torch.equal(found.loss, sums[0] / count)
    spread = (sums[1] / count - (sums[0] / count) ** 2) * count / (count - 1)
    assert torch.equal(found.error, (spread / count).sqrt())
