"""The command line: noisewise train | generate | evaluate | compare | encode.

Each command's own module is imported when it is called, so that `noisewise --help` is quick and needs no extra.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

COMMANDS = {
    "train": "train a model; --preset NAME, --config FILE, --resume, --dry-run, --print-config",
    "generate": "make images with a trained model",
    "evaluate": "measure a run, a folder of images or a file: FID, held-out loss, bits per dimension",
    "compare": "train with several samplers under the same conditions and compare them",
    "encode": "turn images into latents with an autoencoder",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: noisewise COMMAND [options]\n")
        print("\n".join(f"  {name:10s} {what}" for name, what in COMMANDS.items()))
        print("\nnoisewise COMMAND --help shows the options of a command")
        return 0
    if arguments[0] == "--version":
        from noisewise import __version__

        print(__version__)
        return 0
    if arguments[0] not in COMMANDS:
        print(f"noisewise: there is no command {arguments[0]!r}; choose one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    warnings.showwarning = _show_warning
    return _reporting_errors(lambda: COMMAND[arguments[0]](arguments[1:]))


def _show_warning(message: Warning | str, *where: Any, **more: Any) -> None:
    """A sentence for the user, without the place in the code."""
    print(f"noisewise: warning: {message}", file=sys.stderr)


def _reporting_errors(command: Callable[[], int]) -> int:
    """Errors that say what to do need no traceback; NOISEWISE_TRACEBACK=1 shows it all the same."""
    try:
        return command()
    except ModuleNotFoundError as error:
        if os.environ.get("NOISEWISE_TRACEBACK"):
            raise
        print(f"noisewise: {error}; this command needs the extras: pip install 'noisewise[train]'", file=sys.stderr)
        return 1
    except (ValueError, TypeError, OSError, RuntimeError, FloatingPointError) as error:
        if os.environ.get("NOISEWISE_TRACEBACK"):
            raise
        print(f"noisewise: {error}", file=sys.stderr)
        print("(set NOISEWISE_TRACEBACK=1 to see where this happened)", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def train(arguments: list[str]) -> int:
    """noisewise train."""
    from noisewise.training.options import config_parser, parse_config, preset_names, with_files

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
    if known.dry_run:
        from noisewise.training.run import dry_run

        said = dry_run(config)
        for name, value in said.items() if os.environ.get("RANK", "0") == "0" else ():
            print(f"{name:18s} {f'{value:,}' if isinstance(value, int) else value}")
        return 0
    from noisewise.training.progress import suitable_progress
    from noisewise.training.run import train as run_training

    folder = run_training(config, resume=known.resume, progress=suitable_progress(os.environ.get("RANK", "0") == "0"))
    if os.environ.get("RANK", "0") == "0":
        print(f"run: {folder}")
    return 0


def encode(arguments: list[str]) -> int:
    """noisewise encode."""
    from noisewise.training.encoding import main as encode_images

    return encode_images(arguments)


def compare(arguments: list[str]) -> int:
    """noisewise compare."""
    from noisewise.study.compare import main as compare_samplers

    return compare_samplers(arguments)


def generate(arguments: list[str]) -> int:
    """noisewise generate."""
    from noisewise.evaluation.generate_command import main as generate_images

    return generate_images(arguments)


def evaluate(arguments: list[str]) -> int:
    """noisewise evaluate."""
    from noisewise.evaluation.evaluate_command import main as evaluate_images

    return evaluate_images(arguments)


COMMAND: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "generate": generate,
    "evaluate": evaluate,
    "compare": compare,
    "encode": encode,
}
