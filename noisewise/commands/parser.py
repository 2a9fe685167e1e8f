"""The parser of all commands: one look of the help, one style of errors, and a hint where something is misspelt."""

import argparse
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from noisewise.words import closest


class Help(argparse.HelpFormatter):
    """Wraps sentences to the terminal's width, leaves the lines of examples as they are, and says what the defaults are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        shown = []
        for part in inspect.cleandoc(text).split("\n\n"):
            lines = [f"  {line.strip()}" for line in part.splitlines()]
            example = all(line.startswith("  noisewise ") for line in lines)
            shown.append("\n".join(lines) if example else super()._fill_text(part, width, indent))
        return "\n\n".join(shown)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        known = action.default not in (None, False, [], "", argparse.SUPPRESS)
        shown = known and action.option_strings and "default" not in (action.help or "")
        return f"{action.help}; default: %(default)s" if shown else action.help

    def add_argument(self, action: argparse.Action) -> None:
        """Room for the names of subcommands, which are indented once more than argparse counts."""
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += 2

    def _format_action(self, action: argparse.Action) -> str:
        text = super()._format_action(action)  # of subcommands the first line is their common name, which the title says
        return text.partition("\n")[2] if isinstance(action, argparse._SubParsersAction) else text


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, whose subcommands are modules that are imported when they are asked for."""

    module: str | None = None  # adds the options
    more_help: Callable[[], str] | None = None  # what stands below the options

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=Help, **settings)

    def add_subcommands(self, title: str, what: str, names: Mapping[str, str], package: str, *parents: "Parser") -> None:
        """One for each name, with a line of help: the module of that name, which has `add_options(parser)`."""
        made = self.add_subparsers(title=title, metavar=what.upper(), dest=what, prog=self.prog)
        for name, line in names.items():
            made.add_parser(
                name, help=line, description=line[0].upper() + line[1:], parents=parents
            ).module = f"{package}.{name}"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse; `parser` in the namespace is the one that has read the last subcommand."""
        if self.module is not None:
            module, self.module = importlib.import_module(self.module), None
            module.add_options(self)
        self.set_defaults(parser=self)
        return super().parse_known_args(args, namespace)

    def flags(self) -> list[str]:
        """All options, as they are written."""
        return [flag for action in self._actions for flag in action.option_strings]

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """End with an error: nobody knows these words."""
        names = [word.partition("=")[0] for word in words if word.startswith("-")]
        meant = [flag for name in names if (flag := closest(name, self.flags())) is not None]
        self.error(f"unrecognized arguments: {' '.join(words)}" + (f"; did you mean {' or '.join(meant)}?" if meant else ""))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nsee {self.prog} --help\n")

    def format_help(self) -> str:
        return super().format_help() + (self.more_help() if self.more_help is not None else "")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Of subcommands argparse would list the names alone."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            meant = closest(value, action.choices)
            hint = f"; did you mean {meant}?" if meant is not None else ""
            self.error(f"there is no {action.dest} {value!r}; choose one of {', '.join(action.choices)}{hint}")
        super()._check_value(action, value)
