"""Whose word it takes to import a model: a run folder may come from somebody else, and an import path in it names code.

The user's own word is the command line, a file of settings, or Python. A name from a folder alone is imported only if the user
repeats it (`--trust NAME`), or began a run with it on this machine: such names are remembered outside of all run folders.
"""

import os
from collections.abc import Collection
from pathlib import Path


class Untrusted(ValueError):
    """A folder names code that the user has not."""


def is_import_path(name: str) -> bool:
    """Whether a model's name is that of code to import, not of a network of this package."""
    return "." in name or ":" in name


def check_trusted(name: str, folder: Path, trust: Collection[str] = ()) -> None:
    """Raise Untrusted if a run folder names code that the user has given neither now nor to an earlier run."""
    if is_import_path(name) and name not in trust and name not in remembered():
        raise Untrusted(
            f"{folder} names the model {name!r}, which would be imported and called: it could do anything that you can. "
            f"If it is yours, or you have read it, say so with --trust {name!r}"
        )


def remember(name: str) -> None:
    """Keep a name that the user gave, so that runs made with it need no --trust; where that cannot be written, they do."""
    if is_import_path(name) and len(name.split()) == 1 and name not in remembered():
        try:
            file = memory()
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as opened:
                opened.write(f"{name}\n")
        except (OSError, RuntimeError):
            return


def remembered() -> set[str]:
    """The names that the user gave to earlier runs."""
    try:
        return set(memory().read_text().splitlines())
    except (OSError, RuntimeError, ValueError):
        return set()


def memory() -> Path:
    """The file of those names, in the user's state folder."""
    place = os.environ.get("XDG_STATE_HOME", "")
    return (Path(place) if os.path.isabs(place) else Path.home() / ".local" / "state") / "noisewise" / "trusted-models"
