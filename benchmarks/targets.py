"""What each estimator and target does to early, middle and late timesteps: the same run again and again, one thing changed.

    python benchmarks/targets.py --seeds 3 --json benchmarks/results/targets_digits.jsonl          on two CPU cores

One seed means one set of initial weights, one order of data and one stream of noise, whatever the method. Reported for each
third of the timesteps (early: little noise): the share of the draws over all of training, and the held-out loss of the
averaged weights (fixed noise, stratified timesteps) over uniform's. Also the Fréchet distance of generated pixels to the
data's (DDIM, 50 steps), over uniform's: not FID, but a measure of the pictures.
"""

import argparse
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from rows import append
from sklearn.datasets import load_digits
from torch import Tensor, nn

import noisewise
from noisewise import DDPM, PROCESSES, Monitor, Objective
from noisewise.metrics.frechet import features_distance

LR = 1e-3

METHODS = {
    "uniform": "uniform",
    "Min-SNR": "minsnr",
    "loss, plain": "adaptive:estimator=loss,correction=unbiased",
    "loss, Min-SNR": "adaptive:estimator=loss+minsnr",
    "loss, Min-SNR, no importance weight": "adaptive:estimator=loss,target=(minsnr),correction=none",
    "loss, VLB, no importance weight": "adaptive:estimator=loss,target=(vlb:clip=5),correction=none",
    "reinforce as published (VLB)": "paper_cifar10",
    "reinforce, VLB": "adaptive:estimator=reinforce,target=(vlb:clip=5)",
    "reinforce, plain": "adaptive:estimator=reinforce",
    "reinforce, Min-SNR": "adaptive:estimator=reinforce,target=(minsnr)",
    "reinforce, scale-free": "adaptive:estimator=reinforce,scale_free=true",
    "lookahead, VLB": "adaptive:estimator=lookahead,target=(vlb:clip=5)",
    "lookahead, plain": "adaptive:estimator=lookahead",
    "lookahead, Min-SNR": "adaptive:estimator=lookahead,target=(minsnr)",
    "lookahead, scale-free": "adaptive:estimator=lookahead,scale_free=true",
}


