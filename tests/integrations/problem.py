"""One tiny training run that every framework has to reproduce bit for bit, and the plain loop that is the reference."""

import hashlib

import torch
from torch import nn

import noisewise
from noisewise import DDPM, Objective

PROCESS = DDPM.linear(100)
OBJECTIVE = Objective(PROCESS)
BATCH, BATCHES = 8, 8  # samples in a batch, batches in an epoch
SPECS = {
    "uniform": "uniform:draws=stratified",
    "adaptive": "adaptive:warmup=2,every=2,strata=10",
    "loss_adaptive": "loss_adaptive:warmup=2,every=2",
    "loss_moment": "loss_moment:history=1,bins=10",
    "reinforce": "adaptive:estimator=reinforce,every=2,strata=10,queue=3",
    "lookahead": "adaptive:estimator=lookahead,horizon=2,strata=4,warmup=2,budget=10,probe=16",
    "gradient_variance": "gradient_variance:every=1,strata=4",
}


def recipe_of(name):
    return noisewise.recipe(SPECS[name], OBJECTIVE)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 2))


def data(rank=0):
    return torch.randn(BATCH * BATCHES, 2, generator=torch.Generator().manual_seed(7 + rank)) * torch.tensor([2.0, 0.5])


def losses_of(model, x0, u):
    return OBJECTIVE.losses(lambda x, time: model(torch.cat([x, time[:, None] / 100], 1)), x0, u)


def seed(epoch, batch):
    """Noise is a function of the batch, in every framework."""
    torch.manual_seed(1000 * epoch + batch)


def digest(state):
    whole = hashlib.sha256()
    for key in sorted(state):
        whole.update(key.encode() + state[key].detach().contiguous().cpu().numpy().tobytes())
    return whole.hexdigest()


def plain(name, *, accumulate=1, epochs=2):
    """The loop with `observe` of docs/distributed.md; the recipe, its draws and the trained network."""
    recipe, model = recipe_of(name), network()
    sampler = recipe.sampler
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sampler.attach(model, optimizer)
    kept, draws, losses = [], [], []
    for epoch in range(epochs):
        for batch, x0 in enumerate(data().split(BATCH)):
            seed(epoch, batch)

            def loss_at(rows, u, x0=x0):
                return losses_of(model, x0[rows], u)

            draws.append(sampler.sample(x0))
            losses.append(loss_at(slice(None), draws[-1].u))
            ((draws[-1].weight * losses[-1]).mean() / accumulate).backward()
            losses[-1] = losses[-1].detach()
            kept.append(draws[-1])
            if len(draws) == accumulate:
                with sampler.observe(draws, losses, loss_at):
                    optimizer.step()
                optimizer.zero_grad()
                draws, losses = [], []
    return recipe, kept, model


def assert_same_run(recipe, draws, model, reference):
    """State of the recipe, draws with their weights and the network are equal, bit for bit."""
    expected_recipe, expected_draws, expected_model = reference
    state, expected = recipe.state_dict(), expected_recipe.state_dict()
    assert state.keys() == expected.keys()
    for key in expected:
        assert torch.equal(state[key], expected[key]), key
    assert len(draws) == len(expected_draws)
    for step, (draw, wanted) in enumerate(zip(draws, expected_draws, strict=True)):
        for field in ("u", "time", "weight", "density"):
            assert torch.equal(getattr(draw, field), getattr(wanted, field)), (step, field)
    for parameter, wanted in zip(model.parameters(), expected_model.parameters(), strict=True):
        assert torch.equal(parameter, wanted)


def accelerated_batch(run, x0):
    """One batch of the loop in docs/accelerate.md, of a run with accelerator, model, optimizer, recipe; returns its draw."""

    def loss_at(rows, u):
        return losses_of(run.model, x0[rows], u)

    with run.accelerator.accumulate(run.model):
        draw = run.recipe.sample(x0)
        run.accelerator.backward(run.recipe.loss(draw, loss_at(slice(None), draw.u), loss_at))
        run.optimizer.step()
        run.optimizer.zero_grad()
    return draw
