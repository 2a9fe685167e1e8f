"""Files of runs and comparisons read back with care: they may be damaged, edited, or of another version."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from noisewise.training.jsonl import read_lines

Kind = TypeVar("Kind")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever is wrong with what the block reads becomes a ValueError that names the file."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        said = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} cannot be read: is it damaged, or of another version of noisewise? {said}") from error


def objects(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file, without what a kill has cut off."""
    lines = list(read_lines(path))
    with reading(path):
        for line in lines:
            if line.row is None and not line.text.lstrip().startswith(b"{"):
                raise ValueError(f"line {line.number}, {line.text[:40]!r}, is no row of it")
    return [line.row for line in lines if line.row is not None]


def checked(kind: type[Kind], values: dict[str, Any]) -> Kind:
    """A dataclass made of values from JSON, each of the kind that its field says."""
    made = kind(**values)
    for name, hint in get_type_hints(kind).items():
        if not fits(getattr(made, name), hint):
            raise TypeError(f"its {name} is {getattr(made, name)!r}")
    return made


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is what a type hint says: a plain type, a list or tuple of one, or one of several."""
    if isinstance(hint, UnionType):
        return any(fits(value, one) for one in get_args(hint))
    if inner := get_args(hint):
        return isinstance(value, get_origin(hint)) and all(fits(one, inner[0]) for one in value)
    return isinstance(value, int | float if hint is float else hint)