class DigitsModel(nn.Module):
    """An MLP on 64 pixels and Fourier features of the time, with the input added to the output (at much noise they agree)."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.pi * 2.0 ** torch.arange(8))
        self.first = nn.Linear(64 + 16, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.last = nn.Linear(width, 64)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        angle = time[:, None] / 1000 * self.frequencies
        h = nn.functional.silu(self.first(torch.cat([x, angle.sin(), angle.cos()], 1)))
        for layer in self.hidden:
            h = h + nn.functional.silu(layer(h))
        return x + self.last(h)


def digits() -> tuple[Tensor, Tensor]:
    """1,500 images to train on and the rest, in [-1, 1]."""
    images = torch.from_numpy(load_digits().data).float() / 8 - 1
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order[:1500]], images[order[1500:]]


def batches(images: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        for rows in torch.randperm(len(images), generator=generator).split(size):
            if len(rows) == size:
                torch.rand(size, generator=generator)  # the draws of mirror images, which digits have none of
                yield images[rows]


def train(method: str, process: DDPM, seed: int, args: argparse.Namespace) -> dict:
    torch.manual_seed(seed)
    (images, test), model = digits(), DigitsModel()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.995))
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    objective = Objective(process)
    recipe = noisewise.recipe(METHODS[method], objective, seed=seed)
    sampler, monitor = recipe.sampler.attach(model, optimizer), Monitor(bins=30, snapshots=25)
    data, start, drawn = batches(images, args.batch, seed), time.perf_counter(), torch.zeros(3)
    for step in range(args.steps):
        x0 = next(data)
        torch.manual_seed(seed * 1_000_003 + step)

        def loss_at(rows, u, x0=x0):
            return objective.losses(model, x0[rows], u)

        for group in optimizer.param_groups:
            group["lr"] = LR * min(1, (step + 1) / 500)
        draw = sampler.sample(x0)
        losses = loss_at(slice(None), draw.u)
        optimizer.zero_grad(set_to_none=True)
        (draw.weight * recipe.weighting.weighted(losses, objective, draw.u)).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with sampler.observe(draw, losses.detach(), loss_at):
            optimizer.step()
        average.update_parameters(model)
        drawn += torch.stack([(draw.u * 3).long() == third for third in range(3)]).sum(1)
        if step % max(args.steps // 25, 1) == 0:
            monitor.snapshot(sampler, x0)
    seconds = time.perf_counter() - start
    curve = [round(value, 6) for value in held_out(test, average.module, objective, args.per_level).tolist()]
    arrays = monitor.arrays()
    return {
        "seconds": round(seconds, 1),
        "drawn": (drawn / drawn.sum()).tolist(),
        "loss": curve,
        "density": arrays["density"].round(3).tolist(),
        "density_steps": arrays["step"].tolist(),
        "frechet": features_distance(generate(average.module, process, 3000, seed), torch.cat([images, test])),
    }


@torch.no_grad()
def held_out(test: Tensor, model: nn.Module, objective: Objective, per_level: int, levels: int = 60) -> Tensor:
    """The plain loss at 60 noise levels, each on the same images with the same noise whatever the method."""
    model.eval()
    losses = []
    for level in range(levels):
        generator = torch.Generator().manual_seed(level)
        x0 = test[torch.randint(0, len(test), (per_level,), generator=generator)]
        noise = torch.randn(x0.shape, generator=generator)
        losses.append(objective.losses(model, x0, torch.full((per_level,), (level + 0.5) / levels), noise).mean())
    return torch.stack(losses)


@torch.no_grad()
def generate(model: nn.Module, process: DDPM, n: int, seed: int, steps: int = 50) -> Tensor:
    """DDIM, eta = 0, for the digits."""
    x = torch.randn(n, 64, generator=torch.Generator().manual_seed(seed))
    times = torch.linspace(process.steps - 1, 0, steps).round().long()
    for t, following in zip(times.tolist(), [*times[1:].tolist(), None], strict=True):
        alpha, sigma = process.scales(process.u_of_time(torch.tensor([t])))
        eps = model(x, torch.full((n,), t))
        x0 = ((x - sigma * eps) / alpha).clamp(-1, 1)
        eps = (x - alpha * x0) / sigma
        if following is None:
            break
        alpha, sigma = process.scales(process.u_of_time(torch.tensor([following])))
        x = alpha * x0 + sigma * eps
    return x0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="linear", choices=["linear", "cosine", "quadratic"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--only", help="comma-free names of methods, separated by ;")
    parser.add_argument("--per-level", type=int, default=200, help="held-out images at each noise level")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    process = PROCESSES[args.schedule]()
    machine = platform.processor() or platform.machine()
    environment = {"torch": torch.__version__, "noisewise": noisewise.__version__, "machine": machine}
    settings = {"task": "digits", "schedule": args.schedule, "steps": args.steps, "batch": args.batch}
    print(f"{'method':38s} seed  draws early/middle/late   loss over uniform's  Fréchet over uniform's")
    for seed in range(args.seeds):
        reference: dict = {}
        for method in args.only.split(";") if args.only else METHODS:
            row = train(method, process, seed, args)
            reference = reference or row
            mine, theirs = (np.reshape(one["loss"], (3, 20)).mean(1) for one in (row, reference))
            ratio = (mine / theirs).tolist()
            line = f"{method:38s} {seed:4d}  {' '.join(f'{share:6.3f}' for share in row['drawn'])}"
            row["frechet_ratio"] = row["frechet"] / reference["frechet"]
            line += f"   {' '.join(f'{value:6.3f}' for value in ratio)}   {row['frechet_ratio']:6.3f}"
            print(f"{line}   {row['seconds']:.0f} s", flush=True)
            row |= {"method": method, "spec": METHODS[method], "seed": seed, "loss_ratio": ratio, **settings, **environment}
            if args.json:
                append(args.json, row)


if __name__ == "__main__":
    main()
