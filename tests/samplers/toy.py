"""A real, tiny training run: a linear eps-model of 2-D data, so that learning samplers have something to learn from."""

import torch
from torch import Tensor, nn

import noisewise
from noisewise import Objective, Process, Sampler


class Toy:
    """One training run with a sampler; `step()` is the loop of the README."""

    def __init__(
        self, spec: str, process: Process, batch: int = 32, wrap=lambda model: model, data_seed: int = 0, **settings
    ) -> None:
        self.recipe = noisewise.recipe(spec, process, **settings)
        self.sampler: Sampler = self.recipe.sampler
        self.objective = Objective(process, "eps")
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 2))
        self.model = wrap(self.inner)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.sampler.attach(self.model, self.optimizer)
        self.batch = batch
        self.data = torch.Generator().manual_seed(data_seed)
        self.noise = 0  # which noise the next batch sees

    def predict(self, x: Tensor, time: Tensor) -> Tensor:
        scale = 1 / (self.objective.process.steps or 1)
        return self.model(torch.cat([x, time[:, None].float() * scale], 1))

    def step(self) -> tuple:
        x0 = torch.randn(self.batch, 2, generator=self.data) * torch.tensor([2.0, 0.5])
        self.noise += 1

        def loss_at(rows, u):
            return self.objective.losses(self.predict, x0[rows], u, torch.randn_like(x0[rows]))

        torch.manual_seed(self.noise)
        draw = self.sampler.sample(x0)
        losses = loss_at(slice(None), draw.u)
        self.optimizer.zero_grad()
        (draw.weight * self.recipe.weighting.weighted(losses, self.objective, draw.u)).mean().backward()
        with self.sampler.observe(draw, losses.detach(), loss_at):
            self.optimizer.step()
        return draw, losses.detach()

    def run(self, steps: int) -> "Toy":
        for _ in range(steps):
            self.step()
        return self

    def state(self) -> dict:
        return {
            "sampler": self.sampler.state_dict(),
            "model": self.inner.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "data": self.data.get_state(),
            "noise": torch.tensor(self.noise),
        }

    def load(self, state: dict) -> "Toy":
        self.sampler.load_state_dict(state["sampler"])
        self.inner.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.data.set_state(state["data"])
        self.noise = int(state["noise"])
        return self
