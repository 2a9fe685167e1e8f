"""A class-conditional model: labels go through `loss_at` like the data. Labels are dropped now and then, for guidance.

Run it: python examples/class_conditional.py
"""

import torch
from torch import Tensor, nn

import noisewise
from noisewise import DDPM, Objective

CLASSES, NO_LABEL = 6, 6
objective = Objective(DDPM.cosine(), "v")


def data(n: int) -> tuple[Tensor, Tensor]:
    """Six blobs on a circle, each with its label."""
    label = torch.randint(CLASSES, (n,))
    angle = label * (2 * torch.pi / CLASSES)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(n, 2), label


class Network(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.label = nn.Embedding(CLASSES + 1, 16)
        self.layers = nn.Sequential(nn.Linear(20, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x: Tensor, time: Tensor, label: Tensor) -> Tensor:
        phase = time[:, None] / 1000 * torch.pi / 2
        return self.layers(torch.cat([x, phase.sin(), phase.cos(), self.label(label)], 1))


def train(spec: str, steps: int = 600, batch: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """How often each third of the noise levels is drawn in the end; the held-out loss there, with right and wrong labels."""
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    recipe = noisewise.recipe(spec, objective)
    recipe.attach(optimizer)
    for _ in range(steps):
        x0, label = data(batch)
        label = torch.where(torch.rand(batch) < 0.1, NO_LABEL, label)
        draw = recipe.sample(x0)
        losses = objective.losses(model, x0, draw.u, label=label)
        recipe.loss(draw, losses).backward()  # which applies the weighting
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(1)
    u = (torch.arange(15_000) + 0.5) / 15_000
    x0, label = data(len(u))
    noise = torch.randn_like(x0)
    with torch.no_grad():
        right = objective.losses(model, x0, u, noise, label)
        wrong = objective.losses(model, x0, u, noise, (label + 1) % CLASSES)
        return recipe.sampler.density(u).view(3, -1).mean(1), right.view(3, -1).mean(1), wrong.view(3, -1).mean(1)


if __name__ == "__main__":
    torch.set_num_threads(1)  # threads only get in the way of so small a network
    print("thirds of the noise levels            little   medium     much")
    for spec in ("minsnr", "adaptive+minsnr"):
        rows = zip(("drawn", "loss", "loss with wrong labels"), train(spec), strict=True)
        for name, values in rows:
            print(f"{spec:16} {name:22}" + "".join(f"{float(x):9.3f}" for x in values))
    print("Wrong labels do harm: the model uses them. One seed of a toy: it shows that it runs, not which sampler is better.")
