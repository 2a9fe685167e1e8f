"""Text that comes from files, made fit for a terminal."""

import re


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
