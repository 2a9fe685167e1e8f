"""Rows of result files: appended one by one, without places on somebody's machine, and without numbers that JSON lacks."""

import json
import math
import re
from pathlib import Path
from typing import Any

from noisewise.spec import Term, parse

TARGETED, STRATIFIED = "2026-11-16T09:26:59", "2026-11-16T12:10:00"
"""Since when `adaptive` alone trains Min-SNR's objective, and since when it draws in strata (UTC)."""
PLACE = re.compile(r"""(?<![\w.:/~])/(?:[^\s/'"<>,:;()]+/)*([^\s/'"<>,:;()]+)/?""")  # an absolute path within a text, not a URL


def append(path: Path, row: dict[str, Any]) -> None:
    """Write a row at the end of a file."""
    with path.open("a") as file:
        file.write(json.dumps(publishable(row), allow_nan=False) + "\n")


def publishable(value: Any) -> Any:
    """The value with the last part alone of absolute paths, also within a text, and None for what is not finite."""
    if isinstance(value, dict):
        return {key: publishable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [publishable(inner) for inner in value]
    if isinstance(value, str):
        return PLACE.sub(r"\1", value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def spec_now(row: dict[str, Any]) -> str:
    """The spec that means today what the spec of a row of field.py meant when its session began, without today's defaults."""
    terms, session = parse(row["sampler"]), row.get("session", "now")
    for term in terms:
        if term.name != "adaptive":
            continue
        if session < TARGETED and len(terms) == 1 and not {"target", "correction"} & set(term.options):
            terms = [*terms, Term("none", {})]
        if session < STRATIFIED:
            term.options.setdefault("draws", "independent")
        for name, value in (("estimator", "loss"), ("draws", "stratified")):
            if term.options.get(name) == value:
                del term.options[name]
    return "+".join(text_of(term) for term in terms)


def text_of(term: Term) -> str:
    """A term as it is written."""
    settings = ",".join(f"{name}={value}" for name, value in term.options.items())
    return f"{term.name}:{settings}" if settings else term.name
