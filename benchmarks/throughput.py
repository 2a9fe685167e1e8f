"""Training steps a second, all paths side by side: a plain script, this trainer step by step, and its fast path.

    python benchmarks/throughput.py --json benchmarks/results/throughput.jsonl            on a GPU, about ten minutes
    python benchmarks/throughput.py --quick --models dit-b                                three paths in about a minute
    python benchmarks/throughput.py --models dit-xl --at-once 1 --paths "script, compiled;fast"    large ones one by one
    python benchmarks/throughput.py --models tiny --device cpu --batch 8 --warm 0 --blocks 2 --steps 3    to see that it works

Models are those of the benchmark protocol: `small` (9 M parameters) and `paper` (35.7 M), 32 x 32 images, batch 128, on the
device; `digits` and `ldm` are the presets digits and celebahq-ldm, with their batches. `dit-b`, `dit-xl` and `uvit-h` are the
papers' transformers (patches of 2) for 32 x 32 x 4 latents of 1000 classes with a rectified flow, batch 256. Every row has a
process of its own. As many as `--at-once` says get ready side by side (all of them, unless told: transformers of this size
need the memory for themselves); then they are measured one after the other, alone on the machine. Speed is the median of
blocks of steps, with the slowest and the fastest. Set-up is all between imports and the second step (compilation, recording,
choice of kernels), measured in processes of its own: with empty compile caches, and once more. The arithmetic floor is the
time that a step's multiplications and additions would take at the peak of the data sheet.
"""

import argparse
import copy
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
from torch import Tensor, nn

from noisewise.data import Synthetic
from noisewise.models.dit import DiT
from noisewise.models.transformer import Attention
from noisewise.models.unet import UNet
from noisewise.models.uvit import UViT
from noisewise.training.components import Parts, build_parts
from noisewise.training.config import Config
from noisewise.training.options import load_preset
from noisewise.training.parallel import make_accelerator
from noisewise.training.run_folder import environment
from noisewise.training.trainer import Trainer

