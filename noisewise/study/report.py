"""A comparison as one HTML file that needs nothing else: no network, no scripts."""

import base64
import html
from pathlib import Path

from noisewise.evaluation.digits_features import METRIC
from noisewise.study.figures import draw_comparison
from noisewise.study.measure import Measured
from noisewise.study.table import by_sampler, explanation, ratio, table_rows, verdict
from noisewise.training.config import Config
from noisewise.training.folder import environment
from noisewise.training.options import as_yaml

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse } th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left } img { max-width: 100% }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; font-size: .85rem } .scroll { overflow-x: auto }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818 } pre { background: #242424 }
  th, td { border-color: #444 } img { background: #fff } }
"""


def write_report(folder: Path, configs: list[Config], results: list[Measured]) -> Path:
    """Draw the picture and write report.html; returns its path."""
    picture = folder / "comparison.png"
    draw_comparison(results, [Path(config.out or "") for config in configs], picture)
    headings, rows = table_rows(results)
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    image = base64.b64encode(picture.read_bytes()).decode()
    machine = environment()
    settings = html.escape(as_yaml(configs[0]))
    page = f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>noisewise: {html.escape(configs[0].name)}</title><style>{STYLE}</style>
<h1>Which noise levels to train on: {html.escape(configs[0].name)}</h1>
<p>{html.escape(sentence(results))}</p>
<div class="scroll"><table><tr>{head}</tr>{body}</table></div>
<p>{html.escape(explanation(results))} {html.escape(conditions(configs, results))}</p>
<img alt="Generated samples, density of draws through training, and held-out loss by noise level, for each sampler"
 src="data:image/png;base64,{image}">
<h2>Settings of the first run</h2><pre>{settings}</pre>
<p>noisewise {machine["noisewise"]}, torch {machine["torch"]}, Python {machine["python"]},
{html.escape(str(machine["machine"]))}, {machine["threads"]} threads. Raw numbers: results.jsonl; each run: runs/.</p></html>
"""
    path = folder / "report.html"
    path.write_text(page)
    return path


def sentence(results: list[Measured]) -> str:
    """The outcome in plain words, with no more than the seeds allow."""
    grouped = by_sampler(results)
    name, baseline = next(iter(grouped.items()))
    measure = f"the distance of its images to the data ({results[0].metric})" if results[0].metric else "its held-out loss"
    words = {
        "better": "was better than {name} in every seed",
        "worse": "was worse than {name} in every seed",
        "unclear": "was better than {name} in some seeds and worse in others",
        "one seed": "had one seed, too few to judge",
    }
    others = [(sampler, runs) for sampler, runs in grouped.items() if sampler != name]
    said = [
        f"{sampler} {words[verdict(baseline, runs)].format(name=name)} ({ratio(baseline, runs):.2f} times its value)"
        for sampler, runs in others
    ]
    return f"Judged by {measure}: {'; '.join(said)}." if said else f"{name} alone: nothing to compare with."


def conditions(configs: list[Config], results: list[Measured]) -> str:
    """Under which conditions that was found."""
    config, seeds = configs[0], len({config.seed for config in configs})
    budget = f"{config.seconds:g} seconds of training steps" if config.seconds is not None else f"{config.steps} steps"
    text = (
        f"Each run had {budget}, the same initial weights, data order and noise for each seed; {seeds} seed{'s' * (seeds > 1)}."
    )
    if results[0].metric == METRIC:
        text += (
            f" {METRIC} is the Fréchet distance between features of a small digit classifier, of generated images and of the "
            "data; it is not FID. A short run on a toy says little about large models."
        )
    return text
