"""All settings, and how to repeat it."""

import shlex
from dataclasses import replace
from html import escape

from noisewise.report.html import Part, details
from noisewise.report.subject import Subject
from noisewise.training.options import as_yaml, flat

OWN = ("out", "seed", "name")  # of each run, and no difference


def parts(subject: Subject) -> list[Part]:
    """The command, the files, the settings."""
    again = command(subject)
    html = f"<p>The same again:</p><pre>{escape(again)}</pre>" if again else ""
    html += f"<p>What this page was made of, in its folder:</p><ul class='files'>{_files(subject)}</ul>"
    first = next((run for run in subject.comparison.outcomes if run.sampler == subject.baseline.name), None)
    first = first or subject.comparison.outcomes[0]
    title = "Settings" if subject.single else f"Settings of {first.sampler}"
    html += details(title, f"<pre>{escape(as_yaml(replace(first.config, out=None)))}</pre>")
    if not subject.single:
        html += details("What differs in the others", f"<pre>{escape(differences(subject))}</pre>")
    return [Part("settings", "Settings, and how to repeat it", html)]


def command(subject: Subject) -> str:
    """What to type, a line for each command that added runs; nothing if it was made from Python."""
    if subject.single:
        return "noisewise train --config config.yaml --out runs/again"
    given = [list(one) for one in (*subject.plan.earlier, subject.plan.command) if one]
    named = [one if one[0] in ("compare", "analyze") else ["compare", *one] for one in given]
    return "\n".join(shlex.join(["noisewise", *one]) for one in named)


def differences(subject: Subject) -> str:
    """For each other method and schedule, the settings that are not those of the baseline."""
    runs = subject.comparison.outcomes
    first = next((run for run in runs if run.sampler == subject.baseline.name), runs[0])
    base = flat(first.config)
    blocks = []
    seen = {(first.sampler, first.process)}
    for run in runs:
        if (run.sampler, run.process) not in seen:
            seen.add((run.sampler, run.process))
            mine = flat(run.config)
            names = [name for name in {**base, **mine} if name not in OWN and base.get(name) != mine.get(name)]
            blocks.append("\n".join(f"{name}: {mine.get(name)}" for name in names))
    return "\n\n".join(blocks) if blocks else "nothing"


def _files(subject: Subject) -> str:
    whole = {
        "comparison.json": "what was asked for",
        "results.jsonl": "a row for each run: its evaluations, settings, versions and machine",
        "results.csv": "a line for each evaluation",
        "summary.csv": "a line for each schedule and sampler",
        "config.yaml": "every setting",
        "metrics.jsonl": "a row for each log point, and for each evaluation",
        "environment.jsonl": "versions and machine of each start",
    }
    found = [(name, what) for name, what in whole.items() if (subject.folder / name).is_file()]
    if not subject.single:
        found.append(("runs/", f"{len(subject.comparison.outcomes)} run folders, each with config.yaml and metrics.jsonl"))
    return "".join(f"<li><code>{escape(name)}</code> {escape(what)}</li>" for name, what in found)
