"""The settings in a folder's config.yaml, which may be anybody's: reading them imports nothing and ends soon.

jsonargparse imports and calls what it finds under a key `class_path`: in a group, among free options, and in text that reads as
YAML. So it is shown plain values of settings that exist, and never the free options.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from noisewise.plain_files import read_plain
from noisewise.training.config import Config
from noisewise.words import closest

FREE_FORM = ("data.options", "model.options", "evaluation.data_options")  # only their source or network knows these
LARGEST = 2**20  # bytes of a file of settings
MOST = 100_000  # values in it, those that it repeats by reference included
DEEPEST = 50  # of values in one another


class Refused(ValueError):
    """What is wrong with a file of settings, in words that need no more."""


@dataclass(frozen=True)
class Stored:
    """What a config.yaml says."""

    settings: dict[str, Any]  # plain values, in groups
    options: dict[str, dict[str, Any]]  # those of `FREE_FORM`, as they were written


def read_stored(path: Path) -> Stored:
    """The settings in a file; `Refused` says what is wrong with them, or an error of YAML or of the system."""
    text = read_plain(path, LARGEST).decode()
    try:
        _check_size(text)
        content = get_loader("yaml")(text)
    except RecursionError:
        raise Refused("its values lie too deep in one another") from None
    if not isinstance(content, dict):
        what = "there are no settings in it" if content is None else f"{str(content)[:40]!r} is no setting"
        raise Refused(f"{what}: write them as YAML, one a line, as in steps: 1000")
    groups: dict[str, dict[str, Any]] = {field.name: {} for field in fields(Config) if is_dataclass(field.type)}
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if key in groups and not isinstance(value, dict):
            raise Refused(f"{key} must be a group of settings, got {value!r}")
        flat |= {f"{key}.{name}": one for name, one in value.items()} if key in groups else {str(key): value}
    options = {name: flat.pop(name) for name in FREE_FORM if name in flat}
    for key, free in options.items():
        if not isinstance(free, dict) or not all(isinstance(name, str) for name in free):
            raise Refused(f"{key} must be names and values in braces, as in '{{size: 8}}', got {free}")
    known = [f"{group}.{field.name}" for group in groups for field in fields(getattr(Config(), group))]
    known += [field.name for field in fields(Config) if field.name not in groups]
    words = [name for name in known if name in ("name", "process", "sampler", "data.source", "model.name")]
    for name, value in flat.items():
        if name not in known:
            raise Refused(no_setting(name, known))
        if name in words and not isinstance(value, str):
            raise Refused(f"{name} must be a word, got {value!r}")
        inner = value if isinstance(value, list) else [value]
        if any(isinstance(one, dict | list) for one in inner):
            raise Refused(f"{name} must be a value, or a list of values")
    settings: dict[str, Any] = {}
    for name, value in flat.items():
        group, _, inner_name = name.rpartition(".")
        (settings.setdefault(group, {}) if group else settings)[inner_name] = value
    return Stored(settings, options)


def no_setting(name: str, known: Iterable[str]) -> str:
    """What to say of a setting that is none."""
    meant = closest(name, list(known))
    return f"there is no setting {name!r}" + (f"; did you mean {meant!r}?" if meant else "")


def _check_size(text: str) -> None:
    """References of YAML can make a short file mean any number of values, or a value that holds itself."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node, depth: int = 0) -> int:
        if depth > DEEPEST:
            raise Refused(f"its values lie more than {DEEPEST} deep in one another")
        if id(node) not in sizes:
            inner: list[yaml.Node] = []
            if isinstance(node, yaml.SequenceNode):
                inner = node.value
            elif isinstance(node, yaml.MappingNode):
                inner = [one for pair in node.value for one in pair]
            sizes[id(node)] = 1 + sum(size(one, depth + 1) for one in inner)
        if sizes[id(node)] > MOST:
            raise Refused(f"it means more than {MOST:,} values: it repeats itself by reference")
        return sizes[id(node)]

    root = yaml.compose(text, yaml.SafeLoader)
    if root is not None:
        size(root)
