"""noisewise train: the command line around run.py."""

import argparse
import os
from pathlib import Path

from noisewise.commands import evaluate
from noisewise.generation.run_samples import draw_samples, evaluation_solver, quick_solver
from noisewise.training.options import config_parser, parse_config, preset_names, with_files
from noisewise.training.progress import suitable_progress
from noisewise.training.run import dry_run, train
from noisewise.training.signals import StopRequest


def main(arguments: list[str]) -> int:
    """The command line."""
    first = argparse.ArgumentParser(prog="noisewise train", add_help=False, allow_abbrev=False)
    first.add_argument("--preset", action="append", default=[])
    first.add_argument("--resume", action="store_true")
    first.add_argument("--dry-run", action="store_true")
    first.add_argument("--out")
    known, rest = first.parse_known_args(arguments)
    parser = config_parser(
        prog="noisewise train",
        description="Train a model. Besides the settings below: --preset NAME begins with the settings of a preset "
        f"({', '.join(preset_names())}); --resume continues the run in --out, or begins it; --dry-run builds everything, "
        "makes two steps on noise and prints parameters, memory and time.",
    )
    stored = Path(known.out) / "config.yaml" if known.out and known.resume else None
    rest += ["--out", known.out] if known.out else []
    config = parse_config(parser, with_files(rest, known.preset, stored), ["--preset", "--resume", "--dry-run"])
    main_process = os.environ.get("RANK", "0") == "0"
    if known.dry_run:
        said = dry_run(config)
        for name, value in said.items() if main_process else ():
            print(f"{name:18s} {f'{value:,}' if isinstance(value, int) else value}")
        return 0
    evaluation_solver(config), quick_solver(config)  # what cannot be one is known now, not at the first picture
    at_end, stop = config.evaluation.at_end, StopRequest()
    if at_end and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("evaluation.at_end is for one process: run noisewise evaluate afterwards, with the same launcher")
    folder = train(config, resume=known.resume, progress=suitable_progress(main_process), draw=draw_samples, stop=stop)
    if main_process:
        print(f"run: {folder}")
    if at_end and not stop.requested:
        return evaluate.main([str(folder), "--device", config.device])
    return 0
