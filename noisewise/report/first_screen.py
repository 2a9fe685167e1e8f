"""The first screen: one large number and how sure it is, samples side by side, and one curve."""

from html import escape
from typing import Any

from noisewise.report.html import breakable, colour, per_schedule, swatch
from noisewise.report.opening import Lead, lead, run_lead
from noisewise.report.sections import Samples, first_charts, row_of, samples
from noisewise.report.subject import Subject

MOST_OTHERS = 5  # methods named beside the large number; the table has all


def first_screen(subject: Subject) -> tuple[str, dict[str, Any]]:
    """Its HTML, and what the script needs for it."""
    pictures = samples(subject)
    data = dict(pictures.data) if pictures else {}
    blocks = []
    for i, process in enumerate(subject.schedules):
        charts, more = row_of(
            first_charts(subject, process), "run" if subject.single and not _measured(subject) else f"quality-{i}"
        )
        data |= more
        blocks.append(_lead(run_lead(subject) if subject.single else lead(subject, process)) + _beside(pictures, i, charts))
    controls = pictures.controls if pictures else ""
    return f'<section id="first" aria-label="What was found">{per_schedule(subject, blocks)}{controls}</section>', data


def _measured(subject: Subject) -> bool:
    return any(run.evaluations for run in subject.comparison.outcomes)


def _beside(pictures: Samples | None, number: int, charts: str) -> str:
    """Samples and curve, side by side where there is room."""
    grid = pictures.blocks[number] if pictures else ""
    return f'<div class="show">{grid}{charts}</div>' if grid or charts else ""


def _lead(found: Lead) -> str:
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
