"""noisewise compare: the same model, data, noise and time for several samplers.

    noisewise compare --preset digits --samplers "uniform,minsnr,adaptive" --seeds 2 --budget 30s

The runs take turns in small slices of time, so that whatever else the machine does hits all of them alike. Each is an ordinary
run folder; the clock counts training steps alone, the sampler's own cost included.
"""

import argparse
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from noisewise import distributed
from noisewise.spec import split_specs
from noisewise.study.live import Board
from noisewise.study.measure import Measured, measure
from noisewise.study.report import write_report
from noisewise.study.table import print_table
from noisewise.training.checkpoint import steps_in
from noisewise.training.config import Config
from noisewise.training.folder import environment
from noisewise.training.options import config_parser, parse_config, plain, with_files
from noisewise.training.parts import open_source
from noisewise.training.run import Run, default_folder
from noisewise.training.signals import StopRequest

SLICES = 20  # turns that each run gets
LATE = 20  # steps, at their mean time, that a run may have gone beyond its budget: the last one may be slow


def main(arguments: list[str]) -> int:
    """The command line."""
    first = argparse.ArgumentParser(
        prog="noisewise compare",
        allow_abbrev=False,
        description="Train with several samplers under the same conditions, compare, and write a report. "
        "All settings of noisewise train can follow.",
    )
    first.add_argument("--preset", action="append", default=[], help="begin with the settings of a preset")
    first.add_argument(
        "--samplers", default="uniform,minsnr,adaptive", help="specs, separated by commas; the first is the baseline"
    )
    first.add_argument("--seeds", type=int, default=2, help="runs of each sampler")
    first.add_argument("--budget", default="25s", help="of each run: seconds (30s) or steps (1000it)")
    first.add_argument(
        "--images", type=int, default=1000, help="generated images of each run for the distance; 5000 or more for figures"
    )
    first.add_argument("--out", type=Path, default=None, help="a folder for runs, results and report")
    known, rest = first.parse_known_args(arguments)
    if any(word.partition("=")[0] in ("--sampler", "--seed") for word in rest):
        raise ValueError("compare takes --samplers and --seeds, not --sampler and --seed")
    own = [option for action in first._actions for option in action.option_strings]
    config = parse_config(config_parser(prog="noisewise compare"), with_files(rest, known.preset), own)
    config = with_budget(config, known.budget)
    configs = combinations(config, split_specs(known.samplers), known.seeds, known.out or Path("out") / config.name)
    folder = Path(configs[0].out or "").parent.parent
    with StopRequest() as stop:
        results = compare(configs, images=known.images, stop=stop)
    if results is None:
        print(f"{stop.name}: the runs are saved; the same command goes on with them")
        return 0
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in result_rows(configs, results)))
    print_table(results)
    print(f"\nreport: {write_report(folder, configs, results)}")
    return 0


def with_budget(config: Config, budget: str) -> Config:
    """The configuration with "30s" or "1000it" as its end."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?=s)|\d+(?=it))(s|it)", budget)
    if not match or not float(match[1]) > 0:
        raise ValueError(f"--budget {budget!r}: give seconds as in 30s, or steps as in 1000it")
    if match[2] == "it":
        return replace(config, steps=int(match[1]), seconds=None)
    return replace(config, steps=10**9, seconds=float(match[1]))


def combinations(config: Config, samplers: list[str], seeds: int, out: Path) -> list[Config]:
    """A configuration for each sampler and seed; bad specs are found before anything is trained."""
    if seeds < 1:
        raise ValueError(f"--seeds must be >= 1, got {seeds}")
    if len(set(samplers)) < len(samplers):
        raise ValueError("--samplers names one sampler twice")
    log = replace(config.log, trackers=[], samples_every=0)
    made = [replace(config, sampler=spec, seed=config.seed + k, log=log) for k in range(seeds) for spec in samplers]
    for one in made:
        one.check()
    return [replace(one, out=str(out / "runs" / default_folder(one).name)) for one in made]


def compare(configs: list[Config], *, images: int, stop: StopRequest | None = None) -> list[Measured] | None:
    """Train all runs in turns, then measure each; None, with all runs saved, if asked to stop."""
    if distributed.world_size() > 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("compare is one process: start it without torchrun")
    open_source(configs[0], "test")  # needed in the end: better missed now
    for config in configs:
        made = max(steps_in(Path(config.out or "") / "checkpoints"), default=0)
        if made > config.steps:
            raise ValueError(f"{config.out} has made {made} steps, more than --budget: give another --out")
    board = Board(configs)
    runs = [Run(config, resume=True, progress=board.progress(i)) for i, config in enumerate(configs)]
    try:
        for run in runs:
            step = run.trainer.seconds / max(run.trainer.step, 1)
            if run.config.seconds is not None and run.trainer.seconds > run.config.seconds + LATE * step:
                raise ValueError(
                    f"{run.folder.path} has trained for {run.trainer.seconds:.0f} s, more than --budget: use another --out"
                )
        with board.shown():
            take_turns(runs, stop)
            if stop is not None and stop.requested:
                return None
            results = []
            for i, run in enumerate(runs):
                board.note(i, "measuring")
                results.append(measure(run, images=images, tell=board.lines[i].tell))
                board.note(i, "done")
    finally:
        for run in runs:
            run.close()
    return results


def take_turns(runs: list[Run], stop: StopRequest | None = None) -> None:
    """Every run advances by a slice of the budget, then the next one; until all are done."""
    walks: list[Iterator[int] | None] = [run.advance(stop) for run in runs]
    for turn in range(1, SLICES + 1):
        for i, run in enumerate(runs):
            walk, there = walks[i], reached(run, turn / SLICES)
            if there():
                continue
            while walk is not None and not there():
                if next(walk, None) is None:
                    walk = walks[i] = None
            if walk is not None:
                run.trainer.settle()
    for walk in walks:
        for _ in walk or ():
            pass


def reached(run: Run, share: float) -> Callable[[], bool]:
    """Whether a run has spent this share of its budget."""
    config, trainer = run.config, run.trainer
    if config.seconds is None:
        return lambda: trainer.step >= share * config.steps
    seconds = share * config.seconds
    return lambda: trainer.seconds >= seconds


def result_rows(configs: list[Config], results: list[Measured]) -> list[dict[str, object]]:
    """Everything needed to repeat and to judge each run."""
    machine = environment()
    return [{**result.row(), "config": plain(config), **machine} for config, result in zip(configs, results, strict=True)]
