"""Fill in what was measured with each sampler and weighting, on its card: python docs/make_cards.py"""

from functools import cache
from pathlib import Path
from typing import Any

from pages import fill_in, rows, spec_now

from noisewise.spec import parse

DOCS = Path(__file__).parent
FILES = ("digits_screen.jsonl", "digits_search.jsonl", "digits_cards.jsonl", "digits_long.jsonl", "digits_continuous.jsonl")
FILES += ("digits_bells.jsonl", "digits_default.jsonl", "digits_warmup.jsonl", "cifar10-v1-field.jsonl")
FILES += ("digits_estimators.jsonl", "cifar10-v1-confirmation.jsonl", "cifar10-v1-paper.jsonl")
NOTHING = ["Not yet: no file of `benchmarks/results/` has it with a U-Net."]
MEANT_FOR = {  # weights that were run on the linear schedule with eps-prediction, which is not what they are for
    "sigma_sqrt": "It is meant for flows; on this schedule with ε-prediction it counts little but the most noise.",
    "cosmap_weight": "It is meant for flows; on this schedule with ε-prediction it counts little but the most noise.",
    "edm_weight": "It is meant for EDM's density; with uniform timesteps it counts little but the most noise.",
    "vlb": "It is meant for likelihood: it counts the least noise most, which pictures hardly show.",
}
DATA = {"cifar10-small": "CIFAR-10", "cifar10": "CIFAR-10, 35.7 M parameters"}  # of presets; others are named as they are
BASELINE = ["The baseline: all others are measured against it."]


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


def measured(name: str) -> list[str]:
    """A table of all runs whose spec names this sampler or weighting, over uniform's with the same seed."""
    uniform = {(*row["where"], row["seed"]): row["distance"] for row in ends() if row["sampler"] == "uniform"}
    found: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in ends():
        if row["sampler"] != "uniform" and name in {term.name for term in parse(row["sampler"])}:
            ratio = row["distance"] / uniform[*row["where"], row["seed"]]
            found.setdefault((*row["where"], row["sampler"]), {})[row["seed"]] = ratio
    if not found:
        return BASELINE if name == "uniform" else NOTHING
    lines = ["| data | process | steps | spec | distance over uniform's, each seed |", "|---|---|---|---|---|"]
    for (data, process, steps, spec), ratios in sorted(found.items(), key=lambda item: item[0][:3]):
        cells = " / ".join(f"{ratios[seed]:.2f}" for seed in sorted(ratios))
        lines.append(f"| {data} | {process} | {steps:,} | `{spec}` | {cells} |")
    return lines + (["", MEANT_FOR[name]] if name in MEANT_FOR else [])


def cards() -> dict[Path, str]:
    """Every card with the name that it is of."""
    return {path: path.stem for folder in ("methods", "weightings") for path in sorted((DOCS / folder).glob("*.md"))}


if __name__ == "__main__":
    for path, name in cards().items():
        fill_in(path, {"measured": lambda name=name: measured(name)})
