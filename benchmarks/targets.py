"""What each estimator and target does to early, middle and late timesteps: the same run again and again, one thing changed.

    python benchmarks/targets.py digits --seeds 3 --json benchmarks/results/targets_digits.jsonl          on two CPU cores
    python benchmarks/targets.py cifar10 --data DIR --device cuda --json benchmarks/results/targets_cifar10.jsonl

One seed means one set of initial weights, one order of data and one stream of noise, whatever the method. Reported for each
third of the timesteps (early: little noise): the share of the draws over all of training, and the held-out loss of the
averaged weights (fixed noise, stratified timesteps) over uniform's. For digits also the Fréchet distance of generated
pixels to the data's (DDIM, 50 steps), over uniform's: not FID, but a measure of the pictures.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import noisewise
from noisewise import DDPM, PROCESSES, Monitor, Objective

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


class Task:
    """Data, model and settings of one of the two benchmarks."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = args.device
        if args.task == "digits":
            from sklearn.datasets import load_digits

            images = torch.from_numpy(load_digits().data).float() / 8 - 1
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
            self.train, self.test = images[order[:1500]], images[order[1500:]]
            self.lr, self.ema, self.steps, self.flip = 1e-3, 0.995, args.steps or 2000, False
        else:
            paths = sorted(Path(args.data).glob("data_batch_*.bin"))
            records = torch.cat([torch.from_numpy(np.fromfile(path, np.uint8)).view(-1, 3073) for path in paths])
            images = records[:, 1:].view(-1, 3, 32, 32)
            self.train, self.test = images[:-1000].to(args.device), images[-1000:].to(args.device)
            self.lr, self.ema, self.steps, self.flip = 2e-4, 0.9995, args.steps or 3000, True
        self.name, self.batch = args.task, args.batch
        self.compile, self.per_level = args.compile, args.per_level
        self.precision = torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda")

    def model(self) -> nn.Module:
        if self.name == "digits":
            return DigitsModel()
        from step_cost import unet

        return unet(64)

    def scaled(self, images: Tensor) -> Tensor:
        return images if images.is_floating_point() else images.float() / 127.5 - 1

    def batches(self, seed: int) -> Iterator[Tensor]:
        generator = torch.Generator(self.device).manual_seed(seed)
        while True:
            for rows in torch.randperm(len(self.train), generator=generator, device=self.device).split(self.batch):
                if len(rows) == self.batch:
                    x0 = self.scaled(self.train[rows])
                    mirrored = torch.rand(len(x0), generator=generator, device=self.device) < 0.5 * self.flip
                    yield torch.where(mirrored.view(-1, 1, 1, 1), x0.flip(-1), x0) if self.flip else x0


