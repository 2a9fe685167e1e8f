"""What was measured with each sampler and weighting."""

from functools import cache
from typing import Any

from noisewise.spec import parse

from . import rows, spec_now, table

FILES = ("digits_screen.jsonl", "digits_search.jsonl", "digits_cards.jsonl", "digits_long.jsonl", "digits_continuous.jsonl")
FILES += ("digits_bells.jsonl", "digits_default.jsonl", "digits_warmup.jsonl", "cifar10-v1-field.jsonl")
FILES += ("digits_estimators.jsonl", "cifar10-v1-confirmation.jsonl", "cifar10-v1-paper.jsonl")
MANY = 15
NOTHING = "Not yet: no file of `benchmarks/results/` has it with a U-Net."
BASELINE = "The baseline: all others are measured against it."
DATA = {"cifar10-small": "CIFAR-10", "cifar10": "CIFAR-10, 35.7 M parameters"}  # of presets; others are named as they are


@cache
def ends() -> list[dict[str, Any]]:
    """The last evaluation of every run with a U-Net."""
    found = []
    for file in FILES:
        for row in rows(file):
            if row.get("share") == 1 and row["distance"] is not None:
                where = (DATA.get(row["name"], row["name"]), row["process"], row["steps"])
                found.append({**row, "sampler": spec_now(row), "where": where})
    return found


def measured(name: str, which: str = "") -> str:
    """A table of the runs whose spec names this sampler or weighting, over uniform's with the same seed.

    Where there are more than MANY lines, only those on CIFAR-10 and of the shortest spec, unless `which` is "all".
    """
    uniform = {(*row["where"], row["seed"]): row["distance"] for row in ends() if row["sampler"] == "uniform"}
    found: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in ends():
        if row["sampler"] != "uniform" and name in {term.name for term in parse(row["sampler"])}:
            ratio = row["distance"] / uniform[*row["where"], row["seed"]]
            found.setdefault((*row["where"], row["sampler"]), {})[row["seed"]] = ratio
    if not found:
        return BASELINE if name == "uniform" else NOTHING
    heads = ["data", "process", "steps", "spec", "distance over uniform's, each seed"]
    if which != "all" and len(found) > MANY:
        shortest = min((spec for *_, spec in found), key=len)
        found = {key: ratios for key, ratios in found.items() if key[0].startswith("CIFAR-10") or key[-1] == shortest}
    lines = []
    for (data, process, steps, spec), ratios in sorted(found.items(), key=lambda item: item[0][:3]):
        cells = " / ".join(f"{ratios[seed]:.2f}" for seed in sorted(ratios))
        lines.append([data, process, f"{steps:,}", f"`{spec}`", cells])
    return table(heads, lines)
