"""Train a model. Settings come from presets, YAML files and the command line; later ones win.

noisewise train --preset digits --out runs/first
noisewise train --preset digits --sampler adaptive+minsnr --steps 4000
noisewise train --resume --out runs/first --steps 8000
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from noisewise.commands import evaluate
from noisewise.commands.parser import Parser
from noisewise.generation.run_samples import draw_samples, evaluation_solver, quick_solver
from noisewise.models.build import check_trusted, is_import_path, remember
from noisewise.training.components import said_picked, usual_on_cpu
from noisewise.training.display import Shown
from noisewise.training.options import as_yaml, config_parser, parse_config, parse_fitting, preset_names, with_files
from noisewise.training.run import dry_run, train
from noisewise.training.signals import StopRequest


def add_options(parser: Parser) -> None:
    parser.description, parser.more_help = __doc__, settings_help
    parser.set_defaults(settings=[])
    parser.add_argument(
        "--preset", action="append", default=[], metavar="NAME", help=f"settings to start from: {', '.join(preset_names())}"
    )
    parser.add_argument("--out", metavar="DIR", help="the run's folder; by default runs/NAME-SAMPLER-SEED")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out, or start it")
    parser.add_argument("--resume-from", type=int, metavar="STEP", help="continue it from the checkpoint of this step")
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="NAME",
        help="allow --resume to import the model NAME, if only the folder in --out names it",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="build everything, make two steps on noise, print parameters, memory and time"
    )
    parser.add_argument("--print-config", action="store_true", help="print all settings, as a file for --config, and exit")


def settings_help() -> str:
    """What jsonargparse says of the settings."""
    parser = config_parser(usage=argparse.SUPPRESS, add_help=False)
    parser._optionals.title = "all settings at once"
    return "\n" + parser.format_help()


def run(args: argparse.Namespace) -> int:
    parser, resume = config_parser(), args.resume or args.resume_from is not None
    stored = Path(args.out) / "config.yaml" if args.out and resume else None
    given = with_files([*args.settings, *(["--out", args.out] if args.out else [])], args.preset)
    picked: dict[str, Any] = {}
    if args.preset or (stored is not None and os.path.lexists(stored)):
        config = parse_config(parser, given, args.parser.flags(), stored)
    else:
        config, picked = parse_fitting(given, args.parser.flags(), usual_on_cpu)
    main_process = os.environ.get("RANK", "0") == "0"
    if main_process and (said := said_picked(picked)):
        print(said, file=sys.stderr)
    if args.print_config:
        print(as_yaml(config) * main_process, end="")
        return 0
    if stored is not None and is_import_path(config.model.name):
        own = parser.parse_args(given)["model.name"] == config.model.name
        check_trusted(config.model.name, stored, [config.model.name] if own else args.trust)
        remember(config.model.name)
    if args.dry_run:
        measured = dry_run(config)
        for name, value in measured.items() if main_process else ():
            print(f"{name:18s} {f'{value:,}' if isinstance(value, int) else value}")
        return 0
    evaluation_solver(config), quick_solver(config)  # what cannot be one is known now, not at the first picture
    at_end, stop = config.evaluation.at_end, StopRequest()
    if at_end and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("evaluation.at_end is for one process: run noisewise evaluate afterwards, with the same launcher")
    progress = Shown() if main_process else None
    folder = train(config, resume=resume, step=args.resume_from, progress=progress, draw=draw_samples, stop=stop)
    if main_process:
        print(f"run: {folder}")
    if at_end and not stop.requested:
        options = Parser(prog="noisewise evaluate")
        evaluate.add_options(options)
        return evaluate.run(options.parse_args([str(folder), "--device", config.device]))
    return 0
