"""One run: its loss through training, and what `noisewise evaluate` found."""

from noisewise.report.axis import number
from noisewise.report.charts import training_charts
from noisewise.report.html import Cell, Part, charts_row, table
from noisewise.report.subject import Subject
from noisewise.report.wording import measures
from noisewise.study.summary import metric_label


def parts(subject: Subject) -> list[Part]:
    """Nothing in a comparison: it has evaluations that can be compared."""
    if not subject.single:
        return []
    charts = training_charts(subject)
    html, data = charts_row(charts, "run")
    made = [Part("training", "Loss", html, data)] if charts else []
    return [*made, *_measured(subject)]


def _measured(subject: Subject) -> list[Part]:
    rows = subject.measured()
    if not rows:
        return []
    names = list(dict.fromkeys(name for row in rows for name in measures(row)))
    lines = []
    for row in rows:
        found = measures(row)
        cells = [Cell(f"{row['step']:,}" if "step" in row else "", row.get("step"), "step")]
        cells += [Cell(number(found[name]), found[name], name) if name in found else Cell("") for name in names]
        cells.insert(1, Cell(f"{row['images']:,}" if "images" in row else "", row.get("images"), "images"))
        lines.append("<tr>" + "".join(cell.html() for cell in cells) + "</tr>")
    html = table(["step", "images", *map(metric_label, names)], lines, "measured")
    return [Part("measured", "Evaluations", html)]
