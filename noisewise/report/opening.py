"""What was found, and what was run: the first lines of the page."""

import re
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from noisewise.report.html import Part, details
from noisewise.report.subject import Subject
from noisewise.report.wording import counted, method_by_method, run_findings, verdicts


def header(subject: Subject, parts: Sequence[Part]) -> str:
    """Title, findings, facts, failures, contents."""
    kind = "run" if subject.single else "comparison"
    first, more = (run_findings(subject), []) if subject.single else (verdicts(subject), method_by_method(subject))
    said = "".join(f'<p class="finding">{escape(sentence)}</p>' for sentence in first) + _listed(more)
    pairs = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts(subject))
    links = "".join(f'<a href="#{part.name}">{escape(part.title)}</a>' for part in parts)
    return (
        f'<header><p class="eyebrow">noisewise {kind}</p><h1>{escape(title(subject))}</h1>{said}'
        f'<dl class="facts">{pairs}</dl>{failures(subject)}<nav aria-label="Contents">{links}</nav></header>'
    )


def title(subject: Subject) -> str:
    """What the page is called."""
    return f"{subject.plan.name}, {subject.baseline.name}" if subject.single else subject.plan.name


def _listed(sentences: list[str]) -> str:
    if not sentences:
        return ""
    entries = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    html = f'<ul class="said">{entries}</ul>'
    return html if len(sentences) <= 6 else details("Method by method, in words", html)


def facts(subject: Subject) -> list[tuple[str, str]]:
    """What was run, and on what."""
    runs, plan = subject.comparison.outcomes, subject.plan
    config = runs[0].config
    found = [
        ("data", config.data.source),
        ("network", config.model.name.rpartition(":")[2]),
        ("schedule" if len(subject.schedules) == 1 else "schedules", ", ".join(subject.schedules)),
        ("prediction", f"{config.prediction}, batch {config.batch:,}"),
        ("budget" if subject.single else "budget of each run", budget_text(plan.budget)),
    ]
    if subject.single:
        found.append(("seed", str(config.seed)))
    else:
        found.append(("runs", f"{counted(len(subject.methods), 'method')}, {counted(len(subject.seeds), 'seed')}"))
        more = "" if plan.headline is None else f", {plan.headline:,} at the end"
        found.append(("evaluations", f"{len(plan.evaluate_at)} of each run, {plan.images:,} images each{more}"))
    starts = [start for run in runs if (start := run.environment())]
    for name, told in (("machine", _machine), ("versions", _versions), ("commit", _commit)):
        found.append((name, "; ".join(dict.fromkeys(filter(None, map(told, starts))))))  # all, should they differ
    found.append(("last result", date_of([run.folder / "metrics.jsonl" for run in runs])))
    return [(name, value) for name, value in found if value]


def _machine(start: dict[str, Any]) -> str:
    threads = f", {counted(start['threads'], 'thread')}" if start.get("threads") else ""
    return f"{start.get('machine', 'unknown')}{threads}"


def _versions(start: dict[str, Any]) -> str:
    return f"noisewise {start.get('noisewise')}, torch {start.get('torch')}, Python {start.get('python')}"


def _commit(start: dict[str, Any]) -> str:
    commit = str(start.get("git") or "")
    return commit[:10] + " with changes" * commit.endswith("+")


def budget_text(budget: str) -> str:
    """ "25s" and "1000it" in words."""
    match = re.fullmatch(r"([\d.]+)(s|it)", budget)
    if not match:
        return budget
    return f"{float(match[1]):,g} s of training" if match[2] == "s" else f"{int(float(match[1])):,} steps"


def date_of(paths: Sequence[Path]) -> str:
    """The day of the newest of some files."""
    times = [path.stat().st_mtime for path in paths if path.is_file()]
    if not times:
        return ""
    day = time.localtime(max(times))
    return f"{day.tm_mday} {time.strftime('%B %Y', day)}"


def failures(subject: Subject) -> str:
    """Runs that failed, with the reason; and those that are not finished."""
    parts = []
    for run in subject.comparison.outcomes:
        if run.failure is not None and run.status == "failed":
            where = "" if run.failure.step is None else f" at step {run.failure.step:,}"
            who = f"{run.sampler}, seed {run.seed}" + (f", {run.process}" if len(subject.schedules) > 1 else "")
            log = details("the last lines of its log", f"<pre>{escape(run.failure.log)}</pre>") if run.failure.log else ""
            message = run.failure.message.rstrip(".")
            parts.append(f"<div class='failure'><p><b>{escape(who)}</b> failed{where}: {escape(message)}.</p>{log}</div>")
    missing = len(subject.plan.runs) - len(subject.comparison.outcomes)
    going = missing + sum(run.status == "unfinished" for run in subject.comparison.outcomes)
    if going and not subject.single:
        verb = "is" if going == 1 else "are"
        text = f"{going} of {len(subject.plan.runs)} runs {verb} not finished: what follows is preliminary."
        parts.append(f"<div class='failure'><p>{text}</p></div>")
    return "".join(parts)
