"""The command line: noisewise train | generate | evaluate | compare | analyze | report | preview | encode.

Each command's own module is imported when it is called, so that `noisewise --help` is quick and needs no extra.
"""

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from noisewise.printable import printable

COMMANDS = {
    "train": "train a model; --preset NAME, --config FILE, --resume, --dry-run, --print-config",
    "generate": "make images with a trained model",
    "evaluate": "measure a run, a folder of images or a file: FID, held-out loss, likelihood",
    "compare": "train with several samplers under the same conditions and compare them",
    "analyze": "look inside training: gradients, interdependence, densities, overhead",
    "report": "a run or a comparison as one HTML file, or live in the browser",
    "preview": "show which noise levels a recipe draws and how much they count, before any training",
    "encode": "turn images into latents with an autoencoder",
}
"""What each command does. Each is a module of this package, whose main takes the other arguments."""


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
    if strange := [word for word in arguments if not _is_text(word)]:
        print(f"noisewise: {printable(strange[0])} is no UTF-8: give it another name", file=sys.stderr)
        return 2
    warnings.showwarning = _show_warning
    return _reporting_errors(lambda: _module(arguments[0]).main(arguments[1:]))


def _is_text(word: str) -> bool:
    """Whether a word of the command line can be written down; names of files may be any bytes."""
    return not any("\ud800" <= one <= "\udfff" for one in word)


def _module(command: str) -> Any:
    return importlib.import_module(f"noisewise.commands.{command}")


def _show_warning(message: Warning | str, *where: Any, **more: Any) -> None:
    """A sentence for the user, without the place in the code."""
    print(f"noisewise: warning: {printable(str(message))}", file=sys.stderr)


def _reporting_errors(command: Callable[[], int]) -> int:
    """Errors that say what to do need no traceback; NOISEWISE_TRACEBACK=1 shows it all the same."""
    try:
        status = command()
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # nobody reads on, as in `noisewise preview ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain at its end
        return 141
    except ModuleNotFoundError as error:
        if os.environ.get("NOISEWISE_TRACEBACK"):
            raise
        print(f"noisewise: {error}; this command needs the extras: pip install 'noisewise[train]'", file=sys.stderr)
        return 1
    except (ValueError, TypeError, OSError, RuntimeError, FloatingPointError, ImportError) as error:
        if os.environ.get("NOISEWISE_TRACEBACK"):
            raise
        print(f"noisewise: {printable(str(error))}", file=sys.stderr)
        print("(set NOISEWISE_TRACEBACK=1 to see where this happened)", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
