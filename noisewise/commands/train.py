"""noisewise train: the command line around run.py."""

import argparse
import os
from pathlib import Path

from noisewise.generation.run_samples import draw_samples
from noisewise.models.trust import check_trusted, is_import_path, remember
from noisewise.training.options import config_parser, parse_config, preset_names, with_files
from noisewise.training.progress import suitable_progress
from noisewise.training.run import dry_run, train


def main(arguments: list[str]) -> int:
    """The command line."""
    first = argparse.ArgumentParser(prog="noisewise train", add_help=False, allow_abbrev=False)
    first.add_argument("--preset", action="append", default=[])
    first.add_argument("--resume", action="store_true")
    first.add_argument("--resume-from", type=int)
    first.add_argument("--dry-run", action="store_true")
    first.add_argument("--trust", action="append", default=[])
    first.add_argument("--out")
    known, rest = first.parse_known_args(arguments)
    known.resume |= known.resume_from is not None
    parser = config_parser(
        prog="noisewise train",
        description="Train a model. Besides the settings below: --preset NAME begins with the settings of a preset "
        f"({', '.join(preset_names())}); --resume continues the run in --out, or begins it; --resume-from STEP goes on from "
        "that checkpoint; --dry-run builds everything, "
        "makes two steps on noise and prints parameters, memory and time; --trust NAME lets --resume import a model that only "
        "the folder names.",
    )
    stored = Path(known.out) / "config.yaml" if known.out and known.resume else None
    rest += ["--out", known.out] if known.out else []
    given = with_files(rest, known.preset)
    config = parse_config(parser, given, ["--preset", "--resume", "--resume-from", "--dry-run", "--trust"], stored)
    if stored is not None and is_import_path(config.model.name):
        own = parser.parse_args(given)["model.name"] == config.model.name
        check_trusted(config.model.name, stored, [config.model.name] if own else known.trust)
        remember(config.model.name)
    main_process = os.environ.get("RANK", "0") == "0"
    if known.dry_run:
        said = dry_run(config)
        for name, value in said.items() if main_process else ():
            print(f"{name:18s} {f'{value:,}' if isinstance(value, int) else value}")
        return 0
    progress = suitable_progress(main_process)
    folder = train(config, resume=known.resume, step=known.resume_from, progress=progress, draw=draw_samples)
    if main_process:
        print(f"run: {folder}")
    return 0
