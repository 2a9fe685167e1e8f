"""Text for people: what comes from files made fit for a terminal, and what was probably meant by an unknown name."""

import difflib
import re
from collections.abc import Iterable


def printable(text: str) -> str:
    """The text with control characters written out: an escape code in somebody's file must not reach the terminal."""
    return "".join(one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in text)


def in_lines(spec: str, width: int) -> str:
    """A spec in lines of at most so many characters, broken after : , + = and ( alone; longer words stay whole."""
    lines = [""]
    for part in re.findall(r"[^:,+=(]*[:,+=(]|[^:,+=(]+", spec):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most like this one, if any is; capitals do not count."""
    spelt = {one.lower(): one for one in known}
    return next((spelt[one] for one in difflib.get_close_matches(word.lower(), list(spelt), 1)), None)


def unknown(what: str, name: str, known: Iterable[str], listed: bool = True) -> str:
    """An error message: the name, what was probably meant, and what there is (where nothing was meant if not `listed`)."""
    known = list(known)
    meant = closest(name, known)
    hint = "." if meant is None else f": did you mean {meant!r}?"
    if meant is not None and not listed:
        return f"unknown {what} {name!r}{hint}"
    return f"unknown {what} {name!r}{hint} " + (f"Known: {', '.join(known)}" if known else "It has none.")