def train(task: Task, method: str, process: DDPM, seed: int) -> dict:
    torch.manual_seed(seed)
    model = task.model().to(task.device)
    network = torch.compile(model, dynamic=False) if task.compile else model
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(task.ema))
    optimizer = torch.optim.Adam(model.parameters(), lr=task.lr, fused=task.device == "cuda")
    objective = Objective(process)
    recipe = noisewise.recipe(METHODS[method], objective, seed=seed)
    sampler, monitor = recipe.sampler.attach(model, optimizer), Monitor(bins=30, snapshots=25)
    batches, start, drawn = task.batches(seed), time.perf_counter(), torch.zeros(3, device=task.device)
    for step in range(task.steps):
        x0 = next(batches)
        torch.manual_seed(seed * 1_000_003 + step)

        def loss_at(rows, u, x0=x0):
            with task.precision:
                return objective.losses(network, x0[rows], u)

        for group in optimizer.param_groups:
            group["lr"] = task.lr * min(1, (step + 1) / 500)
        draw = sampler.sample(x0)
        losses = loss_at(slice(None), draw.u)
        optimizer.zero_grad(set_to_none=True)
        (draw.weight * recipe.weighting.weighted(losses, objective, draw.u)).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with sampler.observe(draw, losses.detach(), loss_at):
            optimizer.step()
        average.update_parameters(model)
        drawn += torch.stack([(draw.u * 3).long() == third for third in range(3)]).sum(1)
        if step % max(task.steps // 25, 1) == 0:
            monitor.snapshot(sampler, x0)
    seconds = time.perf_counter() - start
    curve = [round(value, 6) for value in held_out(task, average.module, objective).tolist()]
    result = {"seconds": round(seconds, 1), "drawn": (drawn / drawn.sum()).tolist(), "loss": curve}
    arrays = monitor.arrays()
    result |= {"density": arrays["density"].round(3).tolist(), "density_steps": arrays["step"].tolist()}
    if task.name == "digits":
        result["frechet"] = frechet(generate(average.module, process, 3000, seed), torch.cat([task.train, task.test]))
    return result


@torch.no_grad()
def held_out(task: Task, model: nn.Module, objective: Objective, levels: int = 60) -> Tensor:
    """The plain loss at 60 noise levels, each on the same images with the same noise whatever the method."""
    model.eval()
    losses, per_level = [], task.per_level
    for level in range(levels):
        generator = torch.Generator(task.device).manual_seed(level)
        rows = torch.randint(0, len(task.test), (per_level,), generator=generator, device=task.device)
        x0 = task.scaled(task.test[rows])
        noise = torch.randn(x0.shape, generator=generator, device=task.device)
        u = torch.full((per_level,), (level + 0.5) / levels, device=task.device)
        with task.precision:
            losses.append(objective.losses(model, x0, u, noise).mean())
    return torch.stack(losses).cpu()


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


def frechet(a: Tensor, b: Tensor) -> float:
    """Between Gaussians fitted to the pixels."""
    (m1, c1), (m2, c2) = ((x.double().mean(0), x.double().T.cov()) for x in (a, b))
    values, vectors = torch.linalg.eigh(c1)
    root = vectors @ torch.diag(values.clamp(min=0).sqrt()) @ vectors.T
    cross = torch.linalg.eigvalsh(root @ c2 @ root).clamp(min=0).sqrt().sum()
    return float((m1 - m2).square().sum() + c1.trace() + c2.trace() - 2 * cross)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["digits", "cifar10"])
    parser.add_argument("--data", help="the folder of CIFAR-10's data_batch_*.bin")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--schedule", default="linear", choices=["linear", "cosine", "quadratic"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--only", help="comma-free names of methods, separated by ;")
    parser.add_argument("--per-level", type=int, default=200, help="held-out images at each noise level")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    task, process = Task(args), PROCESSES[args.schedule]()
    machine = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    environment = {"torch": torch.__version__, "noisewise": noisewise.__version__, "machine": machine}
    settings = {"task": args.task, "schedule": args.schedule, "steps": task.steps, "batch": task.batch, "compile": args.compile}
    print(f"{'method':38s} seed  draws early/middle/late   loss over uniform's  Fréchet over uniform's")
    for seed in range(args.seeds):
        reference: dict = {}
        for method in args.only.split(";") if args.only else METHODS:
            row = train(task, method, process, seed)
            reference = reference or row
            ratio = [
                float(
                    np.mean(row["loss"][20 * third : 20 * third + 20])
                    / np.mean(reference["loss"][20 * third : 20 * third + 20])
                )
                for third in range(3)
            ]
            line = f"{method:38s} {seed:4d}  {' '.join(f'{share:6.3f}' for share in row['drawn'])}"
            line += f"   {' '.join(f'{value:6.3f}' for value in ratio)}"
            if "frechet" in row:
                row["frechet_ratio"] = row["frechet"] / reference["frechet"]
                line += f"   {row['frechet_ratio']:6.3f}"
            print(f"{line}   {row['seconds']:.0f} s", flush=True)
            row |= {"method": method, "spec": METHODS[method], "seed": seed, "loss_ratio": ratio, **settings, **environment}
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
