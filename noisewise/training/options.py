"""Configurations on the command line and in YAML files, by jsonargparse.

A preset is a YAML file of this package; the order is preset, then --config files, then single options, later ones win.
"""

import json
import os
import re
from argparse import ArgumentError, ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, get_loader  # type: ignore[attr-defined]

from noisewise.training.config import FREE_WITHIN, PINNED, Config
from noisewise.training.stored import FREE_FORM, Refused, no_setting, read_stored
from noisewise.words import closest

PRESETS = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def preset_path(name: str) -> Path:
    """The file of a preset, or an error that names them all."""
    path = PRESETS / f"{name}.yaml"
    if name not in preset_names():
        meant = f"; did you mean {found}?" if (found := closest(name, preset_names())) else ""
        raise ValueError(f"there is no preset {name!r}; choose one of {', '.join(preset_names())}{meant}")
    return path


def config_parser(**settings: Any) -> ArgumentParser:
    """A parser with an option for every value of `Config`."""
    parser = ArgumentParser(print_config=None, allow_abbrev=False, exit_on_error=False, **settings)
    parser.add_argument("--config", action=ActionConfigFile, help="a YAML file of settings; may be given more than once")
    parser.add_class_arguments(Config)
    return parser


def to_config(parser: ArgumentParser, namespace: Namespace) -> Config:
    """What was parsed, as a checked `Config`."""
    for group in (field.name for field in fields(Config) if is_dataclass(field.type)):
        if not isinstance(namespace[group], Namespace):
            raise ValueError(f"{group} must be a group of settings, got {namespace[group]!r}")
    values = parser.instantiate(namespace)
    config = Config(**{field.name: values[field.name] for field in fields(Config)})
    config.check()
    return config


def with_files(arguments: Sequence[str], presets: Sequence[str] = ()) -> list[str]:
    """The arguments after those that read presets, so that they override them."""
    return [part for name in presets for part in ("--config", str(preset_path(name)))] + list(arguments)


def load_preset(name: str, *overrides: str) -> Config:
    """A preset as a Config, with overrides such as "--steps=100"."""
    return parse_config(_plain_parser(), with_files(overrides, [name]))


def load_config(path: Path) -> Config:
    """The configuration in a YAML file, which may be anybody's: reading it imports nothing (`stored.py`).

    Its text is parsed, not its path: jsonargparse goes to a file's folder while it reads it, and a process has one working
    directory for all threads. What another one began in that moment with a relative path would end up there.
    """
    parser = _plain_parser()
    with _reading(parser, path):
        stored = read_stored(path)
        config = to_config(parser, parser.parse_object(stored.settings))
        return _with_options(config, stored.options)


def _with_options(config: Config, stored: dict[str, dict[str, Any]]) -> Config:
    """The configuration with free options of a file, word for word, below those that it has."""
    for free, options in stored.items():
        group, _, name = free.partition(".")
        part = getattr(config, group)
        setattr(part, name, {**options, **getattr(part, name)})
    return config


