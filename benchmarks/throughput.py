"""Training steps a second, all paths side by side: a plain script, this trainer step by step, and its fast path.

    python benchmarks/throughput.py --json benchmarks/results/throughput.jsonl            on a GPU, about ten minutes
    python benchmarks/throughput.py --models tiny --device cpu --blocks 2 --steps 3       to see that it works

Models are those of the benchmark protocol: `small` (9 M parameters) and `paper` (35.7 M), 32 x 32 images, batch 128. Every row
is measured in a process of its own, on images that lie on the device. Speed is the median of blocks of steps, with the slowest
and the fastest; set-up is all before the first step on the clock (compilation, recording, choice of kernels), without imports.
The arithmetic floor is the time that the multiplications and additions of a step would take at the data sheet's peak.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from noisewise.training.config import Config
from noisewise.training.data import Synthetic
from noisewise.training.fast import graphs
from noisewise.training.folder import environment
from noisewise.training.models.unet import UNet
from noisewise.training.options import load_preset
from noisewise.training.parallel import make_accelerator
from noisewise.training.parts import Parts, build_parts
from noisewise.training.trainer import Trainer

CHANNELS = {"tiny": 16, "small": 64, "paper": 128}
PATHS = {
    "script, fp32": "diffusers' U-Net, float32 (TF32 convolutions), torch's Adam, EMA in a Python loop",
    "script, bf16": "the same under autocast",
    "plain": "this trainer, bf16, step by step",
    "plain, compiled": "the same with torch.compile",
    "graphs": "compiled and recorded, without our kernels",
    "fast": "compiled, recorded, with our kernels: what noisewise train does",
    "fast, adaptive": "the same with the adaptive sampler",
    "fast, any kernel": "fast, with cuDNN choosing kernels by trial, also such as add in no fixed order",
}
PEAK = 989e12  # dense bf16 operations a second of an H100 or H200, by the data sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="small,paper")
    parser.add_argument("--paths", default=";".join(PATHS), help="separated by semicolons")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100, help="in a block; a third of it for the slow paths")
    parser.add_argument("--warm", type=int, default=300, help="steps before the first block: adaptive samplers begin late")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        model, path = args.one.split("/")
        print("ROW " + json.dumps(measure(args, model, path)))
        return
    rows = []
    for model in args.models.split(","):
        for path in args.paths.split(";"):
            row = in_own_process(args, model, path)
            rows.append(row)
            print(line(row), flush=True)
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps({**row, **environment()}) + "\n")


def in_own_process(args: argparse.Namespace, model: str, path: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", f"{model}/{path}"]
    for name in ("batch", "blocks", "steps", "warm", "device"):
        command += [f"--{name}", str(getattr(args, name))]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    found = [text[4:] for text in done.stdout.splitlines() if text.startswith("ROW ")]
    if not found:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"model": model, "path": path, "batch": args.batch, "error": last}
    return json.loads(found[0])


def measure(args: argparse.Namespace, model: str, path: str) -> dict[str, Any]:
    cuda = args.device == "cuda"
    if "any kernel" in path:
        graphs.repeatable_kernels = lambda: torch.backends.cudnn.flags(benchmark=True)
    told: list[str] = []
    start = time.perf_counter()
    make = script if path.startswith("script") else ours
    step, network = make(args, model, path, told)
    step()
    wait(cuda)
    ready = time.perf_counter() - start
    slow = path.startswith(("script", "plain"))
    for _ in range(args.warm // (10 if slow else 1)):
        step()
    rates, count = [], max(args.steps // (3 if slow else 1), 1)
    for _ in range(args.blocks):
        wait(cuda)
        begun = time.perf_counter()
        for _ in range(count):
            step()
        wait(cuda)
        rates.append(count / (time.perf_counter() - begun))
    middle, operations = statistics.median(rates), operations_of(model, args.batch)
    return {
        "model": model,
        "path": path,
        "what": PATHS[path],
        "batch": args.batch,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "steps_per_second": round(middle, 3),
        "slowest": round(min(rates), 3),
        "fastest": round(max(rates), 3),
        "images_per_second": round(middle * args.batch, 1),
        "operations_per_step": operations,
        "share_of_floor": round(middle * operations / PEAK, 4),
        "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if cuda else None,
        "setup_seconds": round(ready, 1),
        "steps_per_block": count,
        "blocks": args.blocks,
        "told": told,
    }


def wait(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()


def ours(args: argparse.Namespace, model: str, path: str, told: list[str]) -> tuple[Callable[[], None], nn.Module]:
    """A step of this package's trainer."""
    sampler = "adaptive" if "adaptive" in path else "uniform"
    fast = "always" if path.startswith(("fast", "graphs")) and args.device == "cuda" else "never"
    options = [
        f"--sampler={sampler}",
        f"--batch={args.batch}",
        f"--device={args.device}",
        f"--fast={fast}",
        "--log.trackers=[]",
    ]
    options += [f"--model.options.channels={CHANNELS[model]}", f"--compile={'compiled' in path}"]
    config: Config = load_preset("cifar10-small", *options)
    if path == "graphs":
        from noisewise.training import trainer as module

        module.fuse = lambda _: 0
    parts = build_parts(config, synthetic=True)
    parts = Parts(parts.objective, Synthetic((3, 32, 32), count=10_000), parts.model, parts.classes)
    trainer = Trainer(config, parts, make_accelerator(config), told.append)
    trainer.warm_up()
    return trainer.training_step, trainer.model


def script(args: argparse.Namespace, model: str, path: str, told: list[str]) -> tuple[Callable[[], None], nn.Module]:
    """A step as most training scripts have it."""
    device = torch.device(args.device)
    network = UNet((3, 32, 32), channels=CHANNELS[model]).to(device)
    average = UNet((3, 32, 32), channels=CHANNELS[model]).to(device)
    average.load_state_dict(network.state_dict())
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-4)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, device=device), 0)
    images = torch.randint(0, 256, (10_000, 3, 32, 32), dtype=torch.uint8, device=device)

    def step() -> None:
        x = images[torch.randint(0, len(images), (args.batch,), device=device)].float() / 127.5 - 1
        noise, t = torch.randn_like(x), torch.randint(0, 1000, (args.batch,), device=device)
        signal = alphas[t].view(-1, 1, 1, 1)
        with torch.autocast(device.type, torch.bfloat16, enabled="bf16" in path):
            predicted = network(signal.sqrt() * x + (1 - signal).sqrt() * noise, t)
            loss = nn.functional.mse_loss(predicted.float(), noise)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), network.parameters(), strict=True):
                mine.mul_(0.9995).add_(theirs, alpha=0.0005)

    return step, network


def operations_of(model: str, batch: int) -> int:
    """Multiplications and additions of a forward and backward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    network = UNet((3, 32, 32), channels=CHANNELS[model])
    with FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, 3, 32, 32), torch.zeros(1)).sum().backward()
    return counter.get_total_flops() * batch


def line(row: dict[str, Any]) -> str:
    name = f"{row['model']:6s} {row['path']:20s}"
    if "error" in row:
        return f"{name} failed: {row['error']}"
    memory = "" if row["memory_gib"] is None else f"{row['memory_gib']:6.2f} GiB"
    speed = f"{row['steps_per_second']:8.2f} it/s ({row['slowest']:.2f}-{row['fastest']:.2f})"
    return (
        f"{name} {speed} {row['images_per_second']:9.0f} img/s"
        f" {row['share_of_floor']:6.1%} of the floor {memory}  set-up {row['setup_seconds']:.0f} s"
    )


if __name__ == "__main__":
    main()
