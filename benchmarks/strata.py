"""Which noise levels pictures want, and which target knows it: from one checkpoint, more of one stratum at a time.

    python benchmarks/strata.py --steps 5000 --json benchmarks/results/cifar10-v1-strata.jsonl       on a GPU, ten minutes
    python benchmarks/strata.py --preset digits --steps 120 --branch-steps 20 --strata 4 --seeds 2 --images 64      on a CPU

A run with uniform sampling is trained for `--steps`, in the run folder `--from`, where a finished one is used as it is. From
its end go branches of `--branch-steps` steps each: some with uniform sampling, and for each of `--strata` equal intervals of u
some that draw half of their batch (`--share`) there and the rest from all of [0, 1], a density of 0.5 + 0.5 K inside and 0.5
outside. No importance weights: the sampler is the weighting. Every branch begins with the same weights and optimizer state, and
branches of one seed see the same data, noise, dropout and uniform numbers behind their draws: seed s those of training steps
N + s M and after, so that uniform sampling with seed 0 is how training would have gone on. Nothing else of the step changes, so
that on a GPU it is compiled and recorded once.

What is judged is an average of the weights along the branch alone: it begins at the checkpoint's last weights and forgets with
a time constant of a quarter of the branch. The average of training (0.9995: 2,000 steps) would hide what 300 steps did. The
checkpoint itself is judged too, with its own average and with its last weights.

Each branch is a row of `--json`: the distance of generated images to the data (the same noise for all), the held-out loss at
50 noise levels, and candidate targets made of it. In the end a table has the gain of each stratum over uniform with the same
seed, log(uniform's / its own), and Spearman's rho of each target's gain with that of the pictures. What is in the file already,
from the same checkpoint (`start` is a digest of its weights) with the same settings, is not made again. All settings of
noisewise train can follow.
"""

import argparse
import hashlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rows import append
from torch import Tensor

from noisewise.analysis.moments_of_training import RangeSampler, rewound
from noisewise.analysis.predictor import spearman
from noisewise.generation.run_samples import run_samples
from noisewise.generation.solvers import Solver
from noisewise.looking.validation import Validation
from noisewise.objective import Objective
from noisewise.plain_files import read_rows
from noisewise.processes import DDPM, Process
from noisewise.samplers import Sampler
from noisewise.samplers.static import Uniform
from noisewise.study.measure import distance_to_data, held_out_of
from noisewise.training.config import Config, EMAConfig
from noisewise.training.options import load_preset, plain
from noisewise.training.run import Run
from noisewise.training.run_folder import environment
from noisewise.training.signals import StopRequest
from noisewise.training.trainer import Trainer
from noisewise.weighting import P2, VLB, MinSNR, Weighting

MEMORY = 4  # the branch's length over the time constant of its average
WEIGHTS: dict[str, Callable[[], Weighting]] = {
    "vlb": VLB,
    "vlb, clip 5": lambda: VLB(clip=5),
    "minsnr 5": MinSNR,
    "minsnr 1": lambda: MinSNR(1),
    "p2": P2,
}
"""Targets that weight the loss of each level; besides them the plain mean, and the mean of the log (its exponential)."""
SETTINGS = ("branch_steps", "strata", "share", "images", "held_out_images")  # rows with others cannot be compared


def main() -> None:
    begun = time.monotonic()
    args, rest = options().parse_known_args()
    config = load_preset(args.preset, *rest, f"--steps={args.steps}", "--sampler=uniform", f"--out={args.start}")
    config = replace(config, log=replace(config.log, trackers=[], samples_every=0))
    check(args, config)
    end = math.inf if args.limit_seconds is None else begun + args.limit_seconds
    with StopRequest() as stop:
        run = Run(config, resume=True)
        run.trainer.tell = print
        try:
            if train_start(run, stop, end):
                rows = make_branches(run, args, stop, end)
                print("\n" + table([row for row in rows if "failed" not in row], args.strata))
            else:
                print(f"stopped at step {run.trainer.step} of the start: the same command goes on from there")
        finally:
            run.close()


