"""One-dimensional data: short trajectories (2 channels, 64 points), a convolutional network, EDM.

Run it: python examples/trajectories.py
"""

import torch
from torch import Tensor, nn

import noisewise
from noisewise import EDM, Objective

process = EDM()
objective = Objective(process, "edm", sigma_data=0.5)


def trajectories(n: int, length: int = 64) -> Tensor:
    """Smooth closed curves of different speed and size, with standard deviation 0.5: (n, 2, length)."""
    angle = torch.linspace(0, 2 * torch.pi, length) * torch.randint(1, 4, (n, 1)) + 6.28 * torch.rand(n, 1)
    size = 0.35 + 0.6 * torch.rand(n, 1, 1)
    return size * torch.stack([angle.cos(), (2 * angle).sin()], 1)


class Network(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.enter = nn.Conv1d(4, width, 5, padding=2)
        self.blocks = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2 * d, dilation=d) for d in (1, 2, 4))
        self.leave = nn.Conv1d(width, 2, 5, padding=2)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        level = torch.stack([time, time**2], 1)[..., None].expand(-1, -1, x.shape[-1])  # time is ln(sigma) / 4
        h = self.enter(torch.cat([x, level], 1))
        for block in self.blocks:
            h = h + block(torch.nn.functional.silu(h))
        return self.leave(h)


def train(spec: str, steps: int = 200, batch: int = 32) -> tuple[Tensor, Tensor]:
    """How often each fifth of EDM's noise levels is drawn in the end, and the held-out loss there."""
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    recipe = noisewise.recipe(spec, objective)
    recipe.attach(optimizer)
    for _ in range(steps):
        x0 = trajectories(batch)
        draw = recipe.sample(x0)
        recipe.loss(draw, objective.losses(model, x0, draw.u)).backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(1)
    u = (torch.arange(2000) + 0.5) / 2000
    with torch.no_grad():
        losses = objective.losses(model, trajectories(len(u)), u)
        return recipe.sampler.density(u).view(5, -1).mean(1), losses.view(5, -1).mean(1)


if __name__ == "__main__":
    torch.set_num_threads(1)  # threads only get in the way of so small a network
    middle = process.scales(torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9]))[1]
    print(f"{'sigma':30}" + "".join(f"{float(s):9.3f}" for s in middle))
    for spec in ("uniform", "loss_moment:bins=20"):
        density, loss = train(spec)
        print(f"{spec:20} drawn    " + "".join(f"{float(x):9.3f}" for x in density))
        print(f"{'':20} loss     " + "".join(f"{float(x):9.3f}" for x in loss) + f"   mean {float(loss.mean()):.4f}")
    print("One seed of a toy: it shows what the sampler does, not what it is worth on your data.")