CHANNELS = {"tiny": 16, "small": 64, "paper": 128}  # of the protocol's U-Nets
PRESETS = {"digits": "digits", "ldm": "celebahq-ldm"}  # other U-Nets
TRANSFORMERS: dict[str, tuple[type[DiT] | type[UViT], dict[str, Any]]] = {
    "dit-tiny": (DiT, {"width": 32, "depth": 2, "heads": 2}),
    "dit-b": (DiT, {"width": 768, "depth": 12, "heads": 12}),
    "dit-xl": (DiT, {"width": 1152, "depth": 28, "heads": 16}),
    "uvit-h": (UViT, {"width": 1152, "depth": 29, "heads": 16, "final_conv": False}),
}
MODELS = (*CHANNELS, *PRESETS, *TRANSFORMERS)
LATENTS, CLASSES = (4, 32, 32), 1000
TIMES = 1000.0  # time_scale: a flow's times lie in [0, 1]
PATHS = {
    "script, fp32": "the network in float32 (TF32 convolutions), torch's Adam, EMA in a Python loop",
    "script, bf16": "the same under autocast",
    "script, compiled": "the same under autocast, with torch.compile",
    "plain": "this trainer, bf16, step by step",
    "plain, compiled": "the same with torch.compile",
    "graphs": "compiled and recorded, without our kernels in the network",
    "fast": "compiled, recorded, with our kernels: what noisewise train does",
    "fast, adaptive": "the same with the adaptive sampler",
    "fast, any kernel": "fast, with deterministic: false",
}
QUICK = {"paths": "script, bf16;script, compiled;fast", "blocks": 3, "steps": 12, "warm": 6, "setup": ""}
KERNELS = 40  # that a profile names
PEAK = 989e12  # dense bf16 operations a second of an H100 or H200, by the data sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="small,paper")
    parser.add_argument("--paths", help="separated by semicolons; by default all")
    parser.add_argument("--batch", type=int, help="by default 128, 256 for transformers, and that of a preset")
    parser.add_argument("--blocks", type=int, help="by default 7")
    parser.add_argument("--steps", type=int, help="in a block, 100 by default; a third of it for the slow paths of U-Nets")
    parser.add_argument("--warm", type=int, help="steps before the first block, 300 by default: adaptive samplers begin late")
    parser.add_argument(
        "--setup", help="paths whose set-up is measured, separated by semicolons, by default fast; none if empty"
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"other defaults: {', '.join(f'{k} {v!r}' for k, v in QUICK.items())}"
    )
    parser.add_argument("--profile", action="store_true", help="name the kernels that take most of a step")
    parser.add_argument("--at-once", type=int, default=0, help="processes that get ready side by side; 0 for all")
    parser.add_argument("--caches", type=Path, help="a folder of compile caches to keep, for a second run without the wait")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--gate", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--launcher", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    usual = {"paths": ";".join(PATHS), "blocks": 7, "steps": 100, "warm": 300, "setup": "fast", **(QUICK if args.quick else {})}
    for name, value in usual.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if unknown := [one for one in args.models.split(",") if one not in MODELS]:
        parser.error(f"unknown model {unknown[0]!r}: choose from {', '.join(MODELS)}")
    if unknown := [one for one in (*args.paths.split(";"), *args.setup.split(";")) if one and one not in PATHS]:
        parser.error(f"unknown path {unknown[0]!r}: choose from {'; '.join(PATHS)}")
    if args.caches and args.setup:
        parser.error('set-up is measured with caches that are empty at first: leave out --caches, or add --setup ""')
    if args.one:
        model, path = args.one.split("/")
        print("ROW " + json.dumps(measure(args, model, path)))
        return
    with tempfile.TemporaryDirectory() as folder:
        args.caches = args.caches or Path(folder)
        for row in rows(args, Path(folder)):
            print(line(row), flush=True)
            if args.json:
                append(args.json, {**row, **environment()})


