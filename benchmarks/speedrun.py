"""The half-hour run: the best FID of 25 minutes of training on one GPU, beside the same with uniform draws.

    python benchmarks/speedrun.py --json benchmarks/results/speedrun.jsonl                              on an H200, an hour
    python benchmarks/speedrun.py --preset digits --minutes 0.3 --images 64 --out out/tiny              on a CPU

The clock is that of the trainer: steps, without compilation, checkpoints and evaluation. A first share of the minutes tells how
many steps the whole takes; then the run goes on to that step, and its learning rate cools down over the last fifth. Each
sampler trains in a run folder of its own, `--out`/SAMPLER, with as many steps as its own speed allows. The distance of
`--images` images is a row of `--json`, and the first hundred are in `--out`/SAMPLER.png.

After `--limit-seconds` everything is saved and the same command goes on: 25 minutes may be several sittings, and the evaluation
another. All settings of noisewise train can follow.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

from rows import append

from noisewise.generation.images import save_grid
from noisewise.generation.run_samples import headline_solver, run_samples
from noisewise.study.measure import distance_to_data
from noisewise.training.config import Config
from noisewise.training.display import Shown
from noisewise.training.options import load_config, load_preset, plain
from noisewise.training.run import Run
from noisewise.training.run_folder import environment
from noisewise.training.signals import StopRequest

TRIAL = 0.04  # of the minutes: to learn how fast steps are
COOLDOWN = 0.2  # of all steps
SETTINGS = {
    "cifar10-flow": (
        *("--model.conditional=true", "--model.label_dropout=0", "--batch=256", "--optimizer.lr=5e-4"),
        *("--optimizer.warmup=1000", "--ema.kind=power", "--ema.std=0.05", "--evaluation.solver=heun:steps=25"),
        *("--log.samples_every=0", "--log.trackers=[]", "--checkpoint.every=5000"),
    )
}
"""What differs from a preset: classes are told, larger batches and steps than a long training has, a short average."""


def main() -> None:
    begun = time.monotonic()
    args, rest = options().parse_known_args()
    with StopRequest() as stop:
        for sampler in args.samplers.split(","):
            out = args.out / sampler.partition(":")[0]
            config = load_preset(args.preset, *SETTINGS.get(args.preset, ()), *rest, f"--sampler={sampler}", f"--out={out}")
            run = trained(config, args.minutes * 60, begun + args.limit_seconds, stop)
            try:
                if stop.requested:
                    print(f"{sampler}: {run.trainer.seconds / 60:.1f} of {args.minutes:g} minutes; the same command goes on")
                    return
                judge(run, args.images, args.json, out.with_suffix(".png"))
            finally:
                run.close()


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--preset", default="cifar10-flow")
    parser.add_argument("--samplers", default="adaptive,uniform", help="each has the minutes to itself")
    parser.add_argument("--minutes", type=float, default=25.0, help="of training")
    parser.add_argument("--images", type=int, default=50_000, help="generated for the distance")
    parser.add_argument("--limit-seconds", type=float, default=1e9, help="then save and end")
    parser.add_argument("--out", type=Path, default=Path("out/speedrun"), help="the folder of the runs")
    parser.add_argument("--json", type=Path, help="append a row for each sampler to this file")
    return parser


def trained(config: Config, seconds: float, end: float, stop: StopRequest) -> Run:
    """The run at the end of its minutes, or where it was asked to stop."""
    stored = Path(config.out) / "config.yaml"
    if stored.exists() and (before := load_config(stored)).optimizer.cooldown:
        planned = replace(config, steps=before.steps, optimizer=before.optimizer)  # begun in an earlier sitting
    else:
        trial = advance(replace(config, steps=10**9, seconds=TRIAL * seconds), end, stop)
        if stop.requested:
            return trial
        trial.close()
        steps = round(seconds * trial.trainer.step / trial.trainer.seconds)
        planned = replace(config, steps=steps, optimizer=replace(config.optimizer, cooldown=round(COOLDOWN * steps)))
    return advance(planned, end, stop)


def advance(config: Config, end: float, stop: StopRequest) -> Run:
    """Train from the newest checkpoint to the end of the configuration, or until it is time to stop."""
    run = Run(config, resume=True, progress=Shown())
    with run.progress.running(run.config, run.trainer.step):
        for _ in run.advance(stop):
            if time.monotonic() > end:
                stop.name = "--limit-seconds"
    return run


def judge(run: Run, images: int, path: Path | None, picture: Path) -> None:
    samples = run_samples(run, images, solver=headline_solver(run.config))
    save_grid(samples[:100], picture, columns=10)
    metric, distance, _ = distance_to_data(run, [samples], print)
    trainer = run.trainer
    print(f"{run.config.sampler}: {metric} {distance} of {images} images, {trainer.step} steps, {trainer.seconds / 60:.1f} min")
    row = {"sampler": run.config.sampler, "step": trainer.step, "seconds": trainer.seconds, "samples": trainer.samples}
    row |= {"metric": metric, "distance": distance, "images": images}
    if path is not None:
        append(path, row | {"config": plain(run.config), "environment": environment()})


if __name__ == "__main__":
    main()
