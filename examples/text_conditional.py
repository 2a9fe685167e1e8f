"""A text-conditional model: `cond` is a dict of tensors (any nesting will do), and `take` picks rows of all of it.

Run it: python examples/text_conditional.py
"""

import torch
from torch import Tensor, nn

import noisewise
from noisewise import Flow, Objective, take

WORDS = ["<pad>", "left", "right", "top", "bottom", "far", "near"]
objective = Objective(Flow(), "flow")
Cond = dict[str, Tensor]


def data(n: int) -> tuple[Tensor, Cond]:
    """Points and their captions, such as "near left top": token ids, and a mask since captions differ in length."""
    side, height, far = torch.randint(2, (n,)), torch.randint(3, (n,)), torch.randint(2, (n,))
    x0 = torch.stack([2.0 * side - 1, torch.tensor([1.0, -1.0, 0.0])[height]], 1) * (1 + far)[:, None]
    tokens = torch.stack([6 - far, 1 + side, torch.tensor([3, 4, 0])[height]], 1)
    return x0 + 0.1 * torch.randn(n, 2), {"tokens": tokens, "mask": tokens > 0}


class Network(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), 16)
        self.layers = nn.Sequential(nn.Linear(20, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x: Tensor, time: Tensor, cond: Cond) -> Tensor:
        text = (self.words(cond["tokens"]) * cond["mask"][..., None]).sum(1)
        phase = time[:, None] * torch.pi / 2
        return self.layers(torch.cat([x, phase.sin(), phase.cos(), text], 1))


def train(spec: str, steps: int = 600, batch: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """How often each third of the noise levels is drawn in the end; the held-out loss there, with right and wrong captions."""
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    recipe = noisewise.recipe(spec, objective)
    recipe.attach(optimizer, model)  # lookahead tries steps out
    for _ in range(steps):
        x0, cond = data(batch)

        def loss_at(rows: Tensor | slice, u: Tensor, x0: Tensor = x0, cond: Cond = cond) -> Tensor:
            return objective.losses(model, x0[rows], u, cond=take(cond, rows))

        draw = recipe.sample(x0)
        recipe.loss(draw, loss_at(slice(None), draw.u), loss_at).backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(1)
    u = (torch.arange(15_000) + 0.5) / 15_000
    x0, cond = data(len(u))
    noise, others = torch.randn_like(x0), torch.randperm(len(u))
    with torch.no_grad():
        right = objective.losses(model, x0, u, noise, cond)
        wrong = objective.losses(model, x0, u, noise, take(cond, others))
        return recipe.sampler.density(u).view(3, -1).mean(1), right.view(3, -1).mean(1), wrong.view(3, -1).mean(1)


if __name__ == "__main__":
    torch.set_num_threads(1)  # threads only get in the way of so small a network
    print("thirds of the noise levels                         little   medium     much")
    for spec in ("uniform", "adaptive:estimator=lookahead"):
        rows = zip(("drawn", "loss", "wrong captions"), train(spec), strict=True)
        for name, values in rows:
            print(f"{spec:30} {name:15}" + "".join(f"{float(x):9.3f}" for x in values))
    print("Wrong captions do harm: the model uses them. One seed of a toy: it shows that it runs, not which sampler is better.")