@contextmanager
def _reading(parser: ArgumentParser, path: Path) -> Iterator[None]:
    """Within the block a file of settings is read; what is wrong with it is a ValueError that names it."""
    try:
        yield
    except (ArgumentError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {_reason(parser, path, error)}") from error


def _reason(parser: ArgumentParser, path: Path, error: Exception) -> str:
    """What is wrong with a file that gave an error: no text, no YAML, no settings, misspelt ones, or what the error says."""
    if isinstance(error, Refused):
        return str(error)
    try:
        content = get_loader("yaml")(path.read_text())
    except UnicodeDecodeError:
        return "this is no text: settings are written as YAML, one a line, as in steps: 1000"
    except yaml.MarkedYAMLError as bad:
        mark = bad.problem_mark or bad.context_mark
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        return f"this is no YAML{place}: {bad.problem or bad.context}"
    except yaml.YAMLError:
        return _line(error)
    if not isinstance(content, dict):
        what = "there are no settings in it" if content is None else f"{str(content)[:40]!r} is no setting"
        return f"{what}: write them as YAML, one a line, as in steps: 1000"
    known = [option.removeprefix("--") for action in parser._actions for option in action.option_strings]
    unknown = [name for name in dotted(content) if name not in known and not name.startswith(FREE_FORM)]
    if not unknown or unknown[0] in (field.name for field in fields(Config)):  # a group with a single value
        return _line(error)
    return no_setting(unknown[0], known)


def _line(error: Exception) -> str:
    """What jsonargparse says, in one line: of a value of the wrong type the name, what it takes, and the value; of one value
    for a whole group the names in it."""
    text = " ".join(str(error).split())
    found = re.match(r'Parser key "([\w.]+)": (?:.*(?:Got value:|Given value:|Unable to load config) (.*))?', text)
    if found is None:
        return text
    name, value = found[1], found[2] or ""
    if name == "config":
        return text.replace(found[0], "--config: ")
    group, _, last = name.rpartition(".")
    hint = get_type_hints(type(attrgetter(group)(Config()) if group else Config()))[last]
    if is_dataclass(hint):
        names = ", ".join(f"--{name}.{one.name}" for one in fields(hint))
        return f"--{name} is a group of settings, not {value[:80]}: give {names}"
    return f"{name} must be {_kind(hint)}" + f", got {value[:80]}" * bool(value)


def _kind(hint: Any) -> str:
    """What a setting of this type takes, in words."""
    inner, kind = get_args(hint), get_origin(hint)
    if kind is Literal:
        return f"one of {', '.join(inner)}"
    if kind in (tuple, list):
        return f"[{', '.join('...' if one is Ellipsis else _kind(one) for one in inner)}]"
    if kind is dict:
        return "names and values in braces, as in '{size: 8}'"
    if inner:
        return " or ".join(_kind(one) for one in inner)
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a word", NoneType: "null"}[hint]


def parse_config(
    parser: ArgumentParser, arguments: list[str], others: Sequence[str] = (), stored: Path | None = None
) -> Config:
    """The configuration that arguments describe; a ValueError says what is wrong with them, and what was probably meant.

    `others` are options of the command besides those of the configuration, for the suggestions. `stored` is the config.yaml of
    a folder, if it is there: the arguments override it.
    """
    if stored is not None and os.path.lexists(stored):
        with _reading(parser, stored):
            found = read_stored(stored)
            to_config(parser, parser.parse_object(found.settings))
        arguments = ["--config", yaml.dump(found.settings, Dumper=_Dumper), *arguments]
        return _with_options(parse_config(parser, arguments, others), found.options)
    try:
        namespace = parser.parse_args([*arguments, *_without_earlier_epochs(arguments)])
    except (ArgumentError, UnicodeDecodeError) as error:
        for file in config_files(arguments):
            with _reading(parser, file):  # is it one of these?
                parser.parse_string(file.read_text())
        known = [*others, *(option for action in parser._actions for option in action.option_strings)]
        names = [word.partition("=")[0] for word in arguments if word.startswith("--")]
        free = tuple(f"--{name}." for name in FREE_FORM)
        words = [name for name in names if name not in known and not name.startswith(free)]
        close = [meant for word in words if (meant := closest(word, known))]
        hint = f"; did you mean {' or '.join(close)}?" if close and "nrecognized" in str(error) else ""
        raise ValueError(f"{_line(error)}{hint}") from error
    files = [str(file) for file in namespace.config or [] if file is not None]
    texts = [Path(file).read_text() for file in files if os.path.isfile(file)]
    return with_words(to_config(parser, namespace), texts, [word.partition("=")[0] for word in arguments])


def parse_fitting(
    arguments: list[str], others: Sequence[str], usual: Callable[[Config], Mapping[str, Any]]
) -> tuple[Config, dict[str, Any]]:
    """As `parse_config`, with defaults that `usual` finds for what is described; also those of them that nobody overrides."""
    plain = parse_config(config_parser(), arguments, others)
    defaults = dict(usual(plain))
    if not defaults:
        return plain, {}
    parser = config_parser()
    parser.set_defaults(defaults)
    config = parse_config(parser, arguments, others)
    before, after = flat(plain), flat(config)
    return config, {name: value for name, value in defaults.items() if before[name] != after[name] == value}


def _without_earlier_epochs(arguments: Sequence[str]) -> list[str]:
    """Steps that come after a file's epochs are meant instead of them: the argument that takes the epochs back, if so."""
    words = [word.partition("=")[0] for word in arguments]
    if {"--steps", "--epochs"} <= {*words}:
        raise ValueError("give --steps or --epochs, not both")
    given: list[set[str]] = []
    for place, word in enumerate(words):
        files = config_files(arguments[place : place + 2]) if word == "--config" else []
        given += [{word}, *({f"--{name}" for name in _names_in(file)} for file in files)]
    last = next((names for names in reversed(given) if {"--steps", "--epochs"} & names), {"--epochs"})
    return [] if "--epochs" in last else ["--epochs=null"]


def _names_in(file: Path) -> set[str]:
    """The settings and groups that a file names; none if it is no YAML, which is told elsewhere."""
    try:
        content = get_loader("yaml")(file.read_text())
    except (UnicodeDecodeError, yaml.YAMLError):
        return set()
    return {*content} if isinstance(content, dict) else set()


def config_files(arguments: Sequence[str]) -> list[Path]:
    """The files that arguments name with --config, if they are there."""
    words = [(word, after) for word, after in pairwise((*arguments, "")) if word.partition("=")[0] == "--config"]
    names = [after if word == "--config" else word.removeprefix("--config=") for word, after in words]
    return [Path(name) for name in names if os.path.isfile(name)]  # others are settings written in one line


def with_words(config: Config, texts: Sequence[str], given: Sequence[str] = ()) -> Config:
    """The configuration with the words among free options as its files have them, unless they were `given` as arguments too.

    jsonargparse reads such words as YAML once more, and what is in quotes because it looks like a number becomes one. What is
    not exactly that comes from elsewhere, and stays.
    """
    read = get_loader("yaml")
    contents = [content for text in texts if isinstance(content := read(text), dict)]
    for free in FREE_FORM:
        group, _, last = free.partition(".")
        kept = getattr(getattr(config, group), last)
        written = [one for content in contents if (one := _free_options(content, free)) is not None] or [{}]
        for name, value in written[-1].items():  # those of the last file replace all others
            overridden = {f"--{group}", f"--{free}", f"--{free}.{name}"} & {*given}
            word = isinstance(value, str) and name in kept and kept[name] != value and not overridden
            if word and kept[name] == _read_twice(free, name, value):
                kept[name] = value
    return config


def _read_twice(free: str, name: str, word: str) -> Any:
    """What jsonargparse makes of a word among free options."""
    return _plain_parser().parse_string(yaml.safe_dump({free: {name: word}}))[free][name]


def _free_options(content: dict[str, Any], free: str) -> dict[str, Any] | None:
    """The free options in what a file says, if it has any: below their group, or under a dotted key."""
    group, _, last = free.partition(".")
    inner = content.get(group)
    found = inner[last] if isinstance(inner, dict) and last in inner else content.get(free)
    return found if isinstance(found, dict) else None


def read_mapping(text: str) -> dict[str, Any]:
    """Settings in YAML such as {size: 8}, as `train` reads those of its command line; the `type` of an option of argparse."""
    try:
        found = json.loads(text)  # YAML too, but PyYAML does not know all of it, such as tabs
    except ValueError:
        try:
            found = get_loader("yaml")(text)
        except yaml.YAMLError:
            found = None
    if not isinstance(found, dict):
        raise ArgumentTypeError(f"{text!r} is no mapping: write names and values in braces, as in '{{size: 8}}'")
    return found


@cache
def _plain_parser() -> ArgumentParser:
    """Made once: it takes a tenth of a second."""
    return config_parser()


def as_yaml(config: Config) -> str:
    """The whole configuration as YAML that `load_config` reads back."""
    return yaml.dump(plain(config), sort_keys=False, Dumper=_Dumper)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Puts a name such as 1e5 in quotes: a string for PyYAML, but a number for jsonargparse, as in YAML 1.2."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9._]+[eE][-+]?[0-9]+"), list("-+.0123456789"))


