"""Run folders out of rows of benchmarks/field.py, for noisewise report: the folders themselves were not kept.

    python benchmarks/rebuild.py benchmarks/results/cifar10-v1-field.jsonl --out out/field
    noisewise report out/field --figures out/figures

A run that several sessions have begun is that of the session which got farthest, of several such with the most evaluations, of
several such the newest. Rows have what evaluations found and what the sampler drew at that moment, newer ones also at some
moments before; curves of training between evaluations, and pictures, are not there.

Seconds of runs that shared a GPU mean nothing. With `--cost FILE`, rows of method_cost.py, each run gets the seconds that
its steps take alone: a step of uniform, times what was measured for its sampler.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from field import key
from rows import spec_now

from noisewise.plain_files import read_rows
from noisewise.samplers import SAMPLERS
from noisewise.spec import parse
from noisewise.study.outcome import FAILURE, Plan

TRAINING = ("step", "seconds", "steps_per_second", "density_by_level", "objective_by_level", "effective_share")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--baseline", default="uniform", help="the sampler that others are compared with")
    parser.add_argument("--cost", type=Path, help="rows of method_cost.py, for the seconds")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    args = parser.parse_args()
    if args.out.exists():
        raise ValueError(f"--out {args.out} exists: give a new folder")
    count = rebuild([row for path in args.rows for row in read_rows(path)], args.out, args.baseline, args.cost)
    print(f"{count} runs in {args.out}")


def rebuild(rows: list[dict[str, Any]], out: Path, baseline: str = "uniform", cost: Path | None = None) -> int:
    """Write the folders; returns how many runs there are."""
    runs = best_sessions(rows)
    if not runs:
        raise ValueError("the files have no rows")
    if cost is not None:
        known = Cost(read_rows(cost))
        runs = [[timed(row, known.step_seconds(spec_now(row))) for row in run] for run in runs]
    names = [write_run(out / "runs", run) for run in runs]
    some = next(row for run in runs for row in run)
    shares = sorted({row["share"] for run in runs for row in run if "share" in row} | {1.0})
    Plan(
        name=some["name"],
        baseline=baseline,
        budget=f"{some['steps']}it",
        evaluate_at=tuple(shares),
        images=some["images"],
        runs=tuple(names),
        headline=max(row.get("headline_images") or 0 for run in runs for row in run) or None,
    ).write(out)
    return len(names)


def best_sessions(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The rows of each run, of one session, in the order in which runs first appear."""
    runs: dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        runs.setdefault(key(row), {}).setdefault(row["session"], []).append(row)

    def reached(found: tuple[str, list[dict[str, Any]]]) -> tuple[float, int, str]:
        shares = [row["share"] for row in found[1] if "share" in row]
        return max(shares, default=0.0), len(shares), found[0]

    return [max(sessions.items(), key=reached)[1] for sessions in runs.values()]


class Cost:
    """What a step takes alone, from rows of method_cost.py."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.ratios = {spec_now({**row, "sampler": row["spec"]}): row["ratio"] for row in rows}
        self.uniform = 1 / next(row["steps_per_second"] for row in rows if row["spec"] == "uniform")

    def step_seconds(self, spec: str) -> float:
        """Of a spec: its own, or that of its sampler and estimator whatever else is set, or uniform's if it names none."""
        if spec in self.ratios:
            return self.uniform * self.ratios[spec]
        if (kind := kind_of(spec)) is None:
            return self.uniform
        alike = [ratio for known, ratio in self.ratios.items() if kind_of(known) == kind]
        if not alike:
            raise ValueError(f"no cost of {kind[0]} was measured: add it with method_cost.py --methods {spec!r}")
        return self.uniform * max(alike)


def kind_of(spec: str) -> tuple[str, str] | None:
    """What decides the cost of a spec: its sampler, and the estimator of one that has several."""
    found = [term for term in parse(spec) if term.name in SAMPLERS]
    return (found[0].name, found[0].options.get("estimator", "loss")) if found else None


def timed(row: dict[str, Any], step_seconds: float) -> dict[str, Any]:
    """A row with the seconds of its steps alone."""
    if "step" not in row or row["step"] is None:
        return row
    found = {**row, "seconds": row["step"] * step_seconds, "steps_per_second": round(1 / step_seconds, 3)}
    if "through" in row:
        found["through"] = [timed(one, step_seconds) for one in row["through"]]
    return found


def write_run(folder: Path, rows: list[dict[str, Any]]) -> str:
    """A run's folder; returns its name."""
    first = rows[0]
    name = Path(first["config"]["out"]).name
    run = folder / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(json.dumps({**first["config"], "sampler": spec_now(first)}))  # JSON is YAML
    (run / "environment.jsonl").write_text(json.dumps(first["environment"]) + "\n")
    with (run / "metrics.jsonl").open("w") as file:
        for row in sorted((row for row in rows if "share" in row), key=lambda row: row["share"]):
            for one in (*row.get("through", ()), row):
                file.write(json.dumps({key: one[key] for key in TRAINING if key in one}) + "\n")
            file.write(
                json.dumps({key: value for key, value in row.items() if key != "through"} | {"kind": "evaluation"}) + "\n"
            )
    for row in rows:
        if "failed" in row:
            failure = {"message": row["failed"], "step": row["step"], "log": row.get("log", "")}
            (run / FAILURE).write_text(json.dumps(failure) + "\n")
    return name


if __name__ == "__main__":
    try:
        main()
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"rebuild.py: {error}") from error
