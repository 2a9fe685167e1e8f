"""Known FIDs of real CIFAR-10 images, and how fast features are made: is the whole chain right on this machine?

Usage: python benchmarks/fid_sanity.py DATA_FOLDER [--device cuda] [--json OUT] [--batch 500] [--limit N] [--compile]

FID of the first 5,000 training images against all 50,000 is 4.81, and of the 10,000 test images about 3.15, with pytorch-fid's
preprocessing. Figures are of float32 features without TF32; on CUDA everything is done again with TF32, for its speed and what
it does to the FID. Both memory layouts are timed and the faster is used. Exits with 1 if a full run is off by more than 0.05.
"""

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from noisewise.data.cifar10 import open_cifar10
from noisewise.metrics.features import PREPROCESSING, features
from noisewise.metrics.frechet import Moments, moments_distance
from noisewise.metrics.inception import load_inception

EXPECTED = {"first_tenth_against_train": 4.81, "test_against_train": 3.15}
TOLERANCE = 0.05
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def load(folder: Path, split: str, limit: int | None) -> Tensor:
    """The first images of a split, uint8."""
    source = open_cifar10(folder, split)
    return source.read(torch.arange(min(len(source), limit or len(source))).numpy())[0]


def timed_features(images: Tensor, network: nn.Module, args: argparse.Namespace, tf32: bool) -> tuple[Tensor, float]:
    """Features and images a second, transfers included."""
    start = time.perf_counter()
    found = features(images, network, args.preprocessing, args.device, batch=args.batch, tf32=tf32)
    return found, len(images) / (time.perf_counter() - start)


def fids(train: Tensor, test: Tensor, device: str) -> dict[str, float]:
    """The two known distances."""
    whole = Moments.of(train.to(device))
    parts = {"first_tenth_against_train": train[: len(train) // 10], "test_against_train": test}
    return {name: moments_distance(Moments.of(part.to(device)), whole) for name, part in parts.items()}


def fastest(network: nn.Module, images: Tensor, args: argparse.Namespace) -> tuple[nn.Module, dict[str, float]]:
    """The network in the faster memory layout, and the speed of both, warm."""
    speeds = {}
    for name, layout in LAYOUTS.items():
        network = network.to(memory_format=layout)
        timed_features(images[: args.batch], network, args, tf32=False)
        speeds[name] = round(timed_features(images, network, args, tf32=False)[1], 1)
    return network.to(memory_format=LAYOUTS[max(speeds, key=lambda name: speeds[name])]), speeds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="cifar-10-batches-bin or -py")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--preprocessing", choices=list(PREPROCESSING)[:2], default="pytorch-fid")
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--limit", type=int, help="use the first N images of either split: a trial, not a check")
    parser.add_argument("--compile", action="store_true", help="torch.compile the network")
    args = parser.parse_args()
    if args.limit:
        warnings.simplefilter("ignore")

    network, name = load_inception(args.weights, args.device)
    train, test = (load(args.data, split, args.limit) for split in ("train", "test"))
    network, layouts = fastest(network, train[: min(4 * args.batch, 2000)], args)
    if args.compile:
        network = torch.compile(network)
        timed_features(train[: args.batch], network, args, tf32=False)
    cuda = args.device.startswith("cuda")
    result: dict[str, Any] = {
        "network": name,
        "preprocessing": args.preprocessing,
        "device": torch.cuda.get_device_name() if cuda else args.device,
        "torch": torch.__version__,
        "images": [len(train), len(test)],
        "batch": args.batch,
        "compiled": args.compile,
        "layout_images_per_s": layouts,
    }
    before = torch.backends.cudnn.allow_tf32
    for tf32 in (False, True) if cuda else (False,):
        torch.backends.cudnn.allow_tf32 = True
        (of_train, speed), (of_test, _) = (timed_features(images, network, args, tf32) for images in (train, test))
        start = time.perf_counter()
        found = fids(of_train, of_test, args.device)
        spent = round(time.perf_counter() - start, 2)
        result["tf32" if tf32 else "float32"] = {"images_per_s": round(speed, 1), "distances_s": spent, **found}
    torch.backends.cudnn.allow_tf32 = before
    if cuda:
        result["tf32_minus_float32"] = {key: result["tf32"][key] - result["float32"][key] for key in EXPECTED}
    whole = (len(train), len(test), args.preprocessing) == (50_000, 10_000, "pytorch-fid")
    off = {key: result["float32"][key] - value for key, value in EXPECTED.items()} if whole else {}
    result["minus_expected"] = off
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return int(any(abs(value) > TOLERANCE for value in off.values()))


if __name__ == "__main__":
    sys.exit(main())
