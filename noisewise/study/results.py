"""The numbers of a comparison as files for other programs, at full precision.

results.jsonl   a row for each run, failed and unfinished ones too: its evaluations, settings, versions and machine
results.csv     a line for each evaluation of each run
summary.csv     a line for each schedule and sampler

JSON has no NaN: a number that is not finite is null in results.jsonl ("nan" or "inf" in the others).
"""

import csv
import io
import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from noisewise.plain_files import replace_file
from noisewise.study.outcome import Comparison, Evaluation, Outcome
from noisewise.study.summary import Spread, Summary, summarise
from noisewise.training.options import plain

MEASURED = ("metric", "distance", "headline", "loss", "vlb", "held_out")  # of the final evaluation
# of each evaluation
FLAT = ("share", "step", "seconds", "images", "metric", "distance", "headline_images", "headline", "loss", "vlb")
SPREADS = ("steps", "seconds", "steps_per_second", "loss", "distance", "headline", "area")  # of a summary


def write_results(comparison: Comparison) -> list[Path]:
    """Write the three files into the comparison's folder; returns their paths."""
    rows = "".join(json.dumps(_strict(result_row(comparison, one)), allow_nan=False) + "\n" for one in comparison.outcomes)
    texts = {
        "results.jsonl": rows,
        "results.csv": _csv(line for one in comparison.outcomes for line in flat_rows(one)),
        "summary.csv": _csv(map(summary_row, summarise(comparison))),
    }
    for name, text in texts.items():
        replace_file(comparison.folder / name, text)
    return [comparison.folder / name for name in texts]


def result_row(comparison: Comparison, outcome: Outcome) -> dict[str, Any]:
    """Everything needed to repeat and to judge a run; what is measured is of the end of its budget, and None before that."""
    plan, final = comparison.plan, outcome.final
    step, seconds = progress(outcome)
    end = {} if final is None else evaluation_row(final)
    return {
        **_identity(outcome),
        "step": step,
        "seconds": seconds,
        "steps_per_second": step / seconds if step is not None and seconds else None,
        **{name: end.get(name) for name in MEASURED},
        "curve": [evaluation_row(one) for one in outcome.evaluations],
        "baseline": plan.baseline,
        "budget": plan.budget,
        "evaluate_at": list(plan.evaluate_at),
        "images": plan.images,
        "headline_images": plan.headline,
        "config": plain(outcome.config),
        "environment": outcome.environment(),
    }


def evaluation_row(evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation with its mean loss."""
    return {**asdict(evaluation), "loss": evaluation.loss}


def progress(outcome: Outcome) -> tuple[int | None, float | None]:
    """Steps and seconds of a run: those of its final evaluation or, before that, the last that were written down."""
    if outcome.final is not None:
        return outcome.final.step, outcome.final.seconds
    seen = [(one.step, one.seconds) for one in outcome.evaluations]
    seen += [(row["step"], row["seconds"]) for row in outcome.metrics()]
    return max(seen, default=(None, None))


def flat_rows(outcome: Outcome) -> list[dict[str, Any]]:
    """A row for each evaluation; a run without any has one row with nothing measured."""
    found = [evaluation_row(one) for one in outcome.evaluations] or [{}]
    return [{**_identity(outcome), **{name: row.get(name) for name in FLAT}} for row in found]


def summary_row(summary: Summary) -> dict[str, Any]:
    """A summary in one line; the spreads as their mean and half range, lists of seeds separated by spaces."""
    spreads: dict[str, float | None] = {}
    for name in SPREADS:
        spread: Spread | None = getattr(summary, name)
        spreads[name], spreads[f"{name}_half_range"] = (None, None) if spread is None else (spread.mean, spread.half_range)
    reached = [one for one in summary.reached if one.steps is not None]
    return {
        "process": summary.process,
        "sampler": summary.sampler,
        "baseline": summary.baseline,
        **{name: " ".join(map(str, getattr(summary, name))) for name in ("seeds", "failed", "unfinished")},
        "metric": summary.metric,
        **spreads,
        "ratio": summary.ratio,
        "p": summary.p,
        "p_adjusted": summary.p_adjusted,
        "verdict": summary.verdict,
        "pairs": len(summary.reached),
        "reached": " ".join(str(one.seed) for one in reached),
        "reached_at_most": " ".join(str(one.seed) for one in reached if one.at_most),
        "speedup_steps": summary.speedup_steps,
        "speedup_seconds": summary.speedup_seconds,
    }


def _identity(outcome: Outcome) -> dict[str, Any]:
    return {
        "sampler": outcome.sampler,
        "process": outcome.process,
        "seed": outcome.seed,
        "run": outcome.folder.name,
        "status": outcome.status,
        "failure": outcome.failure.message if outcome.failure is not None and outcome.status == "failed" else None,
    }


def _csv(rows: Iterable[dict[str, Any]]) -> str:
    """Rows with the same keys; floats are written so that they read back as they were."""
    rows = list(rows)
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _strict(value: Any) -> Any:
    """The value without numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _strict(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
