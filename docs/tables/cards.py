"""What was measured with each sampler and weighting."""

import inspect
import statistics
from functools import cache
from typing import Any

from noisewise.spec import Term, parse
from noisewise.weighting import WEIGHTINGS

from . import rows, spec_now, table, text_of

FILES = ("digits_screen.jsonl", "digits_search.jsonl", "digits_cards.jsonl", "digits_long.jsonl", "digits_continuous.jsonl")
FILES += ("digits_bells.jsonl", "digits_default.jsonl", "digits_warmup.jsonl", "cifar10-v1-field.jsonl")
FILES += ("digits_estimators.jsonl", "cifar10-v1-confirmation.jsonl", "cifar10-v1-paper.jsonl")
EARLY_AND_LATE = (4000, 32000)  # marks of runs on small images
MANY = 6
NOTHING = "Not yet."
BASELINE = "The baseline: all others are measured against it."
PROCESSES = {"linear": "linear", "cosine": "cosine", "quadratic": "quadratic", "edm": "EDM", "flow": "flow"}
DATA = {"cifar10-small": "CIFAR-10", "cifar10": "CIFAR-10, 35.7 M parameters"}  # of presets; others are named as they are


@cache
def ends() -> list[dict[str, Any]]:
    """The last evaluation of every run with a U-Net; of those on small images two."""
    found = []
    for file in FILES:
        for row in rows(file):
            if row.get("share") == 1 and row["distance"] is not None:
                where = (DATA.get(row["name"], row["name"]), row["process"], row["steps"])
                found.append({**row, "sampler": shortened(spec_now(row)), "where": where})
    for row in rows("thumbnails.jsonl"):
        if row["step"] in EARLY_AND_LATE and "solver" not in row:
            judged = row["seed"], row.get("classifier", "")  # distances by one classifier alone can be compared
            where = "CIFAR-10 at 8×8", row["process"], row["step"]
            found.append({**row, "sampler": shortened(row["spec"]), "where": where, "seed": judged})
    return found


def shortened(spec: str) -> str:
    """A spec without settings of its weightings that are what they are by default."""
    terms = []
    for term in parse(spec):
        settings = inspect.signature(WEIGHTINGS[term.name]).parameters if term.name in WEIGHTINGS else {}
        usual = {name: str(setting.default).removesuffix(".0") for name, setting in settings.items()}
        terms.append(Term(term.name, {name: value for name, value in term.options.items() if value != usual.get(name)}))
    return "+".join(map(text_of, terms))


def measured(name: str, which: str = "") -> str:
    """The runs whose spec names this sampler or weighting, as distances over uniform's with the same seed.

    A card has a line for each spec and data, with the mean over seeds ± half of their range; of more than MANY lines only
    those of the shortest spec. With `all` there is a line for each process too, and every seed.
    """
    uniform = {(*row["where"], row["seed"]): row["distance"] for row in ends() if row["sampler"] == "uniform"}
    found: dict[tuple[str, str, int, str], dict[int, float]] = {}
    for row in ends():
        beside = (*row["where"], row["seed"])
        if row["sampler"] != "uniform" and beside in uniform and name in {term.name for term in parse(row["sampler"])}:
            ratio = row["distance"] / uniform[beside]
            found.setdefault((*row["where"], row["sampler"]), {})[row["seed"]] = ratio
    if not found:
        return BASELINE if name == "uniform" else NOTHING
    return every_seed(found) if which == "all" else means(found)


def every_seed(found: dict[tuple[str, str, int, str], dict[int, float]]) -> str:
    heads = ["data", "process", "steps", "spec", "distance over uniform's, each seed"]
    lines = []
    for (data, process, steps, spec), ratios in sorted(found.items(), key=lambda item: item[0][:3]):
        cells = " / ".join(f"{ratios[seed]:.2f}" for seed in sorted(ratios))
        lines.append([data, process, f"{steps:,}", f"`{spec}`", cells])
    return table(heads, lines)


def means(found: dict[tuple[str, str, int, str], dict[int, float]]) -> str:
    ratios = {(data, process.partition(":")[0], steps, spec): one for (data, process, steps, spec), one in found.items()}
    processes = [process for process in PROCESSES if any(process == one for _, one, _, _ in ratios)]
    lines = sorted({(data, steps, spec) for data, _, steps, spec in ratios}, key=lambda line: (*line[:2], len(line[2])))
    if len(lines) > MANY:
        shortest = min((spec for *_, spec in lines), key=len)
        lines = [line for line in lines if line[2] == shortest]
    if len(lines) == 1:
        data, steps, spec = lines[0]
        ends = {process: ratios.get((data, process, steps, spec), {}) for process in processes}
        said = " and ".join(f"{with_spread(end)} ({PROCESSES[process]})" for process, end in ends.items() if end)
        return f"`{spec}`: {said} times uniform's distance; {data}, {steps:,} steps."
    cells = [
        [f"`{spec}`", data, f"{steps:,}", *(with_spread(ratios.get((data, process, steps, spec), {})) for process in processes)]
        for data, steps, spec in lines
    ]
    heads = ["distance over uniform's, ± half range", "data", "steps", *(PROCESSES[process] for process in processes)]
    return table(heads, cells)


def with_spread(ratios: dict[int, float]) -> str:
    """The mean over seeds, and half of their range."""
    if not ratios:
        return "–"
    spread = (max(ratios.values()) - min(ratios.values())) / 2
    return f"{statistics.fmean(ratios.values()):.2f}" + (f"±{spread:.2f}" if len(ratios) > 1 else "")
