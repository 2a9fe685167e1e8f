"""Which sizes of the normalisation's kernels are fastest, at every shape of a U-Net's step.

    python benchmarks/kernel_sizes.py --json benchmarks/results/kernel_sizes.jsonl                      on a GPU, two minutes
    TRITON_INTERPRET=1 python benchmarks/kernel_sizes.py --models tiny --device cpu --images 1 --most 2     to see that it works

For each shape, forwards and backwards: the sizes of norm.py, then others; tiles that hold an image in registers, and tiles
through which it is streamed, with rows fetched ahead (`STAGES`). A row has the time of one call, how often a step makes it, the
time that its memory traffic alone would take at `--bandwidth`, and whether these are the sizes of norm.py (`now`). Calls go
round four sets of tensors, so that little is found in the cache. Numbers come out the same whatever the sizes, up to rounding.
"""

import argparse
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rows import append
from throughput import CHANNELS
from torch import Tensor, nn

from noisewise.models.unet import UNet
from noisewise.training.fast import norm
from noisewise.training.run_folder import environment

SETS = 4  # of tensors
DROPOUT = 0.1
BYTES = {"forward": 4, "backward": 6}  # a value in bf16, read and written
Sizes = dict[str, int]


class Shape(NamedTuple):
    channels: int
    groups: int
    pixels: int
    dropout: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="small,paper")
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--most", type=int, default=1000, help="candidates of a shape")
    parser.add_argument("--share", type=float, default=0.03, help="of all values: shapes with fewer are left as they are")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile at the same time")
    parser.add_argument("--bandwidth", type=float, default=4.2e12, help="bytes a second")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    norm.QUICK = args.device == "cuda"
    shapes = {model: large(shapes_of(model), args.share) for model in args.models.split(",")}
    compile_all(args, {shape for found in shapes.values() for shape, _ in found})
    for model, found_shapes in shapes.items():
        now = best = 0.0
        for shape, count in found_shapes:
            for which in BYTES:
                found = list(timed(args, shape, which))
                for place, (sizes, seconds) in enumerate(found):
                    row = about(args, model, shape, which, count, sizes, seconds) | {"now": place == 0}
                    if args.json:
                        append(args.json, {**row, **environment()})
                first, (sizes, least) = found[0][1], min(found, key=lambda one: one[1])
                now, best = now + count * first, best + count * least
                print(f"{line(args, model, shape, which, count, first)}, best {1e6 * least:6.1f} us: {sizes}", flush=True)
        print(f"{model}: {1e6 * now:.0f} us a step, {1e6 * best:.0f} with the best sizes of each shape")


def shapes_of(model: str) -> Counter[Shape]:
    """The normalisations of a step, and how often each shape comes."""
    network, found = UNet((3, 32, 32), channels=CHANNELS[model], dropout=DROPOUT), Counter[Shape]()

    def watch(name: str) -> Callable[..., None]:
        def note(module: nn.GroupNorm, inputs: tuple[Tensor], _: Tensor) -> None:
            pixels = inputs[0][0, 0].numel()
            found[Shape(module.num_channels, module.num_groups, pixels, name.endswith("norm2"))] += 1

        return note

    for name, module in network.named_modules():
        if isinstance(module, nn.GroupNorm):
            module.register_forward_hook(watch(name))
    network(torch.zeros(1, 3, 32, 32), torch.zeros(1))
    return found


def large(shapes: Counter[Shape], share: float) -> list[tuple[Shape, int]]:
    """Those that have so much of all values, the largest first."""
    values = {shape: shape.channels * shape.pixels * count for shape, count in shapes.items()}
    chosen = [shape for shape in shapes if values[shape] >= share * sum(values.values())]
    return [(shape, shapes[shape]) for shape in sorted(chosen, key=lambda shape: -values[shape])]


