"""Seconds to generate images and to compare them with data, part by part and all together.

    python benchmarks/generation.py --json benchmarks/results/generation.jsonl                     on a GPU, several minutes
    python benchmarks/generation.py --models paper --parts generation --paths "fused, graph" --precisions bf16 --solver ddpm \
        --steps 100 --images 2000 --batches 1000 --repeats 1       a fiftieth of 10,000 images by 1000 steps, half a minute
    python benchmarks/generation.py --device cpu --models tiny --images 8 --steps 2 --batches 4    to see that it works

Models are those of benchmarks/throughput.py with random weights, 32 x 32 images. What is timed:

total        from noise to the FID, as a comparison of samplers evaluates a run (bf16), recording included; weights of Inception
             and statistics of the data are there already. The first time a process does it is a row of its own
loading      those weights (if there are any here) and statistics
generation   on each path; a path that records does so within the time
features     of so many images by Inception, with random weights if there are no others
distance     from features to the Fréchet distance

Short parts are repeated: the median, with the fastest and the slowest.
"""

import argparse
import copy
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import timing
import torch
from rows import append
from throughput import CHANNELS
from torch import Tensor, nn

from noisewise import DDPM, Objective
from noisewise.generation.images import generate, to_uint8
from noisewise.generation.replay import Replay
from noisewise.generation.solvers import Solver
from noisewise.metrics.distances import Network, compare_images
from noisewise.metrics.features import feature_batches
from noisewise.metrics.frechet import Moments, moments_distance
from noisewise.metrics.inception import DIM, Inception, load_inception
from noisewise.metrics.reference import Key, Reference, load_reference, save_reference
from noisewise.models.unet import UNet
from noisewise.precision import full_float32
from noisewise.training.fast.fuse import compiler_options, fuse
from noisewise.training.run_folder import environment

SHAPE = (3, 32, 32)
PATHS = {
    "plain": "diffusers' U-Net, kernel by kernel",
    "fused": "with our kernels",
    "graph": "recorded, without our kernels",
    "fused, graph": "recorded, with our kernels: what noisewise does",
    "fused, compiled, graph": "compiled and recorded, with our kernels: with --compile",
}
PARTS = ("total", "loading", "generation", "features", "distance")
DEFAULT_BATCH = 500
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="small")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--paths", default=";".join(PATHS), help="of generation, separated by semicolons")
    parser.add_argument("--precisions", default="bf16,fp32", help="of generation; fp32 is without TF32")
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--solver", default="ddim", choices=("ddim", "ddpm"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batches", default="500,250,1000", help="all on our path, the first on the others")
    parser.add_argument("--feature-batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--long", type=float, default=10.0, help="seconds from which on a part is not repeated")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*samples for .* dimensions")
    parts = args.parts.split(",")
    for row in rows(args, parts):
        row = {"images": args.images, "device": args.device, **row}
        print(line(row), flush=True)
        if args.json:
            append(args.json, {**row, **environment()})


def rows(args: argparse.Namespace, parts: list[str]) -> Iterator[Row]:
    """The total comes first: a process that has measured anything else before has its libraries loaded."""
    network, real = random_network(args.device), random_reference(args.device)
    for model in args.models.split(","):
        if "total" in parts:
            yield from total_rows(args, model, network, real)
        if "generation" in parts:
            yield from generation_rows(args, model)
    if "loading" in parts:
        yield from loading_rows(args, real)
    if "features" in parts:
        yield from feature_rows(args, network.module)
    if "distance" in parts:
        yield distance_row(args, real)


# What is measured --------------------------------------------------------------------------------------------------------


