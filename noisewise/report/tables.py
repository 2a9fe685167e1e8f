"""The sections of tables: results, costs, every evaluation, what `noisewise evaluate` found of a run, and all settings."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from html import escape

from noisewise.report.html import Cell, Part, colour, details, method_head, number, per_schedule, table
from noisewise.report.opening import facts, measures, method_by_method
from noisewise.report.subject import Subject
from noisewise.study.findings import explanation
from noisewise.study.outcome import Outcome
from noisewise.study.summary import Summary, budget_unit, headline_images, judged, metric_label, summarise
from noisewise.study.table import Column, filled, spread_text, table_columns
from noisewise.training.options import as_yaml, flat

SPARE = 4  # columns that the table for terminals gives up before these are left to the unfolded table


def results(subject: Subject) -> list[Part]:
    """The table of a comparison."""
    if subject.single:
        return []
    summaries, unit = summarise(subject.comparison), budget_unit(subject.comparison)
    main, whole = [], []
    for process in subject.schedules:
        name = f'<h3 class="process">{escape(process)} schedule</h3>' if len(subject.schedules) > 1 else ""
        mine = [one for one in summaries if one.process == process]
        columns = sorted(filled(table_columns(mine, unit), mine), key=lambda column: column.spare)
        main.append(name + _rows(subject, mine, [column for column in columns if column.spare <= SPARE], "results"))
        whole.append(name + _rows(subject, mine, columns, "results all"))
    note = "Lower is better; ± is half the range over seeds; bold is what was shown to be better."
    entries = "".join(f"<li>{escape(sentence)}</li>" for sentence in method_by_method(subject))
    words = details("Method by method, in words", f'<ul class="said">{entries}</ul>')
    more = f'<p class="note">{escape(explanation(subject.comparison))}</p>'
    html = "".join(main) + words + details("How to read it, and all columns", more + "".join(whole))
    return [Part("table", "Results", html, intro=f"<p>{note}</p>")]


def _rows(subject: Subject, summaries: list[Summary], columns: list[Column], kind: str) -> str:
    looks = {method.name: method for method in subject.methods}
    rows = []
    for one in summaries:
        cells = [
            method_head(looks[one.sampler])
            if column.heading == "sampler"
            else Cell(column.cell(one)).html(left=column.left, more=column.spare > 0)
            for column in columns
        ]
        kinds = "best" if one.verdict == "better" else ""
        rows.append(f'<tr class="{kinds}" data-method="{looks[one.sampler].index}"{_exact(one)}>{"".join(cells)}</tr>')
    sides, more = [column.left for column in columns], [column.spare > 0 for column in columns]
    return table([column.heading for column in columns], rows, kind, sides, more)


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
            ]
            if headline:
                more = found.headline
                cells.append(Cell("") if more is None else Cell(number(more), more, "headline"))
            name = escape(run.folder.name)
            yield f'<tr data-run="{name}" data-method="{index[run.sampler]}">{"".join(cell.html() for cell in cells)}</tr>'


def cost(subject: Subject) -> list[Part]:
    """Steps per second, a bar for each method, if there are several."""
    if subject.single or len(subject.methods) < 2:
        return []
    intro = (
        "<p>Training steps per second over the baseline's: 1 is as fast, below 1 is slower. Only training steps are on the "
        "clock; other work on the same machine moves these numbers.</p>"
    )
    summaries = summarise(subject.comparison)
    blocks = [_bars(subject, [one for one in summaries if one.process == process]) for process in subject.schedules]
    return [Part("cost", "Cost", per_schedule(subject, blocks), intro=intro)] if any(blocks) else []


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


def measured(subject: Subject) -> list[Part]:
    """Of one run: what `noisewise evaluate` has written into its metrics."""
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


# All settings, and how to repeat it -----------------------------------------------------------------------------------


OWN = ("out", "seed", "name")  # of each run, and no difference


def settings(subject: Subject) -> list[Part]:
    """The command, the files, the settings."""
    again = command(subject)
    pairs = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts(subject))
    html = f'<dl class="facts">{pairs}</dl>' + (f"<p>The same again:</p><pre>{_words(again)}</pre>" if again else "")
    html += f"<p>What this page was made of, in its folder:</p><ul class='files'>{_files(subject)}</ul>"
    first = _of_baseline(subject)
    title = "Settings" if subject.single else f"Settings of {first.sampler}"
    html += details(title, f"<pre>{escape(as_yaml(replace(first.config, out=None)))}</pre>")
    if not subject.single:
        html += details("What differs in the others", f"<pre>{escape(differences(subject))}</pre>")
    return [Part("settings", "Settings, and how to repeat it", html)]


def command(subject: Subject) -> str:
    """What to type, a line for each command that added runs; nothing if it was made from Python."""
    if subject.single:
        return "noisewise train --config config.yaml --out runs/again"
    given = [list(one) for one in (*subject.plan.earlier, subject.plan.command) if one]
    named = [one if one[0] in ("compare", "analyze") else ["compare", *one] for one in given]
    return "\n".join(shlex.join(["noisewise", *one]) for one in named)


def _words(command: str) -> str:
    """Each word by itself, since a browser would break a line after the dashes of an option."""
    return re.sub(r"\S+", lambda word: f"<span>{escape(word[0])}</span>", command)


def differences(subject: Subject) -> str:
    """For each other method and schedule, the settings that are not those of the baseline."""
    runs, first = subject.comparison.outcomes, _of_baseline(subject)
    base = flat(first.config)
    blocks = []
    seen = {(first.sampler, first.process)}
    for run in runs:
        if (run.sampler, run.process) not in seen:
            seen.add((run.sampler, run.process))
            mine = flat(run.config)
            names = [name for name in {**base, **mine} if name not in OWN and base.get(name) != mine.get(name)]
            blocks.append("\n".join(f"{name}: {mine.get(name)}" for name in names))
    return "\n\n".join(blocks) if blocks else "nothing"


def _of_baseline(subject: Subject) -> Outcome:
    """A run of the baseline, or the first one where there is none."""
    runs = subject.comparison.outcomes
    return next((run for run in runs if run.sampler == subject.baseline.name), runs[0])


def _files(subject: Subject) -> str:
    whole = {
        "comparison.json": "what was asked for",
        "results.jsonl": "a row for each run: its evaluations, settings, versions and machine",
        "results.csv": "a line for each evaluation",
        "summary.csv": "a line for each schedule and sampler",
        "config.yaml": "every setting",
        "metrics.jsonl": "a row for each log point, and for each evaluation",
        "environment.jsonl": "versions and machine of each start",
    }
    found = [(name, what) for name, what in whole.items() if (subject.folder / name).is_file()]
    if not subject.single:
        found.append(("runs/", f"{len(subject.comparison.outcomes)} run folders, each with config.yaml and metrics.jsonl"))
    return "".join(f"<li><code>{escape(name)}</code> {escape(what)}</li>" for name, what in found)
