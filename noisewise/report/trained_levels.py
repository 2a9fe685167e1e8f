"""Which noise levels were trained, as training went on."""

from noisewise.report.heat import HeatMap, colour_table, draw_panel, heat_map, log_snr_of, scale_texts
from noisewise.report.html import Part, caption, per_schedule
from noisewise.report.subject import Subject

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
    maps = [None if heat is None else HeatMap(heat.process, heat.panels, reach) for heat in maps]
    blocks = [_panels(heat, i) if heat else "" for i, heat in enumerate(maps)]
    data = {
        f"density-{i}-{panel.method.index}": {"snr": log_snr_of(heat.process)}
        for i, heat in enumerate(maps)
        if heat
        for panel in heat.panels
    }
    table = ["".join(f"{part:02x}" for part in colour) for colour in colour_table()]
    html = INTRO + _views() + _scale(reach) + per_schedule(subject, blocks)
    return [Part("density", "Which noise levels were trained", html, {**data, "scale": {"reach": reach, "colours": table}})]


def _views() -> str:
    choices = (("draws", "Draws", " checked"), ("objective", "Draws times weights", ""))
    radios = "".join(
        f'<label><input type="radio" name="view" id="view-{value}" value="{value}"{checked}><span>{text}</span></label>'
        for value, text, checked in choices
    )
    return f'<div class="choice views" role="group" aria-label="What the colours show">{radios}</div>'


def _scale(reach: int) -> str:
    colours = colour_table(17)
    stops = ", ".join(f"rgb({r} {g} {b})" for r, g, b in colours.tolist())
    texts = "".join(f"<span>{text}</span>" for text in scale_texts(reach))
    return (
        f'<div class="scale"><span class="what">times uniform</span><div><div class="bar" style="background:linear-gradient('
        f'to right, {stops})"></div><div class="texts">{texts}</div></div></div>'
    )


def _panels(heat: HeatMap, number: int) -> str:
    figures = "".join(
        f'<figure data-method="{panel.method.index}">{caption(panel.method, f"seed {panel.seed}")}'
        f"{draw_panel(panel, heat, f'density-{number}-{panel.method.index}')}</figure>"
        for panel in heat.panels
    )
    return f'<div class="panels">{figures}</div>'
