"""Training steps a second, all paths side by side: a plain script, this trainer step by step, and its fast path.

    python benchmarks/throughput.py --json benchmarks/results/throughput.jsonl            on a GPU, about ten minutes
    python benchmarks/throughput.py --models tiny --device cpu --batch 8 --warm 0 --blocks 2 --steps 3    to see that it works

Models are those of the benchmark protocol: `small` (9 M parameters) and `paper` (35.7 M), 32 x 32 images, batch 128, on the
device. Every row has a process of its own. All of them get ready side by side; then they are measured one after the other,
alone on the machine. Speed is the median of blocks of steps, with the slowest and the fastest. Set-up is all between imports
and the second step (compilation, recording, choice of kernels), measured in processes of its own: with empty compile caches,
and once more. The arithmetic floor is the time that a step's multiplications and additions would take at the peak of the data
sheet.
"""

import argparse
import contextlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rows import append
from timing import seconds, wait
from torch import nn

from noisewise.data import Synthetic
from noisewise.models.unet import UNet
from noisewise.training.components import Parts, build_parts
from noisewise.training.config import Config
from noisewise.training.fast import graphs
from noisewise.training.options import load_preset
from noisewise.training.parallel import make_accelerator
from noisewise.training.run_folder import environment
from noisewise.training.trainer import Trainer