def total_rows(args: argparse.Namespace, model: str, network: Network, real: Reference) -> Iterator[Row]:
    """One row for the first time, one for the times after it."""
    unet = build(model, args.device)
    fused = fuse(unet)
    batch = min(DEFAULT_BATCH, args.images)
    parts: list[tuple[float, float]] = []

    def whole() -> None:
        begun = time.perf_counter()
        samples = generated(args, Replay(unet, unet), "bf16", batch)
        timing.wait(args.device)
        middle = time.perf_counter()
        compare_images([to_uint8(samples)], real, network, args.device, batch=args.feature_batch)
        parts.append((middle - begun, time.perf_counter() - middle))

    about = {"part": "total", "model": model, "path": "fused, graph", "precision": "bf16", "batch": batch, "fused": fused}
    reset(args.device)
    first = timed(whole, args.device, 1, args.long)
    yield {**about, "path": "fused, graph, first", **summary(first, args), "generation": parts[0][0], "distance": parts[0][1]}
    parts.clear()
    seconds = timed(whole, args.device, args.repeats, args.long)
    generation, distance = (statistics.median(column) for column in zip(*parts, strict=True))
    yield {**about, **summary(seconds, args), "generation": generation, "distance": distance}


def generation_rows(args: argparse.Namespace, model: str) -> Iterator[Row]:
    """Precisions times paths, and batches of the last path."""
    plain = build(model, args.device)
    ours = copy.deepcopy(plain)
    blocks, batches = fuse(ours), [int(batch) for batch in args.batches.split(",")]
    for precision in args.precisions.split(","):
        for path in args.paths.split(";"):
            unet = ours if path.startswith("fused") else plain
            for batch in batches if path == "fused, graph" else batches[:1]:
                replays: list[Replay] = []
                forward: Any = torch.compile(unet, dynamic=False, options=compiler_options()) if "compiled" in path else unet

                def call(
                    unet: nn.Module = unet, forward: Any = forward, path: str = path, replays: list[Replay] = replays
                ) -> Any:
                    """Recorded anew each time, or a function, which is never recorded."""
                    if not path.endswith("graph"):
                        return lambda *inputs: forward(*inputs)
                    replays[:] = [Replay(forward, unet)]
                    return replays[0]

                short = argparse.Namespace(**{**vars(args), "steps": 2, "images": min(batch, args.images)})
                begun = time.perf_counter()
                generated(short, lambda *inputs, forward=forward: forward(*inputs), precision, batch)  # compiles, chooses
                reset(args.device)
                setup = time.perf_counter() - begun
                seconds = timed(
                    lambda batch=batch, call=call, precision=precision: generated(args, call(), precision, batch),
                    args.device,
                    args.repeats,
                    args.long,
                )
                yield {
                    "part": "generation",
                    "model": model,
                    "parameters": sum(parameter.numel() for parameter in unet.parameters()),
                    "path": path,
                    "what": PATHS[path],
                    "precision": precision,
                    "batch": batch,
                    "solver": args.solver,
                    "steps": args.steps,
                    "setup": round(setup, 2),
                    "fused": blocks if unet is ours else 0,
                    "recorded": replays[0].recorded if replays else 0,
                    "why_not": replays[0].why_not if replays else None,
                    **summary(seconds, args),
                }


def loading_rows(args: argparse.Namespace, real: Reference) -> Iterator[Row]:
    """What a process does once: Inception's weights and the statistics of the data."""
    try:
        seconds = timed(lambda: load_inception(None, args.device), args.device, args.repeats, args.long)
        yield {"part": "loading", "path": "Inception's weights", **summary(seconds, args, rate=False)}
    except FileNotFoundError:
        yield {"part": "loading", "path": "Inception's weights", "error": "there are none here"}
    with tempfile.TemporaryDirectory() as folder:
        save_reference(real, folder)
        seconds = timed(lambda: load_reference(real.key, folder), args.device, args.repeats, args.long)
    yield {"part": "loading", "path": "statistics of the data", **summary(seconds, args, rate=False)}


def feature_rows(args: argparse.Namespace, network: nn.Module) -> Iterator[Row]:
    """float32 and TF32 (torch's own settings: in convolutions, where nearly all of the time goes), called and recorded."""
    generator = torch.Generator(args.device).manual_seed(0)
    images = torch.randint(0, 256, (args.images, *SHAPE), dtype=torch.uint8, device=args.device, generator=generator)
    for precision, tf32 in (("fp32", False), ("tf32", True)):
        for path in ("plain", "graph"):

            def work(path: str = path, tf32: bool = tf32) -> None:
                module: Any = Replay(network, network) if path == "graph" else network
                moments = Moments(DIM, args.device)
                for part in feature_batches(images, module, device=args.device, batch=args.feature_batch, tf32=tf32):
                    moments.update(part)

            work()
            reset(args.device)
            seconds = timed(work, args.device, args.repeats, args.long)
            about = {"part": "features", "path": path, "precision": precision, "batch": args.feature_batch}
            yield {**about, **summary(seconds, args)}


