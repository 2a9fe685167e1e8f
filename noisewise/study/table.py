"""The outcome of a comparison in words and numbers."""

import statistics
from collections.abc import Callable, Iterable

from rich.console import Console
from rich.table import Table

from noisewise.study.measure import DISTANCE, Measured


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


def verdict(baseline: list[Measured], runs: list[Measured], value: Callable[[Measured], float | None]) -> str:
    """ "better" or "worse" than the baseline only if every seed agrees, and there are two or more."""
    pairs = [(value(run), value(base)) for run, base in zip(runs, baseline, strict=True)]
    known = [(mine, theirs) for mine, theirs in pairs if mine is not None and theirs is not None]
    if len(known) < 2:
        return "one seed: not judged"
    if all(mine < theirs for mine, theirs in known):
        return "better in every seed"
    return "worse in every seed" if all(mine > theirs for mine, theirs in known) else "seeds disagree"


def ratio(baseline: list[Measured], runs: list[Measured], value: Callable[[Measured], float | None]) -> float | None:
    """The mean over seeds of a run's value over the baseline's."""
    pairs = [(value(run), value(base)) for run, base in zip(runs, baseline, strict=True)]
    ratios = [mine / theirs for mine, theirs in pairs if mine is not None and theirs]
    return statistics.mean(ratios) if ratios else None


def table_rows(results: list[Measured]) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row for each sampler."""
    grouped = by_sampler(results)
    name, baseline = next(iter(grouped.items()))
    measured = results[0].distance is not None
    headings = ["sampler", "steps", "it/s", "held-out loss", f"over {name}'s"]
    headings += [DISTANCE, f"over {name}'s", f"against {name}"] if measured else [f"against {name}"]
    judged: Callable[[Measured], float | None] = (lambda m: m.distance) if measured else (lambda m: m.loss)
    rows = []
    for sampler, runs in grouped.items():
        row = [
            sampler,
            f"{statistics.mean(run.steps for run in runs):.0f}",
            f"{statistics.mean(run.steps_per_second for run in runs):.1f}",
            spread(run.loss for run in runs),
            f"{ratio(baseline, runs, lambda m: m.loss):.3f}",
        ]
        if measured:
            row += [spread(run.distance or 0.0 for run in runs), f"{ratio(baseline, runs, lambda m: m.distance):.3f}"]
        rows.append([*row, "baseline" if sampler == name else verdict(baseline, runs, judged)])
    return headings, rows


def print_table(results: list[Measured]) -> None:
    """The table in the terminal, the best in bold."""
    headings, rows = table_rows(results)
    grouped = by_sampler(results)
    judged = {
        name: statistics.mean((run.loss if run.distance is None else run.distance) for run in runs)
        for name, runs in grouped.items()
    }
    best = min(judged, key=lambda name: judged[name])
    table = Table(title="lower is better", title_justify="left")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i in (0, len(headings) - 1) else "right")
    for row in rows:
        table.add_row(*row, style="bold" if row[0] == best else None)
    Console().print(table)
