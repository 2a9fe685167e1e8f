"""What the Fréchet step costs once the features are there.

Usage: python benchmarks/frechet_cost.py [--dim 2048] [--samples 10000] [--repeats 3] [--device cpu] [--json OUT]

Prints the seconds (median of the repeats) of the covariance, of the distance from two covariances of full rank, of the distance
from two singular ones, and of the distance straight from few features. A bootstrap of R resamples costs R times the first two.
"""

import argparse
import json
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from timing import seconds

from noisewise.metrics.frechet import Moments, features_distance, frechet_distance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(0, -3, args.dim)  # spectra fall, as Inception's do
    few = args.dim // 4

    def draw(n: int) -> torch.Tensor:
        return (torch.randn(n, args.dim, generator=generator) * scale).to(args.device)

    many, small = [draw(args.samples) for _ in range(2)], [draw(few) for _ in range(2)]
    full, singular = [Moments.of(f) for f in many], [Moments.of(f) for f in small]

    def distance(pair: list[Moments]) -> float:
        return frechet_distance(pair[0].mean, pair[0].cov, pair[1].mean, pair[1].cov)

    work: dict[str, Callable[[], object]] = {
        f"moments of {args.samples:,} features": lambda: Moments.of(many[0]),
        "distance, full rank": lambda: distance(full),
        f"distance, singular (rank {few - 1:,})": lambda: distance(singular),
        f"distance from {few:,} features": lambda: features_distance(*small),
    }
    result = {"dim": args.dim, "device": args.device, "threads": torch.get_num_threads(), "torch": torch.__version__}
    for name, what in work.items():
        times = [seconds(what, args.device) for _ in range(args.repeats + 1)]
        result[name] = round(statistics.median(times[1:]), 3)
        print(f"{name:40} {result[name]:8.3f} s")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
