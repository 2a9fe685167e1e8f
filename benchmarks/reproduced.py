"""Gathers what `noisewise reproduce` found at a scale: the numbers of its pages, and every evaluation of its runs.

    python benchmarks/reproduced.py out/reproduce/toy

Writes results/reproduce_SCALE.jsonl, a row for each item with machine and versions, and results/reproduce_SCALE.csv.
"""

import argparse
import csv
import json
from pathlib import Path

from rows import append

from noisewise.study.outcome import read_comparison
from noisewise.study.results import flat_rows

RESULTS = Path(__file__).parent / "results"
KEPT = ("machine", "threads", "noisewise", "torch", "python", "git")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of a scale")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    comparisons = [read_comparison(path.parent) for path in sorted(args.folder.glob("*/comparison.json"))]
    starts = [start for one in comparisons for run in one.outcomes if (start := run.environment())]
    environment = {name: starts[0].get(name) for name in KEPT} if starts else {}
    out = args.results / f"reproduce_{args.folder.name}.jsonl"
    out.unlink(missing_ok=True)
    for path in sorted(args.folder.glob("*.json")):
        append(out, {**json.loads(path.read_text()), "environment": environment})
    rows = [{"folder": one.folder.name, **row} for one in comparisons for run in one.outcomes for row in flat_rows(run)]
    if rows:
        with out.with_suffix(".csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    print(f"{out}: {len(out.read_text().splitlines())} items, {len(rows)} evaluations")


if __name__ == "__main__":
    main()