def make_branches(run: Run, args: argparse.Namespace, stop: StopRequest, end: float) -> list[dict[str, Any]]:
    """All rows of this checkpoint and these settings, from the file or made now, as far as time allows."""
    settings = {"start": digest(run.trainer), **{name: getattr(args, name) for name in SETTINGS}}
    before = read_rows(args.json) if args.json else []
    rows = [row for row in before if all(row.get(name) == value for name, value in settings.items())]
    done, longest = {(row["branch"], row["seed"]) for row in rows if "failed" not in row}, 0.0
    about = {"preset": args.preset, "config": plain(run.config), "environment": environment()}
    for name, seed in plan(args.strata, args.seeds, args.stratum_seeds or args.seeds, not args.skip_start):
        if (name, seed) in done:
            continue
        begun = time.monotonic()
        if stop.requested or begun + longest > end:
            print("stopped: the same command makes the other branches, if the start is still there")
            break
        row = {"branch": name, "seed": seed, **settings, **branch(run, args, name, seed)}
        seconds = time.monotonic() - begun
        longest = max(longest, seconds)
        print(line(row, seconds), flush=True)
        rows.append(row)
        if args.json:
            append(args.json, row | about)
    return rows


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--preset", default="cifar10-small")
    parser.add_argument("--steps", type=int, default=5000, help="of uniform training before the branches")
    parser.add_argument("--from", dest="start", default="out/strata", help="the run folder of that training")
    parser.add_argument("--strata", type=int, default=10, help="equal intervals of u")
    parser.add_argument("--branch-steps", type=int, default=300)
    parser.add_argument("--share", type=float, default=0.5, help="of a branch's batch in its stratum; the rest is uniform")
    parser.add_argument("--seeds", type=int, default=3, help="branches with uniform sampling: their spread is the noise")
    parser.add_argument("--stratum-seeds", type=int, help="branches of each stratum; default: as many")
    parser.add_argument("--images", type=int, default=5000, help="generated for each distance")
    parser.add_argument("--skip-start", action="store_true", help="do not judge the checkpoint itself")
    parser.add_argument("--also", help="a second solver to judge by, such as ddpm:steps=250")
    parser.add_argument("--also-images", type=int, default=2500, help="generated with it")
    parser.add_argument("--held-out-images", type=int, default=1000, help="test images at each level of the held-out loss")
    parser.add_argument("--limit-seconds", type=float, help="begin no branch that might end later than this")
    parser.add_argument("--json", type=Path, help="append a row for each branch to this file")
    return parser


