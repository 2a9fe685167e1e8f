"""What each method of the field costs a training step: blocks of steps with uniform and with every other sampler in turn.

    python benchmarks/method_cost.py --json benchmarks/results/cifar10-v1-method-cost.jsonl              on a GPU, four minutes
    python benchmarks/method_cost.py --methods probes --rounds 2 --steps 120 --warm 90 --json FILE       those that probe, 100 s
    python benchmarks/method_cost.py --device cpu --channels 16 --batch 8 --rounds 2 --steps 2 --warm 2  to see that it works

All train one model in one process, on the trainer's own path (the fast one on a GPU), so that clocks, caches and neighbours are
the same for all. A loss weighting is part of the recorded step and costs nothing that could be seen, so methods that are a
weighting alone are left out. The ratio is to uniform's block of the same round: the median over rounds, with the lowest and the
highest. A block should hold whole intervals between updates: 40 steps for the paper's policy, 50 for `adaptive`.

Beside it is what the samples alone would make of it (`by_samples`, from noisewise/analysis/cost_model.py), and how many shapes
of probes the fast path has recorded, or why none; recording is off the clock, as in training. `--methods probes` are those that
probe the network. Look-ahead has a budget of one event in 120 steps there, or a block would take minutes: it keeps to its
budget where its ratio is at most 1 + budget.
"""

import argparse
import math
import statistics
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from field import METHODS, chosen
from rows import append
from throughput import protocol_trainer
from timing import seconds

import noisewise
from noisewise.analysis.cost_model import overhead
from noisewise.samplers import Sampler, Uniform
from noisewise.training.run_folder import environment
from noisewise.training.trainer import Trainer

PROBES = (
    "adaptive,paper_cifar10,paper_cifar10:precision=tf32,paper_cifar10:precision=bf16,gradient_variance,"
    "adaptive:estimator=lookahead,warmup=0,budget=0.789"  # an event every 120 steps at a batch of 128
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS), help="names of field.py, and specs; or `probes`")
    parser.add_argument("--channels", type=int, default=64, help="64: the protocol's `small`; 128: `paper`")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="in a block")
    parser.add_argument("--warm", type=int, default=260, help="steps of each sampler before the first round: they begin late")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no other round is begun")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    for row in measure(args):
        speed = f"{row['steps_per_second']:8.2f} it/s  {row['ratio']:.3f} ({row['lowest']:.3f} to {row['highest']:.3f})"
        probes = f"{row['recorded']} recorded" if row["not_recorded"] is None else row["not_recorded"]
        print(f"{row['method']:24s} {speed}  by samples {row['by_samples']:.3f}  {probes}  {row['spec']}", flush=True)
        if args.json:
            append(args.json, row)


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each method, uniform first."""
    begun, started = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    trainer = protocol_trainer(args.device, args.channels, args.batch, args.device == "cuda", print)
    named = {"uniform": "uniform", **chosen(PROBES if args.methods == "probes" else args.methods)}
    samplers = {name: sampler_of(trainer, spec) for name, spec in named.items()}
    samplers = {name: one for name, one in samplers.items() if name == "uniform" or not isinstance(one, Uniform)}
    probed = {}
    for name, sampler in samplers.items():
        before = recorded(trainer)[0]
        block(trainer, sampler, args.warm)
        now, why_not = recorded(trainer)
        probed[name] = {"recorded": now - before, "not_recorded": why_not}
    rounds: list[dict[str, float]] = []
    while len(rounds) < args.rounds and not (rounds and time.monotonic() - started > args.limit):
        rounds.append({name: block(trainer, one, args.steps) for name, one in samplers.items()})
    for name in samplers:
        ratios = [times[name] / times["uniform"] for times in rounds]
        yield {
            "method": name,
            "spec": named[name],
            "channels": args.channels,
            "batch": args.batch,
            "steps_per_second": round(args.steps / statistics.median(times[name] for times in rounds), 3),
            "ratio": round(statistics.median(ratios), 4),
            "lowest": round(min(ratios), 4),
            "highest": round(max(ratios), 4),
            "by_samples": round(overhead(samplers[name], args.batch), 4),
            **probed[name],
            "rounds": len(rounds),
            "steps": args.steps,
            "session": begun,
            "environment": environment(),
        }


def recorded(trainer: Trainer) -> tuple[int, str | None]:
    """How many probes the fast path has recorded, and why it does not, if so."""
    prober = getattr(trainer.arithmetic, "prober", None)
    return (0, None) if prober is None else (prober.recorded, prober.why_not)


def sampler_of(trainer: Trainer, spec: str) -> Sampler:
    sampler = noisewise.recipe(spec, trainer.objective).sampler.to(trainer.device)
    return sampler.attach(trainer.network, trainer.optimizer)


def block(trainer: Trainer, sampler: Sampler, steps: int) -> float:
    """Seconds of so many steps with a sampler."""
    trainer.sampler = sampler
    aside = trainer.arithmetic.aside
    taken = seconds(lambda: [trainer.training_step() for _ in range(steps)], trainer.device)
    return taken - (trainer.arithmetic.aside - aside)


if __name__ == "__main__":
    main()
