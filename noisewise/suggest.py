"""What was probably meant by a name that is not known, for errors."""

import difflib
from collections.abc import Iterable


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most like this one, if any is."""
    return next(iter(difflib.get_close_matches(word, list(known), 1)), None)


def unknown(what: str, name: str, known: Iterable[str], listed: bool = True) -> str:
    """An error message: the name, what was probably meant, and what there is (where nothing was meant if not `listed`)."""
    known = list(known)
    meant = closest(name, known)
    hint = "." if meant is None else f": did you mean {meant!r}?"
    if meant is not None and not listed:
        return f"unknown {what} {name!r}{hint}"
    return f"unknown {what} {name!r}{hint} " + (f"Known: {', '.join(known)}" if known else "It has none.")
