"""Pieces of HTML that several parts of the page use."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from noisewise.looking.palette import GREY, Method
from noisewise.report.subject import Subject

LEFT = ' class="left"'


@dataclass(frozen=True)
class Part:
    """A section: `name` is its anchor, `data` what the script needs by the ids of its charts."""

    name: str
    title: str
    html: str
    data: dict[str, Any] = field(default_factory=dict)

    def section(self) -> str:
        return f'<section id="{self.name}"><h2>{escape(self.title)}</h2>\n{self.html}\n</section>'


@dataclass(frozen=True)
class Cell:
    """A cell of a table: what is read, and the exact value behind it."""

    text: str
    value: float | int | str | None = None
    name: str = ""  # what the value is, as in results.jsonl

    def html(self, left: bool = False) -> str:
        """As a cell of numbers, or of words (`left`)."""
        value = "" if self.value is None else f' data-value="{escape(repr_of(self.value))}"'
        name = f' data-name="{escape(self.name)}"' if self.name else ""
        return f"<td{LEFT * left}{name}{value}>{escape(self.text)}</td>"


def number(value: float) -> str:
    """A number in a text: four significant digits, all digits before the point."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def repr_of(value: float | int | str) -> str:
    """A number so that it can be read back exactly."""
    return value if isinstance(value, str) else repr(value)


def table(headings: Sequence[str], rows: Iterable[str], kind: str = "", left: Sequence[bool] = ()) -> str:
    """A table that scrolls sideways on its own where it is too wide; columns of words stand `left`."""
    sides = [*left, *[False] * (len(headings) - len(left))]
    head = "".join(
        f'<th scope="col"{LEFT * side}>{escape(heading)}</th>' for heading, side in zip(headings, sides, strict=True)
    )
    body = "\n".join(rows)
    return (
        f'<div class="scroll" tabindex="0"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def per_schedule(subject: Subject, made: Sequence[str]) -> str:
    """A block for each schedule, named where there are several."""
    blocks = []
    for i, (process, html) in enumerate(zip(subject.schedules, made, strict=True)):
        name = f'<h3 class="process">{escape(process)} schedule</h3>' if len(subject.schedules) > 1 else ""
        blocks.append(f'<div class="schedule" data-schedule="{i}">{name}{html}</div>' if html else "")
    return "\n".join(blocks)


def colour(method: Method) -> str:
    """As CSS: the grey of the baseline is another one in the dark."""
    return "var(--baseline)" if method.colour == GREY else method.colour


def swatch(method: Method) -> str:
    """A short piece of the method's line."""
    dashes = " ".join(f"{length:g}" for length in method.dash)
    return (
        f'<svg class="swatch" viewBox="0 0 26 10" aria-hidden="true"><line x1="1" y1="5" x2="25" y2="5" '
        f'style="stroke:{colour(method)}" stroke-dasharray="{dashes}"/></svg>'
    )


def legend(methods: Sequence[Method], kind: str = "") -> str:
    """Lines and their names."""
    entries = "".join(f"<span>{swatch(method)}{escape(method.name)}</span>" for method in methods)
    return f'<p class="legend {kind}">{entries}</p>'


def details(summary: str, html: str) -> str:
    """Something that is there for whoever wants it."""
    return f"<details><summary>{escape(summary)}</summary>{html}</details>"


def method_head(method: Method) -> str:
    """The head of a table's row."""
    return f'<th scope="row"><span class="name">{swatch(method)}<span>{breakable(method.name)}</span></span></th>'


def caption(method: Method, more: str = "") -> str:
    """The head of a figure that belongs to one method."""
    end = f'<span class="seed">{escape(more)}</span>' if more else ""
    return f"<figcaption>{swatch(method)}<span>{breakable(method.name)}</span>{end}</figcaption>"


def breakable(name: str) -> str:
    """A spec that may go on in the next line where its parts end."""
    return re.sub(r"(:|,|\+|=(?=\(|\w{8}))", r"\1<wbr>", escape(name))
