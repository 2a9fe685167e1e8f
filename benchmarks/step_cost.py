"""What a learning sampler costs in training: time per step over uniform's, on the CIFAR-10 UNet of the papers.

    python benchmarks/step_cost.py --device cuda --channels 128 --json benchmarks/results/step_cost.jsonl [--compile]

Single steps of uniform (with the same loss weighting) and of the sampler alternate in one run on one model, so that clocks,
caches and neighbours are the same for both. Step times have a long tail when the CPU's launches are the limit, so the ratio is
of medians: that of the steps between updates, plus that of an update spread over its interval; with a 90 % range from
resampling. Trials of the look-ahead estimator are timed by themselves and spread over their interval.
"""

import argparse
import platform
import statistics
from pathlib import Path

import diffusers
import torch
from diffusers import UNet2DModel
from rows import append
from timing import seconds

import noisewise
from noisewise import DDPM, Objective
from noisewise.analysis.overhead import Times

SAMPLERS = {
    "adaptive": "adaptive",
    "adaptive+minsnr": "adaptive+minsnr",
    "reinforce": "adaptive:estimator=reinforce",
    "paper_cifar10": "paper_cifar10",
    "paper_cifar10-128": "paper_cifar10:probe_batch=128",
    "loss_moment": "loss_moment",
    "gradient_variance": "gradient_variance",
}


def unet(channels: int) -> UNet2DModel:
    return UNet2DModel(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        block_out_channels=(channels, 2 * channels, 2 * channels, 2 * channels),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        dropout=0.1,
        norm_num_groups=min(32, channels),
    )


class Training:
    """One model, trained on in blocks with whichever sampler is asked for."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device, self.batch = args.device, args.batch
        self.model = unet(args.channels).to(args.device)
        self.network = torch.compile(self.model, dynamic=False) if args.compile else self.model
        fused = args.device == "cuda"
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5, fused=fused)
        self.objective = Objective(DDPM.linear())
        self.images = torch.randn(4 * args.batch, 3, 32, 32, device=args.device)
        self.precision = torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda")

    def step(self, recipe: noisewise.Recipe) -> None:
        x0 = self.images[torch.randint(0, len(self.images), (self.batch,), device=self.device)]

        def loss_at(rows, u):
            with self.precision:
                return self.objective.losses(self.network, x0[rows], u)

        draw = recipe.sampler.sample(x0)
        losses = loss_at(slice(None), draw.u)
        self.optimizer.zero_grad(set_to_none=True)
        (draw.weight * recipe.weighting.weighted(losses, self.objective, draw.u)).mean().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        with recipe.sampler.observe(draw, losses.detach(), loss_at):
            self.optimizer.step()

    def seconds(self, recipe: noisewise.Recipe, steps: int = 1) -> float:
        """Of a step."""
        return seconds(lambda: [self.step(recipe) for _ in range(steps)], self.device) / steps

    def recipe(self, spec: str) -> noisewise.Recipe:
        recipe = noisewise.recipe(spec, self.objective.process)
        recipe.sampler.attach(self.model, self.optimizer)
        return recipe


def compare(training: Training, spec: str, updates: int) -> dict:
    """Single steps of both, in turn; steps with an update of the sampler are timed apart and spread over their interval."""
    weighting = spec.partition("+")[2]
    uniform, other = training.recipe(f"uniform+{weighting}" if weighting else "uniform"), training.recipe(spec)
    every = getattr(getattr(other.sampler, "estimator", other.sampler), "every", 1)
    for _ in range(3 * every):  # warm up: compile, allocate, select for the first time
        training.step(other)
    training.step(uniform)
    plain, between, at_update = [], [], []
    for step in range(every * updates):
        plain.append(training.seconds(uniform))
        (at_update if (step + 1) % every == 0 else between).append(training.seconds(other))
    times = Times(plain, between or at_update, at_update, every)
    return {
        "uniform_ms": round(1e3 * statistics.median(times.plain), 3),
        "between_updates_ms": round(1e3 * statistics.median(times.between), 3),
        "update_ms": round(1e3 * statistics.median(times.update), 3),
        "every": every,
        "ratio": round(times.ratio(), 4),
        "range": [round(end, 4) for end in times.spread(1000)],
        "updates": updates,
    }


def lookahead(training: Training, spec: str, rounds: int) -> dict:
    """The time of one event over that of the training steps it is spread over."""
    recipe = training.recipe(spec)
    estimator, device = recipe.sampler.estimator, torch.device(training.device)
    x0 = training.images[: training.batch]
    recipe.sampler.sample(x0)

    def loss_at(rows, u):
        with training.precision:
            return training.objective.losses(training.network, x0[rows], u)

    uniform = training.recipe("uniform")
    training.seconds(uniform, 20)
    step = training.seconds(uniform, 40)
    events = [
        seconds(lambda: estimator.measure(recipe.sampler, training.batch, device, loss_at), device) for _ in range(rounds)
    ]
    interval = estimator.interval(training.batch)
    return {
        "uniform_ms": round(1e3 * step, 3),
        "event_ms": round(1e3 * statistics.median(events[1:]), 1),
        "interval": interval,
        "ratio": round(1 + statistics.median(events[1:]) / (interval * step), 4),
        "range": [round(1 + t / (interval * step), 4) for t in (min(events[1:]), max(events[1:]))],
        "rounds": rounds - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=6, help="updates of the sampler to time")
    parser.add_argument("--only", help="comma-separated names")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    training = Training(args)
    parameters = sum(p.numel() for p in training.model.parameters())
    environment = {
        "gpu": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "noisewise": noisewise.__version__,
        "parameters": parameters,
        "batch": args.batch,
        "compile": args.compile,
        "precision": "bf16 autocast" if args.device == "cuda" else "fp32",
    }
    print(environment)
    wanted = args.only.split(",") if args.only else [*SAMPLERS, "lookahead"]
    for name in wanted:
        if name == "lookahead":
            spec = "adaptive:estimator=lookahead"
            row = lookahead(training, spec, args.rounds)
        else:
            spec = SAMPLERS[name]
            row = compare(training, spec, args.rounds)
        print(
            f"{name:20s} {row['ratio']:.3f}x uniform's time per step ({row['range'][0]:.3f} to {row['range'][1]:.3f})",
            flush=True,
        )
        if args.json:
            append(args.json, {"sampler": name, "spec": spec, **row, **environment})


if __name__ == "__main__":
    main()
