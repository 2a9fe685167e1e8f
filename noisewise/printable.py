"""Text that comes from files, made fit for a terminal."""


def printable(text: str) -> str:
    """The text with control characters written out: an escape code in somebody's file must not reach the terminal."""
    return "".join(one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in text)
