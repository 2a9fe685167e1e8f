"""The three lines: points on a spiral, a small network, uniform against adaptive noise levels.

Run it: python examples/plain_loop.py
"""

import torch
from torch import Tensor, nn

import noisewise
from noisewise import DDPM, Objective

objective = Objective(DDPM.linear(), "eps")


def spiral(n: int) -> Tensor:
    angle = 9 * torch.rand(n).sqrt()
    return torch.stack([angle.cos(), angle.sin()], 1) * angle[:, None] / 4 + 0.02 * torch.randn(n, 2)


class Network(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        phase = time[:, None] / 1000 * torch.tensor([1.0, 4.0, 16.0, 64.0])
        return self.layers(torch.cat([x, phase.sin(), phase.cos()], 1))


def train(spec: str, steps: int = 800, batch: int = 128) -> tuple[Tensor, Tensor]:
    """Train with one sampler; how often it draws each fifth of the noise levels, and the held-out loss there."""
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    recipe = noisewise.recipe(spec, objective)
    recipe.attach(optimizer)
    for _ in range(steps):
        x0 = spiral(batch)
        draw = recipe.sample(x0)
        losses = objective.losses(model, x0, draw.u)  # one a sample
        recipe.loss(draw, losses).backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(1)  # the same points and noise for every sampler
    u = (torch.arange(20_000) + 0.5) / 20_000
    with torch.no_grad():
        return recipe.sampler.density(u).view(5, -1).mean(1), objective.losses(model, spiral(len(u)), u).view(5, -1).mean(1)


if __name__ == "__main__":
    torch.set_num_threads(1)  # threads only get in the way of so small a network
    print("noise level u            0-0.2  0.2-0.4  0.4-0.6  0.6-0.8    0.8-1      all")
    for spec in ("uniform", "adaptive"):
        density, loss = train(spec)
        print(f"{spec:9}  drawn    " + "".join(f"{float(x):9.3f}" for x in density))
        print(f"{'':9}  loss     " + "".join(f"{float(x):9.4f}" for x in [*loss, loss.mean()]))
    print("One seed of a toy: it shows what the sampler does, not what it is worth on your data.")
