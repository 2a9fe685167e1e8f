"""The outcome of a comparison in words and numbers."""

import statistics
from collections.abc import Iterable
from typing import Literal

from rich.console import Console
from rich.table import Table

from noisewise.study.measure import Measured


def by_sampler(results: list[Measured]) -> dict[str, list[Measured]]:
    """The runs of each sampler, seeds in order; the baseline first."""
    grouped: dict[str, list[Measured]] = {}
    for result in results:
        grouped.setdefault(result.sampler, []).append(result)
    return grouped


def spread(values: Iterable[float]) -> str:
    """Mean, and half the range over seeds."""
    values = list(values)
    mean = statistics.mean(values)
    return f"{mean:.4g}" + (f" ± {(max(values) - min(values)) / 2:.2g}" if len(values) > 1 else "")


def verdict(baseline: list[Measured], runs: list[Measured]) -> str:
    """ "better" or "worse" than the baseline only if there are two seeds or more and all agree."""
    pairs = [(judged(run), judged(base)) for run, base in zip(runs, baseline, strict=True)]
    if len(pairs) < 2:
        return "one seed"
    if all(mine < theirs for mine, theirs in pairs):
        return "better"
    return "worse" if all(mine > theirs for mine, theirs in pairs) else "unclear"


def judged(run: Measured) -> float:
    """What runs are judged by: the distance of their images to the data or, without one, their held-out loss."""
    return run.loss if run.distance is None else run.distance


def ratio(baseline: list[Measured], runs: list[Measured]) -> float:
    """The mean over seeds of a run's value over the baseline's."""
    return statistics.mean(judged(run) / judged(base) for run, base in zip(runs, baseline, strict=True))


def table_rows(results: list[Measured]) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row for each sampler."""
    grouped = by_sampler(results)
    name, baseline = next(iter(grouped.items()))
    metric = results[0].metric
    headings = ["sampler", "steps", "it/s", "held-out loss", *([metric] if metric else []), f"over {name}", ""]
    rows = []
    for sampler, runs in grouped.items():
        distances = [run.distance for run in runs if run.distance is not None]
        row = [
            sampler,
            f"{statistics.mean(run.steps for run in runs):.0f}",
            f"{statistics.mean(run.steps_per_second for run in runs):.1f}",
            spread(run.loss for run in runs),
            *([spread(distances)] if metric else []),
            f"{ratio(baseline, runs):.3f}",
            "baseline" if sampler == name else verdict(baseline, runs),
        ]
        rows.append(row)
    return headings, rows


def explanation(results: list[Measured]) -> str:
    """How to read the table."""
    name, metric = results[0].sampler, results[0].metric or "held-out loss"
    return (
        f"Lower is better. ± is half the range over seeds. The last columns are of {metric}: its mean ratio to {name}'s, and "
        '"better" or "worse" only where every seed agrees.'
    )


def print_table(results: list[Measured]) -> None:
    """The table in the terminal, the best in bold."""
    headings, rows = table_rows(results)
    means = {name: statistics.mean(map(judged, runs)) for name, runs in by_sampler(results).items()}
    best = min(means, key=lambda name: means[name])
    table = Table()
    widest = min(12, max(map(len, means)))  # names go on in the next line; numbers give way at their spaces
    for i, heading in enumerate(headings):
        justify: Literal["left", "right"] = "left" if i in (0, len(headings) - 1) else "right"
        last = i == len(headings) - 1
        table.add_column(heading, justify=justify, min_width=widest if i == 0 else None, overflow="fold", no_wrap=last)
    for row in rows:
        table.add_row(*row, style="bold" if row[0] == best else None)
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a file is as wide as it needs
    console.print(table)
    console.print(explanation(results), highlight=False)
