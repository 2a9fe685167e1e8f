"""The table, how the quality of images went with training, and where on the way the noise the model is good."""

from collections.abc import Iterator
from html import escape
from typing import Any

from noisewise.metrics import digits_features
from noisewise.report.axis import number
from noisewise.report.charts import Chart, loss_charts, quality_charts
from noisewise.report.html import Cell, Part, charts_row, details, method_head, per_schedule, printed_legend, table
from noisewise.report.subject import Subject
from noisewise.study.findings import explanation
from noisewise.study.outcome import Evaluation
from noisewise.study.summary import Summary, budget_unit, headline_images, judged, metric_label, summarise
from noisewise.study.table import Column, lowest, table_columns

PUBLISHED = 50_000  # images of a FID in papers
SPARE = 4  # columns that the table for terminals gives up before these are left to the unfolded table


def parts(subject: Subject) -> list[Part]:
    """The table, the charts of quality, and the losses by noise level; the last two also for a run that was measured."""
    made = [] if subject.single else [_table(subject)]
    if any(run.evaluations for run in subject.comparison.outcomes):
        bands = "" if subject.single else "Lines are means over seeds, bands the range from the lowest to the highest seed. "
        intro = f"<p>{bands}Training time includes what the sampler itself costs.{_about(subject)}</p>"
        quality = [quality_charts(subject, process) for process in subject.schedules]
        made.append(_charts("quality", "Quality through training", intro, subject, quality, evaluations(subject)))
    return made


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
    return [_charts("loss", "Loss by noise level", intro, subject, charts)] if any(charts) else []


def _charts(name: str, title: str, intro: str, subject: Subject, charts: list[list[Chart]], end: str = "") -> Part:
    blocks: list[str] = []
    data: dict[str, Any] = {}
    for i, some in enumerate(charts):
        html, more = charts_row(some, f"{name}-{i}")
        blocks.append(html if some else "")
        data |= more
    return Part(name, title, intro + printed_legend(subject) + per_schedule(subject, blocks) + end, data)


def _table(subject: Subject) -> Part:
    summaries = summarise(subject.comparison)
    columns = table_columns(summaries, budget_unit(subject.comparison))
    main = [column for column in columns if column.spare <= SPARE]
    note = "Lower is better; ± is half the range over seeds; bold is the lowest mean with all seeds, which claims nothing."
    html = _rows(subject, summaries, main, "results") + f'<p class="note">{note}</p>'
    more = f'<p class="note">{escape(explanation(subject.comparison))}</p>'
    whole = _rows(subject, summaries, columns, "results all") if len(columns) > len(main) else ""
    return Part("table", "Results", html + details("How to read it, and all columns", more + whole))


def _rows(subject: Subject, summaries: list[Summary], columns: list[Column], kind: str) -> str:
    looks = {method.name: method for method in subject.methods}
    best = [one for process in subject.schedules for one in lowest([each for each in summaries if each.process == process])]
    rows = []
    for one in summaries:
        cells = [
            method_head(looks[one.sampler]) if column.heading == "sampler" else Cell(column.cell(one)).html(left=column.left)
            for column in columns
        ]
        kinds = " ".join(["best"] * (one in best) + ["first"] * one.baseline)
        rows.append(f'<tr class="{kinds}" data-method="{looks[one.sampler].index}"{_exact(one)}>{"".join(cells)}</tr>')
    return table([column.heading for column in columns], rows, kind, [column.left for column in columns])


def _exact(summary: Summary) -> str:
    """The numbers of a row, to the last digit."""
    spreads = {"value": summary.value, "loss": summary.loss}
    numbers = {name: spread and spread.mean for name, spread in spreads.items()} | {"ratio": summary.ratio, "p": summary.p}
    exact = "".join(f' data-{name}="{number!r}"' for name, number in numbers.items() if number is not None)
    return f' data-process="{escape(summary.process)}" data-sampler="{escape(summary.sampler)}"{exact}'


def evaluations(subject: Subject) -> str:
    """Every evaluation of every run, as in results.jsonl."""
    headings = ["sampler", "schedule", "seed", "share", "step", "seconds", metric_label(subject.metric)]
    headings += [] if subject.metric is None else ["held-out loss"]
    headline = headline_images(summarise(subject.comparison))
    headings += [] if headline is None else [f"{metric_label(subject.metric)} of {headline:,}"]
    rows = _evaluation_rows(subject, headline is not None)
    return details("All evaluations, in numbers", table(headings, rows, "numbers"))


def _headline(found: Evaluation) -> Cell:
    return Cell("") if found.headline is None else Cell(number(found.headline), found.headline, "headline")


def _evaluation_rows(subject: Subject, headline: bool) -> Iterator[str]:
    index = {method.name: method.index for method in subject.methods}
    for run in subject.comparison.outcomes:
        for found in run.evaluations:
            value = judged(found, subject.metric)
            cells = [
                Cell(run.sampler, run.sampler, "sampler"),
                Cell(run.process, run.process, "process"),
                Cell(str(run.seed), run.seed, "seed"),
                Cell(f"{found.share:.0%}", found.share, "share"),
                Cell(f"{found.step:,}", found.step, "step"),
                Cell(f"{found.seconds:,.1f}", found.seconds, "seconds"),
                Cell(number(value), value, "value"),
                *([] if subject.metric is None else [Cell(number(found.loss), found.loss, "loss")]),
                *([_headline(found)] if headline else []),
            ]
            name = escape(run.folder.name)
            yield f'<tr data-run="{name}" data-method="{index[run.sampler]}">{"".join(cell.html() for cell in cells)}</tr>'