def rows(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """First set-up, as it fills the compile caches for the others."""
    setups, paths = ([path for path in text.split(";") if path] for text in (args.setup, args.paths))
    models = args.models.split(",")
    yield from setup_rows(args, [(model, path) for model in models for path in setups])
    yield from speed_rows(args, folder, [(model, path) for model in models for path in paths])


def setup_rows(args: argparse.Namespace, wanted: list[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Set-up alone, models side by side: with empty compile caches, then again with what that has left in them."""
    short = argparse.Namespace(**{**vars(args), "blocks": 1, "steps": 1, "warm": 0})
    for caches in ("empty", "filled"):
        for group in groups(wanted, args.at_once):
            for job, (model, path) in [(Job(short, *one), one) for one in group]:
                about = {"model": model, "path": path, "batch": batch_of(args, model), "caches": caches, "at_once": len(group)}
                found = job.answer()
                yield about | {key: found[key] for key in ("setup_seconds", "error") if key in found}


def speed_rows(args: argparse.Namespace, folder: Path, wanted: list[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Those of a group get ready at once, then each has its turn; one that is alone does not wait."""
    for number, group in enumerate(groups(wanted, args.at_once)):
        gates = [None] if len(group) == 1 else [folder / f"{number}-{place}" for place in range(len(group))]
        jobs = [Job(args, *one, gate=gate) for one, gate in zip(group, gates, strict=True)]
        while not all(job.ready() for job in jobs):
            time.sleep(0.1)
        for (model, path), job in zip(group, jobs, strict=True):
            yield {"model": model, "path": path, "batch": batch_of(args, model), **job.answer()}


def groups(wanted: list[tuple[str, str]], at_once: int) -> list[list[tuple[str, str]]]:
    size = at_once or max(len(wanted), 1)
    return [wanted[first : first + size] for first in range(0, len(wanted), size)]


def batch_of(args: argparse.Namespace, model: str) -> int:
    if model in PRESETS:
        return args.batch or load_preset(PRESETS[model]).batch
    return args.batch or (256 if model in TRANSFORMERS else 128)


class Job:
    """A row in a process of its own, which waits before it measures if it has a gate."""

    def __init__(self, args: argparse.Namespace, model: str, path: str, gate: Path | None = None) -> None:
        command = [sys.executable, __file__, "--one", f"{model}/{path}", "--launcher", str(os.getpid())]
        command += ["--gate", str(gate)] if gate else []
        for name in ("batch", "blocks", "steps", "warm", "device"):
            command += [f"--{name}", str(getattr(args, name))] if getattr(args, name) is not None else []
        command += ["--profile"] if args.profile else []
        caches = {f"{name.upper()}_CACHE_DIR": str(args.caches / name) for name in ("torchinductor", "triton")}
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
    told: list[str] = []
    import_all()
    begun = time.perf_counter()
    make = script if path.startswith("script") else ours
    step, network = make(args, model, path, told)
    step()
    wait(args.device)
    ready = time.perf_counter() - begun
    if args.gate:
        if cuda:
            torch.cuda.empty_cache()  # for those who are not ready yet
        args.gate.with_suffix(".ready").touch()
        while not args.gate.with_suffix(".go").exists():
            if os.getppid() != args.launcher:  # it was killed: nobody would ever open the gate
                raise SystemExit("the benchmark that began this process is gone")
            time.sleep(0.05)
    slow = path.startswith(("script", "plain")) and model not in TRANSFORMERS
    for _ in range(args.warm // (10 if slow else 1)):
        step()
    count = max(args.steps // (3 if slow else 1), 1)
    rates = [count / seconds(lambda: [step() for _ in range(count)], args.device) for _ in range(args.blocks)]
    batch, middle = batch_of(args, model), statistics.median(rates)
    operations = operations_of(model, batch)
    return {
        "model": model,
        "path": path,
        "what": PATHS[path],
        "batch": batch,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "steps_per_second": round(middle, 3),
        "slowest": round(min(rates), 3),
        "fastest": round(max(rates), 3),
        "images_per_second": round(middle * batch, 1),
        "operations_per_step": operations,
        "tflops": round(middle * operations / 1e12, 1),
        "share_of_floor": round(middle * operations / PEAK, 4),
        "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if cuda else None,
        **({} if args.gate else {"setup_seconds": round(ready, 1)}),  # beside many others it says nothing
        "steps_per_block": count,
        "blocks": args.blocks,
        "told": told,
        **({"kernels": kernels_of(step)} if args.profile and cuda else {}),
    }


def kernels_of(step: Callable[[], None], steps: int = 3) -> list[tuple[str, float, float]]:
    """The kernels that take most of a step: name, microseconds and launches."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
    except RuntimeError as error:  # the speed is known all the same
        return [(f"no profile: {error}"[:110], 0.0, 0.0)]
    on_device = [event for event in profile.key_averages() if event.self_device_time_total > 0]  # not calls of the host
    found = sorted(on_device, key=lambda event: -event.self_device_time_total)[:KERNELS]
    return [(event.key[:110], round(event.self_device_time_total / steps, 1), event.count / steps) for event in found]


def import_all() -> None:
    """What is otherwise imported on first use, within the set-up."""
    for name in ("diffusers.models.unets.unet_2d", "torch._dynamo", "torch._inductor.compile_fx"):
        importlib.import_module(name)


def ours(args: argparse.Namespace, model: str, path: str, told: list[str]) -> tuple[Callable[[], None], nn.Module]:
    """A step of this package's trainer."""
    if path == "graphs":
        from noisewise.training.fast import GraphedStep, choose

        choose.fuse, choose.fuse_transformer, GraphedStep.as_a_whole = (lambda _: 0), (lambda _: False), True
    fast = path.startswith(("fast", "graphs")) and args.device == "cuda"
    options = [f"--sampler={'adaptive' if 'adaptive' in path else 'uniform'}", f"--compile={'compiled' in path}"]
    options += [f"--deterministic={'any kernel' not in path}"]
    batch = batch_of(args, model)
    if model in TRANSFORMERS:
        trainer = transformer_trainer(args.device, model, batch, fast, told.append, *options)
    elif model in PRESETS:
        trainer = unet_trainer(args.device, PRESETS[model], batch, fast, told.append, *options)
    else:
        trainer = protocol_trainer(args.device, CHANNELS[model], batch, fast, told.append, *options)
    return trainer.training_step, trainer.model


def protocol_trainer(device: str, channels: int, batch: int, fast: bool, tell: Callable[[str], None], *options: str) -> Trainer:
    """This package's trainer with the protocol's network, on random images, ready for its first step."""
    return unet_trainer(device, "cifar10-small", batch, fast, tell, f"--model.options.channels={channels}", *options)


def unet_trainer(device: str, preset: str, batch: int, fast: bool, tell: Callable[[str], None], *options: str) -> Trainer:
    """The same with the network and the settings of a preset."""
    options += (f"--batch={batch}", f"--device={device}", f"--fast={'always' if fast else 'never'}", "--log.trackers=[]")
    config: Config = load_preset(preset, *options)
    parts = build_parts(config, synthetic=True)
    data = Synthetic(parts.source.shape, count=10_000, floats=not parts.source.image)
    parts = Parts(parts.objective, data, parts.model, parts.classes)
    trainer = Trainer(config, parts, make_accelerator(config), tell)
    trainer.warm_up()
    return trainer


def transformer_trainer(device: str, model: str, batch: int, fast: bool, tell: Callable[[str], None], *options: str) -> Trainer:
    """The same with a transformer on random latents."""
    options += (f"--batch={batch}", f"--device={device}", f"--fast={'always' if fast else 'never'}", "--log.trackers=[]")
    options += ("--process=flow", "--prediction=flow", "--data.flip=false", "--model.conditional=true")
    kind, settings = TRANSFORMERS[model]
    settings = json.dumps({**settings, "time_scale": TIMES})
    config = load_preset("cifar10-small", *options, f"--model.name={kind.__name__.lower()}", f"--model.options={settings}")
    network = transformer(model)
    latents = Synthetic(LATENTS, CLASSES, count=10_000, floats=True)
    trainer = Trainer(config, Parts(config.objective(), latents, network, CLASSES), make_accelerator(config), tell)
    trainer.warm_up()
    return trainer


def unet(model: str) -> UNet:
    if model in CHANNELS:
        return UNet((3, 32, 32), channels=CHANNELS[model])
    config = load_preset(PRESETS[model])
    return UNet(tuple(config.data.shape), **config.model.options)


def transformer(model: str) -> nn.Module:
    kind, settings = TRANSFORMERS[model]
    return kind(LATENTS, CLASSES, time_scale=TIMES, **settings)


def script(args: argparse.Namespace, model: str, path: str, told: list[str]) -> tuple[Callable[[], None], nn.Module]:
    """A step as most training scripts have it."""
    device, batch = torch.device(args.device), batch_of(args, model)
    if model in TRANSFORMERS:
        return transformer_script(device, model, batch, path)
    network = unet(model).to(device)
    average = copy.deepcopy(network)
    call = torch.compile(network) if "compiled" in path else network
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-4)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, device=device), 0)
    images = torch.randint(0, 256, (10_000, *network.shape), dtype=torch.uint8, device=device)

    def step() -> None:
        x = images[torch.randint(0, len(images), (batch,), device=device)].float() / 127.5 - 1
        noise, t = torch.randn_like(x), torch.randint(0, 1000, (batch,), device=device)
        signal = alphas[t].view(-1, 1, 1, 1)
        with torch.autocast(device.type, torch.bfloat16, enabled="fp32" not in path):
            predicted = call(signal.sqrt() * x + (1 - signal).sqrt() * noise, t)
            loss = nn.functional.mse_loss(predicted.float(), noise)
        move(network, average, optimizer, loss)

    return step, network


def transformer_script(device: torch.device, model: str, batch: int, path: str) -> tuple[Callable[[], None], nn.Module]:
    """The same for a rectified flow over latents."""
    network = transformer(model).to(device)
    average = copy.deepcopy(network)
    call = torch.compile(network) if "compiled" in path else network
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4, fused=device.type == "cuda")
    latents, labels = torch.randn(10_000, *LATENTS, device=device), torch.randint(0, CLASSES, (10_000,), device=device)

    def step() -> None:
        chosen = torch.randint(0, len(latents), (batch,), device=device)
        x, noise, t = latents[chosen], torch.randn(batch, *LATENTS, device=device), torch.rand(batch, device=device)
        between = (1 - t).view(-1, 1, 1, 1) * x + t.view(-1, 1, 1, 1) * noise
        with torch.autocast(device.type, torch.bfloat16, enabled="fp32" not in path):
            predicted = call(between, t, labels[chosen])
            loss = nn.functional.mse_loss(predicted.float(), noise - x)
        move(network, average, optimizer, loss)

    return step, network


def move(network: nn.Module, average: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        for mine, theirs in zip(average.parameters(), network.parameters(), strict=True):
            mine.mul_(0.9995).add_(theirs, alpha=0.0005)


def operations_of(model: str, batch: int) -> int:
    """Multiplications and additions of a forward and backward pass."""
    if model in TRANSFORMERS:
        with torch.device("meta"):
            return transformer_operations(transformer(model)) * batch
    from torch.utils.flop_counter import FlopCounterMode

    network = unet(model)
    with FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, *network.shape), torch.zeros(1)).sum().backward()
    return counter.get_total_flops() * batch


