"""What the samplers cost: steps per second."""

from noisewise.report.html import Cell, Part, method_head, per_schedule, table
from noisewise.report.subject import Subject
from noisewise.report.svg import colour
from noisewise.study.summary import Summary, summarise
from noisewise.study.table import spread_text

INTRO = """<p>Training steps per second over the baseline's: 1 is as fast, below 1 is slower. Only training steps are on the
clock; other work on the same machine moves these numbers.</p>"""


def parts(subject: Subject) -> list[Part]:
    """A bar for each method, if there are several."""
    if subject.single or len(subject.methods) < 2:
        return []
    summaries = summarise(subject.comparison)
    blocks = [_bars(subject, [one for one in summaries if one.process == process]) for process in subject.schedules]
    return [Part("cost", "Cost", INTRO + per_schedule(subject, blocks))] if any(blocks) else []


def _bars(subject: Subject, summaries: list[Summary]) -> str:
    base = next((one.steps_per_second for one in summaries if one.baseline), None)
    known = [(one, one.steps_per_second) for one in summaries if one.steps_per_second is not None]
    if base is None or not known:
        return ""
    longest = max(1.0, *(speed.mean / base.mean for _, speed in known))
    index = {method.name: method for method in subject.methods}
    rows = []
    for one, speed in known:
        method, ratio = index[one.sampler], speed.mean / base.mean
        bar = f'<td class="bar"><span style="width:{ratio / longest:.1%};background:{colour(method)}"></span></td>'
        cells = Cell(spread_text(speed), speed.mean, "steps_per_second").html()
        cells += Cell(f"{ratio:.3f}", ratio, "speed").html() + bar
        rows.append(f'<tr data-method="{method.index}">{method_head(method)}{cells}</tr>')
    return table(["sampler", "steps per second", f"over {subject.baseline.name}", ""], rows, "cost")
