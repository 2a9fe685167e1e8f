"""The page of a study: the paper and ours side by side, in one HTML file; and the same as JSON, for other programs."""

import base64
import json
import shlex
from html import escape
from math import inf
from pathlib import Path
from typing import Any

from noisewise.papers.evidence import PLACE, SCALES, Section, Study
from noisewise.plain_files import replace_file
from noisewise.report.html import Part, details, table
from noisewise.report.page import bound
from noisewise.report.sections import row_of
from noisewise.study.outcome import Plan

TYPES = {".svg": "svg+xml", ".png": "png"}


def write_page(name: str, study: Study, scale: str, folder: Path) -> tuple[Path, str]:
    """Write NAME.html and NAME.json into the folder of the scale; returns the page's path, and what was found."""
    found, sections = study.shown(folder)
    page, data = folder / f"{name}.html", folder / f"{name}.json"
    replace_file(page, render(name, study, scale, folder, sections, found))
    replace_file(data, json.dumps(as_data(name, study, scale, sections, found), indent=1, ensure_ascii=False) + "\n")
    return page, found


def as_data(name: str, study: Study, scale: str, sections: list[Section], found: str) -> dict[str, Any]:
    """All that the page says in words and numbers."""
    return {
        "item": name,
        "scale": scale,
        "source": study.source,
        "title": study.title,
        "says": study.says,
        "found": found,
        "notes": list(study.notes),
        "command": _command(name, study, scale),
        "commands": [shlex.join(words) for words in study.scales[scale].words(PLACE)],
        "tables": [
            {"title": one.title, "heads": list(made.heads), "rows": [list(row) for row in made.rows], "note": made.note}
            for one in sections
            for made in one.tables
        ],
    }


def render(name: str, study: Study, scale: str, folder: Path, sections: list[Section], found: str) -> str:
    """The whole page."""
    parts = [_part(one, f"part-{i}") for i, one in enumerate(sections)]
    parts.append(Part("settings", "Settings, and how to repeat it", _commands(name, study, scale, folder)))
    facts = {"scale": f"{scale}: {SCALES[scale]}", "source": study.source, "takes": study.scales[scale].takes}
    pairs = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in facts.items())
    said = "".join(f"<li>{escape(note)}</li>" for note in study.notes)
    top = [
        f'<header><p class="eyebrow">noisewise reproduce {escape(name)}</p><h1>{escape(study.title)}</h1>',
        _said("The paper", study.says),
        _said("Ours", found),
        f'<ul class="said">{said}</ul><dl class="facts">{pairs}</dl></header>',
    ]
    return bound(top, parts, f"noisewise: {study.source}, {scale}", {})


def _said(who: str, what: str) -> str:
    return f'<p class="eyebrow">{escape(who)}</p><p class="finding">{escape(what)}</p>'


def _part(section: Section, name: str) -> Part:
    html = []
    for one in section.tables:
        best = {(_lowest([row[column] for row in one.rows]), column) for column in one.lowest}
        rows = [
            f'<tr><th scope="row">{escape(row[0])}</th>'
            + "".join(
                f"<td><b>{escape(cell)}</b></td>" if (i, column) in best else f"<td>{escape(cell)}</td>"
                for column, cell in enumerate(row[1:], 1)
            )
            + "</tr>"
            for i, row in enumerate(one.rows)
        ]
        html.append(
            table(one.heads, rows, "results", [k == 0 for k in range(len(one.heads))])
            + (f'<p class="note">{escape(one.note)}</p>' if one.note else "")
        )
    charts, data = row_of(section.charts, name)
    pictures = [
        f'<figure class="picture"><figcaption>{escape(what)}</figcaption>'
        f'<img alt="{escape(what)}" src="{_embedded(path)}"></figure>'
        for what, path in section.pictures.items()
    ]
    return Part(name, section.title, "".join([charts, *html, *pictures]), data)


def _lowest(cells: list[str]) -> int:
    """Where the lowest number of a column stands."""
    values = [float(cell.replace(",", "")) if cell[:1].isdigit() else inf for cell in cells]
    return values.index(min(values))


def _embedded(path: Path) -> str:
    """A picture within the page."""
    return f"data:image/{TYPES[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _command(name: str, study: Study, scale: str) -> str:
    """What makes the page."""
    return shlex.join(["noisewise", "reproduce", name, "--scale", scale, *study.scales[scale].settings])


def _commands(name: str, study: Study, scale: str, folder: Path) -> str:
    made = study.scales[scale]
    commands = made.words(folder)
    lines = "\n".join(shlex.join(["noisewise", *words]) for words in commands)
    html = f"<pre>{escape(_command(name, study, scale))}</pre>"
    html += f"<p>which is</p><pre>{escape(lines)}</pre>"
    outs = dict.fromkeys(Path(words[-1]) for words in commands if words[0] == "compare")
    reports = [escape(str(out.relative_to(folder) / "report.html")) for out in outs if (out / "report.html").is_file()]
    links = "".join(f'<li><a href="{report}">{report}</a></li>' for report in reports)
    if links:
        html += f"<p>The whole comparisons, with every run, curve and setting:</p><ul class='files'>{links}</ul>"
    if made.needs:
        html += f"<p>It needs {escape(made.needs)}.</p>"
    settings = [out / "runs" / Plan.read(out).runs[0] / "config.yaml" for out in outs]
    return html + "".join(
        details(f"Settings of {path.parent.name}", f"<pre>{escape(path.read_text())}</pre>") for path in settings
    )
