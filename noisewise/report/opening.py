"""What was found, and what was run: the first lines of the page."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite
from pathlib import Path
from typing import Any

from noisewise.looking.palette import Method
from noisewise.report.charts import time_unit
from noisewise.report.html import Part, breakable, details, number
from noisewise.report.subject import Subject
from noisewise.study.findings import ENOUGH, findings, p_equals
from noisewise.study.summary import SEEDS, Summary, budget_unit, judged, metric_label, summarise
from noisewise.training.config import Config

KNOWN_DATA = {"digits": "handwritten digits", "cifar10": "CIFAR-10"}
ONE_SEED_TIE = 0.02  # of the baseline's value: runs of one method differ by as much between seeds


def header(subject: Subject, parts: Sequence[Part]) -> str:
    """What was trained, on what, and which runs failed."""
    kind = "run" if subject.single else "comparison"
    links = "".join(f'<a href="#{part.name}">{escape(part.title)}</a>' for part in parts)
    return (
        f'<header><div class="top"><p class="eyebrow">noisewise {kind}: {escape(subject.plan.name)}</p>'
        f'<nav aria-label="Contents">{links}</nav></div><h1>{breakable(title(subject))}</h1>'
        f'<p class="about">{escape(about(subject))}</p>{failures(subject)}</header>'
    )


def title(subject: Subject) -> str:
    """Which methods, on which data."""
    names = [method.name for method in subject.methods]
    named = joined(names) if len(names) <= 4 and sum(map(len, names)) <= 60 else f"{len(names)} methods"
    return f"{named} on {data_name(subject.comparison.outcomes[0].config)}"


def data_name(config: Config) -> str:
    """The data in words, with the size of an image."""
    source, where = config.data.source, Path(config.data.path or "").name
    known = KNOWN_DATA.get(source) or (f"{where} ({source})" if where else source)
    shape = config.data.shape or ()
    size = "×".join(map(str, shape if source == "latents" else shape[1:]))
    return f"{known}, {size}" if size else known


def about(subject: Subject) -> str:
    """How it was trained, in a line."""
    config, plan = subject.comparison.outcomes[0].config, subject.plan
    seeds = f"seed {config.seed}" if subject.single else counted(len(subject.seeds), "seed")
    each = "" if subject.single else " each"
    schedules = [f"{subject.schedules[0]} schedule"] if len(subject.schedules) == 1 else []
    return ", ".join([f"{budget_text(plan.budget)}{each}", f"batch {config.batch:,}", *schedules, seeds])


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


@dataclass(frozen=True)
class Lead:
    """The one number of a page: what it is, and how sure it is."""

    number: str = ""
    what: str = ""
    sure: str = ""
    method: Method | None = None
    shown: bool = False  # to be better
    others: tuple[tuple[Method, float, str], ...] = ()  # ratio and verdict


def lead(subject: Subject, process: str) -> Lead:
    """The best method's ratio to the baseline on a schedule; "better" is only said where the seeds allow it."""
    summaries = [one for one in summarise(subject.comparison) if one.process == process]
    base = next((one for one in summaries if one.baseline), None)
    others = [one for one in summaries if not one.baseline]
    found = [(one.ratio, one) for one in others if one.ratio is not None]
    name = subject.baseline.name
    if not others:
        return Lead(what=f"{name} alone: there is nothing to compare it with.")
    if not found or base is None:
        return Lead(what=f"No method can be compared with {name} yet.")
    found.sort(key=lambda pair: (pair[1].verdict != "better", pair[0]))
    (ratio, best), metric = found[0], metric_label(base.metric)
    looks = {method.name: method for method in subject.methods}
    values = ""
    if best.value is not None and base.value is not None:
        values = f" ({number(best.value.mean)} against {number(base.value.mean)})"
    return Lead(
        f"{ratio:.2f}×",
        f"{best.sampler}'s {metric} over {name}'s{values}",
        " ".join(filter(None, (certainty(best, base), _sooner(best, subject, metric)))),
        looks[best.sampler],
        best.verdict == "better",
        tuple(
            (looks[one.sampler], each, "tie" if tied(one) else "" if one.verdict == "one seed" else one.verdict)
            for each, one in found[1:]
        ),
    )


