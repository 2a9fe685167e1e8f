"""A comparison as tables, one for each schedule, with what they say and how to read them.

In a narrow terminal cells go on in the next line and the least important columns give way, named below the table; no number is
ever cut.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isfinite

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from noisewise.study.findings import baseline_name, explanation, findings, p_text
from noisewise.study.outcome import Comparison
from noisewise.study.summary import Spread, Summary, Unit, budget_unit, headline_images, metric_label, summarise
from noisewise.words import in_lines

FILE_WIDTH = 160  # of text where there is no terminal
GAP = 2  # between columns


@dataclass(frozen=True)
class Column:
    """A column: its cells are made of summaries."""

    heading: str
    cell: Callable[[Summary], str]
    spare: int = 0  # those with the highest leave first where there is no room; 0 stays
    left: bool = False


def table_columns(summaries: Sequence[Summary], unit: str = "steps") -> list[Column]:
    """The columns for summaries of one comparison, whose budget counts `unit`; the first names the schedule, if several do."""
    name = baseline_name(summaries)
    metric = " / ".join(dict.fromkeys(metric_label(one.metric) for one in summaries if one.metric))
    several = len({one.process for one in summaries}) > 1
    headline = headline_images(summaries)
    return [
        *([Column("schedule", lambda one: one.process, left=True)] if several else []),
        Column("sampler", lambda one: one.sampler, left=True),
        Column("seeds", _seeds, spare=1, left=True),
        Column("steps", lambda one: f"{one.steps.mean:.0f}" if one.steps else "", spare=6),
        Column("it/s", lambda one: number(one.steps_per_second.mean, 3) if one.steps_per_second else "", spare=7),
        Column("held-out loss", lambda one: spread_text(one.loss), spare=4 if metric else 0),
        *([Column(metric, lambda one: spread_text(one.distance))] if metric else []),
        *([Column(f"{metric} of {headline:,}", lambda one: spread_text(one.headline), spare=1)] if headline else []),
        Column(f"over {name}", lambda one: "" if one.ratio is None else f"{one.ratio:.3f}"),
        Column(f"steps to {name}'s final", lambda one: _needed(one, "steps", "{:.0f}"), spare=3 if unit == "steps" else 5),
        Column(f"seconds to {name}'s final", lambda one: _needed(one, "seconds", "{:.1f}"), spare=5 if unit == "steps" else 3),
        Column("area", lambda one: spread_text(one.area), spare=8),
        Column("p", lambda one: "" if one.p_adjusted is None else p_text(one.p_adjusted), spare=2),
        Column("verdict", lambda one: one.verdict, left=True),
    ]


def print_table(comparison: Comparison, console: Console | None = None) -> None:
    """Print the tables with what was shown to be better in bold, then the findings and how to read the numbers."""
    if console is None:
        console = Console()
        console.width = console.width if console.is_terminal else FILE_WIDTH
    unit = budget_unit(comparison)
    for process, group in groupby(summarise(comparison), lambda one: one.process):
        summaries = list(group)
        columns, left_out = fitting(filled(table_columns(summaries, unit), summaries), summaries, console.width)
        widths = _widths(columns, summaries, console.width)
        needed = sum(widths) + GAP * (len(widths) - 1)
        console.print(Text(process, style="bold"))
        console.print(_rich_table(columns, summaries, widths), width=max(needed, console.width), crop=False)
        if left_out:
            console.print(Text(f"No room for: {', '.join(left_out)}. A wider terminal shows all, as does summary.csv."))
        console.print()
    for sentence in findings(comparison):
        console.print(Text(sentence))
    console.print(Text(f"\n{explanation(comparison)}"))


def filled(columns: Sequence[Column], summaries: Sequence[Summary]) -> list[Column]:
    """Without columns that would stay empty, such as p with one seed."""
    return [column for column in columns if any(map(column.cell, summaries))]


def fitting(columns: Sequence[Column], summaries: Sequence[Summary], room: int) -> tuple[list[Column], list[str]]:
    """The columns that fit into so many characters, and the headings of the others."""
    kept, left_out = list(columns), []
    while sum(_narrowest(column, summaries) + GAP for column in kept) - GAP > room:
        spare = max(kept, key=lambda column: column.spare)
        if not spare.spare:
            break  # the terminal will have to scroll or wrap
        kept.remove(spare)
        left_out.append(spare.heading)
    return kept, left_out


def _rich_table(columns: Sequence[Column], summaries: Sequence[Summary], widths: Sequence[int]) -> Table:
    narrowed = [width < _widest(column, summaries) for column, width in zip(columns, widths, strict=True)]
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0), show_lines=any(narrowed))
    for column, width in zip(columns, widths, strict=True):
        table.add_column(Text(column.heading), justify="left" if column.left else "right", width=width, overflow="fold")
    best = [one for one in summaries if one.verdict == "better"]
    for one in summaries:
        texts = []
        for column, width, narrow in zip(columns, widths, narrowed, strict=True):
            cell = column.cell(one)
            fitted = in_lines(cell, width) if column.heading == "sampler" else _tight(cell)
            texts.append(Text(fitted if narrow else cell))
        table.add_row(*texts, style="bold" if one in best else None)
    return table


def _widths(columns: Sequence[Column], summaries: Sequence[Summary], room: int) -> list[int]:
    """Ours, since rich would cut words to make columns narrower; columns that need little more are served first."""
    widths = [_narrowest(column, summaries) for column in columns]
    wishes = [_widest(column, summaries) - width for column, width in zip(columns, widths, strict=True)]
    left = room - sum(widths) - GAP * (len(widths) - 1)
    for i in sorted(range(len(widths)), key=lambda i: wishes[i]):
        given = max(0, min(left, wishes[i]))
        widths[i] += given
        left -= given
    return widths


def _widest(column: Column, summaries: Sequence[Summary]) -> int:
    return max(len(text) for text in (column.heading, *map(column.cell, summaries)))


def _narrowest(column: Column, summaries: Sequence[Summary]) -> int:
    """The longest word; specs of samplers may go on in the next line between two of theirs."""
    cells = [column.cell(one) for one in summaries]
    texts = [in_lines(cell, 1) if column.heading == "sampler" else _tight(cell) for cell in cells]
    return max(len(word) for text in (column.heading, *texts) for word in text.split())


def _tight(cell: str) -> str:
    """Signs stay with their numbers when a line ends between them."""
    return cell.replace("± ", "±").replace("≤ ", "≤").replace("≥ ", "≥")


def number(value: float, digits: int = 4) -> str:
    """Four significant digits, and whole numbers whole."""
    return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"


def spread_text(spread: Spread | None) -> str:
    """Mean, and half the range over seeds."""
    if spread is None:
        return ""
    several = len(spread.values) > 1 and isfinite(spread.mean)
    return number(spread.mean) + (f" ± {number(spread.half_range, 2)}" if several else "")


def _seeds(one: Summary) -> str:
    lost = [f"{len(seeds)} {what}" for seeds, what in ((one.failed, "failed"), (one.unfinished, "unfinished")) if seeds]
    done, begun = len(one.seeds), len(one.seeds + one.failed + one.unfinished)
    return ", ".join([f"{done} of {begun}" if lost else str(done), *lost])


def _needed(one: Summary, unit: Unit, form: str) -> str:
    """ "610 (1.64×)": the mean over seeds, and the speed-up."""
    needed: list[float | None] = [getattr(reached, unit) for reached in one.reached]
    speedup: float | None = getattr(one, f"speedup_{unit}")
    known = [value for value in needed if value is not None]
    if not needed:
        return ""
    if len(known) < len(needed):
        return f"reached in {len(known)} of {len(needed)} seeds" if known else "not reached"
    most, least = ("≤ ", "≥ ") if any(reached.at_most for reached in one.reached) else ("", "")
    gain = "" if speedup is None else f" ({least}{speedup:.2f}×)"
    return most + form.format(sum(known) / len(known)) + gain
