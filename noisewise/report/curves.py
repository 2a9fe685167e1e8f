"""The sections of line charts: the loss of a run, quality through training, and loss by noise level."""

from collections.abc import Sequence
from html import escape
from typing import Any

from noisewise.metrics import digits_features
from noisewise.report.charts import Chart, loss_charts, quality_charts, training_charts
from noisewise.report.html import Part, legend, per_schedule
from noisewise.report.subject import Subject
from noisewise.report.svg import chart_svg
from noisewise.report.tables import evaluations
from noisewise.study.summary import headline_images, summarise

PUBLISHED = 50_000  # images of a FID in papers


def training(subject: Subject) -> list[Part]:
    """For one run, its loss; nothing in a comparison, which has evaluations that can be compared."""
    charts = training_charts(subject) if subject.single else []
    html, data = _row(charts, "run")
    return [Part("training", "Loss", html, data)] if charts else []


def quality(subject: Subject) -> list[Part]:
    """How the quality of images went with training, also for a run that was measured."""
    if not any(run.evaluations for run in subject.comparison.outcomes):
        return []
    bands = "" if subject.single else "Lines are means over seeds, bands the range from the lowest to the highest seed. "
    intro = f"<p>{bands}Training time includes what the sampler itself costs.{_about(subject)}</p>"
    charts = [quality_charts(subject, process) for process in subject.schedules]
    return [_section("quality", "Quality through training", intro, subject, charts, evaluations(subject))]


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
    rows = [_row(some, f"{name}-{i}") for i, some in enumerate(charts)]
    data = {key: value for _, more in rows for key, value in more.items()}
    printed = legend(subject.methods, "printed") if len(subject.methods) > 1 else ""  # the bar at the top is not printed
    return Part(name, title, intro + printed + per_schedule(subject, [html for html, _ in rows]) + end, data)


def _row(charts: Sequence[Chart], prefix: str) -> tuple[str, dict[str, Any]]:
    """Charts side by side, and their hover data."""
    html, data = [], {}
    for chart in charts:
        name = f"{prefix}-{chart.name}"
        svg, data[name] = chart_svg(chart, name)
        own = legend([line.method for line in chart.lines]) if chart.legend else ""
        html.append(f"<figure><figcaption>{escape(chart.title)}</figcaption>{svg}{own}</figure>")
    return f'<div class="charts">{"".join(html)}</div>' if html else "", data