def distance_row(args: argparse.Namespace, real: Reference) -> Row:
    """From moments to the distance, both of full rank if there are enough images."""
    generator = torch.Generator(args.device).manual_seed(1)
    features = torch.randn(args.images, DIM, device=args.device, generator=generator)
    moments = Moments.of(features)
    moments_distance(moments, real.moments)
    seconds = timed(lambda: moments_distance(moments, real.moments), args.device, args.repeats, args.long)
    return {"part": "distance", "path": "plain", "precision": "fp64", **summary(seconds, args, rate=False)}


# What it is made of ------------------------------------------------------------------------------------------------------


def build(model: str, device: str) -> nn.Module:
    torch.manual_seed(0)
    return UNet(SHAPE, channels=CHANNELS[model], zero_init=False).to(device).eval().requires_grad_(False)


def random_network(device: str) -> Network:
    """Inception with random weights that keep the size of activations: time does not depend on their values."""
    torch.manual_seed(0)
    module = Inception()
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
    return Network(module.to(device), "random", "pytorch-fid", "fid")


def random_reference(device: str) -> Reference:
    generator = torch.Generator(device).manual_seed(2)
    features = torch.randn(2 * DIM, DIM, device=device, generator=generator)
    return Reference(Key("random", "random", "pytorch-fid"), Moments.of(features))


def generated(args: argparse.Namespace, call: Any, precision: str, batch: int) -> Tensor:
    objective, solver = Objective(DDPM.linear()), Solver(args.solver, args.steps)
    context: AbstractContextManager[Any] = full_float32()
    if precision == "bf16":
        context = torch.autocast(torch.device(args.device).type, torch.bfloat16)
    with context:
        return generate(call, objective, SHAPE, args.images, solver=solver, batch=batch, device=args.device)


def timed(work: Callable[[], object], device: str, repeats: int, long: float) -> list[float]:
    """Seconds of each repeat; none after one that took long."""
    seconds: list[float] = []
    while len(seconds) < repeats and max(seconds, default=0.0) < long:
        seconds.append(timing.seconds(work, device))
    return seconds


def reset(device: str) -> None:
    """What the row before has left must not count in this one's memory."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def summary(seconds: list[float], args: argparse.Namespace, rate: bool = True) -> Row:
    middle = statistics.median(seconds)
    row: Row = {"seconds": middle, "fastest": min(seconds), "slowest": max(seconds), "repeats": len(seconds)}
    if rate:
        row["images_per_second"] = round(args.images / middle, 1)
    if args.device.startswith("cuda"):
        row["memory_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 3)
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}


def line(row: Row) -> str:
    names = [str(row.get(key, "")) for key in ("part", "model", "path", "precision", "batch")]
    text = "{:10s} {:6s} {:24s} {:5s} {:>5s}".format(*names)
    if "error" in row:
        return f"{text}  {row['error']}"
    text += f" {row['seconds']:9.3f} s ({row['fastest']:.3f}-{row['slowest']:.3f}, {row['repeats']}x)"
    if "images_per_second" in row:
        text += f" {row['images_per_second']:10.1f} img/s"
    if "solver" in row:
        whole = 10_000 * 1000 * row["seconds"] / (row["images"] * row["steps"])
        text += f" ({whole:.0f} s for 10,000 images by 1000 steps; set-up {row['setup']:.0f} s)"
    if "memory_gib" in row:
        text += f" {row['memory_gib']:6.2f} GiB"
    if row["part"] == "total":
        text += f"  generation {row['generation']:.2f} s, features and distance {row['distance']:.2f} s"
    return text + (f"  not recorded: {row['why_not']}" if row.get("why_not") else "")


if __name__ == "__main__":
    main()
