"""The parts of the page with pictures: loss, quality through training, which levels were trained, loss by level, samples."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from noisewise.looking.palette import AROUND_UNIFORM
from noisewise.metrics import digits_features
from noisewise.report.charts import Chart, HeatMap, heat_map, loss_charts, quality_charts, scale_texts, training_charts
from noisewise.report.html import Part, caption, chart_svg, choice, legend, number, panel_svg, per_schedule
from noisewise.report.subject import Subject
from noisewise.report.tables import evaluations
from noisewise.report.thumbnails import Shown, encoded, pictures_of
from noisewise.study.summary import budget_unit, headline_images, metric_label, summarise

PUBLISHED = 50_000  # images of a FID in papers


def first_charts(subject: Subject, process: str) -> list[Chart]:
    """The quality curve of the first screen, against what the budget counts; for a run without one, its loss."""
    found = quality_charts(subject, process)
    if found and not pictures_of(subject):
        return found  # there is room for both
    if found:
        chart = found[-1] if budget_unit(subject.comparison) == "seconds" else found[0]
        named = f"{metric_label(subject.metric)} {chart.title.lower()}"
        return [replace(chart, title=named[0].upper() + named[1:])]
    return training_charts(subject)[:1] if subject.single else []


def training(subject: Subject) -> list[Part]:
    """For one run, its loss; nothing in a comparison, which has evaluations that can be compared."""
    charts = _others(training_charts(subject), subject, subject.schedules[0]) if subject.single else []
    html, data = row_of(charts, "run")
    return [Part("training", "Training loss", html, data)] if charts else []


def quality(subject: Subject) -> list[Part]:
    """How the quality of images went with training, also for a run that was measured: what the first screen does not show."""
    if not any(run.evaluations for run in subject.comparison.outcomes):
        return []
    bands = "" if subject.single else "Lines are means over seeds, bands the range from the lowest to the highest seed. "
    intro = f"<p>{bands}Training time includes what the sampler itself costs.{_about(subject)}</p>"
    charts = [_others(quality_charts(subject, process), subject, process) for process in subject.schedules]
    return [_section("quality", "Quality through training", intro, subject, charts, evaluations(subject))]


def _others(charts: list[Chart], subject: Subject, process: str) -> list[Chart]:
    """The charts that are not on the first screen."""
    first = {chart.name for chart in first_charts(subject, process)}
    return [chart for chart in charts if chart.name not in first]


def losses(subject: Subject) -> list[Part]:
    """Held-out loss by noise level."""
    intro = (
        "<p>The plain loss on data that was not trained on, at the last evaluation: the same for every method, whatever "
        "its own weights. It shows where a method gains, and what that costs elsewhere.</p>"
    )
    charts = [loss_charts(subject, process) for process in subject.schedules]
    if any(chart.name == "reducible" for some in charts for chart in some):
        intro += (
            "<p>What is left to learn is the loss less that of a perfect model of the training data. Levels at which such a "
            "model would remember its data are left out: there it says nothing about new data.</p>"
        )
    return [_section("loss", "Loss by noise level", intro, subject, charts)] if any(charts) else []


def _about(subject: Subject) -> str:
    metric = subject.metric
    if metric is None:
        return (
            " No distance of images to the data was measured: the held-out loss stands in for it, which is what uniform "
            "sampling minimises, and so favours it."
        )
    if metric == digits_features.METRIC:
        return (
            f" {metric} is the Fréchet distance between features of a small digit classifier, of generated images and of the "
            "data; it is not FID, and a short run on a toy says little about large models."
        )
    images = max(found.images for run in subject.comparison.outcomes for found in run.evaluations)
    if metric == "fid" and images < PUBLISHED:
        headline = headline_images(summarise(subject.comparison)) or 0
        but = f"with papers by the FID of {headline:,} in the table" if headline >= PUBLISHED else "but not with papers"
        return (
            f" FID is of {images:,} generated images, and so higher than a published one of {PUBLISHED:,}: methods can be "
            f"compared here, {but}."
        )
    return ""


def _section(name: str, title: str, intro: str, subject: Subject, charts: list[list[Chart]], end: str = "") -> Part:
    rows = [row_of(some, f"{name}-{i}") for i, some in enumerate(charts)]
    data = {key: value for _, more in rows for key, value in more.items()}
    printed = legend(subject.methods, "printed") if len(subject.methods) > 1 else ""  # the bar at the top is not printed
    return Part(name, title, printed + per_schedule(subject, [html for html, _ in rows]) + end, data, intro)


def row_of(charts: Sequence[Chart], prefix: str) -> tuple[str, dict[str, Any]]:
    """Charts side by side, and their hover data."""
    html, data = [], {}
    for chart in charts:
        name = f"{prefix}-{chart.name}"
        svg, data[name] = chart_svg(chart, name)
        own = legend([line.method for line in chart.lines]) if chart.legend else ""
        html.append(f"<figure><figcaption>{escape(chart.title)}</figcaption>{svg}{own}</figure>")
    return f'<div class="charts">{"".join(html)}</div>' if html else "", data


# Which noise levels were trained, as training went on -----------------------------------------------------------------


INTRO = """<p>Each picture is one run from its first step (bottom) to its last (top); across are the noise levels.
Orange levels were trained more often than uniform sampling would, blue ones less. “Draws × weight” is what the gradient
sees: it also shows methods that change the weight of the loss and not the draws.</p>"""


def trained_levels(subject: Subject) -> list[Part]:
    """The heat maps of all schedules, with one scale of colours."""
    maps = [heat_map(subject, process) for process in subject.schedules]
    known = [heat for heat in maps if heat is not None]
    if not known:
        return []
    reach = max(heat.reach for heat in known)
    made = [_panels(replace(heat, reach=reach), i) if heat else ("", {}) for i, heat in enumerate(maps)]
    data = {name: numbers for _, more in made for name, numbers in more.items()}
    both = all("objective" in panel.views for heat in known for panel in heat.panels)
    views = {"objective": "Draws × weight", "draws": "Draws"}
    html = choice("view", "What the colours show", views, "objective" if both else "draws")
    html += _scale(reach) + per_schedule(subject, [block for block, _ in made])
    return [Part("density", "Which noise levels were trained", html, data, INTRO)]


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


# Generated samples of all methods side by side, with a slider over training -------------------------------------------


@dataclass(frozen=True)
class Samples:
    """Pictures of all methods, a block for each schedule, with what chooses among them."""

    blocks: list[str]
    controls: str
    data: dict[str, Any]


def samples(subject: Subject) -> Samples | None:
    """The pictures, if there are any."""
    shown = encoded(pictures_of(subject))
    if not shown:
        return None
    moments = sorted({one.picture.share for one in shown})
    seeds = sorted({one.picture.seed for one in shown})
    blocks = [_figures(subject, process, shown, moments, seeds) for process in subject.schedules]
    same = "" if subject.single else ", all from the same noise"
    note = f'<p class="note">Samples of the averaged weights{same}, not chosen by hand.</p>'
    steps = {one.picture.share: one.picture.step for one in shown}
    texts = [f"step {steps[moment]:,}" if subject.single else f"{100 * moment:.0f} % of the budget" for moment in moments]
    which = choice("seed", "Seed", {str(i): f"seed {seed}" for i, seed in enumerate(seeds)}, "0") if len(seeds) > 1 else ""
    controls = f'<div class="choose">{_slider(texts)}{which}{note}</div>'
    return Samples(blocks, controls, {"moments": {"texts": texts}})


def _slider(texts: list[str]) -> str:
    """Over moments of training, the last one first."""
    if len(texts) < 2:
        return f'<p class="note">At {escape(texts[-1])}.</p>'
    last = len(texts) - 1
    return (
        f'<div class="slider"><label for="moment">Training</label><input type="range" id="moment" min="0" '
        f'max="{last}" step="1" value="{last}" aria-valuetext="{escape(texts[-1])}">'
        f'<output for="moment" id="moment-text">{escape(texts[-1])}</output></div>'
    )


def _figures(subject: Subject, process: str, shown: list[Shown], moments: list[float], seeds: list[int]) -> str:
    figures = []
    for method in subject.methods_of(process):
        mine = [one for one in shown if one.picture.method == method and one.picture.process == process]
        if not mine:
            continue
        shots = "".join(_shot(subject, one, moments, seeds) for one in mine)
        visible = any(one.picture.share == moments[-1] and one.picture.seed == seeds[0] for one in mine)
        figures.append(
            f'<figure data-method="{method.index}">{caption(method)}'
            f'{shots}<p class="none"{" hidden" * visible}>No picture at this moment.</p></figure>'
        )
    return f'<div class="samples">{"".join(figures)}</div>' if figures else ""


def _shot(subject: Subject, one: Shown, moments: list[float], seeds: list[int]) -> str:
    picture, (width, height) = one.picture, one.size
    moment, seed = moments.index(picture.share), seeds.index(picture.seed)
    value = "" if picture.value is None else f", {metric_label(subject.metric)} {number(picture.value)}"
    hidden = "" if moment == len(moments) - 1 and seed == 0 else " hidden"
    alt = escape(f"Samples of {picture.method.name} at step {picture.step}, seed {picture.seed}")
    return (
        f'<div class="shot" data-moment="{moment}" data-seed="{seed}"{hidden}><img src="{one.address}" width="{width}" '
        f'height="{height}" alt="{alt}"><p>step {picture.step:,}{escape(value)}</p></div>'
    )
