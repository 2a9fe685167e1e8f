"""Which noise levels were trained, as training went on."""

from dataclasses import replace
from typing import Any

from noisewise.looking.palette import AROUND_UNIFORM
from noisewise.report.heat import HeatMap, heat_map, scale_texts
from noisewise.report.html import Part, caption, per_schedule
from noisewise.report.subject import Subject
from noisewise.report.svg import panel_svg

INTRO = """<p>Each picture is one run from its first step (bottom) to its last (top); across are the noise levels.
Orange levels were trained more often than uniform sampling would, blue ones less. “Draws times weights” is what the gradient
sees: it also shows methods that change the weight of the loss and not the draws.</p>"""


def parts(subject: Subject) -> list[Part]:
    """The heat maps of all schedules, with one scale of colours."""
    maps = [heat_map(subject, process) for process in subject.schedules]
    known = [heat for heat in maps if heat is not None]
    if not known:
        return []
    reach = max(heat.reach for heat in known)
    made = [_panels(replace(heat, reach=reach), i) if heat else ("", {}) for i, heat in enumerate(maps)]
    data = {name: numbers for _, more in made for name, numbers in more.items()}
    html = INTRO + _views() + _scale(reach) + per_schedule(subject, [block for block, _ in made])
    return [Part("density", "Which noise levels were trained", html, data)]


def _views() -> str:
    choices = (("draws", "Draws", " checked"), ("objective", "Draws times weights", ""))
    radios = "".join(
        f'<label><input type="radio" name="view" id="view-{value}" value="{value}"{checked}><span>{text}</span></label>'
        for value, text, checked in choices
    )
    return f'<div class="choice views" role="group" aria-label="What the colours show">{radios}</div>'


def _scale(reach: int) -> str:
    texts = "".join(f"<span>{text}</span>" for text in scale_texts(reach))
    return (
        f'<div class="scale"><span class="what">times uniform</span><div><div class="bar" style="background:linear-gradient('
        f'to right, {", ".join(AROUND_UNIFORM)})"></div><div class="texts">{texts}</div></div></div>'
    )


def _panels(heat: HeatMap, number: int) -> tuple[str, dict[str, Any]]:
    """A map for each method, and their hover data."""
    figures, data = [], {}
    for panel in heat.panels:
        name = f"density-{number}-{panel.method.index}"
        svg, data[name] = panel_svg(panel, heat, name)
        figures.append(
            f'<figure data-method="{panel.method.index}">{caption(panel.method, f"seed {panel.seed}")}{svg}</figure>'
        )
    return f'<div class="panels">{"".join(figures)}</div>', data
