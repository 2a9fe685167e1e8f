"""The page: its parts in order, in one file without anything from elsewhere."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from noisewise.plain_files import replace_file, writing
from noisewise.report import opening, sections, tables
from noisewise.report.html import Part, as_json, breakable, choice, colour, per_schedule, swatch
from noisewise.report.subject import Subject, read_subject

HERE = Path(__file__).parent
SECTIONS = (
    tables.results,
    tables.measured,
    sections.trained_levels,
    sections.losses,
    sections.training,
    sections.quality,
    tables.cost,
    tables.settings,
)
"""What makes the sections below the first screen, in their order; each may make none."""
MOST_OTHERS = 5  # methods named beside the large number; the table has all


def write_report(target: Path, out: Path | None = None) -> Path:
    """Write the report of a comparison's or a run's folder, by default into it; returns its path."""
    target = Path(target)
    page = render(read_subject(target))  # complete before anything is written
    path = Path(out) if out is not None else target / "report.html"
    with writing(str(path) if out is None else f"--out {path}", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, page)
    return path


def render(subject: Subject, live: str = "") -> str:
    """The whole page; `live` is the version of the files behind it, if it should look for newer ones."""
    parts = [part for section in SECTIONS for part in section(subject)]
    first, data = first_screen(subject)
    top = [opening.header(subject, parts), controls(subject), first]
    return bound(top, parts, f"noisewise: {opening.title(subject)}", data, live)


def bound(top: Sequence[str], parts: Sequence[Part], title: str, data: Mapping[str, Any], live: str = "") -> str:
    """A page of these parts, with their data for the script."""
    every = {**data, **{key: value for part in parts for key, value in part.data.items()}}
    script = f'<script type="application/json" id="data">{as_json(every)}</script>'
    return fill("\n".join(["<main>", *top, *(part.section() for part in parts), script, "</main>"]), title, live)


def fill(body: str, title: str, live: str = "") -> str:
    """The template with a body; only our own script may run, and nothing may be loaded."""
    script = (HERE / "script.js").read_text()
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return Template((HERE / "page.html").read_text()).substitute(
        policy=policy + ("; connect-src 'self'" if live else ""),
        title=escape(title),
        style=(HERE / "style.css").read_text(),
        script=script,
        live=escape(live),
        body=body,
    )


def controls(subject: Subject) -> str:
    """The bar that stays in sight: which methods are drawn, and which schedule."""
    if len(subject.methods) < 2 and len(subject.schedules) < 2:
        return ""
    toggles = "".join(
        f'<label class="toggle"><input type="checkbox" id="show-{method.index}" data-toggle="{method.index}" checked>'
        f"{swatch(method)}<span>{breakable(method.name)}</span></label>"
        for method in subject.methods
    )
    bar = f'<div class="toggles" role="group" aria-label="Methods shown"><span class="what">Show</span>{toggles}</div>'
    if len(subject.schedules) > 1:
        bar += choice("schedule", "Noise schedule", {str(i): name for i, name in enumerate(subject.schedules)}, "0")
    return f'<div class="controls">{bar}</div>'


# The first screen: one large number and how sure it is, samples side by side, and one curve ---------------------------


def first_screen(subject: Subject) -> tuple[str, dict[str, Any]]:
    """Its HTML, and what the script needs for it."""
    pictures = sections.samples(subject)
    data = dict(pictures.data) if pictures else {}
    blocks = []
    for i, process in enumerate(subject.schedules):
        charts, more = sections.row_of(
            sections.first_charts(subject, process), "run" if subject.single and not _measured(subject) else f"quality-{i}"
        )
        data |= more
        blocks.append(
            _lead(opening.run_lead(subject) if subject.single else opening.lead(subject, process))
            + _beside(pictures, i, charts)
        )
    controls = pictures.controls if pictures else ""
    return f'<section id="first" aria-label="What was found">{per_schedule(subject, blocks)}{controls}</section>', data


def _measured(subject: Subject) -> bool:
    return any(run.evaluations for run in subject.comparison.outcomes)


def _beside(pictures: sections.Samples | None, number: int, charts: str) -> str:
    """Samples and curve, side by side where there is room."""
    grid = pictures.blocks[number] if pictures else ""
    return f'<div class="show">{grid}{charts}</div>' if grid or charts else ""


def _lead(found: opening.Lead) -> str:
    """The number in its method's colour where it was shown to be better."""
    look = f' style="color:{colour(found.method)}"' if found.shown and found.method else ""
    large = f'<p class="ratio{" shown" * found.shown}"{look}>{escape(found.number)}</p>' if found.number else ""
    sure = f'<p class="sure">{escape(found.sure)}</p>' if found.sure else ""
    said = f'<div class="said"><p class="what">{breakable(found.what)}</p>{sure}</div>'
    rows = "".join(
        f'<li data-method="{method.index}">{swatch(method)}<span class="who">{breakable(method.name)}</span> '
        f'<span class="times">{ratio:.2f}×</span> <span class="verdict">{escape(verdict)}</span></li>'
        for method, ratio, verdict in found.others[:MOST_OTHERS]
    )
    left = len(found.others) - MOST_OTHERS
    rest = f"<li>{left} more in the table</li>" if left > 0 else ""
    others = f'<ul class="others" aria-label="The other methods">{rows}{rest}</ul>' if rows else ""
    return f'<div class="lead">{large}{said}{others}</div>'
