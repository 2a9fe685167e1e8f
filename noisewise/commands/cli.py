"""The command line: noisewise train | generate | evaluate | compare | analyze | report | preview | encode | reproduce.

Each command is a module of this package with `add_options(parser)` and `run(args) -> int`. It is imported when it is asked
for, so that `noisewise --help` is quick and needs no extra.

A command that takes the settings of `noisewise train` besides its own options says so with `parser.set_defaults(settings=[])`:
words that are no options of its own are in `args.settings`.
"""

import importlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from noisewise import __version__
from noisewise.commands.parser import Parser
from noisewise.training.signals import Acknowledged
from noisewise.words import printable

COMMANDS = {
    "train": "train a model",
    "generate": "make images with a trained model",
    "evaluate": "measure a run or images: FID, held-out loss, likelihood",
    "compare": "train with several samplers under the same conditions",
    "analyze": "look inside training: gradients, densities, overhead",
    "report": "show a run or a comparison as one HTML file, or live",
    "preview": "show which noise levels a recipe draws, before training",
    "encode": "turn images into latents with an autoencoder",
    "reproduce": "repeat a table or figure of the papers",
}

REPORTED = (ValueError, TypeError, OSError, RuntimeError, FloatingPointError, ImportError)  # others are mistakes of ours
EXPECTED = (ValueError, OSError, ImportError)  # of them, those of the user's words, files and packages


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = list(sys.argv[1:] if words is None else words)
    parser = whole_parser()
    if words in ([], ["-h"], ["--help"]):
        parser.print_help()
        return 0
    if words == ["--version"]:
        print(__version__)
        return 0
    warnings.showwarning = partial(_show_warning, set())
    with Acknowledged() as signals:
        return _reporting_errors(lambda: run_command(parser, words), signals)


EXAMPLES = """Choose the noise levels that diffusion and flow models train on, and see whether it helps.

noisewise compare --preset digits
noisewise train --preset digits --out runs/first
noisewise preview --scheduler linear --sampler logit_normal+minsnr
"""


def whole_parser() -> Parser:
    """Of all commands."""
    parser = Parser(prog="noisewise", description=EXAMPLES, epilog="The options of a command: noisewise COMMAND --help")
    parser.add_argument("--version", action="version", version=__version__, help="print the version and exit")
    parser.add_subcommands("commands", "command", COMMANDS, __package__)
    return parser


def run_command(parser: Parser, words: list[str]) -> int:
    """Read the words, and do what they ask for."""
    if strange := [word for word in words if any("\ud800" <= one <= "\udfff" for one in word)]:  # names may be any bytes
        raise ValueError(f"{strange[0]} is no UTF-8: give it another name")
    args, rest = parser.parse_known_args(words)
    if args.command is None:
        parser.refuse(rest)
    if hasattr(args, "settings"):
        args.settings = rest
    elif rest:
        args.parser.refuse(rest)
    args.words = tuple(words)
    status: int = importlib.import_module(f"{__package__}.{args.command}").run(args)
    return status


LONGEST = 2000  # characters of a message: a value in somebody's file may have millions


def _shown(message: object) -> str:
    """What is said, fit for a terminal."""
    text = printable(str(message))
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"


def _show_warning(said: set[str], message: Warning | str, *where: Any, **more: Any) -> None:
    """A sentence for the user, without the place in the code; once, though data may be opened several times."""
    if (text := _shown(message)) not in said:
        said.add(text)
        print(f"noisewise: warning: {text}", file=sys.stderr)


def _reporting_errors(command: Callable[[], int], signals: Acknowledged) -> int:
    """What is expected to go wrong is said in one line, what torch and the user's own code raise with how to see where.

    NOISEWISE_TRACEBACK=1 shows the traceback of either.
    """
    try:
        status = command()
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # nobody reads on, as in `noisewise preview ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain at its end
        return 141
    except KeyboardInterrupt:
        if not signals.ending:
            signals.say()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # all is tidied up: more of them need no traceback
        return 130
    except Exception as error:
        if signals.ending:  # C extensions and importers make other errors of Ctrl-C
            return 130
        if os.environ.get("NOISEWISE_TRACEBACK") or not isinstance(error, REPORTED):
            raise
        extras = "; this command needs the extras: pip install 'noisewise[train]'"
        print(f"noisewise: {_shown(error)}{extras * isinstance(error, ModuleNotFoundError)}", file=sys.stderr)
        if not _expected(error):
            print("(set NOISEWISE_TRACEBACK=1 to see where this happened)", file=sys.stderr)
        return 1


def _expected(error: Exception) -> bool:
    """Whether the message says it all, as those of this package's own kinds of error do."""
    return isinstance(error, EXPECTED) or type(error).__module__.startswith("noisewise.")