def check(args: argparse.Namespace, config: Config) -> None:
    """Refuse what cannot work before anything is trained."""
    for name in ("branch_steps", "strata", "seeds"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be >= 1, got {getattr(args, name)}")
    if args.stratum_seeds is not None and not 1 <= args.stratum_seeds <= args.seeds:
        raise ValueError(f"--stratum-seeds must lie in 1 ... --seeds: each is compared with uniform, got {args.stratum_seeds}")
    if args.steps < config.optimizer.warmup:
        raise ValueError(f"--steps {args.steps} ends within the warm-up of {config.optimizer.warmup}: seeds would differ in lr")
    if not (config.ema.ramp or config.ema.kind == "power"):
        raise ValueError("branches change the decay of the average, which a recorded step must expect: give --ema.ramp true")
    if config.accumulation != 1 or config.precision == "fp16":
        raise ValueError("branches need --accumulation 1 and no fp16: a recorded step is rewound")


def plan(strata: int, seeds: int, stratum_seeds: int, start: bool = True) -> Iterator[tuple[str, int]]:
    """The branches with their seeds, so that a plan that is cut short is of use: the noise first, then whole sets of strata."""
    if start:
        yield from (("start, average", 0), ("start, last weights", 0))
    yield from (("uniform", seed) for seed in range(seeds))
    yield from ((f"stratum {k}", seed) for seed in range(stratum_seeds) for k in range(strata))


def train_start(run: Run, stop: StopRequest, end: float) -> bool:
    """Train the run that all branches begin with, and record its step; whether it has come to its end."""
    for _ in run.advance(stop):
        if time.monotonic() > end:
            stop.name = "--limit-seconds"
    if run.trainer.finished():
        run.trainer.warm_up()  # if there was nothing left to train
    return run.trainer.finished()


def digest(trainer: Trainer) -> str:
    """Of the weights and their average: two checkpoints with the same one are the same."""
    total = hashlib.sha256()
    for tensors in (dict(trainer.model.named_parameters()), trainer.ema.average):
        for name, value in sorted(tensors.items()):
            total.update(name.encode() + value.detach().float().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()[:12]


def branch(run: Run, args: argparse.Namespace, name: str, seed: int) -> dict[str, Any]:
    """Train a branch, measure it, and take it back; the reason if it fails."""
    trainer, steps = run.trainer, 0 if name.startswith("start") else args.branch_steps
    stratum = int(name.split()[1]) if name.startswith("stratum") else None
    row = {"stratum": stratum, "start_step": trainer.step, "steps": steps}
    own, skipped = trainer.ema.config, int(trainer.guard.skipped)
    try:
        with rewound(trainer):
            if name != "start, average":
                trainer.ema.blend(1.0)
                trainer.ema.config = branch_average(args.branch_steps)
            trainer.step += seed * steps
            trainer.samples += seed * steps * run.config.batch
            sampler = sampler_of(trainer.objective.process, stratum, args.strata, args.share, run.config.seed)
            sampler.step, trainer.sampler = trainer.step, sampler.to(trainer.device)
            before = time.perf_counter()
            for _ in range(steps):
                trainer.training_step()
            trainer.settle()
            seconds = time.perf_counter() - before
            trainer.guard.check(run.config.max_bad_steps, "")
            row |= {"train_seconds": round(seconds, 3), "skipped": int(trainer.guard.skipped) - skipped}
            return row | measure(run, args.images, args.held_out_images) | second_opinion(run, args.also, args.also_images)
    except FloatingPointError as error:
        return row | {"failed": str(error)}
    finally:
        trainer.ema.config = own


def sampler_of(process: Process, stratum: int | None, strata: int, share: float, seed: int) -> Sampler:
    """Uniform; or a share of the draws from one of the equal intervals of u, the rest from all of them."""
    if stratum is None:
        return Uniform(process, seed=seed)
    return RangeSampler(process, stratum / strata, (stratum + 1) / strata, share, seed)


def branch_average(steps: int) -> EMAConfig:
    """The average along a branch: e^-4 of it is where the branch began."""
    return EMAConfig(kind="constant", decay=max(0.0, 1 - MEMORY / steps), ramp=False)


def measure(run: Run, images: int, held_out_images: int) -> dict[str, Any]:
    """The averaged weights as they are: distance of generated images, held-out losses, targets."""
    held_out = held_out_of(run, held_out_images)
    metric, distance, _ = distance_to_data(run, [run_samples(run, images)], print)
    found = {"metric": metric, "distance": distance, "held_out": [round(value, 8) for value in held_out.loss.tolist()]}
    return found | {"targets": targets(held_out, run.trainer.objective)}


def second_opinion(run: Run, solver: str | None, images: int) -> dict[str, Any]:
    """The distance of images that another solver makes of the same weights and the same noise."""
    if solver is None:
        return {}
    samples = run_samples(run, images, solver=Solver.parse(solver, run.trainer.objective.process))
    return {"also": solver, "also_images": images, "also_distance": distance_to_data(run, [samples], print)[1]}


def targets(held_out: Validation, objective: Objective) -> dict[str, float]:
    """Candidates for what a sampler should make small, all positive."""
    found = {"plain": held_out.mean, "log": float(held_out.loss.log().mean().exp())}
    for name, make in WEIGHTS.items():
        if "vlb" not in name or isinstance(objective.process, DDPM):
            found[name] = held_out.weighted(make(), objective)
    return found


# The table --------------------------------------------------------------------------------------------------------------


def values(row: dict[str, Any]) -> dict[str, float]:
    """All that is to fall: pictures first, if there are any."""
    pictures = {} if row["distance"] is None else {"distance": row["distance"]}
    return {**pictures, **row["targets"]}


def gains(rows: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """For each stratum the mean over its seeds of log(uniform's value with that seed / its own): positive is better."""
    reference = {row["seed"]: values(row) for row in rows if row["branch"] == "uniform"}
    found: dict[int, list[dict[str, float]]] = {}
    for row in rows:
        if row["stratum"] is not None and row["seed"] in reference:
            pair = reference[row["seed"]], values(row)
            found.setdefault(row["stratum"], []).append({name: math.log(pair[0][name] / pair[1][name]) for name in pair[1]})
    return {k: {name: sum(one[name] for one in some) / len(some) for name in some[0]} for k, some in sorted(found.items())}


def correlations(found: dict[int, dict[str, float]]) -> dict[str, float]:
    """Spearman's rho, over strata, of the gain of each target with the gain of the pictures."""
    columns = {name: torch.tensor([[one[name]] for one in found.values()]) for name in next(iter(found.values()), {})}
    pictures: Tensor | None = columns.pop("distance", None)
    if pictures is None or len(found) < 3:
        return {}
    return {name: float(spearman(column, pictures)[0]) for name, column in columns.items()}


def table(rows: list[dict[str, Any]], strata: int) -> str:
    """The gains in per cent, the noise of uniform, and the correlations."""
    found = gains(rows)
    if not found:
        return "no stratum can be compared with uniform yet"
    names = list(next(iter(found.values())))
    said = [f"{'more of u in':14s}" + "".join(f"{name:>13s}" for name in names) + "    gain over uniform in %"]
    for k, one in found.items():
        said.append(f"{k / strata:4.2f} ... {(k + 1) / strata:4.2f} " + "".join(f"{100 * one[name]:13.2f}" for name in names))
    spread = {name: [values(row)[name] for row in rows if row["branch"] == "uniform"] for name in names}
    if len(spread[names[0]]) > 1:
        noise = "".join(f"{100 * float(torch.tensor(spread[name]).log().std()):13.2f}" for name in names)
        said.append(f"{'noise':14s}{noise}    deviation of uniform over seeds")
    rho = correlations(found)
    if rho:
        said.append(f"{'rho':14s}{'':13s}" + "".join(f"{rho[name]:13.2f}" for name in rho) + "    with the pictures' gain")
    return "\n".join(said)


def line(row: dict[str, Any], seconds: float) -> str:
    name = f"{row['branch']:20s} seed {row['seed']}"
    if "failed" in row:
        return f"{name}  failed: {row['failed']}"
    distance = "" if row["distance"] is None else f"{row['metric']} {row['distance']:.3f}  "
    return f"{name}  {distance}loss {row['targets']['plain']:.5f}  ({seconds:.1f} s)"


if __name__ == "__main__":
    try:
        main()
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"strata.py: {error}") from error