def plain(config: Config) -> dict[str, Any]:
    """The configuration as dicts, lists and numbers."""
    return _without_tuples(asdict(config))


def _without_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_tuples(inner) for key, inner in value.items()}
    return [_without_tuples(inner) for inner in value] if isinstance(value, list | tuple) else value


def changed(old: Config, new: Config) -> tuple[list[str], list[str]]:
    """The settings that changed though they may not when a run is resumed, and those that may: "steps: 2000 -> 4000"."""
    before, after = flat(old), flat(new)
    free = {f"{part}.{name}" for part, inner in FREE_WITHIN.items() for name in inner}
    pinned: list[str] = []
    others: list[str] = []
    for name in {**before, **after}:
        if name != "out" and before.get(name) != after.get(name):
            if name == "steps" and new.epochs is not None:
                continue  # known when the data are opened
            fixed = name.partition(".")[0] in PINNED and name not in free
            (pinned if fixed else others).append(f"{name}: {_told_apart(before.get(name), after.get(name))}")
    return pinned, others


def _told_apart(old: Any, new: Any) -> str:
    """Two values side by side; with quotes around words where these make the difference."""
    return f"{old!r} -> {new!r}" if str(old) == str(new) else f"{old} -> {new}"


def flat(config: Config) -> dict[str, Any]:
    """The configuration by dotted names."""
    return dotted(plain(config))


def dotted(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values that lie in one another, by dotted names."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found.update(dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return found
