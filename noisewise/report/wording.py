"""What was found, in plain words."""

from typing import Any

from noisewise.report.charts import time_unit
from noisewise.report.html import number
from noisewise.report.subject import Subject
from noisewise.study.findings import ENOUGH, findings
from noisewise.study.summary import Summary, metric_label, summarise


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
