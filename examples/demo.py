"""A 2-D toy trained twice from the same weights and data, once with each sampler, and drawn as one picture.

    python examples/demo.py --out out/demo [--steps 3000] [--samplers "uniform,adaptive"] [--seeds 3]

About half a minute on two cores. It reports what it measures: on a toy this easy the two may well tie.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from noisewise import DDPM, Monitor, Objective, build

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


def spiral(n: int, generator: torch.Generator) -> Tensor:
    """Two arms of a spiral, standard deviation about 1."""
    r = 2 * torch.rand(n, generator=generator).sqrt()
    angle = 1.2 * torch.pi * r + torch.pi * torch.randint(0, 2, (n,), generator=generator)
    return torch.stack([r * angle.cos(), r * angle.sin()], 1) + 0.08 * torch.randn(n, 2, generator=generator)


class Denoiser(nn.Module):
    """An MLP on Fourier features of the point and of the time."""

    def __init__(self, steps: int, width: int = 128) -> None:
        super().__init__()
        self.steps = steps
        self.register_buffer("frequencies", 2.0 ** torch.arange(3))
        self.net = nn.Sequential(
            nn.Linear(20, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, 2),
        )

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        place = torch.cat([x, 3 * time[:, None] / self.steps], 1)
        angle = (place[:, :, None] * self.frequencies).flatten(1)
        return x + self.net(torch.cat([x, angle.sin(), angle.cos()], 1))  # at much noise the noise is nearly x itself


def train(spec: str, process: DDPM, steps: int, seed: int) -> tuple[nn.Module, Monitor, float]:
    torch.manual_seed(seed)
    model = Denoiser(process.steps)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    objective, recipe, monitor = Objective(process), build(spec, process, seed=seed), Monitor(bins=50)
    sampler = recipe.sampler.attach(model, optimizer)
    data = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    for step in range(steps):
        x0 = spiral(256, data)
        noise = torch.randn(x0.shape, generator=data)

        def loss_at(rows, u, x0=x0, noise=noise):
            return objective.losses(model, x0[rows], u, noise[rows])

        draw = sampler.sample(x0)
        losses = loss_at(slice(None), draw.u)
        optimizer.zero_grad()
        (draw.weight * recipe.weighting.weighted(losses, objective, draw.u)).mean().backward()
        with sampler.observe(draw, losses.detach(), loss_at):
            optimizer.step()
        average.update_parameters(model)
        monitor.update(draw, losses)
        if step % 50 == 0:
            monitor.snapshot(sampler)
        if step % 500 == 499:
            print(
                f"  {spec:24s} seed {seed}  step {step + 1:5d}  loss {losses.mean():.4f}  {time.perf_counter() - start:5.1f} s",
                flush=True,
            )
    return average, monitor, time.perf_counter() - start


@torch.no_grad()
def generate(model: nn.Module, process: DDPM, n: int, seed: int, steps: int = 100) -> Tensor:
    """DDIM, eta = 0."""
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))
    times = torch.linspace(process.steps - 1, 0, steps).round().long()
    for t, following in zip(times, [*times[1:], None], strict=False):
        alpha, sigma = process.scales(process.u_of_time(t.expand(n)))
        eps = model(x, t.expand(n))
        x0 = (x - sigma[:, None] * eps) / alpha[:, None]
        if following is None:
            return x0
        alpha, sigma = process.scales(process.u_of_time(following.expand(n)))
        x = alpha[:, None] * x0 + sigma[:, None] * eps
    return x


def sliced_wasserstein(a: Tensor, b: Tensor, directions: int = 256) -> float:
    """The mean distance between the sorted projections of two sets of equal size."""
    angle = torch.arange(directions) * torch.pi / directions
    axes = torch.stack([angle.cos(), angle.sin()])
    return float((torch.sort(a @ axes, 0).values - torch.sort(b @ axes, 0).values).abs().mean())


def draw_picture(results: dict, truth: Tensor, path: Path) -> None:
    figure = Figure(figsize=(4 * (len(results) + 1), 7), layout="constrained")
    axes = figure.subplots(2, len(results) + 1)
    axes[0, 0].scatter(*truth[:3000].T, s=1, color="#444444")
    axes[0, 0].set_title("data")
    for column, ((spec, runs), colour) in enumerate(zip(results.items(), COLOURS, strict=False), 1):
        samples, monitor, _, distance = runs[0]
        axes[0, column].scatter(*samples[:3000].T, s=1, color=colour)
        axes[0, column].set_title(f"{spec}\ndistance to data {distance:.4f}")
        arrays = monitor.arrays()
        image = axes[1, column].pcolormesh(
            arrays["edges"],
            arrays["step"],
            arrays["density"][:-1],
            cmap="viridis",
            vmin=0,
            vmax=max(2.0, arrays["density"].max()),
        )
        axes[1, column].set(xlabel="u (0: least noise)", ylabel="training step", title="how often each noise level is drawn")
        figure.colorbar(image, ax=axes[1, column], label="times uniform")
        middles = (arrays["edges"][1:] + arrays["edges"][:-1]) / 2
        axes[1, 0].plot(middles, arrays["loss"], color=colour, label=spec)
    axes[1, 0].set(xlabel="u (0: least noise)", ylabel="eps-loss at the end of training", yscale="log")
    axes[1, 0].legend(frameon=False)
    for axis in axes[0]:
        axis.set(xlim=(-2.4, 2.4), ylim=(-2.4, 2.4), aspect="equal")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--samplers", default="uniform,adaptive")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the model is too small to share
    process = DDPM.linear()
    truth = spiral(10_000, torch.Generator().manual_seed(1234))
    floor = sliced_wasserstein(truth, spiral(10_000, torch.Generator().manual_seed(4321)))
    results: dict[str, list] = {}
    for spec in args.samplers.split(","):
        for seed in range(args.seeds):
            model, monitor, seconds = train(spec, process, args.steps, seed)
            samples = generate(model, process, len(truth), seed)
            results.setdefault(spec, []).append((samples, monitor, seconds, sliced_wasserstein(truth, samples)))
    print(f"\n{'sampler':24s} {'sliced Wasserstein distance to the data, a seed each':55s} seconds a run")
    for spec, runs in results.items():
        print(f"{spec:24s} {'  '.join(f'{run[3]:.4f}' for run in runs):55s} {statistics.mean(run[2] for run in runs):.1f}")
    print(f"{'(data against data)':24s} {floor:.4f}")
    draw_picture(results, truth, args.out / "demo.png")
    print(f"\npicture: {args.out / 'demo.png'}")


if __name__ == "__main__":
    main()
