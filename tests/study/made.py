"""Comparisons that nobody ran, with planted numbers.

`compared` makes one in memory, `planted` on the disk as noisewise compare leaves it. Both take curves: for each
(process, sampler, seed) a list of (share, step, seconds, value). The value is the distance or, with metric=None, the
held-out loss.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from noisewise.study.job import with_budget
from noisewise.study.outcome import Comparison, Evaluation, Failure, Outcome, Plan, read_comparison, write_failure
from noisewise.training.options import as_yaml
from tests.training.tiny import tiny

LEVELS, COARSE, FINE = 20, 10, 50  # of held-out losses, and of the two kinds of lists in rows of training
SHAPE = np.linspace(1.9, 0.1, LEVELS)  # of held-out losses over noise levels; its mean is 1
ROWS = 8  # of training in each run
MACHINE = {
    "noisewise": "0.0",
    "torch": "2.0",
    "python": "3.11.0",
    "machine": "planted",
    "processes": 1,
    "threads": 1,
    "arguments": ["compare", "--preset", "digits"],
    "git": "0123abc+",
}


def curve(*values, steps=1000, seconds=10.0):
    """Evaluations at equal shares of a budget."""
    shares = [(i + 1) / len(values) for i in range(len(values))]
    return [(share, round(share * steps), share * seconds, value) for share, value in zip(shares, values, strict=True)]


def evaluations(points, metric="fid", images=100, losses=None, picture=None, headline=None):
    """A curve as evaluations; unless `losses` are given, a distance of 20 comes with a held-out loss of 0.2.

    With `headline` images at the end the distance is half.
    """
    made = []
    for i, (share, step, seconds, value) in enumerate(points):
        loss = value if metric is None else losses[i] if losses else 0.2 if value is None else value / 100
        held_out = [float(part) for part in loss * SHAPE]
        distance = None if metric is None or value is None else float(value)
        more = (headline, distance / 2) if headline and share == 1 and distance is not None else (None, None)
        made.append(Evaluation(share, step, seconds, images, metric, distance, held_out, loss / 10, picture, *more))
    return made


def compared(
    curves,
    *,
    baseline="uniform",
    budget="1000it",
    metric="fid",
    images=100,
    losses=None,
    failures=None,
    folder=Path("planted"),
    headline=None,
):
    """A comparison in memory; `losses` maps keys to a held-out loss for each evaluation, `failures` to messages or Failures."""
    failures = {key: Failure(why) if isinstance(why, str) else why for key, why in (failures or {}).items()}
    keys = list(dict.fromkeys([*curves, *failures]))
    names = {key: f"{i:02d}-{key[1].partition(':')[0]}-{key[2]}" for i, key in enumerate(keys)}
    shares = sorted({point[0] for points in curves.values() for point in points} | {1.0})
    plan = Plan("planted", baseline, budget, tuple(shares), images, tuple(names.values()), ("--preset", "digits"), headline)
    outcomes = []
    for process, sampler, seed in keys:
        key = (process, sampler, seed)
        path = folder / "runs" / names[key]
        config = with_budget(tiny(name="planted", process=process, sampler=sampler, seed=seed, out=str(path)), budget)
        found = evaluations(curves.get(key, []), metric, images, (losses or {}).get(key), headline=headline)
        outcomes.append(Outcome(path, config, found, failures.get(key)))
    return Comparison(folder, plan, outcomes)


def planted(folder, curves, **settings):
    """The same on the disk, with configurations, rows of training, pictures and comparison.json; returns what is read back."""
    folder = Path(folder)
    made = compared(curves, folder=folder, **settings)
    made.plan.write(folder)
    for outcome in made.outcomes:
        write_run(outcome)
    return read_comparison(folder)


def write_run(outcome):
    """The folder of one run."""
    outcome.folder.mkdir(parents=True)
    (outcome.folder / "config.yaml").write_text(as_yaml(outcome.config))
    rows = training_rows(outcome)
    for evaluation in outcome.evaluations:
        name = f"samples/step-{evaluation.step:08d}.png"
        write_picture(outcome.folder / name, outcome.seed + len(rows))
        rows.append(replace(evaluation, picture=name).row())
    rows.sort(key=lambda row: row["step"])
    (outcome.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (outcome.folder / "environment.jsonl").write_text(json.dumps(MACHINE) + "\n")
    (outcome.folder / "log.txt").write_text(f"training {outcome.sampler}\n")
    if outcome.failure is not None:
        write_failure(outcome.folder, outcome.config, outcome.failure)


def rewrite(folder, change):
    """What `change` makes of each row of a run's metrics; None leaves it out."""
    rows = [change(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows if row is not None))


def training_rows(outcome):
    """Rows as the trainer writes them; the density of all samplers but uniform leans on little noise, more so with time."""
    last = outcome.evaluations[-1] if outcome.evaluations else None
    end, seconds = (last.step, last.seconds) if last else (0, 0.0)
    rows, before = [], 0
    for i in range(1, ROWS + 1):
        step, share = round(end * i / ROWS), i / ROWS
        if step == before:
            continue
        tilt = 0.0 if outcome.sampler == "uniform" else 0.8 * share
        density = [1 + tilt * (1 - 2 * (k + 0.5) / FINE) for k in range(FINE)]
        loss = 0.1 + 0.9 / (1 + step)
        row = {
            "step": step,
            "samples": step * outcome.config.batch,
            "seconds": round(seconds * share, 3),
            "steps_per_second": round(end / seconds, 3) if seconds else None,
            "loss": loss,
            "gradient_norm": 0.5,
            "lr": outcome.config.optimizer.lr,
            "skipped": 0,
            "loss_by_level": [loss * 2 * (1 - (k + 0.5) / COARSE) for k in range(COARSE)],
            "density_by_level": [round(value, 5) for value in density],
            "objective_by_level": [1.0] * FINE,
            "effective_share": round(1 / (1 + tilt**2 / 3), 5),
        }
        rows.append(row)
        before = step
    return rows


def write_picture(path, shade):
    """A small PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((16, 16, 3), 40 * shade % 256, np.uint8)
    pixels[4:12, 4:12] = 255 - pixels[4:12, 4:12]
    Image.fromarray(pixels).save(path)
