"""Rows of result files: appended one by one, without places on somebody's machine, and without numbers that JSON lacks."""

import json
import math
import re
from pathlib import Path
from typing import Any

from noisewise.spec import Term, _unbracketed, parse

TARGETED, STRATIFIED, FLOORED = "2026-11-16T09:26:59", "2026-11-16T12:10:00", "2026-11-16T14:50:00"
"""Since when (UTC) `adaptive` alone trains Min-SNR's objective, draws in strata, and has a floor of 0.35, no longer 0.2."""
EXACT, MIRRORED = "2026-11-18T02:30:51", "2026-11-18T01:58:38"
"""Since when `paper_*` is Algorithm 2 to the letter, and `speed:mirror=true` mirrors where the authors' code does."""
PINNED = {"f097b5de7228daa32fdafcf19f45ea1892ca91f1": "2026-11-17T16:56:57"}
"""Commits that later sessions ran, with the time of the code."""
EARLIER_PAPER = {"estimator": "reinforce", "strata": "1000", "normalise": "false", "floor": "0", "target": "vlb"}
"""What `paper_cifar10` was before, on the linear schedule, as options of `adaptive`; draws were independent."""
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
    session = PINNED.get(row.get("environment", {}).get("git", ""), session)
    if session < EXACT:
        terms = [_paper_then(term) if term.name == "paper_cifar10" else term for term in terms]
    if session < MIRRORED:
        terms = [_speed_then(term) if term.name == "speed" else term for term in terms]
    if (
        session < TARGETED
        and [term.name for term in terms] == ["adaptive"]
        and not {"target", "correction"} & set(terms[0].options)
    ):
        terms = [*terms, Term("none", {})]
    return "+".join(text_of(Term(term.name, options_now(term, session))) for term in terms)


def _paper_then(term: Term) -> Term:
    """The earlier `paper_cifar10`: S of the update before, a Beta in bins, entropy as a term of its own."""
    return Term("adaptive", {**EARLIER_PAPER, "draws": "independent", **term.options})


def _speed_then(term: Term) -> Term:
    """The earlier `speed`: mirrored at its tau, which no setting of today's does. The spec says so, and does not build."""
    if term.options.get("mirror") != "true":
        return term
    return Term(term.name, {**term.options, "mirror": f"at_{term.options.get('tau', 'tau')}"})


def options_now(term: Term, session: str) -> dict[str, str]:
    """The options of a term, those of samplers inside it too, as they are to be written today."""
    options = {name: inner_now(value, session) for name, value in term.options.items()}
    if term.name != "adaptive":
        return options
    if session < STRATIFIED:
        options.setdefault("draws", "independent")
    if session < FLOORED and options.get("estimator", "loss") == "loss":
        options.setdefault("floor", "0.2")
    today = {"estimator": "loss", "draws": "stratified", "floor": "0.35"}
    return {name: options[name] for name in sorted(options) if options[name] != today.get(name)}


def inner_now(value: str, session: str) -> str:
    """An option's value; that of one that is a sampler, in brackets or not, as it is to be written today."""
    if "adaptive" not in value:
        return value
    now = "+".join(text_of(Term(term.name, options_now(term, session))) for term in parse(_unbracketed(value)))
    return f"({now})" if set(now) & set(":,+") else now


def text_of(term: Term) -> str:
    """A term as it is written."""
    settings = ",".join(f"{name}={value}" for name, value in term.options.items())
    return f"{term.name}:{settings}" if settings else term.name
