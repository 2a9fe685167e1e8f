"""The page: its parts in order, in one file without anything from elsewhere."""

import base64
import hashlib
from html import escape
from pathlib import Path
from string import Template

from noisewise.report import opening, sections, tables
from noisewise.report.first_screen import first_screen
from noisewise.report.html import as_json, breakable, swatch
from noisewise.report.subject import Subject, read_subject
from noisewise.training.plain_files import writing
from noisewise.training.run_folder import replace_file

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
    data |= {key: value for part in parts for key, value in part.data.items()}
    body = "\n".join(
        [
            "<main>",
            opening.header(subject, parts),
            controls(subject),
            first,
            *(part.section() for part in parts),
            f'<script type="application/json" id="data">{as_json(data)}</script>',
            "</main>",
        ]
    )
    return fill(body, f"noisewise: {opening.title(subject)}", live)


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
        choices = "".join(
            f'<label><input type="radio" name="schedule" id="schedule-{i}" data-schedule-choice="{i}"{" checked" * (i == 0)}>'
            f"<span>{escape(name)}</span></label>"
            for i, name in enumerate(subject.schedules)
        )
        bar += f'<div class="choice schedules" role="group" aria-label="Noise schedule">{choices}</div>'
    return f'<div class="controls">{bar}</div>'