def transformer_operations(network: nn.Module) -> int:
    """Of one sample: matrix products, those of attention among them; the backward pass has twice those of the forward pass.

    What a kernel computes again backwards instead of keeping it is not counted.
    """
    tokens = network.grid[0] * network.grid[1]
    everything, forward = tokens + getattr(network, "extras", 0), 0
    for name, part in network.named_modules():
        if isinstance(part, nn.Conv2d):
            forward += 2 * part.weight.numel() * (tokens if name == "patches.project" else tokens * network.patch**2)
        elif isinstance(part, nn.Linear):  # conditions have one vector a sample
            forward += 2 * part.weight.numel() * (1 if "modulation" in name or name.startswith("time.") else everything)
        elif isinstance(part, Attention):
            forward += 4 * everything**2 * part.project.in_features
    return 3 * forward


def line(row: dict[str, Any]) -> str:
    name = f"{row['model']:6s} {row['path']:20s}"
    if "error" in row:
        return f"{name} failed: {row['error']}"
    if "caches" in row:
        return f"{name} set-up {row['setup_seconds']:.0f} s with {row['caches']} compile caches"
    memory = "" if row["memory_gib"] is None else f"{row['memory_gib']:6.2f} GiB"
    speed = f"{row['steps_per_second']:8.2f} it/s ({row['slowest']:.2f}-{row['fastest']:.2f})"
    share = f"{row['tflops']:6.1f} TFLOP/s, {row['share_of_floor']:.1%} of the peak"
    text = f"{name} {speed} {row['images_per_second']:9.0f} img/s {share} {memory}"
    text += f" set-up {row['setup_seconds']:.0f} s" if "setup_seconds" in row else ""
    notes = [told for told in row["told"] if not told.startswith("compiling")]
    notes += [f"{microseconds:9.1f} us {count:7.1f}x {kernel}" for kernel, microseconds, count in row.get("kernels", ())]
    return "\n    ".join([text, *notes])


if __name__ == "__main__":
    main()
