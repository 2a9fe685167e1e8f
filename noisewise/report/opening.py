"""What was found, and what was run: the first lines of the page."""

import re
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from noisewise.report.charts import time_unit
from noisewise.report.html import Part, details, number
from noisewise.report.subject import Subject
from noisewise.study.findings import ENOUGH, findings
from noisewise.study.summary import Summary, metric_label, summarise


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


# What was found, in plain words ---------------------------------------------------------------------------------------


def verdicts(subject: Subject) -> list[str]:
    """The outcome in plain words, a sentence for each schedule; "better" is only said where the seeds allow it."""
    summaries = summarise(subject.comparison)
    said = []
    for process in subject.schedules:
        where = f"On the {process} schedule, " if len(subject.schedules) > 1 else ""
        sentence = _verdict(subject, [one for one in summaries if one.process == process])
        said.append(where + (sentence if not where else sentence[0].lower() + sentence[1:]))
    return said


def _verdict(subject: Subject, summaries: list[Summary]) -> str:
    base, metric = subject.baseline.name, metric_label(summaries[0].metric)
    others = [one for one in summaries if not one.baseline]
    judged = [(one.ratio, one) for one in others if one.ratio is not None]
    if not others:
        return f"{base} alone: there is nothing to compare it with."
    if not judged:
        return f"No method can be compared with {base} yet."
    judged.sort(key=lambda pair: pair[0])
    better, worse = ([pair for pair in judged if pair[1].verdict == word] for word in ("better", "worse"))
    rest = len(judged) - len(better) - len(worse)
    said = []
    if better:
        said.append(f"Better than {base}{_seeds(better)}: {_ratios(better, metric)}.")
    if worse:
        said.append(f"Worse than {base}{_seeds(worse)}: {_ratios(worse, metric)}.")
    if better or worse:
        which = "the other method" if rest == 1 else f"the other {rest} methods"
        return " ".join([*said, *([f"For {which} the seeds show no clear difference."] if rest else [])])
    ratio, best = judged[0]
    seeds = len(best.reached)
    few = f"with {counted(seeds, 'seed')}" if seeds < ENOUGH else f"in {seeds} seeds"
    lowest = f"{best.sampler} came lowest, with {ratio:.2f} times {base}'s {metric}"  # by ratio: seeds may differ
    if best.failed:
        lowest += f", but {len(best.failed)} of its runs failed"
    if ratio >= 1:
        lowest = f"{base} itself had the lowest {metric}"
    return f"No method was shown to be better than {base} {few}; {lowest}."


def _seeds(judged: list[tuple[float, Summary]]) -> str:
    """A reminder of how little a few seeds say."""
    fewest = min(len(one.reached) for _, one in judged)
    return f" over {counted(fewest, 'seed')} only" if fewest < ENOUGH else ""


def _ratios(judged: list[tuple[float, Summary]], metric: str) -> str:
    sizes = [f"{judged[0][0]:.2f} times its {metric}", *(f"{ratio:.2f}" for ratio, _ in judged[1:])]
    return _joined([f"{one.sampler} ({size})" for (_, one), size in zip(judged, sizes, strict=True)])


def method_by_method(subject: Subject) -> list[str]:
    """A sentence for each method; what became of failed runs is said below."""
    lost = sum(run.status != "finished" for run in subject.comparison.outcomes)
    said = findings(subject.comparison)
    return said[: len(said) - lost]


def _joined(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def run_findings(subject: Subject) -> list[str]:
    """Of one run: how far it got."""
    run = subject.comparison.outcomes[0]
    rows = run.metrics()
    if not rows:
        return ["Nothing was written down during training."]
    last = rows[-1]
    unit, size = time_unit(last["seconds"])
    loss = "" if last.get("loss") is None else f"; the training loss is {number(last['loss'])}"
    skipped = f" {last['skipped']} steps were skipped because something in them was not finite." if last.get("skipped") else ""
    spent = f"Trained for {last['step']:,} steps in {number(last['seconds'] / size)} {unit}{loss}.{skipped}"
    measured = {key: value for found in subject.measured() for key, value in measures(found).items()}
    best = [f"{metric_label(key)} {number(value)}" for key, value in measured.items()]
    return [spent, *([f"Last measured: {', '.join(best)}."] if best else [])]


def measures(row: dict[str, Any]) -> dict[str, float]:
    """The numbers that `noisewise evaluate` found, by name."""
    found = {key: value for key, value in row.items() if isinstance(value, float)}
    for key, inner, name in (("heldout", "loss", "held-out loss"), ("vlb", "bits_per_dimension", "bits per dimension")):
        part = row.get(key)
        if isinstance(part, dict) and isinstance(part.get(inner), float):
            found[name] = part[inner]
    for key in ("kid", "precision_recall", "density_coverage"):
        part = row.get(key)
        if isinstance(part, dict):
            found |= {f"{key} {inner}" if key == "kid" else inner: v for inner, v in part.items() if isinstance(v, float)}
    return found


def counted(count: int, noun: str) -> str:
    """ "1 seed", "2 seeds"."""
    return f"{count} {noun}{'s' * (count != 1)}"