def certainty(one: Summary, base: Summary) -> str:
    """How far a ratio can be trusted, in a sentence."""
    ratio, seeds, ratios = one.ratio or 1.0, len(one.reached), _ratios(one, base)
    lost = f" {counted(len(one.failed), 'run')} of it failed." if one.failed else ""
    if seeds == 1:
        first = "A tie, as far as one seed can tell. " if tied(one) else ""
        first = first or (f"{base.sampler} itself came lowest. " if ratio > 1 else "")
        return f"{first}One seed is a demonstration; {ENOUGH} are evidence.{lost}"
    if one.verdict == "same":
        return f"A tie: the same in {seeds} seeds.{lost}"
    span = f"{min(ratios):.2f} to {max(ratios):.2f} seed by seed" if ratios else f"{seeds} seeds"
    p = "" if one.p_adjusted is None else f", {p_equals(one.p_adjusted)}"
    if one.verdict in ("better", "worse"):
        few = f" {counted(seeds, 'seed')} are few." if seeds < ENOUGH else ""
        return f"Shown to be {one.verdict} in {seeds} seeds: {span}{p}.{few}{lost}"
    few = f" {counted(seeds, 'seed')} are too few to call it better." if seeds < SEEDS and ratio < 1 else ""
    return f"Not shown to be better: {one.verdict}, {span}{p}.{few}{lost}"


def tied(one: Summary) -> bool:
    """Whether it is as good as the baseline; one seed tells no small difference from none."""
    small = one.ratio is not None and abs(one.ratio - 1) < ONE_SEED_TIE
    return one.verdict == "same" or (len(one.reached) == 1 and small)


def _ratios(one: Summary, base: Summary) -> list[float]:
    """The ratio of each seed, where all have one."""
    if one.value is None or base.value is None:
        return []
    mine, theirs = (dict(zip(each.seeds, each.value.values, strict=False)) for each in (one, base) if each.value is not None)
    return [mine[seed] / theirs[seed] for seed in mine if theirs.get(seed, 0) > 0]


def _sooner(one: Summary, subject: Subject, metric: str) -> str:
    """When it had what the baseline had in the end, in what the budget counts."""
    in_time = budget_unit(subject.comparison) == "seconds" and one.speedup_seconds is not None
    gain = one.speedup_seconds if in_time else one.speedup_steps
    if gain is None or gain < 1.005 or tied(one):
        return ""
    most = "at most " if any(reached.at_most for reached in one.reached) else ""
    share = f"{most}{100 / gain:.0f} % of the {'time' if in_time else 'steps'}"
    return f"It had {subject.baseline.name}'s final {metric} after {share}."


def method_by_method(subject: Subject) -> list[str]:
    """A sentence for each method; what became of failed runs is said above."""
    lost = sum(run.status != "finished" for run in subject.comparison.outcomes)
    said = findings(subject.comparison)
    return said[: len(said) - lost]


def joined(names: list[str]) -> str:
    """ "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def run_lead(subject: Subject) -> Lead:
    """Of one run: what it was last measured by, or its loss; and how far it got."""
    found = {key: value for row in subject.measured() for key, value in measures(row).items()}
    ends = [one for run in subject.comparison.outcomes for one in run.evaluations]
    if found:
        name, value = next(iter(found.items()))
    elif ends:
        name, value = subject.metric or "held-out loss", judged(ends[-1], subject.metric)
    else:
        losses = [row["loss"] for row in subject.comparison.outcomes[0].metrics() if row.get("loss") is not None]
        name, value = "training loss", losses[-1] if losses else float("nan")
    known = number(value) if isfinite(value) else ""
    best = ", ".join(f"{metric_label(key)} {number(value)}" for key, value in found.items())
    said = _spent(subject) + (f" Last measured: {best}." if best else "")
    return Lead(known, metric_label(name) if known else "", said, subject.baseline)


def _spent(subject: Subject) -> str:
    rows = subject.comparison.outcomes[0].metrics()
    if not rows:
        return "Nothing was written down during training."
    last = rows[-1]
    unit, size = time_unit(last["seconds"])
    loss = "" if last.get("loss") is None else f"; the training loss is {number(last['loss'])}"
    skipped = f" {last['skipped']} steps were skipped because something in them was not finite." if last.get("skipped") else ""
    return f"Trained for {last['step']:,} steps in {number(last['seconds'] / size)} {unit}{loss}.{skipped}"


def measures(row: dict[str, Any]) -> dict[str, float]:
    """The numbers that `noisewise evaluate` found, by name."""
    found = {key: value for key, value in row.items() if isinstance(value, float)}
    for key, inner, name in (("heldout", "loss", "held-out loss"), ("vlb", "bits_per_dimension", "bits per dimension")):
        part = row.get(key)
        if isinstance(part, dict) and isinstance(part.get(inner), float):
            chosen = part.get("levels")  # in words, if they are not even in u: their mean is another number
            found[f"{name} at {chosen}" if isinstance(chosen, str) else name] = part[inner]
    for key in ("kid", "precision_recall", "density_coverage"):
        part = row.get(key)
        if isinstance(part, dict):
            found |= {f"{key} {inner}" if key == "kid" else inner: v for inner, v in part.items() if isinstance(v, float)}
    return found


def counted(count: int, noun: str) -> str:
    """ "1 seed", "2 seeds"."""
    return f"{count} {noun}{'s' * (count != 1)}"