def candidates(shape: Shape, which: str) -> list[Sizes]:
    """Those of norm.py, and others with as many channels as fill some power of two of columns."""
    x = torch.empty(1, shape.pixels, shape.channels, device="meta").transpose(1, 2)
    found = [norm._share(x, shape.groups, which)[1]]
    per_group, block = shape.channels // shape.groups, 1 << (shape.pixels - 1).bit_length()
    for wanted in (16, 32, 64):
        count, columns = norm._columns(shape.groups, per_group, wanted)
        for rows, each, stages in [
            *(
                (max(values // columns, 1), each, stages)
                for values in (1024, 2048, 4096)
                for each in (8, 16)
                for stages in (1, 3)
            ),
            *((block, each, 1) for each in (16, 32, 64)),
        ]:
            warps = rows * columns // (32 * each)
            if rows <= block and 1 <= warps <= 16 and (rows < block or rows * columns <= norm.MOST):
                sizes = {"GROUPS": count, "K": columns, "ROWS": rows, "num_warps": warps, "STAGES": stages}
                found.append({**found[0], **sizes})
    return [sizes for place, sizes in enumerate(found) if sizes not in found[:place]]


def compile_all(args: argparse.Namespace, shapes: set[Shape]) -> None:
    """Run every candidate once in some process: Triton keeps what it has compiled on the disk."""
    if args.device == "cuda":
        jobs = [
            (args.device, shape, which, args.images, sizes)
            for shape in shapes
            for which in BYTES
            for sizes in candidates(shape, which)[: args.most]
        ]
        with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compiled, jobs, chunksize=8))


def timed(args: argparse.Namespace, shape: Shape, which: str) -> Iterator[tuple[Sizes, float]]:
    """Seconds of a call with each candidate; one that does not run is left out."""
    for sizes in candidates(shape, which)[: args.most]:
        try:
            calls = [call_of(args.device, shape, which, args.images, sizes) for _ in range(SETS)]
            yield sizes, seconds_of(calls, args.device)
        except Exception as error:  # more registers or memory than there are
            print(f"    {sizes}: {str(error).splitlines()[0][:100]}")


def compiled(job: tuple[str, Shape, str, int, Sizes]) -> None:
    try:
        call_of(*job)()
    except Exception:  # it will fail again where it is timed
        return


def call_of(device: str, shape: Shape, which: str, images: int, sizes: Sizes) -> Callable[[], object]:
    """One call of the kernel with these sizes, on tensors of its own."""
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.randn(images, shape.pixels, shape.channels, device=device).to(kind).transpose(1, 2)
    dy = torch.randn_like(x)
    gamma, beta = (torch.randn(shape.channels, device=device) for _ in range(2))
    shift = torch.randn(images, shape.channels, device=device).to(kind) if shape.dropout else None
    seed, p = torch.zeros((), dtype=torch.int64, device=device), DROPOUT if shape.dropout else 0.0
    grid = (shape.groups // sizes["GROUPS"], images)
    usual = norm._share

    def call() -> object:
        norm._share = lambda *_: (grid, sizes)  # type: ignore[assignment]
        try:
            if which == "forward":
                return norm._norm(x, shift, gamma, beta, seed, shape.groups, 1e-5, True, p)
            centre, rstd = (torch.zeros(x.shape[:2], device=device) for _ in range(2))
            return norm._norm_backward(dy, x, gamma, beta, seed, centre, rstd, shape.groups, True, p)
        finally:
            norm._share = usual

    return call


def seconds_of(calls: list[Callable[[], object]], device: str) -> float:
    """Of one call, in the mean; on a GPU recorded, as in a step."""
    for call in calls:
        call()
    if device == "cpu":
        begun = time.perf_counter()
        calls[0]()
        return time.perf_counter() - begun
    from triton.testing import do_bench_cudagraph

    return float(do_bench_cudagraph(lambda: [call() for call in calls], rep=5)) / 1000 / len(calls)


def about(
    args: argparse.Namespace, model: str, shape: Shape, which: str, count: int, sizes: Sizes, seconds: float
) -> dict[str, Any]:
    values = args.images * shape.channels * shape.pixels
    floor = {"microseconds": round(1e6 * seconds, 2), "floor": round(1e6 * values * BYTES[which] / args.bandwidth, 2)}
    return {"model": model, "which": which, **shape._asdict(), "images": args.images, "count": count, **floor, "sizes": sizes}


def line(args: argparse.Namespace, model: str, shape: Shape, which: str, count: int, seconds: float) -> str:
    row = about(args, model, shape, which, count, {}, seconds)
    what = f"{model} {which:8s} {shape.channels:4d} channels, {shape.pixels:4d} pixels, dropout {shape.dropout:d}, {count:2d}x"
    return f"{what}: {row['microseconds']:6.1f} us now, memory {row['floor']:5.1f}"


if __name__ == "__main__":
    main()