CHANNELS = {"tiny": 16, "small": 64, "paper": 128}
PATHS = {
    "script, fp32": "diffusers' U-Net, float32 (TF32 convolutions), torch's Adam, EMA in a Python loop",
    "script, bf16": "the same under autocast",
    "plain": "this trainer, bf16, step by step",
    "plain, compiled": "the same with torch.compile",
    "graphs": "compiled and recorded, without our kernels in the network",
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
    parser.add_argument(
        "--setup", default="fast", help="paths whose set-up is measured, separated by semicolons; none if empty"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--gate", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--launcher", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := [one for one in (*args.paths.split(";"), *args.setup.split(";")) if one and one not in PATHS]:
        parser.error(f"unknown path {unknown[0]!r}: choose from {'; '.join(PATHS)}")
    if args.one:
        model, path = args.one.split("/")
        print("ROW " + json.dumps(measure(args, model, path)))
        return
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(args, Path(folder)):
            print(line(row), flush=True)
            if args.json:
                append(args.json, {**row, **environment()})


def rows(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """First set-up, as it fills the compile caches for the others."""
    setups, paths = ([path for path in text.split(";") if path] for text in (args.setup, args.paths))
    models = args.models.split(",")
    yield from setup_rows(args, folder, [(model, path) for model in models for path in setups])
    yield from speed_rows(args, folder, [(model, path) for model in models for path in paths])


def setup_rows(args: argparse.Namespace, folder: Path, wanted: list[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Set-up alone, models side by side: with empty compile caches, then again with what that has left in them."""
    short = argparse.Namespace(**{**vars(args), "blocks": 1, "steps": 1, "warm": 0})
    for caches in ("empty", "filled"):
        for job, (model, path) in [(Job(short, folder, *one), one) for one in wanted]:
            about = {"model": model, "path": path, "batch": args.batch, "caches": caches, "at_once": len(wanted)}
            found = job.answer()
            yield about | {key: found[key] for key in ("setup_seconds", "error") if key in found}


def speed_rows(args: argparse.Namespace, folder: Path, wanted: list[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """All get ready at once, then each has its turn."""
    jobs = [Job(args, folder, *one, gate=folder / str(number)) for number, one in enumerate(wanted)]
    while not all(job.ready() for job in jobs):
        time.sleep(0.1)
    for (model, path), job in zip(wanted, jobs, strict=True):
        yield {"model": model, "path": path, "batch": args.batch, **job.answer()}


class Job:
    """A row in a process of its own, which waits before it measures if it has a gate."""

    def __init__(self, args: argparse.Namespace, folder: Path, model: str, path: str, gate: Path | None = None) -> None:
        command = [sys.executable, __file__, "--one", f"{model}/{path}", "--launcher", str(os.getpid())]
        command += ["--gate", str(gate)] if gate else []
        for name in ("batch", "blocks", "steps", "warm", "device"):
            command += [f"--{name}", str(getattr(args, name))]
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
        self.gate, self.said = gate, tempfile.TemporaryFile("w+")  # noqa: SIM115  as long as the process
        self.process = subprocess.Popen(command, stdout=self.said, stderr=self.said, env={**os.environ, **caches})

    def ready(self) -> bool:
        return self.gate is None or self.gate.with_suffix(".ready").exists() or self.process.poll() is not None

    def answer(self) -> dict[str, Any]:
        """The row that it prints when it may go on, or its last complaint."""
        if self.gate is not None:
            self.gate.with_suffix(".go").touch()
        self.process.wait()
        self.said.seek(0)
        lines = [text for text in self.said.read().splitlines() if text.strip()]
        found = [text[4:] for text in lines if text.startswith("ROW ")]
        return json.loads(found[0]) if found else {"error": (lines or ["no output"])[-1]}


def measure(args: argparse.Namespace, model: str, path: str) -> dict[str, Any]:
    cuda = args.device == "cuda"
    if "any kernel" in path:
        graphs.repeatable_kernels = lambda: torch.backends.cudnn.flags(enabled=True, benchmark=True)
        graphs.fixed_order = contextlib.nullcontext
    told: list[str] = []
    import_all()
    begun = time.perf_counter()
    make = script if path.startswith("script") else ours
    step, network = make(args, model, path, told)
    step()
    wait(args.device)
    ready = time.perf_counter() - begun
    if args.gate:
        args.gate.with_suffix(".ready").touch()
        while not args.gate.with_suffix(".go").exists():
            if os.getppid() != args.launcher:  # it was killed: nobody would ever open the gate
                raise SystemExit("the benchmark that began this process is gone")
            time.sleep(0.05)
    slow = path.startswith(("script", "plain"))
    for _ in range(args.warm // (10 if slow else 1)):
        step()
    count = max(args.steps // (3 if slow else 1), 1)
    rates = [count / seconds(lambda: [step() for _ in range(count)], args.device) for _ in range(args.blocks)]
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
        **({} if args.gate else {"setup_seconds": round(ready, 1)}),  # beside many others it says nothing
        "steps_per_block": count,
        "blocks": args.blocks,
        "told": told,
    }


def import_all() -> None:
    """What is otherwise imported on first use, within the set-up."""
    for name in ("diffusers.models.unets.unet_2d", "torch._dynamo", "torch._inductor.compile_fx"):
        importlib.import_module(name)


def ours(args: argparse.Namespace, model: str, path: str, told: list[str]) -> tuple[Callable[[], None], nn.Module]:
    """A step of this package's trainer."""
    if path == "graphs":
        from noisewise.training.fast import choose

        choose.fuse = lambda _: 0
    fast = path.startswith(("fast", "graphs")) and args.device == "cuda"
    options = [f"--sampler={'adaptive' if 'adaptive' in path else 'uniform'}", f"--compile={'compiled' in path}"]
    trainer = protocol_trainer(args.device, CHANNELS[model], args.batch, fast, told.append, *options)
    return trainer.training_step, trainer.model


def protocol_trainer(device: str, channels: int, batch: int, fast: bool, tell: Callable[[str], None], *options: str) -> Trainer:
    """This package's trainer with the protocol's network, on random images, ready for its first step."""
    options += (f"--batch={batch}", f"--device={device}", f"--fast={'always' if fast else 'never'}", "--log.trackers=[]")
    config: Config = load_preset("cifar10-small", f"--model.options.channels={channels}", *options)
    parts = build_parts(config, synthetic=True)
    parts = Parts(parts.objective, Synthetic((3, 32, 32), count=10_000), parts.model, parts.classes)
    trainer = Trainer(config, parts, make_accelerator(config), tell)
    trainer.warm_up()
    return trainer


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
    if "caches" in row:
        return f"{name} set-up {row['setup_seconds']:.0f} s with {row['caches']} compile caches"
    memory = "" if row["memory_gib"] is None else f"{row['memory_gib']:6.2f} GiB"
    speed = f"{row['steps_per_second']:8.2f} it/s ({row['slowest']:.2f}-{row['fastest']:.2f})"
    return f"{name} {speed} {row['images_per_second']:9.0f} img/s {row['share_of_floor']:6.1%} of the floor {memory}"


if __name__ == "__main__":
    main()
