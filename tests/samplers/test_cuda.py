"""On a GPU: the same draws as on a CPU, and no waiting for the device outside update steps."""

import pytest
import torch

import noisewise
from noisewise import DDPM
from tests.samplers.specs import ALL_SPECS, LEARNERS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SPECS = [spec for spec in ALL_SPECS if "{table}" not in spec]


@pytest.mark.parametrize("spec", SPECS)
def test_draws_are_those_of_the_cpu(spec):
    here, there = noisewise.recipe(spec, DDPM.linear()).sampler, noisewise.recipe(spec, DDPM.linear()).sampler
    x0 = torch.randn(256, 3, 8, 8)
    mine, theirs = here.sample(x0), there.sample(x0.cuda())
    assert theirs.u.is_cuda
    torch.testing.assert_close(mine.u, theirs.u.cpu(), atol=2e-5, rtol=0)
    torch.testing.assert_close(mine.weight, theirs.weight.cpu(), atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("spec", SPECS)
def test_no_host_synchronisation_between_updates(spec):
    sampler = noisewise.recipe(spec, DDPM.linear()).sampler
    for part in sampler.modules():  # updates so far apart that the steps between them can be watched
        for name in ("every", "next_event"):
            if hasattr(part, name):
                setattr(part, name, 10**6)
    model = torch.nn.Linear(1, 1).cuda()
    sampler.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x0, losses = torch.randn(64, 3, 8, 8, device="cuda"), torch.rand(64, device="cuda")

    def loss_at(rows, u):
        return model(u[:, None]).squeeze(1)

    def step():
        draw = sampler.sample(x0)
        with sampler.observe(draw, losses, loss_at):
            pass

    for _ in range(2):  # place tables, build the policy, make the first measurement
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("spec", LEARNERS)
def test_learning_works_on_the_device(spec):
    sampler = noisewise.recipe(spec, DDPM.linear()).sampler
    model = torch.nn.Linear(1, 1).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    sampler.attach(model, optimizer)
    x0 = torch.randn(64, 3, 8, 8, device="cuda")

    def loss_at(rows, u):
        return (model(u[:, None]).squeeze(1) - u - 0.1 * torch.randn_like(u)) ** 2 * (1 + 5 * u)

    for _ in range(20):
        draw = sampler.sample(x0)
        losses = loss_at(slice(None), draw.u)
        optimizer.zero_grad()
        (draw.weight * losses).mean().backward()
        with sampler.observe(draw, losses.detach(), loss_at):
            optimizer.step()
    assert torch.isfinite(sampler.density(torch.rand(100, device="cuda"))).all()
    state = {key: value.cpu() for key, value in sampler.state_dict().items()}
    again = noisewise.recipe(spec, DDPM.linear()).sampler
    again.load_state_dict(state)
    torch.testing.assert_close(again.sample(x0).u, sampler.sample(x0).u)
